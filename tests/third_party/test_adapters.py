"""The trainer's adapters against peft's around transformers: ten steps, and folders that each writes for the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fivefold.adapter import (
    EXPERT_TARGETS,
    Adapter,
    expand_targets,
)
from fivefold.base_format import BASE_FORMATS, FOUR_BIT_BASES
from fivefold.errors import UserError
from fivefold.job import Job, LearningRate, Optimizer, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.catalog import resolve
from fivefold.model.huggingface.families import FAMILIES
from fivefold.model.huggingface.peft import EXPERT_LAYERS, NAMED_AS_MLPS, NAMED_W1
from fivefold.planner.counts.operations.adapters import _quantize_to_int8
from fivefold.planner.counts.operations.op import matmul
from fivefold.trainer.build import build
from fivefold.trainer.checkpoint import huggingface_import
from fivefold.trainer.checkpoint.huggingface_export import export, find
from fivefold.trainer.checkpoint.huggingface_import import HuggingFaceFolder
from fivefold.trainer.checkpoint.peft_adapter import (
    BY_ROWS,
    AdapterFolder,
    ExpertFactor,
    _list_expert_factors,
    _list_tensor_names,
    find_family,
)
from fivefold.trainer.engine import Engine
from fivefold.trainer.generate.source import WeightSource
from fivefold.trainer.model.dropout import ADAPTERS, AdapterDropout, sequence_keys
from fivefold.trainer.model.quantized.formats import allocate
from fivefold.trainer.model.quantized.fp8 import Fp8Weight
from fivefold.trainer.model.quantized.int8 import Int8Weight
from fivefold.trainer.model.quantized.weight import MatrixSlice
from tests.planner.counts.expert_adapters import count_expert_adapters
from tests.trainer.checkpoint.test_peft_adapter import ADAPTER, base_of, ignore_progress, text_tokens, train_and_save
from tests.trainer.checkpoint.test_published_tensors import (
    OF_EXPERTS,
    publish_experts_in_fp8,
    publish_fp8_by_tensor,
    publish_latents_in_fp8,
    publish_mxfp4,
)

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

# peft calls what transformers has renamed
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

PATTERNS = Adapter(rank=4, alpha=12, rank_pattern={"q_proj": 2, "down_proj": 7}, alpha_pattern={"o_proj": 3.5})
ENDS = Adapter(rank=4, alpha=12, targets=("all-linear", "embed_tokens", "lm_head"), rank_pattern={"lm_head": 6})
STEPS, BATCH, TOKENS, VOCAB = 10, 8, 24, 251


def batches() -> Tensor:
    return torch.randint(0, VOCAB, (STEPS, BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(5))


def job_of(adapter: Adapter, *, epsilon: float = 1e-5) -> Job:
    return Job(
        sequence=TOKENS,
        global_batch=BATCH,
        precision=get_recipe("fp32"),
        adapter=adapter,
        optimizer=Optimizer(clip=0, epsilon=epsilon),
        learning_rate=LearningRate(kind="constant", peak=1e-3),
    )


class PeftName(NamedTuple):
    """Peft's name of one of our factors, and the rows of peft's that ours has in this order; None: the same."""

    name: str
    rows: Tensor | None

    expert: ExpertFactor | None = None

    def read(self, tensor: Tensor) -> Tensor:
        if self.expert is not None:
            return self.expert.read(tensor).flatten(0, 1)  # as the trainer holds it
        return tensor if self.rows is None else tensor[self.rows]

    def write(self, tensor: Tensor, value: Tensor) -> None:
        if self.expert is not None:
            self.expert.write(tensor, value.view(self.expert.experts, -1, value.shape[1]))
        elif self.rows is None:
            tensor.copy_(value)
        else:
            tensor.index_copy_(0, self.rows, value)


def map_names(folder: Path, adapter: Adapter) -> dict[str, PeftName]:
    """By our names: of peft's base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight."""
    names, model = {}, resolve(str(folder / "config.json"))
    parameters = tuple(target for target in adapter.targets if target in EXPERT_TARGETS)
    for ours, factor in _list_expert_factors(model, find_family(folder), parameters):
        names[ours] = PeftName(f"{factor.name.removesuffix('.weight')}.default.weight", None, factor)
    for ours, (name, part) in _list_tensor_names(model, find_family(folder), adapter):
        if adapter.is_saved(ours):
            names[ours] = PeftName(f"{name.removesuffix('.weight')}.modules_to_save.default.weight", None)
            continue
        stem, _, leaf = name.rpartition(".lora_")
        if ours.startswith("embed.tokens."):
            names[ours] = PeftName(f"{name}.default", None)
            continue
        rows = torch.tensor(part.order()) if ours.endswith(BY_ROWS) else None
        names[ours] = PeftName(f"{stem}.lora_{leaf.removesuffix('.weight')}.default.weight", rows)
    return names


