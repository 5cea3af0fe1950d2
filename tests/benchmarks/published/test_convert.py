"""Cells, rates and layouts that the readers share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.published import cells, convert
from benchmarks.published.case import Case, Excluded, machine, rows
from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.model.catalog import resolve
from fivefold.stack.catalog import build_stack


def test_an_empty_cell_is_zero_and_text_is_not_a_number() -> None:
    row = {"tp": "8", "zero": "1 (8 GPUs)", "pp": "", "rate": "12.5", "ep": "2x4"}
    assert [cells.integer(row, key) for key in ("tp", "pp", "cp")] == [8, 0, 0]
    assert (cells.number(row, "rate"), cells.number(row, "none")) == (12.5, 0.0)
    assert (cells.sharding(row, silent=3), cells.sharding({}, silent=3)) == (1, 3)
    for read in (cells.integer, cells.number):
        with pytest.raises(UserError, match="ep is '2x4'"):
            read(row, "ep")


def test_data_parallelism_is_the_remaining_degree() -> None:
    layout = convert.layout_of_row({"gpus": "576", "tp": "8", "pp": "9", "vp": "7", "cp": "2", "mbs": "1"}, zero=1)
    assert str(layout) == "dp4 tp8 cp2 pp9 v7 zero1 interleaved mbs1"


def test_seconds_from_tokens_and_from_flops_agree() -> None:
    """NeMo 24.07's Llama 2 7B: 16847 tokens/s and 776 TFLOP/s per GPU, both as printed, of 128 sequences of 4096."""
    job = Job(sequence=4096, global_batch=128)
    tokens = convert.seconds_of_tokens(job, rate=16847, ranks=8)
    flops = convert.seconds_of_flops(resolve("llama2-7b"), job, rate=776e12, ranks=8, count="full")
    assert tokens == pytest.approx(128 * 4096 / 16847 / 8)
    assert flops == pytest.approx(tokens, rel=2e-3)


def test_16_bit_gradients_take_two_of_sixteen_bytes() -> None:
    recipe = cells.use_16bit_gradients("fp8")
    assert (recipe.summed_bytes, recipe.total_bytes, recipe.compute) == (2, 16, "fp8")


def test_megatron_overlaps_pipeline_messages_only_between_virtual_stages() -> None:
    row = {"gpus": "64", "tp": "4", "pp": "4", "mbs": "1"}
    plain, interleaved = convert.layout_of_row(row, zero=1), convert.layout_of_row(row | {"vp": "5"}, zero=1)
    for name in ("megatron-core", "megatron-bridge", "nemo"):
        assert not build_stack(name).overlaps_p2p(plain.schedule)
        assert build_stack(name).overlaps_p2p(interleaved.schedule)


def test_nodes_of_another_size_have_the_same_link_rates() -> None:
    before, after = machine("h200", 8), convert.split_into_nodes(machine("h200", 8), 4)
    assert (after.ranks_per_node, after.nodes, [link.span for link in after.links]) == (4, 2, [4, 8])
    assert [link.bandwidth for link in after.links] == [link.bandwidth for link in before.links]


@pytest.mark.parametrize(
    ("change", "rule"),
    [({"oom": "y"}, convert.OUT_OF_MEMORY), ({"trust": "check"}, convert.CHECK), ({}, "of the source")],
)
def test_exclusion_rules_of_all_sources_are_applied_first(
    change: dict[str, str], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = next(iter(rows("kempnerforge")))
    monkeypatch.setattr(convert, "rows", lambda source: [one | change, one | {"kind": "formula"}])
    never: Callable[[convert.Row], Case] = lambda row: pytest.fail("an excluded row became a case")  # noqa: E731
    result = list(convert.read("kempnerforge", rule=lambda row: "of the source", case=never))
    formula = "not measured: formula"
    assert result == [Excluded("kempnerforge", "kempnerforge-0001", item) for item in (rule, formula)]
