"""Every family of Hugging Face, as its small config, under a layout of each axis and of experts against one process.

    python -m tests.agree.parity.families [FAMILY …]

Axis code knows no family, so ``make test`` has a few pairs; here every family takes every layout. Exits 1 unless all
are equal, in messages and FLOPs too.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from fivefold.errors import UserError
from fivefold.layout.spec import Layout
from fivefold.layout.validity import refuse
from fivefold.model.huggingface.read import from_config
from fivefold.model.spec import Model
from fivefold.trainer.supported import check_supported
from tests.agree.drawn import VOCAB, Drawn
from tests.agree.parity.cases import TOKENS, job_for
from tests.agree.parity.drawn import run
from tests.model.mutations import FAMILIES, LATENT

LAYOUTS = (
    "tp2 mbs2", "cp2 zero1 mbs2", "pp2 zb1p mbs1", "dp2 zero3 mbs1 ac=full", "tp2 mbs1 nosp ac=norm+act",
    "cp2 mbs1 cp=ulysses ac=selective", "pp2 v2 zbv mbs1 ac=full", "tp2 pp2 dualpipev mbs1",
    "dp2 cp2 zero2 mbs1 ac=qkv+mlp",
    "tp2 cp2 zero3 mbs1 ac=core+rope+out", "dp2 pp2 interleaved v2 zero3 mbs1",
)  # fmt: skip
OF_EXPERTS = (
    "dp2 ep2 zero2 mbs1",
    "dp4 ep4 zero3 mbs1 ac=full",
    "dp2 tp2 ep2 etp2 mbs2",
    "cp2 ep2 zero3 mbs1 ac=moe+norm",
    "dp2 pp2 ep2 zb2p zero2 mbs1",
    "dp2 tp2 ep4 zero1 mbs1",
)
CONFIGS: dict[str, dict[str, Any]] = {family: {"model_type": family, **keys} for family, keys in FAMILIES.items()} | {
    "deepseek_v3+mtp": {"model_type": "deepseek_v3", **FAMILIES["deepseek_v3"], "num_nextn_predict_layers": 1},
    "nemotron_h+mtp": {"model_type": "nemotron_h", **FAMILIES["nemotron_h"], "num_nextn_predict_layers": 1},
    "gemma4+experts": {"model_type": "gemma4_text", **FAMILIES["gemma4_text"], "enable_moe_block": True}
    | {
        "hidden_size_per_layer_input": 0,
        "num_global_key_value_heads": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-2,
    },
    "gemma3n_text": {"model_type": "gemma3n_text", **FAMILIES["gemma3n_text"], "num_hidden_layers": 4}
    | {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "kimi_k2": {"model_type": "kimi_k2", **LATENT, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827},
}


def model_of(family: str, layout: Layout) -> Model:
    """The family's small model with as many layers as the layout has stages, and the vocabulary of the text."""
    model = from_config(CONFIGS[family], name=family)
    window = None if model.window is None else 7 if model.window_kind == "sliding" else TOKENS // 3
    return model.replace(layers=max(4, layout.pp * layout.v), vocab=VOCAB, window=window, positions=64)


def case(family: str, text: str) -> Drawn:
    """``UserError`` if the two do not go together."""
    layout = Layout.parse(text)
    model, job = model_of(family, layout), job_for(layout)
    refuse(layout, model=model, job=job)
    check_supported(layout, job, model=model)
    return Drawn(0, model, layout, job)


def main() -> int:
    """One line per case; 1 if any differs from one process or says other messages than planned."""
    parser = argparse.ArgumentParser(description="families under a layout of each axis against one process")
    parser.add_argument("families", nargs="*", default=list(CONFIGS))
    wrong = done = 0
    for family in parser.parse_args().families:
        for text in (*LAYOUTS, *(OF_EXPERTS if model_of(family, Layout()).moe else ())):
            try:
                drawn = case(family, text)
            except UserError as refusal:
                print(f"{family} {text}: {refusal}", flush=True)
                continue
            verdict = run(drawn)
            good = verdict.is_equal and not verdict.said and verdict.flops[0] == verdict.flops[1]
            done, wrong = done + 1, wrong + (not good)
            print(f"{family} {text}: {verdict.gradient_error:.1e} {'' if good else verdict}", flush=True)
    print(f"{done - wrong} of {done} equal one process")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