class OurDropout(torch.nn.Module):
    """Dropout by the trainer's masks, in place of peft's ``lora_dropout``. ``keys``: of the sequences of a step."""

    keys: Tensor

    def __init__(self, rate: float, *, place: int) -> None:
        super().__init__()
        self.drop = AdapterDropout(rate, place=place)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.drop.draw(OurDropout.keys, rows=x.numel() // x.shape[-1], columns=range(x.shape[-1]))
        return x * mask.view_as(x) * self.drop.scale


def wrap_with_peft(
    folder: Path, job: Job, start: dict[str, Tensor], *, dtype: torch.dtype
) -> tuple[torch.nn.Module, dict[str, tuple[Tensor, PeftName]]]:
    """Return the model with adapters, in training, and its factors by our names, which begin as ``start``."""
    adapter = job.adapter
    assert adapter is not None
    config = peft.LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha or 2 * adapter.rank,
        lora_dropout=adapter.dropout,
        use_rslora=adapter.rank_stabilized,
        use_dora=adapter.has_magnitudes,
        modules_to_save=list(adapter.modules_to_save) or None,
        rank_pattern=adapter.ranks,
        alpha_pattern=adapter.alphas,
        target_parameters=[f"mlp.{target}" for target in adapter.targets if target in EXPERT_TARGETS] or None,
        target_modules="all-linear"
        if adapter.targets == ("all-linear",)
        else [target for target in expand_targets(adapter.targets) if target not in EXPERT_TARGETS],
    )
    quantized = {}
    quantization = resolve(str(folder / "config.json")).quantization
    if adapter.base in FOUR_BIT_BASES and quantization != adapter.base:
        quantized["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=adapter.base,
            bnb_4bit_use_double_quant=adapter.double_quantization,
            bnb_4bit_compute_dtype=torch.float32,
        )
    configs = {"mxfp4": transformers.Mxfp4Config, "fp8": transformers.FineGrainedFP8Config}
    if is_published := quantization in configs:
        quantized["quantization_config"] = configs[quantization](dequantize=True)
    # grouped_mm, which experts call otherwise, has no fp64
    base = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, experts_implementation="eager", **quantized
    )
    if adapter.base not in FOUR_BIT_BASES:
        base = base.to(dtype)  # some of the tensors that are dequantized as they are read stay in bf16
    if adapter.base in ("int8", "fp8") and not is_published:
        round_blocks(base, round_to_int8 if adapter.base == "int8" else round_to_fp8)
    model = peft.get_peft_model(base, config)
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    names = map_names(folder, adapter)
    assert weights.keys() == {there.name for there in names.values()}
    trained = {ours: (weights[there.name], there) for ours, there in names.items()}
    with torch.no_grad():
        for ours, (weight, there) in trained.items():
            if ours.endswith("magnitude"):  # norms of the rows of the base
                torch.testing.assert_close(start[ours], there.read(weight), rtol=1e-6, atol=0)
            value = start[ours].to(dtype)
            there.write(weight, value)
    return model.train(), trained


def round_blocks(model: Any, round_weight: Callable[[Tensor], Tensor]) -> None:
    """Round the weights of the linear layers of blocks."""
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = round_weight(module.weight.data)


def round_to_int8(weight: Tensor) -> Tensor:
    """Return a weight in bitsandbytes' int8, dequantized by bitsandbytes."""
    stored = pytest.importorskip("bitsandbytes.nn").Int8Params(weight.clone(), requires_grad=False).to("cpu")
    rounded: Tensor = pytest.importorskip("bitsandbytes.functional").int8_vectorwise_dequant(stored.CB, stored.SCB)
    return rounded.to(weight.dtype)


def round_to_fp8(weight: Tensor) -> Tensor:
    """Return a weight in fp8 and dequantized, both by transformers, which takes full blocks of 128 x 128 alone."""
    integration = pytest.importorskip("transformers.integrations.finegrained_fp8")
    quantizer = type("Quantizer", (), {"quantization_config": transformers.FineGrainedFP8Config()})()
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
    stored = integration.Fp8Quantize(quantizer).convert({"up.weight": padded})
    codes, scales = stored["up.weight"], stored["up.weight_scale_inv"]
    rounded: Tensor = integration.Fp8Dequantize(quantizer)._dequantize_one(codes, scales)
    return rounded[:rows, :columns].to(weight.dtype)


