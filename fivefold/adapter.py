"""The adapter record: low-rank adapters (LoRA) that are trained next to frozen weights, and how those are stored.

    LoRA   y = W x + s·B A x               A [rank, in], B [out, rank], s = alpha / rank, or alpha / √rank if
                                           rank-stabilized
    DoRA   y = m / n · (W x + s·B A x)     magnitudes m [out] are trained, n is the norm of each row of W + s·B A

W is frozen: it has no gradient, no optimizer state and no master copy, and may be quantized (QLoRA). m begins as the
norms of W's rows, and n has no gradient. Sources: LoRA, arXiv:2106.09685; QLoRA, arXiv:2305.14314; rsLoRA,
arXiv:2312.03732; DoRA, arXiv:2402.09353 §4.
"""

from math import sqrt
from typing import Annotated, Literal

from pydantic import Field, field_validator

from fivefold.bounded_types import Positive
from fivefold.record import Record, UserError
from fivefold.units import ceil_div

Base = Literal["bf16", "fp32", "nf4", "int8"]
Rank = Annotated[int, Field(ge=1, le=2**16)]

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
# The ends of a model that may be trained in full next to the factors, as peft's ``modules_to_save`` names them, by the
# beginnings of the names of their weights and of the operations that read these.
SavedModule = Literal["embed_tokens", "lm_head"]
SAVED: dict[SavedModule, tuple[str, ...]] = {"embed_tokens": ("embed.tokens",), "lm_head": ("head.out", "loss")}
ADAPTERS = ("lora", "qlora", "dora", "qdora")  # as in ``--adapter lora:16``; with q: over a base in nf4

# bitsandbytes' 4-bit NormalFloat with double quantization (bitsandbytes@0.50.2:bitsandbytes/functional.py,
# quantize_4bit with compress_statistics): two elements in a byte; a scale for each block of 64 elements, in one byte;
# for each 256 of these an fp32 scale; and per weight an fp32 offset. bitsandbytes keeps both codebooks (16 and 256 in
# fp32) per weight too.
NF4_BLOCK, NF4_SCALES_BLOCK, NF4_CODEBOOK_BYTES = 64, 256, 4 * (16 + 256)


class Adapter(Record):
    """A low-rank adapter (LoRA or DoRA): everything else of the model is frozen, but for ``modules_to_save``."""

    kind: Literal["lora", "dora"] = "lora"  # method
    rank: Rank = 16  # rank of the update
    alpha: Positive | None = None  # the update is scaled by alpha / rank; None: twice the rank
    dropout: float = Field(0.0, ge=0, lt=1)  # dropout of the adapter's input
    targets: tuple[str, ...] = (ALL_LINEAR,)  # linear layers with an adapter, such as q_proj,v_proj; or all-linear
    rank_stabilized: bool = False  # scale by alpha / sqrt(rank)
    # modules that are trained in full next to the adapter: embed_tokens, lm_head or both. PEFT trains copies of them
    modules_to_save: tuple[SavedModule, ...] = ()
    # storage of the frozen weights. None: in the dtype of the activations; nf4: matrices of blocks as bitsandbytes
    # stores them with double quantization, all other weights in the dtype of the activations; int8: the same by
    # bitsandbytes' LLM.int8, planned only
    base: Base | None = None

    @field_validator("targets")
    @classmethod
    def _check_targets(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        """Return the targets in the order of a block, each once."""
        if not targets:
            raise ValueError(f"has no layer; take {ALL_LINEAR}, or some of {', '.join(TARGETS)}")
        for target in targets:
            if target != ALL_LINEAR and target not in TARGETS:
                raise ValueError(
                    f"{target!r} is not a linear layer of a block; take {ALL_LINEAR}, or some of {', '.join(TARGETS)}"
                )
        return (ALL_LINEAR,) if ALL_LINEAR in targets else tuple(name for name in TARGETS if name in targets)

    @field_validator("modules_to_save")
    @classmethod
    def _sort_modules(cls, modules: tuple[SavedModule, ...]) -> tuple[SavedModule, ...]:
        """Return the modules in the order of the model, each once."""
        return tuple(module for module in SAVED if module in modules)

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
        """Return the adapter as ``--adapter`` takes it: its method and rank, and whether the base is in nf4."""
        return f"{'q' if self.base == 'nf4' else ''}{self.kind}:{self.rank}"

    @property
    def has_magnitudes(self) -> bool:
        """Tell whether the norms of the updated weight's rows are trained (DoRA)."""
        return self.kind == "dora"

    def has_adapter(self, linear: str) -> bool:
        """Tell whether a linear layer of a block, such as ``attention.q``, has an adapter."""
        targets = TARGETS if self.targets == (ALL_LINEAR,) else self.targets
        return any(linear in TARGETS[target] for target in targets)

    def is_saved(self, name: str) -> bool:
        """Tell whether a weight, such as ``head.out.weight``, is trained in full, or an operation reads such a one."""
        return any(f"{name}.".startswith(f"{start}.") for module in self.modules_to_save for start in SAVED[module])


def parse_adapter(text: str) -> dict[str, object]:
    """Read ``lora:16``, ``qlora:16`` or ``dora:16`` as fields of an ``Adapter``; the rank may be left out."""
    name, colon, rank = text.partition(":")
    if name not in ADAPTERS or (colon and not rank.isdigit()):
        raise UserError(
            f"adapter {text!r} is none of {', '.join(f'{kind}:RANK' for kind in ADAPTERS)}; write lora:16 or qlora:16"
        )
    fields: dict[str, object] = {"kind": name.removeprefix("q")} | ({"rank": int(rank)} if rank else {})
    return fields | ({"base": "nf4"} if name.startswith("q") else {})


def count_int8_bytes(rows: int, columns: int) -> int:
    """Return the bytes of a weight [rows, columns] in int8 as LLM.int8 stores it, with an fp32 scale for each row.

    Source: bitsandbytes@0.50.2:bitsandbytes/nn/modules.py, Int8Params; arXiv:2208.07339.
    """
    return rows * columns + 4 * rows


def count_nf4_bytes(numel: int) -> int:
    """Return the bytes of the packed elements of a weight of ``numel`` elements in nf4."""
    return ceil_div(numel, 2)


def count_nf4_scale_bytes(numel: int) -> int:
    """Return the bytes of the scales of a weight of ``numel`` elements in nf4, without codebooks."""
    scales = ceil_div(numel, NF4_BLOCK)
    return scales + 4 * ceil_div(scales, NF4_SCALES_BLOCK) + 4
