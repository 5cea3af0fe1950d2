"""What a step keeps and sends under autocast: as counted, as transformers' blocks save it, in every storage, and as
PyTorch's own parallelisms do."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.modeling_layers import MtpLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

import fivefold as ff
from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.validity import list_reasons, refuse
from fivefold.model import catalog as models
from fivefold.model.huggingface.read import from_config
from fivefold.model.multi_token_prediction import MTP
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.memory.liveness import count_kept_bytes
from fivefold.planner.counts.operations.layer import get_kind
from fivefold.planner.counts.operations.local_shapes import get_local_degrees
from fivefold.trainer.model.precision import check_trainable
from tests.selection import mark_share
from tests.third_party import loops, measured

pytestmark = pytest.mark.slow

TOKENS = 64
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
}
FAMILIES: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SIZES, num_key_value_heads=2),
    "qwen2": transformers.Qwen2Config(**SIZES, num_key_value_heads=2),  # biases
    "qwen3": transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16),  # norms of 16-bit heads
    "starcoder2": transformers.Starcoder2Config(
        **SIZES, num_key_value_heads=2, residual_dropout=0.0, embedding_dropout=0.0, attention_dropout=0.0
    ),  # LayerNorm and a plain MLP
}


def saved_bytes(model: nn.Module, block: nn.Module, run: Callable[[], object], *, half: bool = True) -> int:
    """Bytes of the storages that autograd saves in ``block``, but parameters and the rotary table; ``half``: under
    autocast.
    """
    mine = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    table = 4 * TOKENS * 16  # cosines, or sines, of one sequence
    result: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape[0] != 1 or tensor.untyped_storage().nbytes() != table:
            result.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    block.register_forward_pre_hook(lambda *_: hooks.__enter__())
    block.register_forward_hook(lambda *_: hooks.__exit__())
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        run()
    return sum(item.untyped_storage().nbytes() for key, item in result.items() if key not in mine)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_block_keeps_what_autograd_saves(name: str) -> None:
    config = FAMILIES[name]
    config._attn_implementation = "sdpa"
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    ours = from_config({**config.to_dict(), "architectures": [type(theirs).__name__]}, name=name)
    job = Job(stack="ddp", sequence=TOKENS, global_batch=4, precision="bf16-autocast")
    counts, part = Counts(ours, job), get_local_degrees(Layout.parse("dp2 mbs2"))
    kept = sum(count_kept_bytes(counts.unit(part, get_kind(ours, 1)), sizes={"x": counts.get_local(part).entry_bytes}))
    ids = torch.randint(256, (2, TOKENS))
    assert kept == saved_bytes(theirs, theirs.model.layers[1], lambda: theirs(ids))


@pytest.mark.parametrize("activation", ["gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-autocast"])
def test_an_activation_written_out_keeps_what_autograd_saves(activation: str, precision: str) -> None:
    """transformers' GPT-2 has gelu_new: without its factors a block in fp32 kept 43 % less. A GPU's autocast cubes in
    fp32, a CPU's does not; so the module does it itself here.
    """
    config = transformers.GPT2Config(
        n_embd=64,
        n_layer=2,
        n_head=4,
        vocab_size=256,
        n_positions=TOKENS,
        n_inner=192,
        activation_function=activation,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    ours = from_config({**config.to_dict(), "architectures": [type(theirs).__name__]}, name="gpt2")
    part, job = get_local_degrees(Layout.parse("dp2 mbs2")), Job(stack="ddp", sequence=TOKENS, precision=precision)
    (act,) = (op for op in Counts(ours, job).unit(part, get_kind(ours, 1)).ops if op.name == "mlp.act")
    half = precision == "bf16-autocast"
    mlp = theirs.transformer.h[1].mlp
    if half and activation == "gelu_new":
        mlp.act = Cubed()
    u = torch.randn(2, TOKENS, 192, requires_grad=True).to(torch.bfloat16 if half else torch.float32)
    kept = sum({"mlp.u": u.nbytes, **act.writes}[name] for name in act.keeps)
    assert kept == saved_bytes(theirs, mlp.act, lambda: mlp.act(u), half=half)
    result = mlp.act(u)
    assert act.writes["mlp.m"] == result.nbytes


class Cubed(nn.Module):
    """transformers' NewGELUActivation under CUDA's autocast, whose list of fp32 operations has pow."""

    def forward(self, x: Tensor) -> Tensor:
        cube = torch.pow(x.float(), 3.0)
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * cube)))


def test_a_multi_token_prediction_module_saves_what_autograd_saves() -> None:
    """transformers': its projection makes the stream of its block, which is in 16 bits."""
    config = FAMILIES["llama"]
    config._attn_implementation = "sdpa"
    main = transformers.LlamaForCausalLM(config)
    theirs = MtpLayer(config, LlamaDecoderLayer, LlamaRMSNorm, 0)
    ours = from_config({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}, name="llama").replace(
        mtp=MTP(depth=1, coefficient=0.1)
    )
    job = Job(stack="ddp", sequence=TOKENS, global_batch=4, precision="bf16-autocast")
    counts, part = Counts(ours, job), get_local_degrees(Layout.parse("dp2 mbs2"))
    head, wide = counts.unit(part, "head"), counts.get_local(part).entry_bytes
    kept = zip(head.ops, count_kept_bytes(head, sizes={"x": wide}), strict=True)
    inside = [any(name.startswith("mtp0.") for name in op.writes) and op.kind != "embedding" for op in head.ops]
    mine = sum(size for (_, size), some in zip(kept, inside, strict=True) if some)
    e, h = (torch.randn(2, TOKENS, 64, requires_grad=True) for _ in range(2))
    turns = main.model.rotary_emb(e, torch.arange(TOKENS)[None])
    assert mine == saved_bytes(theirs, theirs, lambda: theirs(e, h, turns, None, None, None))
    casts = [op.name for op in head.ops if op.name.endswith("head.out.weight")]
    assert len(casts) == 1  # of both losses


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[None]:
    """This process alone in a world, or one of two whose messages return at once."""
    if request.param == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2], indirect=True)