def train_with_peft(
    folder: Path, job: Job, start: dict[str, Tensor]
) -> tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor]]:
    """Losses, gradients of every step, and the factors at the end.

    With dropout in fp64: peft in fp32 rounds the dropped inputs, to 1e-5 of a gradient, and our engine to 3e-6.
    """
    assert job.adapter is not None
    dtype = torch.float64 if job.adapter.dropout else torch.float32
    model, trained = wrap_with_peft(folder, job, start, dtype=dtype)
    if rate := job.adapter.dropout:
        dropouts = [
            module
            for name, module in model.named_modules()
            if name.endswith("lora_dropout") and "embed_tokens" not in name  # which peft does not call
        ]
        for place, module in enumerate(dropouts, start=ADAPTERS):
            module["default"] = OurDropout(rate, place=place)
    factors = list({there.name: weight for weight, there in trained.values()}.values())
    optimizer = torch.optim.AdamW(
        factors, lr=1e-3, betas=job.optimizer.betas, eps=job.optimizer.epsilon, weight_decay=0.1
    )
    losses, gradients = [], []
    for step, tokens in enumerate(batches()):
        OurDropout.keys = sequence_keys(torch.arange(BATCH), seed=job.seed, step=step)
        loss = compute_loss(model, tokens)
        loss.backward()
        gradients.append({ours: there.read(weight.grad).clone() for ours, (weight, there) in trained.items()})  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients, {ours: there.read(weight.detach()) for ours, (weight, there) in trained.items()}


def compute_loss(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(folder: Path, text: str, job: Job) -> tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor], object]:
    """Losses, gradients, the factors before and after; of one process."""
    model, layout = resolve(str(folder / "config.json")), Layout.parse(text)
    built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))
    huggingface_import.start(folder, built=built, model=model)
    engine, losses, gradients = Engine(built, model=model, layout=layout, job=job), [], []
    start = {shard.name: shard.weight.detach().clone() for shard in built.shards}
    for tokens in batches():
        losses.append(engine.step(tokens.view(layout.micro_batches(job), layout.mbs, -1)).loss)
        gradients.append({shard.name: shard.weight.grad.clone() for shard in built.shards})  # type: ignore[union-attr]
        engine.zero_grad()
    return losses, gradients, start, {shard.name: shard.weight.detach().clone() for shard in built.shards}


# Rows of matrices have multiples of 64 elements here: bitsandbytes 0.50.2 dequantizes rows of 48, 80 or 96 wrongly on
# CPUs with AVX-512 (backends/cpu/ops.py, dequantize_4bit), by more than the codes are apart.
@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A small Llama with random weights, as transformers saves it."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize(
    "adapter",
    [
        Adapter(rank=4, alpha=12),
        Adapter(rank=3, targets=("q_proj", "v_proj", "down_proj"), rank_stabilized=True),
        Adapter(rank=4, alpha=12, base="nf4"),
        Adapter(rank=4, alpha=12, base="nf4", double_quantization=False),
        Adapter(rank=4, alpha=12, base="fp4", double_quantization=False),
        Adapter(rank=4, alpha=12, dropout=0.3),
        Adapter(kind="dora", rank=4, alpha=12),
        Adapter(kind="dora", rank=4, alpha=12, base="nf4"),
        Adapter(rank=4, alpha=12, base="int8"),
        Adapter(rank=4, alpha=12, base="fp8"),
        Adapter(kind="dora", rank=4, alpha=12, base="fp8"),
        Adapter(rank=4, alpha=12, modules_to_save=("embed_tokens", "lm_head")),
        PATTERNS,
        PATTERNS.replace(kind="dora", rank_stabilized=True),
        ENDS,
        ENDS.replace(dropout=0.3),
        Adapter(kind="dora", rank=4, targets=("q_proj", "lm_head")),
    ],
    ids=(
        "all-linear",
        "some",
        "qlora",
        "nf4 without double quantization",
        "fp4 without double quantization",
        "dropout by the same masks",
        "dora",
        "dora over nf4",
        "over int8",
        "over fp8",
        "dora over fp8",
        "modules to save",
        "patterns",
        "patterns of dora",
        "embedding and head",
        "embedding and head with dropout",
        "dora of the head",
    ),
)
def test_ten_steps_equal_those_of_peft(forked, base: Path, adapter: Adapter) -> None:
    if adapter.base in FOUR_BIT_BASES:
        pytest.importorskip("bitsandbytes")
    job = job_of(adapter, epsilon=1e-3)  # AdamW divides by more than the rounding of small gradients
    ((losses, gradients, start, finals),) = forked(1, train, base, "dp1 mbs4", job)
    compare_with_peft(base, job, losses, gradients, start, finals)


