"""Gemma 3n: parameters, FLOPs and saved tensors of transformers' model; what is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM
from transformers.models.gemma3n import Gemma3nTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextAltUp, Gemma3nTextLaurelBlock, Gemma3nTextMLP

import fivefold as ff
from fivefold.errors import UserError
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.layout.validity import refuse
from fivefold.model.huggingface.read import from_config
from fivefold.model.spec import Model
from fivefold.model.weights import list_block_weights, list_embedding_weights, list_head_weights
from fivefold.planner.counts.operations.altup import add_laurel, correct, predict
from fivefold.planner.counts.operations.feedforward import list_mlp
from fivefold.planner.counts.operations.layer import list_block, list_embedding, list_head
from fivefold.planner.counts.operations.local_shapes import Local, LocalDegrees
from fivefold.planner.counts.operations.op import Op
from fivefold.trainer.supported import check_supported
from tests.planner.counts.operations.test_per_layer_inputs import count_saved

ROWS, SEQUENCES, WIDTH, STREAMS, FFN = 24, 2, 48, 3, 40
KINDS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
KEYS: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": WIDTH, "intermediate_size": FFN, "num_hidden_layers": 5, "head_dim": 8,
    "num_attention_heads": 6, "num_key_value_heads": 2, "layer_types": KINDS, "sliding_window": 64,
    "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 90, "num_kv_shared_layers": 2,
    "altup_num_inputs": STREAMS, "laurel_rank": 5, "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0, 0.0],
    "pad_token_id": 0,
}  # fmt: skip
CONFIG = Gemma3nTextConfig(**KEYS, attn_implementation="eager")


def read(config: Gemma3nTextConfig) -> Model:
    return from_config(config.to_dict() | {"architectures": ["Gemma3nForCausalLM"]}, name="gemma")


GEMMA = read(CONFIG)


def make_local(**of_job: Any) -> Local:
    job = Job(sequence=ROWS // SEQUENCES, global_batch=SEQUENCES, precision=get_recipe("fp32"), **of_job)
    return Local(GEMMA, job, LocalDegrees(sequences=SEQUENCES))


def count_kept(ops: list[Op], **sizes: int) -> int:
    sizes |= {name: size for op in ops for name, size in op.writes.items()}
    return sum(sizes[name] for name in {name for op in ops for name in op.keeps})


def test_the_default_config_of_gemma3n_has_the_published_parameters() -> None:
    assert read(Gemma3nTextConfig()).parameters == 6_835_235_568


@pytest.mark.parametrize("seed", range(4))
def test_parameters_of_random_configs_are_those_of_transformers(seed: int) -> None:
    chance, n_built = random.Random(seed), 0
    while n_built < 5:
        layers = chance.randint(2, 12)
        keys = KEYS | {
            "num_hidden_layers": layers,
            "layer_types": [chance.choice(("sliding_attention", "full_attention")) for _ in range(layers)],
            "num_kv_shared_layers": chance.randint(0, layers - 1),
            "altup_num_inputs": chance.randint(2, 5),
            "laurel_rank": chance.choice((2, 5)),
            "activation_sparsity_pattern": None,
            "tie_word_embeddings": chance.random() < 0.5,
        }
        config = Gemma3nTextConfig(**keys)
        try:
            with torch.device("meta"):
                theirs = AutoModelForCausalLM.from_config(config)
        except ValueError:  # shared layers without a layer of their kind
            with pytest.raises(UserError, match=r"leaves no (full|sliding) layer with keys"):
                read(config)
            continue
        n_built += 1
        model = read(config)
        assert model.parameters == sum(weight.numel() for weight in theirs.parameters())
        assert model.gate_sparsity == (tuple(config.activation_sparsity_pattern) if layers > 10 else ())


def test_every_weight_is_used_once_and_flops_are_those_of_transformers() -> None:
    theirs = AutoModelForCausalLM.from_config(CONFIG)
    ids = torch.randint(0, 90, (SEQUENCES, ROWS // SEQUENCES))
    counter = FlopCounterMode(display=False)
    with counter:
        theirs(ids, use_cache=False)
    local = make_local()
    units = [(list_embedding(local), list_embedding_weights(GEMMA))]
    units += [(list_block(local, layer=layer), list_block_weights(GEMMA, layer)) for layer in range(5)]
    for ops, weights in units:
        assert sum(op.parameters for op in ops) == sum(weight.numel for weight in weights)
        assert len({op.name for op in ops}) == len(ops)
    head_ops = list_head(local)
    tied = GEMMA.vocab * WIDTH
    assert sum(op.parameters for op in head_ops) == sum(weight.numel for weight in list_head_weights(GEMMA)) + tied
    assert sum(op.flops for ops, _ in (*units, (head_ops, ())) for op in ops) == counter.get_total_flops()


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, SEQUENCES, ROWS // SEQUENCES, WIDTH, requires_grad=True)


def list_parameters(module: torch.nn.Module) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}


def test_saved_bytes_of_altup_are_those_of_transformers() -> None:
    module, part = Gemma3nTextAltUp(CONFIG), ROWS * WIDTH * 4
    x, y = draw(STREAMS), draw()
    # their norm raises the mean of squares to a power, and saves it next to the result
    means = 4 * ROWS
    local = make_local(kernels="plain")
    assert GEMMA.altup is not None
    predicted = count_saved(lambda: module.predict(x), list_parameters(module))
    ops = predict(local, GEMMA.altup, "x", "p")
    assert count_kept(ops, x=STREAMS * part) + means == predicted
    corrected = count_saved(
        lambda: module.scale_corrected_output(module.correct(x, y)[0].clone()), list_parameters(module)
    )
    ops = correct(local, GEMMA.altup, "p", "y", "c")
    clamped = 4 * STREAMS**2 * (GEMMA.altup.clip is not None)  # a copy of the weights that make w
    assert count_kept(ops, y=part) + means + clamped == corrected


def test_saved_bytes_of_the_branch_next_to_attention_are_those_of_transformers() -> None:
    module, h = Gemma3nTextLaurelBlock(CONFIG), draw()
    saved = count_saved(lambda: module(h), list_parameters(module))
    ops = add_laurel(make_local(kernels="plain"), 5, "h", "y.a", "y")
    assert count_kept(ops, h=ROWS * WIDTH * 4) + 4 * ROWS == saved


@pytest.mark.parametrize("layer", [0, 2])
def test_saved_bytes_of_sparse_gates_are_those_of_transformers(layer: int) -> None:
    module, h = Gemma3nTextMLP(CONFIG, layer_idx=layer), draw()
    saved = count_saved(lambda: module(h), list_parameters(module))
    local = make_local(kernels="plain")
    assert count_kept(list_mlp(local, "h", layer=layer), h=ROWS * WIDTH * 4) == saved


@pytest.mark.parametrize("layout", ["dp1 cp2", "dp2 zero3", "dp2 zero1 ac=full", "dp2 ac=selective", "dp2 ac=norm"])
def test_predict_adds_time_and_memory_for_altup_and_laurel(layout: str) -> None:
    fields: dict[str, Any] = {"sequence": 72, "global_batch": 8}
    step = ff.predict(GEMMA, "h100:2", layout, **fields)
    plain = ff.predict(GEMMA.replace(altup=None, laurel_rank=None), "h100:2", layout, **fields)
    assert step.time.step_seconds > plain.time.step_seconds
    assert step.memory.peak_bytes > plain.memory.peak_bytes


def test_unsupported_combinations_with_altup_are_one_line_errors() -> None:
    job = Job(sequence=12, global_batch=2)
    check_supported(Layout(), job, model=GEMMA)
    with pytest.raises(UserError, match="does not shard the matrices of an embedding that makes per-layer inputs"):
        check_supported(Layout.parse("dp2 zero3"), job, model=GEMMA)
    assert GEMMA.altup is not None
    with pytest.raises(UserError, match=r"does not support altup\.scales=False"):
        check_supported(Layout(), job, model=GEMMA.replace(altup=GEMMA.altup.replace(scales=False)))
    with pytest.raises(UserError, match="tp=2 is not counted with sparse gates of gemma; use tp1"):
        refuse(Layout.parse("tp2"), model=GEMMA.replace(per_layer_inputs=None, altup=None, laurel_rank=None), job=job)
    for fields, says in (
        ({"per_layer_inputs": None}, "altup is counted with per_layer_inputs and laurel_rank"),
        ({"altup": None}, "laurel_rank needs altup and block='sandwich'"),
        ({"gate_sparsity": (0.5,)}, "gate_sparsity names 1 of 5 gated MLPs"),
        ({"activation": "clamped_swiglu"}, "per_layer_inputs is not supported with activation='clamped_swiglu'"),
    ):
        with pytest.raises(ValueError, match=says):
            GEMMA.replace(**fields)
    for keys, says in (
        (
            {"intermediate_size": [40, 40, 40, 40, 48]},
            "widths that differ are not supported; give one for all 5 layers",
        ),
        ({"altup_num_inputs": 1}, "altup_num_inputs=1 is not supported"),
        ({"altup_active_idx": 1}, "altup_active_idx=1 needs another part of the stream"),
    ):
        with pytest.raises(UserError, match=says):
            read(Gemma3nTextConfig(**KEYS | keys))
