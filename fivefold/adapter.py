"""The adapter record: low-rank adapters (LoRA) that are trained next to frozen weights, and how those are stored.

    LoRA   y = W x + s·B A x               A [rank, in], B [out, rank], s = alpha / rank, or alpha / √rank if
                                           rank-stabilized
    DoRA   y = m / n · (W x + s·B A x)     magnitudes m [out] are trained, n is the norm of each row of W + s·B A

W is frozen: it has no gradient, no optimizer state and no master copy, and may be quantized (QLoRA). m begins as the
norms of W's rows, and n has no gradient. Sources: LoRA, arXiv:2106.09685; QLoRA, arXiv:2305.14314; rsLoRA,
arXiv:2312.03732; DoRA, arXiv:2402.09353 §4.
"""

from collections.abc import Mapping
from functools import lru_cache
from math import inf, sqrt
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from fivefold.base_format import BASE_FORMATS, FOUR_BIT_BASES, BaseFormat
from fivefold.bounded_types import Positive
from fivefold.errors import UserError
from fivefold.record import Record

Base = Literal["bf16", "fp32", "nf4", "fp4", "int8", "fp8", "mxfp4"]
BASES: tuple[str, ...] = get_args(Base)
MAX_RANK = 2**16
Rank = Annotated[int, Field(ge=1, le=MAX_RANK)]

ALL_LINEAR = "all-linear"
# Linear layers of a block by the names of Hugging Face's Llama and DeepSeek, as peft's ``target_modules`` lists them:
# those of attention, with an output gate as Laguna names it, MLPs and shared experts. Routed experts and their router
# are none of them.
TARGETS: dict[str, tuple[str, ...]] = {
    "q_proj": ("attention.q",),
    "q_a_proj": ("attention.q_down",),
    "q_b_proj": ("attention.q_up",),
    "kv_a_proj_with_mqa": ("attention.kv_down",),
    "kv_b_proj": ("attention.kv_up",),
    "k_proj": ("attention.k",),
    "v_proj": ("attention.v",),
    "g_proj": ("attention.gate",),
    "o_proj": ("attention.out",),
    "gate_proj": ("mlp.gate", "moe.shared.gate"),
    "up_proj": ("mlp.up", "moe.shared.up"),
    "down_proj": ("mlp.down", "moe.shared.down"),
}
# Linear layers of token mixers other than attention, by their names in transformers, and the modules that have them
# there. Which of our layers they are depends on the mixer (``MixerGeometry.targets``); some of attention's names are
# those of mixers too.
MIXER_TARGETS: dict[str, tuple[str, ...]] = {
    "in_proj_qkv": ("linear_attn",),
    "in_proj_qkvz": ("linear_attn",),
    "in_proj_ba": ("linear_attn",),
    "in_proj_z": ("linear_attn",),
    "in_proj_b": ("linear_attn",),
    "in_proj_a": ("linear_attn",),
    "a_proj": ("linear_attn",),
    "b_proj": ("linear_attn", "self_attn"),
    "f_proj": ("self_attn.forget_gate",),
    "f_a_proj": ("self_attn.forget_gate",),
    "f_b_proj": ("self_attn.forget_gate",),
    "g_a_proj": ("self_attn",),
    "g_b_proj": ("self_attn",),
    "in_proj": ("mamba", "mixer", "conv"),
    "out_proj": ("linear_attn", "mamba", "mixer", "conv"),
}
# Linear layers that are one matmul with merged projections, by its name (``Stack.merged_projections``)
MERGED_LINEARS: dict[str, tuple[str, ...]] = {
    "attention.qkv": ("attention.q", "attention.k", "attention.v", "attention.gate"),
    "mlp.gate_up": ("mlp.gate", "mlp.up"),
    "moe.shared.gate_up": ("moe.shared.gate", "moe.shared.up"),
}
# Routed experts of a block, whose stacked matrices peft adapts as parameters (``target_parameters``). Gate and up of an
# expert share a factor A. They are none of ``all-linear``.
EXPERT_TARGETS: dict[str, tuple[str, ...]] = {
    "experts.gate_up_proj": ("moe.experts.gate", "moe.experts.up"),
    "experts.down_proj": ("moe.experts.down",),
}
# The ends of a model, which peft names like modules of ``modules_to_save``. They are none of ``all-linear``. Of the
# embedding A has a column for each token: y = W[:, token] + s·B A[:, token], without dropout.
EMBEDDING, HEAD = "embed_tokens", "lm_head"
END_TARGETS: dict[str, tuple[str, ...]] = {EMBEDDING: ("embed.tokens",), HEAD: ("head.out",)}
ALL_TARGETS = TARGETS | EXPERT_TARGETS | END_TARGETS
LINEAR_TARGETS = (*TARGETS, *MIXER_TARGETS)  # those of ``all-linear``
TARGET_NAMES = (*LINEAR_TARGETS, *EXPERT_TARGETS, *END_TARGETS)  # in the order of a block
# The ends of a model that may be trained in full next to the factors, as peft's ``modules_to_save`` names them, by the
# beginnings of the names of their weights and of the operations that read these.
SavedModule = Literal["embed_tokens", "lm_head"]
SAVED: dict[SavedModule, tuple[str, ...]] = {"embed_tokens": ("embed.tokens",), "lm_head": ("head.out", "loss")}
ADAPTERS = ("lora", "qlora", "dora", "qdora")  # as in ``--adapter lora:16``; with q: over a base in nf4