def compare_with_peft(
    base: Path,
    job: Job,
    losses: list[float],
    gradients: list[dict[str, Tensor]],
    start: dict[str, Tensor],
    finals: dict[str, Tensor],
) -> None:
    """Losses, gradients and the final factors of ten steps."""
    theirs, their_gradients, final = train_with_peft(base, job, start)
    assert losses == pytest.approx(theirs, rel=1e-6)
    for step, (mine, there) in enumerate(zip(gradients, their_gradients, strict=True)):
        for name in there:
            assert (mine[name] - there[name]).norm() <= 1e-5 * there[name].norm(), (step, name)
    for name, weight in finals.items():
        assert (weight - final[name]).norm() <= 1e-5 * final[name].norm(), name


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.0,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 16},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 12, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "deepseek_v2": LATENT | {"q_lora_rank": None, "aux_loss_alpha": 0.0},
    "deepseek_v3": LATENT | {"q_lora_rank": 14},
    "laguna": {
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        "head_dim": 12,
        "gating": "per-head",
        "num_attention_heads_per_layer": [4, 4, 4],
        "layer_types": ["full_attention"] * 3,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
COMPRESSED = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


def base_of_mixture(path: Path, family: str) -> Path:
    """A small mixture with random weights, as transformers saves it."""
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(family, **SIZES | MIXTURES[family])
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # which training of a frozen router leaves as it is
            buffer.normal_(0, 0.1)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("family", "adapter"),
    [
        ("mixtral", Adapter(rank=4, targets=ATTENTION)),
        ("qwen3_moe", Adapter(rank=4, targets=("q_proj", "v_proj"))),
        ("qwen2_moe", Adapter(rank=4, targets=(*ATTENTION, "gate_proj", "up_proj", "down_proj"))),
        ("qwen2_moe", Adapter(rank=4, targets=("down_proj",))),
        ("gpt_oss", Adapter(kind="dora", rank=4, targets=ATTENTION)),
        ("laguna", Adapter(rank=4, targets=(*ATTENTION, "g_proj"))),  # an output gate of attention
        ("laguna", Adapter(rank=4, targets=("q_proj", "v_proj"))),
        ("deepseek_v2", Adapter(rank=4, targets=("q_proj", "kv_a_proj_with_mqa", "kv_b_proj"))),
        ("deepseek_v3", Adapter(rank=4, targets=COMPRESSED)),
        ("deepseek_v3", Adapter(rank=4, targets=COMPRESSED, dropout=0.3)),
        ("deepseek_v3", Adapter(kind="dora", rank=4, targets=COMPRESSED)),
        ("qwen3_moe", Adapter(rank=4, targets=ATTENTION, base="nf4")),  # experts stay in fp32
        ("mixtral", Adapter(rank=4, targets=("q_proj", *EXPERT_TARGETS), rank_stabilized=True)),
        ("qwen3_moe", Adapter(rank=4, targets=("v_proj", *EXPERT_TARGETS), rank_pattern={"experts.gate_up_proj": 8})),
        ("gpt_oss", Adapter(rank=4, targets=("q_proj", *EXPERT_TARGETS), alpha_pattern={"experts.down_proj": 3})),
        ("deepseek_v3", Adapter(rank=4, targets=(*COMPRESSED, "experts.down_proj"))),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.name} of {len(value.targets)}",
)
def test_ten_steps_of_mixtures_equal_those_of_peft(forked, tmp_path: Path, family: str, adapter: Adapter) -> None:
    """Experts and routers are frozen, and gradients of what lies below them go through both."""
    if adapter.base in FOUR_BIT_BASES:
        pytest.importorskip("bitsandbytes")
    base, job = base_of_mixture(tmp_path / "base", family), job_of(adapter, epsilon=1e-3)
    ((losses, gradients, start, finals),) = forked(1, train, base, "dp1 mbs4", job)
    compare_with_peft(base, job, losses, gradients, start, finals)


publish_gpt_oss = partial(publish_mxfp4, **SIZES | MIXTURES["gpt_oss"] | OF_EXPERTS)


@pytest.mark.parametrize(
    ("publish", "adapter"),
    [
        (publish_gpt_oss, Adapter(rank=4, targets=ATTENTION)),
        (publish_gpt_oss, Adapter(rank=4, targets=(*ATTENTION, *EXPERT_TARGETS), base="mxfp4")),
        (publish_experts_in_fp8, Adapter(rank=4, targets=(*ATTENTION, *EXPERT_TARGETS), base="fp8")),
        (publish_latents_in_fp8, Adapter(rank=4, targets=COMPRESSED, base="fp8")),
        (publish_fp8_by_tensor, Adapter(rank=4, base="fp8")),
    ],
    ids=("gpt-oss in 16 bits", "gpt-oss", "experts in fp8", "latent attention and experts in fp8", "fp8 by tensor"),
)
def test_ten_steps_over_a_published_folder_in_few_bits_equal_those_of_peft(
    forked, tmp_path: Path, publish: Callable[..., Path], adapter: Adapter
) -> None:
    """Over weights that transformers dequantizes to train adapters, and our engine for each product."""
    base, job = publish(tmp_path / "base", vocab_size=VOCAB), job_of(adapter, epsilon=1e-3)
    ((losses, gradients, start, finals),) = forked(1, train, base, "dp1 mbs4 ac=full", job)
    compare_with_peft(base, job, losses, gradients, start, finals)


def quantize_with_bitsandbytes(base: Path, path: Path, **options: object) -> Path:
    """A folder of ``base`` as transformers and bitsandbytes save it, such as unsloth/Llama-3.2-3B-bnb-4bit."""
    pytest.importorskip("bitsandbytes")
    config = transformers.BitsAndBytesConfig(**options)
    quantized = transformers.AutoModelForCausalLM.from_pretrained(base, quantization_config=config, dtype=torch.float32)
    quantized.save_pretrained(path)
    return path


