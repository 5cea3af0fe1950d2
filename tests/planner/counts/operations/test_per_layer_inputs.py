"""Per-layer inputs and shared keys: parameters, FLOPs and saved tensors of transformers' Gemma 4; what is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM
from transformers.models.gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextDecoderLayer

import fivefold as ff
from fivefold.adapter import Adapter
from fivefold.errors import UserError
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.layout.validity import refuse
from fivefold.model.huggingface.read import from_config
from fivefold.model.spec import Model
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.operations.layer import build_block_unit, list_block, list_embedding, list_head
from fivefold.planner.counts.operations.local_shapes import Local, LocalDegrees
from fivefold.planner.counts.operations.op import Op
from fivefold.planner.counts.operations.per_layer_inputs import add_input

ROWS, SEQUENCES = 24, 2
KEYS: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 5, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 12, "num_global_key_value_heads": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 64, "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 90,
    "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "pad_token_id": 0,
}  # fmt: skip
CONFIG = Gemma4TextConfig(**KEYS, attn_implementation="eager")


def read(config: Gemma4TextConfig) -> Model:
    return from_config(config.to_dict() | {"architectures": ["Gemma4ForCausalLM"]}, name="gemma")


GEMMA = read(CONFIG)


def list_units(model: Model, **fields: Any) -> list[list[Op]]:
    job = Job(sequence=ROWS // SEQUENCES, global_batch=SEQUENCES, precision=get_recipe("fp32"), **fields)
    local = Local(model, job, LocalDegrees(sequences=SEQUENCES))
    return [list_embedding(local), *(list_block(local, layer=layer) for layer in range(model.layers)), list_head(local)]


def draw(chance: random.Random) -> dict[str, Any]:
    layers = chance.randint(2, 9)
    kinds = [chance.choice(("sliding_attention", "full_attention")) for _ in range(layers - 1)]
    return KEYS | {
        "num_hidden_layers": layers,
        "layer_types": [*kinds, "full_attention"],
        "num_key_value_heads": chance.choice((1, 2, 3)),
        "global_head_dim": chance.choice((4, 8, 12)),
        "num_kv_shared_layers": chance.randint(0, layers - 1),
        "use_double_wide_mlp": chance.random() < 0.5,
        "attention_k_eq_v": chance.random() < 0.5,
        "hidden_size_per_layer_input": chance.choice((0, 3, 6)),
        "tie_word_embeddings": chance.random() < 0.5,
    }


@pytest.mark.parametrize("seed", range(8))
def test_parameters_of_random_configs_are_those_of_transformers(seed: int) -> None:
    """A config whose last layers have none to share with is an error on both sides."""
    chance = random.Random(seed)
    n_built = 0
    for _ in range(5):
        config = Gemma4TextConfig(**draw(chance))
        try:
            with torch.device("meta"):
                theirs = AutoModelForCausalLM.from_config(config)
        except ValueError:
            with pytest.raises(UserError, match=r"leaves no (full|sliding) layer with keys"):
                read(config)
            continue
        n_built += 1
        assert read(config).parameters == sum(weight.numel() for weight in theirs.parameters())
    assert n_built


def test_every_weight_is_used_once_and_flops_are_those_of_transformers() -> None:
    theirs = AutoModelForCausalLM.from_config(CONFIG)
    ids = torch.randint(0, 90, (SEQUENCES, ROWS // SEQUENCES))
    counter = FlopCounterMode(display=False)
    with counter:
        theirs(ids, use_cache=False)
    units = list_units(GEMMA)
    ops = [op for unit in units for op in unit]
    assert sum(op.parameters for op in ops) - GEMMA.vocab * GEMMA.width == GEMMA.parameters  # the head is tied
    assert sum(op.flops for op in ops) == counter.get_total_flops()


def count_saved(run: Any, parameters: set[int]) -> int:
    saved, kept = dict[int, int](), list[Tensor]()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters and tensor.numel() > 1:
            saved[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)  # so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(saved.values())


def test_saved_bytes_of_a_layers_input_are_those_of_transformers() -> None:
    layer = Gemma4TextDecoderLayer(CONFIG, layer_idx=0)
    z = torch.randn(SEQUENCES, ROWS // SEQUENCES, 48, requires_grad=True)
    parts = torch.randn(SEQUENCES, ROWS // SEQUENCES, 5, 6, requires_grad=True)

    def run() -> Tensor:  # the end of Gemma4TextDecoderLayer.forward
        hidden = layer.act_fn(layer.per_layer_input_gate(z)) * parts[:, :, 1]
        return z + layer.post_per_layer_input_norm(layer.per_layer_projection(hidden))

    saved_bytes = count_saved(run, {weight.untyped_storage().data_ptr() for weight in layer.parameters()})
    job = Job(sequence=ROWS // SEQUENCES, global_batch=SEQUENCES, precision=get_recipe("fp32"), kernels="plain")
    local = Local(GEMMA, job, LocalDegrees(sequences=SEQUENCES))
    assert GEMMA.per_layer_inputs is not None
    ops = add_input(local, GEMMA.per_layer_inputs, "z.mlp", "z")
    sizes = {"z.mlp": ROWS * 48 * 4} | {name: size for op in ops for name, size in op.writes.items()}
    kept = sum(sizes[name] for name in {name for op in ops for name in op.keeps})
    means = 4 * ROWS  # their norm raises the mean of squares to a power, and saves it next to the result
    assert kept + parts.nbytes + means == saved_bytes


def test_a_recomputed_layer_keeps_the_keys_that_later_layers_share() -> None:
    job = Job(sequence=ROWS // SEQUENCES, global_batch=SEQUENCES, precision=get_recipe("fp32"))
    local = Local(GEMMA, job, LocalDegrees(sequences=SEQUENCES, recomputed=frozenset({"layer"})))
    assert [layer for layer in range(5) if GEMMA.lends_kv(layer)] == [1, 2]  # the last full and the last sliding one
    kept = {}
    for layer in range(5):
        ops = list_block(local, layer=layer)
        unit = build_block_unit(ops, local)
        core = next(op for op in ops if op.name == "attention.core")
        kept[layer] = {name for name in core.reads[1:] if name not in unit.dropped}
        written = {name: size for op in ops for name, size in op.writes.items()}
        if GEMMA.shares_kv(layer):
            assert [written[name] for name in core.reads[1:]] == [0, 0]
            assert not any(op.name.startswith(("attention.k", "attention.v", "rope.k")) for op in ops)
    assert kept == {0: set(), 1: {"kr", "vn"}, 2: {"kr", "vn"}, 3: set(), 4: set()}


def test_the_embedding_keeps_the_inputs_of_all_layers_and_no_second_stream() -> None:
    counts = Counts(GEMMA, Job(sequence=ROWS, global_batch=1, precision=get_recipe("fp32")))
    plain = Counts(GEMMA.replace(per_layer_inputs=None), counts.job)
    part = LocalDegrees(sequences=1)
    size = ROWS * 5 * 6 * 4
    ops = counts.unit(part, "embed").ops
    sizes = {name: size for op in ops for name, size in op.writes.items()}
    kept = {name for op in ops for name in op.keeps if "norm" not in op.name}
    assert {name: sizes[name] for name in kept - {"ids"}} == {"pl": size, "xs": 0}
    statistics = sum(sizes[name] for op in ops if op.kind == "norm" for name in op.keeps)
    more = counts.profile(part, "embed").kept_bytes - plain.profile(part, "embed").kept_bytes
    assert more == size + statistics


@pytest.mark.parametrize("layout", ["dp1 cp2", "dp2 zero3", "dp2 zero1 ac=full", "dp2 ac=selective", "dp2 ac=norm"])
def test_predict_adds_time_and_memory_for_per_layer_inputs(layout: str) -> None:
    fields: dict[str, Any] = {"sequence": 72, "global_batch": 8}
    step = ff.predict(GEMMA, "h100:2", layout, **fields)
    plain = ff.predict(GEMMA.replace(per_layer_inputs=None), "h100:2", layout, **fields)
    assert step.time.step_seconds > plain.time.step_seconds
    assert step.memory.peak_bytes > plain.memory.peak_bytes


@pytest.mark.slow
def test_a_search_finds_layouts_of_one_stage() -> None:
    for found in ff.search(GEMMA, "h100:8", where="cp=1 order=default", sequence=64, global_batch=64).best:
        assert (layout := Layout.parse(found.step.layout)).tp == layout.pp == 1


def test_unsupported_combinations_with_per_layer_inputs_are_one_line_errors() -> None:
    job = Job(sequence=12, global_batch=2)
    shared = GEMMA.replace(per_layer_inputs=None)
    for layout, model, of_job, says in (
        ("tp2", GEMMA, {}, "tp=2 and pp=1 are not counted with inputs of each layer of gemma; use tp1 and pp1"),
        ("pp2 stages=3-2", shared, {}, "begins with layer 3 of gemma, which attends to the keys and values of layer"),
        ("cp2 cp=ulysses ac=full/2", shared, {}, "ac=full/2 is not counted with cp=ulysses and keys that layers share"),
        ("dp1", GEMMA, {"precision": "bf16-autocast", "stack": "ddp"}, "per-layer inputs are not counted under"),
        ("dp1", GEMMA, {"adapter": Adapter()}, "adapters are not modelled with per-layer inputs of gemma"),
        ("dp1", shared, {"adapter": Adapter()}, "adapters are not modelled with keys that layers of gemma share"),
    ):
        with pytest.raises(UserError, match=says):
            refuse(Layout.parse(layout), model=model, job=job.replace(**of_job))
    for fields, says in (
        ({"shared_kv_layers": 4}, "shared_kv_layers=4 leaves no full layer with keys of its own"),
        ({"shared_kv_layers": 0}, "shared_kv_ffn is the width of the last shared_kv_layers=0 layers"),
        ({"qkv_clip": 1.0}, "qkv_clip is not supported with shared_kv_layers"),
        ({"qk_norm": "full", "sliding": None}, "shared_kv_layers is not supported with qk_norm='full'"),
        ({"block": "post"}, "per_layer_inputs is not supported with block='post'"),
        ({"feed_forwards": (True, False)}, "feed_forwards is not supported with per_layer_inputs"),
    ):
        with pytest.raises(ValueError, match=says):
            GEMMA.replace(**fields)