class Adapter(Record):
    """A low-rank adapter (LoRA or DoRA): everything else of the model is frozen, but for ``modules_to_save``."""

    kind: Literal["lora", "dora"] = "lora"  # method
    rank: Rank = 16  # rank of the update
    alpha: Positive | None = None  # the update is scaled by alpha / rank; None: twice the rank
    dropout: float = Field(0.0, ge=0, lt=1)  # dropout of the adapter's input
    targets: tuple[str, ...] = (ALL_LINEAR,)  # layers with an adapter, such as q_proj,v_proj; or all-linear
    rank_stabilized: bool = False  # scale by alpha / sqrt(rank)
    # modules that are trained in full next to the adapter: embed_tokens, lm_head or both. PEFT trains copies of them
    modules_to_save: tuple[SavedModule, ...] = ()
    # ranks of some targets, such as q_proj:8, or as a table; the others have ``rank``
    rank_pattern: tuple[str, ...] = ()
    # alphas of some targets, such as q_proj:16, or as a table; the others have ``alpha``
    alpha_pattern: tuple[str, ...] = ()
    # storage of the frozen weights. None: in the dtype of the activations; nf4 or fp4: matrices of blocks as
    # bitsandbytes stores them in 4 bits, all other weights in the dtype of the activations; int8: the same by
    # bitsandbytes' LLM.int8; fp8: matrices of blocks and routed experts as DeepSeek-V3 publishes them; mxfp4: routed
    # experts as gpt-oss publishes them
    base: Base | None = None
    double_quantization: bool = True  # of a base in nf4 or fp4: its scales are quantized too

    @field_validator("targets")
    @classmethod
    def _check_targets(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        """Return the targets in the order of a block, each once."""
        if not targets:
            raise ValueError(f"has no layer; use {ALL_LINEAR}, or some of {', '.join(TARGET_NAMES)}")
        for target in targets:
            if target != ALL_LINEAR and target not in TARGET_NAMES:
                raise ValueError(
                    f"{target!r} is not a layer that can have an adapter; use {ALL_LINEAR}, or some of "
                    f"{', '.join(TARGET_NAMES)}"
                )
        linears = (ALL_LINEAR,) if ALL_LINEAR in targets else tuple(name for name in LINEAR_TARGETS if name in targets)
        return (*linears, *(name for name in EXPERT_TARGETS | END_TARGETS if name in targets))

    @field_validator("modules_to_save")
    @classmethod
    def _sort_modules(cls, modules: tuple[SavedModule, ...]) -> tuple[SavedModule, ...]:
        """Return the modules in the order of the model, each once."""
        return tuple(module for module in SAVED if module in modules)

    @field_validator("rank_pattern", "alpha_pattern", mode="before")
    @classmethod
    def _write_pattern(cls, pattern: object) -> object:
        """Return a table of targets as words, such as ``q_proj:8``."""
        if isinstance(pattern, Mapping):
            return tuple(f"{target}:{value}" for target, value in pattern.items())
        return (pattern,) if isinstance(pattern, str) else pattern

    @field_validator("rank_pattern")
    @classmethod
    def _check_ranks(cls, pattern: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        """Return the ranks by target, in the order of a block's layers; entries equal to ``rank`` are dropped."""
        ranks = {target: _read_rank(target, text) for target, text in _split_pattern(pattern, info).items()}
        return tuple(f"{target}:{rank}" for target, rank in ranks.items() if rank != info.data.get("rank"))

    @field_validator("alpha_pattern")
    @classmethod
    def _check_alphas(cls, pattern: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        """Return the alphas in the order of a block, without those that are the others'."""
        alphas = {target: _read_alpha(target, text) for target, text in _split_pattern(pattern, info).items()}
        default = info.data.get("alpha") or 2.0 * info.data.get("rank", 0)
        return tuple(f"{target}:{_show_alpha(alpha)}" for target, alpha in alphas.items() if alpha != default)

    @model_validator(mode="after")
    def _check_double_quantization(self) -> Self:
        """Raise a ``ValueError`` for a base whose scales are not quantized in any case."""
        if not self.double_quantization and self.base not in FOUR_BIT_BASES:
            base = self.base or "the dtype of activations"
            raise ValueError(f"double_quantization=false is of a base in nf4 or fp4, not in {base}; leave it out")
        return self

    @property
    def base_format(self) -> BaseFormat | None:
        """Return how the base stores the matrices that it quantizes; None: it quantizes none."""
        base = BASE_FORMATS.get(self.base)
        return base._replace(double_quantization=self.double_quantization) if base and base.is_four_bit else base

    @property
    def ranks(self) -> dict[str, int]:
        """Return the ranks of targets that have one of their own (``rank_pattern``)."""
        return {target: int(rank) for target, rank in _split_words(self.rank_pattern)}

    @property
    def alphas(self) -> dict[str, float]:
        """Return the alphas of targets that have one of their own (``alpha_pattern``)."""
        return {target: float(alpha) for target, alpha in _split_words(self.alpha_pattern)}

    def resolve_target(self, target: str) -> "Adapter":
        """Return the adapter with the rank and alpha of a target, such as ``q_proj`` or ``lm_head``."""
        return _resolve_target(self, target) if self.rank_pattern or self.alpha_pattern else self

    @property
    def scale_numerator(self) -> float:
        """Return alpha, which is twice the rank if it is not given."""
        return 2.0 * self.rank if self.alpha is None else self.alpha

    @property
    def scale(self) -> float:
        """Return the factor on B A x."""
        return self.scale_numerator / (sqrt(self.rank) if self.rank_stabilized else self.rank)

    @property
    def name(self) -> str:
        """Return the adapter as ``--adapter`` takes it: its method and rank, and whether the base is QLoRA's."""
        return f"{'q' if self.base == 'nf4' and self.double_quantization else ''}{self.kind}:{self.rank}"

    @property
    def has_magnitudes(self) -> bool:
        """Tell whether the norms of the updated weight's rows are trained (DoRA)."""
        return self.kind == "dora"

    def has_target(self, target: str) -> bool:
        """Tell whether the layers of a name, such as ``q_proj`` or ``lm_head``, have adapters."""
        return target in self.targets or (self.targets[0] == ALL_LINEAR and target in LINEAR_TARGETS)

    @property
    def adapts_experts(self) -> bool:
        """Tell whether routed experts have adapters."""
        return not set(EXPERT_TARGETS).isdisjoint(self.targets)

    @property
    def adapted_ends(self) -> tuple[str, ...]:
        """Return those of embedding and head that have adapters."""
        return tuple(target for target in END_TARGETS if target in self.targets)

    @property
    def trains_embedding(self) -> bool:
        """Tell whether the embedding is trained, in full or by factors, so that all blocks have a backward."""
        return EMBEDDING in self.modules_to_save or EMBEDDING in self.targets

    def is_saved(self, name: str) -> bool:
        """Tell whether a weight, such as ``head.out.weight``, is trained in full, or an operation reads such a one."""
        return any(f"{name}.".startswith(f"{start}.") for module in self.modules_to_save for start in SAVED[module])


def expand_targets(targets: tuple[str, ...]) -> tuple[str, ...]:
    """Return targets with the names of the layers of ``all-linear``."""
    return (*LINEAR_TARGETS, *targets[1:]) if targets[:1] == (ALL_LINEAR,) else targets


@lru_cache(maxsize=256)
def _resolve_target(adapter: Adapter, target: str) -> Adapter:
    rank = adapter.ranks.get(target, adapter.rank)
    alpha = adapter.alphas.get(target, adapter.scale_numerator)
    return adapter.replace(rank=rank, alpha=alpha, rank_pattern=(), alpha_pattern=())


def _split_words(pattern: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(target, value) for target, _, value in (word.partition(":") for word in pattern)]


def _split_pattern(pattern: tuple[str, ...], info: ValidationInfo) -> dict[str, str]:
    """Return what a pattern gives its targets, in the order of a block; they must be among those of the adapter."""
    values = dict(_split_words(pattern))
    allowed = expand_targets(info.data.get("targets", ()))
    if unknown := [target for target in values if target not in allowed]:
        raise ValueError(f"names {', '.join(unknown)}, which the adapter does not target; use {', '.join(allowed)}")
    return {target: values[target] for target in TARGET_NAMES if target in values}


def _read_rank(target: str, text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= MAX_RANK:
        raise ValueError(f"{target}:{text} has no rank from 1 to {MAX_RANK}; write {target}:8")
    return int(text)


def _read_alpha(target: str, text: str) -> float:
    try:
        alpha = float(text)
    except ValueError:
        alpha = 0.0
    if not 0 < alpha < inf:
        raise ValueError(f"{target}:{text} has no positive alpha; write {target}:16")
    return alpha


def _show_alpha(alpha: float) -> str:
    return str(int(alpha) if alpha.is_integer() else alpha)


def parse_adapter(text: str) -> dict[str, object]:
    """Read ``lora:16``, ``qlora:16`` or ``dora:16`` as fields of an ``Adapter``; the rank may be left out."""
    name, colon, rank = text.lower().partition(":")
    if name not in ADAPTERS or (colon and not rank.isdigit()):
        raise UserError(
            f"adapter {text!r} is none of {', '.join(f'{kind}:RANK' for kind in ADAPTERS)}; write lora:16 or qlora:16"
        )
    fields: dict[str, object] = {"kind": name.removeprefix("q")} | ({"rank": int(rank)} if rank else {})
    return fields | ({"base": "nf4"} if name.startswith("q") else {})