IN_NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
BY_DEFAULT = {"load_in_4bit": True}  # fp4 without double quantization


@pytest.mark.parametrize(
    ("options", "stored_in", "label"),
    [
        (IN_NF4 | {"bnb_4bit_quant_storage": "uint8"}, "nf4", "NF4"),
        (IN_NF4 | {"bnb_4bit_quant_storage": "bfloat16"}, "nf4", "NF4"),
        (BY_DEFAULT, "fp4", "FP4 WITHOUT DOUBLE QUANTIZATION"),
    ],
)
def test_a_folder_in_4_bits_is_read_as_bitsandbytes_reads_it(
    base: Path, tmp_path: Path, options: dict[str, Any], stored_in: str, label: str
) -> None:
    """Codes, scales and their scales to the byte, and values to the bit."""
    functional = pytest.importorskip("bitsandbytes.functional")
    folder = quantize_with_bitsandbytes(base, tmp_path / "folder", **options)
    opened = HuggingFaceFolder.open(folder)
    stored = BASE_FORMATS[stored_in]._replace(double_quantization="bnb_4bit_use_double_quant" in options)
    assert (opened.model.quantization, opened.model.double_quantization) == (stored_in, stored.double_quantization)
    assert sorted(opened.dtypes()) == sorted(["F32", label])
    tensors = safetensors.load_file(folder / "model.safetensors")
    names = {ours: part.name for ours, (part, *_) in opened.parts.items() if f"{part.name}.absmax" in tensors}
    assert len(names) == 3 * 7
    for ours, name in names.items():
        parts = {key: tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}
        state = functional.QuantState.from_dict(parts, device=torch.device("cpu"))
        packed, *scales = opened.read_codes(ours, base=stored) or ()
        assert torch.equal(packed, tensors[name].view(torch.uint8).flatten())
        theirs = [state.absmax, *([state.state2.absmax, state.offset.view(1)] if state.nested else [])]
        assert all(torch.equal(*pair) for pair in zip(scales, theirs, strict=True))
        values = functional.dequantize_4bit(tensors[name].view(torch.uint8).view(-1, 1), state)
        assert torch.equal(opened.read_matrix(ours), values)


def test_a_folder_in_int8_is_read_as_bitsandbytes_reads_it(base: Path, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    opened = HuggingFaceFolder.open(quantize_with_bitsandbytes(base, tmp_path / "int8", load_in_8bit=True))
    tensors = safetensors.load_file(tmp_path / "int8" / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    codes, scales = opened.read_codes("blocks.1.mlp.down.weight", base=BASE_FORMATS["int8"]) or ()
    assert torch.equal(codes, tensors[f"{name}.weight"].view(torch.uint8).flatten())
    assert torch.equal(scales, tensors[f"{name}.SCB"])
    values = functional.int8_vectorwise_dequant(tensors[f"{name}.weight"], scales)
    torch.testing.assert_close(opened.read_matrix("blocks.1.mlp.down.weight"), values, rtol=1e-6, atol=0)


SKIPPED = {"llm_int8_skip_modules": ["lm_head", "model.layers.1.mlp", "model.layers.2.self_attn.q_proj"]}


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("dp1 mbs4", IN_NF4),
        ("dp1 mbs4", IN_NF4 | SKIPPED),
        ("dp2 zero3 mbs2 ac=full", IN_NF4),
        ("dp1 mbs4", BY_DEFAULT),
        ("dp2 zero3 mbs2 ac=full", BY_DEFAULT),
    ],
)
def test_ten_steps_over_a_folder_in_4_bits_equal_those_of_peft(
    forked, base: Path, tmp_path: Path, text: str, options: dict[str, Any]
) -> None:
    """Another layout begins with the same codes, and has the losses of one process."""
    folder = quantize_with_bitsandbytes(base, tmp_path / "folder", **options)
    model = resolve(str(folder / "config.json"))
    assert len(model.unquantized) == (4 if "llm_int8_skip_modules" in options else 0)
    stored = Adapter(base=model.quantization, double_quantization=model.double_quantization)
    job = job_of(stored.replace(rank=4, alpha=12), epsilon=1e-3)
    ((losses, gradients, start, finals),) = forked(1, train, folder, "dp1 mbs4", job)
    if text == "dp1 mbs4":
        compare_with_peft(folder, job, losses, gradients, start, finals)
        return
    layout = Layout.parse(text)
    for ours in forked(layout.world, train_losses, folder, layout, job):
        assert ours == pytest.approx(losses, rel=1e-6)


def train_losses(folder: Path, layout: Layout, job: Job) -> list[float]:
    model = resolve(str(folder / "config.json"))
    built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))
    huggingface_import.start(folder, built=built, model=model)
    engine, losses = Engine(built, model=model, layout=layout, job=job), []
    for tokens in batches():
        rows = tokens.view(layout.micro_batches(job), layout.dp, layout.mbs, -1)[:, built.ranks["dp"].rank]
        losses.append(engine.step(rows).loss)
        engine.zero_grad()
    return losses


