"""Some families, each under the layout whose turn it is; ``families.py`` runs every one of them under all layouts."""

from __future__ import annotations

import pytest

from tests.agree.parity.drawn import run
from tests.agree.parity.families import LAYOUTS, OF_EXPERTS, case
from tests.selection import mark_share

QUICK = (
    ("gemma4+experts", "dp2 ep2 zero2 mbs1"), ("olmo2", "dp2 zero3 mbs1 ac=full"), ("olmo2", "tp2 mbs2"),
    ("gemma3_text", "pp2 zb1p mbs1"), ("cohere2", "cp2 zero1 mbs2"), ("falcon", "tp2 mbs1 nosp ac=norm+act"),
    ("lfm2", "pp2 v2 zbv mbs1 ac=full"), ("lfm2_moe", "dp2 ep2 zero2 mbs1"), ("lfm2", "dp2 zero3 mbs1 ac=full"),
    ("phimoe", "dp2 ep2 zero2 mbs1"), ("phimoe", "tp2 cp2 zero3 mbs1 ac=core+rope+out"),
    ("gpt2", "tp2 cp2 zero3 mbs1 ac=core+rope+out"),
    ("doge", "pp2 zb1p mbs1"), ("jetmoe", "pp2 zb1p mbs1"), ("jetmoe", "dp2 ep2 zero2 mbs1"),
    ("rwkv", "pp2 zb1p mbs1"),
    ("axk2", "tp2 mbs2"), ("axk2", "dp2 pp2 ep2 zb2p zero2 mbs1"),
    ("dots3_note_text", "tp2 mbs2"), ("dots3_note_text", "dp2 ep2 zero2 mbs1"),
    ("beam", "tp2 pp2 zb1p mbs1"), ("beam", "cp2 ep2 zero3 mbs1 ac=norm"),
    ("nemotron_h", "dp2 tp2 ep2 etp2 mbs2"),
    ("longcat_flash", "dp2 ep2 zero2 mbs1"), ("longcat_flash", "pp2 zb1p mbs1"),
    ("longcat_flash", "cp2 ep2 zero3 mbs1 ac=moe+norm"),
    ("diffllama", "pp2 zb1p mbs1"),  # other sums of its factors differ by rounding, of larger terms that cancel
    ("llama4_text", "tp2 pp2 dualpipev mbs1"), ("llama4_text", "cp2 mbs1 cp=ulysses ac=selective"),
)  # fmt: skip


@pytest.mark.parametrize(("family", "layout"), mark_share(len(QUICK), QUICK))
def test_each_family_under_each_parallelism_equals_one_process(family: str, layout: str) -> None:
    assert layout in LAYOUTS + OF_EXPERTS
    verdict = run(case(family, layout))
    assert verdict.is_equal, verdict
    assert verdict.said == ()
    if family != "longcat_flash":  # there it depends on the router how many rows experts compute
        assert verdict.flops[0] == verdict.flops[1]