@pytest.mark.usefixtures("world")
def test_messages_of_tensor_parallelism_are_those_of_dtensor() -> None:
    """What is gathered of the stream goes in fp32, before the layers cast it; sums of their 16-bit results do not."""
    model, optimizer, step, mesh, _ = loops.tensor_parallel(half=True)
    with ff.watch(model, optimizer, mesh=mesh, layout_name="tp2") as watched:
        step(loops.batches(1, 1))
    case = measured.CASES["TP, DTensor, autocast"]._replace(mbs=1)
    assert [item for item in measured.predict_step(case).traffic if item.axis == "tp"] == [*watched.step.traffic]


@pytest.mark.filterwarnings("ignore:.broadcast_buffers:FutureWarning")
@pytest.mark.parametrize("world", [1], indirect=True)
@pytest.mark.usefixtures("world")
def test_recomputed_casts_of_weights_live_to_the_end_of_the_forward() -> None:
    """In autocast's cache: this peak, at the loss's forward, was 4 % low without them."""
    model, optimizer, step, *_ = loops.ddp(half=True, recompute=True)
    with ff.watch(model, optimizer) as watched:
        for _ in range(2):
            step(loops.batches(1, 2))
    case = measured.CASES["DDP, autocast, recomputed"]._replace(layout="dp1 ac=full", mbs=1, micro_batches=2)
    memory, asked = watched.step.memory, measured.predict_step(case).memory
    assert (memory.stages[0].peak_cause, asked.stages[0].peak_cause) == ("forward nll_loss_forward", "head forward")
    assert asked.peak_bytes == pytest.approx(memory.peak_bytes, rel=5e-4)


ENDS = {"embed_tokens": "embed", "norm": "norm", "lm_head": "head"}
MODULES = {
    "": ("",), ".attention": (".attention",), ".mlp": (".mlp",), ".norms": (".norm1", ".norm2"),
    ".q_proj": (".attention.q",), ".o_proj": (".attention.out",), ".down_proj": (".mlp.down",),
}  # fmt: skip


def draw_frozen(seed: int) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """Draw frozen parts, their weights in ``loops.Llama``, and whether blocks are recomputed."""
    draw = random.Random(seed)
    parts, names, layers = list[str](), list[str](), loops.SHAPE.layers
    for part, name in ENDS.items():
        if draw.random() < 0.5:
            parts.append(part)
            names.append(name)
    for _ in range(draw.randint(1, 3)):
        first, module = draw.randrange(layers), draw.choice([*MODULES])
        last = draw.randint(first + 1, layers)
        parts.append(f"layers[{first}:{last}]{module}")
        names += [f"blocks.{layer}{name}" for layer in range(first, last) for name in MODULES[module]]
    return tuple(parts), tuple(names), draw.random() < 0.5


@pytest.mark.filterwarnings("ignore:.broadcast_buffers:FutureWarning")
@pytest.mark.parametrize("world", [1], indirect=True)
@pytest.mark.parametrize("half", [True, False], ids=["autocast", "fp32"])
@pytest.mark.parametrize("seed", mark_share(24, range(24)))
@pytest.mark.usefixtures("world")
def test_frozen_parts_take_what_torch_takes(seed: int, half: bool) -> None:
    """Weights without ``requires_grad``, in 16 bits under autocast, as LLaMA-Factory's ``finetuning_type: freeze``."""
    parts, names, recomputes = draw_frozen(seed)
    layout = "dp1 ac=full" if recomputes else "dp1"
    case = measured.frozen(layout, 2, *parts, weights=names, half=half, recompute=recomputes)._replace(mbs=1)
    job = Job(stack="ddp", sequence=loops.SEQUENCE, precision=case.precision, freeze=parts)
    if list(list_reasons(Layout.parse(layout), model=loops.SHAPE, job=job, machine=None)):  # nothing or the head alone
        pytest.skip(",".join(parts))
    model, optimizer, step, *_ = case.loop()
    with ff.watch(model, optimizer) as watched:
        for _ in range(2):
            step(loops.batches(1, 2))
    planned, taken = measured.predict_step(case), watched.step
    assert planned.work.hardware_flops == taken.work.hardware_flops, parts
    states = [
        (memory.parameters_bytes, memory.optimizer_bytes)
        for memory in (planned.memory.stages[0], taken.memory.stages[0])
    ]
    assert states[0] == states[1], parts
    assert planned.memory.peak_bytes == pytest.approx(taken.memory.peak_bytes, rel=5e-3), (parts, recomputes)


def test_autocast_with_the_trainer_is_an_error() -> None:
    job = Job(precision="bf16-autocast")
    with pytest.raises(UserError, match=r"bf16-autocast.*cannot be trained"):
        check_trainable(job.precision)
    with pytest.raises(UserError, match=r"PyTorch's autocast, which fivefold does not use; use bf16, or a stack"):
        refuse(Layout.parse("dp1"), model=models.build_model("llama3.2-1b"), job=job)