DRAWS, RATE = 100, 0.4


def draw_gradients(folder: Path, job: Job) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Gradients of the factors B at the start, of one batch under many masks; and the factors."""
    model, layout = resolve(str(folder / "config.json")), Layout.parse(f"dp1 mbs{BATCH}")
    built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))
    huggingface_import.start(folder, built=built, model=model)
    engine, gradients = Engine(built, model=model, layout=layout, job=job), []
    shards = [shard for shard in built.shards if shard.name.endswith("lora_b")]
    for number in range(DRAWS):
        engine.step_number = number
        engine.backward(batches()[0][None])
        gradients.append({shard.name: shard.weight.grad.clone() for shard in shards})  # type: ignore[union-attr]
        engine.zero_grad()
    return gradients, {shard.name: shard.weight.detach().clone() for shard in built.shards}


def test_gradients_under_dropout_are_distributed_as_those_of_peft(forked, base: Path) -> None:
    """Mean and variance over the masks that each draws itself. While B is 0, its gradient alone depends on masks."""
    job = job_of(Adapter(rank=4, alpha=12, dropout=RATE))
    ((ours, start),) = forked(1, draw_gradients, base, job)
    model, trained = wrap_with_peft(base, job, start, dtype=torch.float32)
    torch.manual_seed(7)
    theirs = []
    for _ in range(DRAWS):
        compute_loss(model, batches()[0]).backward()
        theirs.append({name: trained[name][0].grad.clone() for name in ours[0]})  # type: ignore[union-attr]
        model.zero_grad()
    squares = []
    for name in ours[0]:
        one, other = (torch.stack([draw[name] for draw in draws]).double() for draws in (ours, theirs))
        variance = (one.var(0) + other.var(0)) / DRAWS
        squares.append(float(((one.mean(0) - other.mean(0)).square() / variance).mean()))
        assert float(one.var(0).sum() / other.var(0).sum()) == pytest.approx(1, abs=0.15), name
    assert (
        max(squares) < 3
    )  # of an element 1 in the mean if both have the same mean; elements of a factor are dependent
    assert sum(squares) / len(squares) == pytest.approx(1, abs=0.25)


@pytest.mark.parametrize(
    ("family", "text", "adapter"),
    [
        ("llama", "dp2 pp3 zero3 mbs1", ADAPTER),
        ("ernie4_5", "tp2 dp2 zero1 mbs1", Adapter(rank=4)),
        ("phi", "dp2 zero2 mbs2", ADAPTER),
        ("qwen3_5_text", "tp2 dp2 zero1 mbs1", Adapter(rank=4)),
        ("qwen3_next", "dp2 zero3 mbs1", Adapter(rank=4, targets=("q_proj", "in_proj_qkvz", "out_proj"))),
        ("phi", "tp2 mbs2", ADAPTER.replace(kind="dora")),
        ("llama", "dp2 zero3 mbs2", ADAPTER.replace(modules_to_save=("embed_tokens", "lm_head"))),
        ("llama", "dp2 zero2 mbs2", ENDS),
        ("phi", "tp2 mbs2", ADAPTER.replace(targets=("q_proj", "lm_head"))),
        ("phi", "dp2 zero3 mbs2", ADAPTER.replace(rank_pattern={"v_proj": 5}, alpha_pattern={"down_proj": 2})),
    ],
)
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")  # they are the base's
def test_peft_computes_what_was_trained_and_is_read_back(
    forked, tmp_path: Path, family: str, text: str, adapter: Adapter
) -> None:
    base, layout = base_of(tmp_path / "base", family), Layout.parse(text)
    logits, _ = forked(layout.world, train_and_save, tmp_path / "run", base, layout, adapter)[0]
    export(find(tmp_path / "run"), tmp_path / "lora", file_bytes=10**9, report=ignore_progress)

    with torch.no_grad():
        model = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "lora", dtype=torch.float32)
        torch.testing.assert_close(model(text_tokens()).logits, logits, rtol=1e-5, atol=1e-5)
        plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        assert (plain(text_tokens()).logits - logits).abs().max() > 1e-3

        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.mul_(1.5)
        model.save_pretrained(tmp_path / "theirs")
        ours = WeightSource.find(tmp_path / "theirs").decoder()(text_tokens())
        torch.testing.assert_close(ours, model(text_tokens()).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "adapter"),
    [
        ("mixtral", Adapter(rank=3)),
        ("qwen3_moe", Adapter(rank=3, targets=ATTENTION)),
        ("qwen2_moe", Adapter(rank=3)),
        ("deepseek_v3", Adapter(rank=3, targets=COMPRESSED)),
        ("deepseek_v3", Adapter(rank=3, targets=("q_b_proj", "up_proj"))),
        ("qwen3_moe", Adapter(rank=3, targets=("q_proj", *EXPERT_TARGETS), rank_pattern={"experts.gate_up_proj": 5})),
        ("gpt_oss", Adapter(rank=3, targets=("q_proj", *EXPERT_TARGETS))),
        ("mixtral", Adapter(rank=3, targets=("q_proj", "experts.down_proj"), alpha_pattern={"experts.down_proj": 2})),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value.targets),
)
def test_peft_computes_adapters_of_mixtures_and_merges_them_the_same(
    forked, tmp_path: Path, family: str, adapter: Adapter
) -> None:
    """Routing biases of a merged folder are the base's. Where peft would drop adapters, no others are written."""
    base, layout = base_of_mixture(tmp_path / "base", family), Layout.parse("dp1 mbs2")
    logits, _ = forked(1, train_and_save, tmp_path / "run", base, layout, adapter)[0]
    write = partial(export, find(tmp_path / "run"), file_bytes=10**9, report=ignore_progress)
    write(tmp_path / "merged", dtype="fp32", merge=True)
    with torch.no_grad():
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        torch.testing.assert_close(merged(text_tokens()).logits, logits, rtol=1e-5, atol=1e-5)
        if "up_proj" in adapter.targets:
            with pytest.raises(UserError, match=r"peft .* takes up_proj of deepseek_v3 as those of its routed experts"):
                write(tmp_path / "lora")
            return
        write(tmp_path / "lora")
        model = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "lora", dtype=torch.float32)
        torch.testing.assert_close(model(text_tokens()).logits, logits, rtol=1e-5, atol=1e-5)
        theirs = dict(model.merge_and_unload().state_dict())
        for name, tensor in merged.state_dict().items():
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*keys did not match any targeted module:RuntimeWarning")  # but parameters
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen2_moe"])
def test_peft_adapts_the_experts_of_the_listed_families(tmp_path: Path, family: str) -> None:
    """With all-linear; twice the rank on gate and up. Its folder is refused by name, as routed experts are not read."""
    base, adapter = base_of_mixture(tmp_path / "base", family), Adapter(rank=3)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.get_peft_model(plain, peft.LoraConfig(r=3, target_modules="all-linear"))
    of_experts = [
        weight.numel() for name, weight in model.named_parameters() if ".experts." in name and weight.requires_grad
    ]
    is_named = family in NAMED_AS_MLPS | NAMED_W1
    expected = count_expert_adapters(resolve(str(base / "config.json")), adapter) if is_named else 0
    assert sum(of_experts) == expected
    if is_named:
        model.save_pretrained(tmp_path / "lora")
        with pytest.raises(UserError, match=r"target_parameters=gate\.weight, and only gate_up_proj and down_proj of"):
            AdapterFolder.open(tmp_path / "lora")


def test_families_whose_experts_peft_adapts_are_those_of_peft() -> None:
    conversion = pytest.importorskip("peft.utils.transformers_weight_conversion")
    pattern_of, layers_of = conversion._MODEL_TO_CONVERSION_PATTERN, conversion._MOE_TARGET_MODULE_MAPPING
    converted = {family: layers_of.get(pattern_of.get(family, ""), {}).keys() for family in FAMILIES}
    assert {family for family, layers in converted.items() if "w1" in layers} == NAMED_W1
    assert {family for family, layers in converted.items() if layers >= set(EXPERT_LAYERS)} == NAMED_AS_MLPS


SHAPES = ((3, 2), (3, 64), (7, 100), (60, 100), (64, 64), (69, 1000), (130, 254), (512, 384))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FOUR_BIT_BASES)
@pytest.mark.parametrize("is_double", [True, False])
def test_codes_and_scales_equal_those_of_bitsandbytes(name: str, is_double: bool, dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    base = BASE_FORMATS[name]._replace(double_quantization=is_double)
    generator = torch.Generator().manual_seed(3)
    for shape in SHAPES:
        for std in (1e-3, 0.02, 3.0):
            weight = (torch.randn(shape, generator=generator) * std).to(dtype)
            weight[: shape[0] // 4] = 0
            packed, state = functional.quantize_4bit(
                weight, blocksize=64, compress_statistics=base.double_quantization, quant_type=base.name
            )
            (ours,), buffers = allocate(base, [MatrixSlice.from_shape(weight.shape)], dtype=dtype, device=weight.device)
            assert torch.equal(ours.quantize(weight), packed.view(-1))
            scales = [state.absmax]
            if base.double_quantization:
                scales += [state.state2.absmax, state.offset.view(1)]
            assert all(torch.equal(*pair) for pair in zip(ours.scales, scales, strict=True))
            assert torch.equal(ours.dequantize(packed.view(-1)), functional.dequantize_4bit(packed, state))
            assert sum(buffer.nbytes for buffer in buffers) == base.count_scale_bytes(*shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes_and_scales_in_int8_equal_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    nn, functional = pytest.importorskip("bitsandbytes.nn"), pytest.importorskip("bitsandbytes.functional")
    generator = torch.Generator().manual_seed(3)
    for shape in SHAPES:
        for std in (1e-3, 0.02, 3.0):
            weight = (torch.randn(shape, generator=generator) * std).to(dtype)
            theirs = nn.Int8Params(weight.clone(), requires_grad=False).to("cpu")
            (ours,), buffers = Int8Weight.allocate(
                BASE_FORMATS["int8"], [MatrixSlice.from_shape(weight.shape)], dtype=dtype, device=weight.device
            )
            codes = ours.quantize(weight)
            assert torch.equal(codes.view(torch.int8).view(shape), theirs.CB)
            assert torch.equal(ours.absmax, theirs.SCB)
            dequantized = functional.int8_vectorwise_dequant(theirs.CB, theirs.SCB).to(dtype)
            torch.testing.assert_close(ours.dequantize(codes), dequantized, rtol=1e-5, atol=0)
            first = shape[0] // 2
            rows = ours.dequantize_rows(codes[first * shape[1] :], first=first, rows=shape[0] - first)
            assert torch.equal(rows, ours.dequantize(codes)[first:].float())
            assert sum(buffer.nbytes for buffer in buffers) == BASE_FORMATS["int8"].count_scale_bytes(*shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (512, 128)], ids=str)
def test_codes_and_scales_in_fp8_equal_those_of_transformers(shape: tuple[int, int], dtype: torch.dtype) -> None:
    integration = pytest.importorskip("transformers.integrations.finegrained_fp8")
    config = transformers.FineGrainedFP8Config()
    quantizer = type("Quantizer", (), {"quantization_config": config})()
    for std in (1e-3, 0.02, 3.0):
        weight = (torch.randn(shape, generator=torch.Generator().manual_seed(3)) * std).to(dtype)
        weight[:128, :128] = 0
        theirs = integration.Fp8Quantize(quantizer).convert({"up.weight": weight})
        (ours,), buffers = Fp8Weight.allocate(
            BASE_FORMATS["fp8"], [MatrixSlice.from_shape(weight.shape)], dtype=dtype, device=weight.device
        )
        codes = ours.quantize(weight)
        assert torch.equal(codes.view(shape), theirs["up.weight"].view(torch.uint8))
        assert torch.equal(ours.scales, theirs["up.weight_scale_inv"])
        inverse = integration.Fp8Dequantize(quantizer)
        dequantized = inverse._dequantize_one(theirs["up.weight"], theirs["up.weight_scale_inv"])
        torch.testing.assert_close(ours.dequantize(codes), dequantized.to(dtype), rtol=0, atol=0)
        assert sum(buffer.nbytes for buffer in buffers) == BASE_FORMATS["fp8"].count_scale_bytes(*shape)


def test_blocks_in_fp8_at_the_ends_of_a_matrix_are_smaller() -> None:
    """Their values are those of full blocks padded with zeros; rows are dequantized from within a block too."""
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(3))
    (ours,), _ = Fp8Weight.allocate(
        BASE_FORMATS["fp8"], [MatrixSlice.from_shape(weight.shape)], dtype=weight.dtype, device=weight.device
    )
    codes = ours.quantize(weight)
    dequantized = ours.dequantize(codes)
    assert torch.equal(dequantized, round_to_fp8(weight))
    for first, rows in ((0, 300), (100, 130), (127, 2), (290, 10), (300, 0)):
        elements = codes[first * 200 : (first + rows) * 200]
        assert torch.equal(ours.dequantize_rows(elements, first=first, rows=rows), dequantized[first : first + rows])


def test_a_base_in_int8_is_stored_and_kept_as_by_bitsandbytes() -> None:
    """Codes and row scales; and the input, which its function keeps on GPUs, by PyTorch's kernels of its operations."""
    nn = pytest.importorskip("bitsandbytes.nn")
    functions = pytest.importorskip("bitsandbytes.autograd._functions")
    weight = nn.Int8Params(torch.randn(60, 100), requires_grad=False).to("cpu")
    state = functions.MatmulLtState(CB=weight.CB, SCB=weight.SCB)
    state.has_fp16_weights, state.threshold = False, 6.0
    assert weight.CB.nbytes + weight.SCB.nbytes == BASE_FORMATS["int8"].count_bytes(60, 100)
    x = torch.randn(24, 100, dtype=torch.bfloat16, requires_grad=True)
    y = functions.MatMul8bitLt.apply(x, weight, None, None, state)
    kept = [tensor for tensor in y.grad_fn.tensors if tensor is not None]
    assert sum(tensor.nbytes for tensor in kept) == x.nbytes
    op = matmul("mlp.up", "x", "y", rows=24, in_features=100, out_features=60, width=2)
    assert _quantize_to_int8(op, width=2, kept=op.reads).keeps == ("x",)
