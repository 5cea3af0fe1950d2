"""The job record: batch, sequence length, precision, optimizer and software of a training run.

The model, the machine and the layout are records of their own.
"""

from __future__ import annotations

from math import gcd
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from fivefold.adapter import Adapter, parse_adapter
from fivefold.base_format import BaseFormat
from fivefold.bounded_types import RAMP_SIZES, ElementBytes, KeptBytes, Positive, Seed, Sequences, Steps, Tokens
from fivefold.errors import UserError
from fivefold.freeze import parse_part
from fivefold.layout.names import Offloaded
from fivefold.number_formats import NUMBER_FORMATS, NumberFormat
from fivefold.record import Record
from fivefold.spelling import find_spelling, make_unknown_name_error
from fivefold.stack.catalog import STACKS, build_stack
from fivefold.stack.spec import FACTS, Stack
from fivefold.units import Dtype, ceil_div, round_up_to_power_of_two
from fivefold.update import NOT_SUPPORTED, SPELLINGS, LearningRate, Optimizer, Ramp

LOSS_CHUNK_ELEMENTS = 2**22  # logits that the loss kernel converts to fp32 at once
KERNEL_ELEMENTS = 4096  # elements in a program of a Triton kernel: a tile of rows with at most as many, or one row
NORM_PROGRAMS = 256  # programs of a norm's backward in Triton, each of which sums the weight's gradient over its rows
LOSS_CHUNK_ROWS = 1024  # rows whose logits a chunked loss computes at once: enough that a matmul is not memory-bound


def tile_rows(rows: int, width: int) -> int:
    """Return the rows of a tile of a kernel over full rows: a power of two, at most that of ``rows`` rounded up."""
    return min(max(1, KERNEL_ELEMENTS // round_up_to_power_of_two(width)), round_up_to_power_of_two(rows))


def count_norm_programs(rows: int, width: int) -> int:
    """Return the number of programs of a norm's backward in Triton, each of which writes a row of partial sums."""
    return max(1, min(NORM_PROGRAMS, ceil_div(rows, tile_rows(rows, width))))


Objective = Literal["pretrain", "sft", "dpo"]
# by the format of the data that it is trained on ([data] format of a run file)
FORMAT_OBJECTIVES: dict[str, Objective] = {
    "text": "pretrain", "messages": "sft", "completions": "sft", "preferences": "dpo",
}  # fmt: skip
# delayed: one scale for a tensor, from the largest elements of earlier steps, so that no pass looks for it
Scaling = Literal["tensorwise", "delayed", "rowwise", "tiles", "blocks", "blocks16"]
# Elements that share one scale, in fp32 (in blocks, of one byte): DeepSeek-V3 §3.3 (tiles 1x128, weights 128x128);
# OCP MX (1x32); NVFP4 (1x16, and an fp32 scale of the full matrix: arXiv:2509.25149).
SCALED_ELEMENTS: dict[Scaling, int] = {"tiles": 128, "blocks": 32, "blocks16": 16}


class Recipe(Record):
    """Numeric precision as bytes per parameter (``docs/notation.md`` §2); 0 means that the tensor is not kept.

    With ``accumulated_bytes`` > 0, gradients are accumulated in that many bytes over micro-batches and ranks, and the
    gradient of one weight (``gradients_bytes``) exists only until it is added.
    """

    name: str  # as in ``--precision``
    compute: Dtype  # number format of the matrix multiplications
    weights_bytes: ElementBytes  # bytes of a weight as gathered and multiplied
    gradients_bytes: ElementBytes  # bytes of the gradient of a weight
    master_bytes: KeptBytes = 0  # bytes of the copy that the optimizer updates
    accumulated_bytes: KeptBytes = 0  # bytes of the gradient accumulation buffer
    moments_bytes: tuple[KeptBytes, KeptBytes] = (4, 4)  # bytes of each of the two moments of Adam
    loss_scaling: bool = False  # dynamic loss scaling (fp16)
    scaling: Scaling = "tensorwise"  # granularity of the scales of fp8 and fp4 operands
    wide_gradients: bool = False  # weight gradients are products of operands that are not cast to fp8
    gathers: Literal["weights", "fp8"] = "weights"  # format in which ZeRO gathers the matrices of blocks
    half: Literal["bf16", "fp16"] = (
        "bf16"  # format of two-byte master weights, accumulated gradients and moments; fp16 moments have scales
    )
    dispatches: Literal["rows", "fp8"] = "rows"  # format of tokens and gradients sent to experts; fp8: in tiles

    @model_validator(mode="after")
    def _check_payloads(self) -> Self:
        """Check that what is sent in fp8 has the format to which the matmuls would cast it."""
        scaled = self.compute == "fp8" and (self.has_one_scale or self.scaling == "tiles")
        if self.gathers == "fp8" and not (scaled and self.master_bytes):
            raise ValueError(
                f"gathers='fp8' needs a master copy and fp8 matmuls by tensor or by tiles, not {self.compute} with "
                f"scaling={self.scaling!r} and master_bytes={self.master_bytes}; use 'fp8-wire', or gathers='weights'"
            )
        if self.dispatches == "fp8" and not (self.compute == "fp8" and self.scaling == "tiles"):
            raise ValueError(
                f"dispatches='fp8' needs compute='fp8' and scaling='tiles', not compute={self.compute!r} and "
                f"scaling={self.scaling!r}; use 'fp8-tiles-wire', or dispatches='rows'"
            )
        return self

    @property
    def holds_casts(self) -> bool:
        """Tell whether matrices of blocks are stored as fp8 casts with their scales, and other weights in 16 bits."""
        return self.weights_bytes == 1 and self.gathers == "fp8"

    @property
    def high_precision_bytes(self) -> int:
        """Return the bytes of weights that no matmul casts (embedding, head, norms, …), and of their gradients."""
        return 2 if self.holds_casts else self.weights_bytes

    @property
    def sends_masters(self) -> bool:
        """Tell whether ZeRO can gather the copy that the optimizer updates, as weights have its format."""
        return self.updated_bytes == self.high_precision_bytes and not (self.holds_casts and self.half == "fp16")

    @property
    def table_gradients_bytes(self) -> int:
        """Return the bytes of a gradient whose matmul is not in fp8; only those of fp8 matmuls have one byte."""
        return max(2, self.gradients_bytes)

    @property
    def scaled_moments(self) -> tuple[bool, bool]:
        """Tell for each of AdamW's moments whether it has an fp32 scale for each block of a row."""
        first, second = (size == 1 or (size == 2 and self.half == "fp16") for size in self.moments_bytes)
        return first, second

    @property
    def number_format(self) -> NumberFormat:
        """Return the properties of the number format of the matrix multiplications."""
        return NUMBER_FORMATS[self.compute]

    @property
    def autocasts(self) -> bool:
        """Tell whether matmuls read 16-bit casts of fp32 weights, under PyTorch's autocast."""
        return self.number_format.operand_bits == 16 and self.weights_bytes == 4

    @property
    def is_low_precision(self) -> bool:
        """Tell whether matmuls read operands with fewer than 16 bits."""
        return self.number_format.operand_bits < 16

    @property
    def has_one_scale(self) -> bool:
        """Tell whether an operand in fp8 has one scale, of its own elements or of those of earlier steps."""
        return self.scaling in ("tensorwise", "delayed")

    @property
    def total_bytes(self) -> int:
        """Return the bytes per parameter of all tensors of the recipe, as published tables count them."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.master_bytes
            + self.accumulated_bytes
            + sum(self.moments_bytes)
        )

    def with_reduce_dtype(self, *, in_fp32: bool) -> Recipe:
        """Return the recipe; unless ``in_fp32``, it accumulates and reduces gradients in the dtype of the backward."""
        if in_fp32 or self.accumulated_bytes <= self.gradients_bytes:
            return self
        return self.replace(name=f"{self.name}-grad16", accumulated_bytes=0)

    def list_changes(self) -> dict[str, Any]:
        """Return the parts that differ from the named recipe; empty if no recipe has this name."""
        name = self.name.removesuffix("-grad16")
        named = RECIPES.get(self.name) or (RECIPES[name].with_reduce_dtype(in_fp32=False) if name in RECIPES else self)
        return {
            part: getattr(self, part) for part in type(self).model_fields if getattr(self, part) != getattr(named, part)
        }

    @property
    def summed_bytes(self) -> int:
        """Return the bytes in which a gradient is accumulated and reduced, which is how it is kept as a state."""
        return self.accumulated_bytes or self.gradients_bytes

    @property
    def updated_bytes(self) -> int:
        """Return the bytes of the copy of a weight that the optimizer updates."""
        return self.master_bytes or self.weights_bytes


# Weights are stored in 16 bits and cast for a matmul: Transformer Engine's recipes in Megatron-Core, torchao's float8.
FP8_OVER_BF16: tuple[tuple[str, Dtype, Scaling], ...] = (
    ("fp8", "fp8", "tensorwise"),
    ("fp8-delayed", "fp8", "delayed"),
    ("fp8-rowwise", "fp8", "rowwise"),
    ("fp8-tiles", "fp8", "tiles"),
    ("mxfp8", "fp8", "blocks"),
    ("nvfp4", "fp4", "blocks16"),
)


def _build(name: str, compute: Dtype, *sizes: int, **other_fields: Any) -> Recipe:
    """Return a recipe; ``sizes``: bytes of weights, gradients, master copy and accumulated gradients."""
    fields = ("weights_bytes", "gradients_bytes", "master_bytes", "accumulated_bytes")
    return Recipe.model_validate(
        {"name": name, "compute": compute} | dict(zip(fields, sizes, strict=False)) | other_fields
    )


# docs/notation.md §2. Sources: fp32, bf16, fp16: ZeRO (arXiv:1910.02054 §3.1); fp8-deepseek: DeepSeek-V3
# (arXiv:2412.19437 §3.3); fp8-nanotron: Ultra-Scale Playbook, table of fp8 recipes; fp8-lm: FP8-LM O3
# (arXiv:2310.18313).
RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _build("fp32", "fp32", 4, 4),
        _build("tf32", "tf32", 4, 4),
        _build("bf16", "bf16", 2, 2, 4, 4),
        _build("bf16-grad16", "bf16", 2, 2, 4),
        _build("bf16-pure", "bf16", 2, 2),
        _build("bf16-full", "bf16", 2, 2, moments_bytes=(2, 2)),
        _build("fp16", "fp16", 2, 2, 4, loss_scaling=True),
        _build("bf16-autocast", "bf16", 4, 4),
        _build("fp16-autocast", "fp16", 4, 4, loss_scaling=True),
        _build("fp8-te", "fp8", 4, 4),
        *(_build(name, compute, 2, 2, 4, 4, scaling=scaling) for name, compute, scaling in FP8_OVER_BF16),
        # torchao's rowwise_with_gw_hp
        _build("fp8-rowwise-gw", "fp8", 2, 2, 4, 4, scaling="rowwise", wide_gradients=True),
        _build(
            "fp8-deepseek", "fp8", 1, 2, 4, 4, moments_bytes=(2, 2), scaling="tiles", gathers="fp8", dispatches="fp8"
        ),
        _build("fp8-nanotron", "fp8", 1, 1, 2, 4, moments_bytes=(1, 1), gathers="fp8"),
        _build("fp8-lm", "fp8", 1, 1, 2, 2, moments_bytes=(1, 2), half="fp16", loss_scaling=True, gathers="fp8"),
    )
}

# Recipes that also send fp8: gathers as in torchao's FSDP2 (pytorch/ao: torchao/float8), dispatches as in DeepSeek-V3.
RECIPES["fp8-wire"] = RECIPES["fp8"].replace(name="fp8-wire", gathers="fp8")
RECIPES["fp8-tiles-wire"] = RECIPES["fp8-tiles"].replace(name="fp8-tiles-wire", gathers="fp8", dispatches="fp8")
# Recipes that also hold the weights in fp8: --fp8-param-gather of Megatron-Core, over Transformer Engine's tensors.
for _name in ("fp8", "fp8-delayed", "fp8-tiles"):
    RECIPES[f"{_name}-param"] = RECIPES[_name].replace(name=f"{_name}-param", weights_bytes=1, gathers="fp8")


def _build_stack(asked: object, changes: dict[str, Any]) -> Stack | dict[str, Any]:
    """Return a stack given by name, as a record, or as a table that may name one, with ``changes`` applied.

    An invalid table is returned unchanged, so that pydantic reports the wrong field.
    """
    stack = build_stack(asked) if isinstance(asked, str) else asked
    if isinstance(stack, Stack):
        if not changes:
            return stack
        stack = stack.model_dump()
    if not isinstance(stack, dict):
        raise UserError(f"stack is {asked!r}; name one of {', '.join(STACKS)}, or give a table of its fields")
    name = stack.get("name")
    fields = (STACKS[name].model_dump() if isinstance(name, str) and name in STACKS else {}) | stack | changes
    try:
        return Stack.model_validate(fields)
    except ValidationError:
        return fields


def get_recipe(name: str) -> Recipe:
    """Return the recipe called ``name``, in any case."""
    name = find_spelling(name, RECIPES)
    if name not in RECIPES:
        raise make_unknown_name_error(name, list(RECIPES), kind="precision")
    return RECIPES[name]


class Job(Record):
    """A training run, independent of the hardware. Fields of its ``stack`` may be given as if they were its own."""

    inlined: ClassVar[tuple[str, ...]] = ("stack",)
    not_supported: ClassVar[dict[str, str]] = NOT_SUPPORTED
    spellings: ClassVar[dict[str, str]] = SPELLINGS

    sequence: Tokens = 4096  # tokens per sequence (T)
    global_batch: Sequences = 8  # sequences per optimizer step
    precision: Recipe = RECIPES["bf16"]  # name of a recipe such as ``bf16`` or ``fp8-tiles``
    # what is trained. pretrain: every token; sft: the tokens that the data marks, such as the replies of conversations;
    # dpo: that the chosen of two completions is more probable than the rejected, relative to a frozen reference. A pair
    # is two sequences
    objective: Objective = "pretrain"
    dpo_beta: Positive = 0.1  # β of DPO: the larger, the closer the model stays to the reference
    # separate: tokens do not attend to other documents packed into the same sequence; the planner counts both equally.
    # The default is joined for pretrain and dpo, and separate for sft
    documents: Literal["joined", "separate"] = "joined"
    # emulate fp8, fp4 and tf32 on devices without kernels for them: operands are cast, then multiplied in fp32
    emulate: bool = False
    imbalance: float = Field(1.0, ge=1, le=2**20)  # tokens of the most loaded expert-parallel rank over the average
    # kept in host memory, under every layout; parameters: shards of ZeRO-3, as DeepSpeed's offload_param, under FSDP2
    # with gradients and optimizer states, as its CPU offload
    offload: tuple[Offloaded, ...] = ()
    optimizer: Optimizer = Optimizer()  # update rule and its settings, as a table or the rule's name
    learning_rate: LearningRate = LearningRate()  # schedule of the learning rate
    ramp: Ramp | None = None  # batch-size ramp-up to ``global_batch``; plans are for the final size
    adapter: Adapter | None = None  # over frozen weights, as a table or ``lora:16``; None: all weights are trained
    # parts that are not trained, such as embed_tokens,layers[:-2],norm,lm_head or layers[8:].mlp. Biases of loss-free
    # balancing stay as they are
    freeze: tuple[str, ...] = ()
    images: int = Field(0, ge=0, le=2**20)  # images in a sequence of a model with a vision tower; 0: only text
    image_tokens: Tokens | None = None  # tokens of an image, part of ``sequence``; None: as the tower makes of its size
    freeze_vision_tower: bool = False  # the vision tower is not trained
    freeze_projector: bool = False  # neither is the projector from its output to tokens
    steps: Steps = 1000  # optimizer steps of the run
    seed: Seed = 0  # random seed of initial weights and of the order of the data
    stack: Stack = Stack()  # the software that runs it

    @model_validator(mode="before")
    @classmethod
    def _resolve_names(cls, values: object) -> object:
        """Resolve a stack, a recipe, optimizer and adapter given by name, or with some fields changed."""
        if not isinstance(values, dict):
            return values
        try:
            changes = {key: value for key, value in values.items() if key in FACTS}
            stack = _build_stack(values.get("stack", {}), changes)
            values = {key: value for key, value in values.items() if key not in FACTS} | {"stack": stack}
            in_fp32 = not isinstance(stack, Stack) or stack.reduce_in_fp32
            precision = values.get("precision", "bf16")
            if isinstance(precision, str):
                values["precision"] = get_recipe(precision).with_reduce_dtype(in_fp32=in_fp32)
            elif isinstance(precision, dict) and isinstance(name := precision.get("name"), str) and name in RECIPES:
                named = RECIPES[name].with_reduce_dtype(in_fp32=in_fp32 or "accumulated_bytes" in precision)
                values["precision"] = named.model_dump() | precision | {"name": named.name}
            if values.get("objective", "pretrain") == "sft":
                values.setdefault("documents", "separate")
            if isinstance(optimizer := values.get("optimizer"), str):
                values["optimizer"] = {"kind": optimizer}
            if isinstance(adapter := values.get("adapter"), str):
                values["adapter"] = parse_adapter(adapter)
        except UserError as error:
            raise ValueError(str(error)) from None
        return values

    @field_validator("freeze")
    @classmethod
    def _check_parts(cls, parts: tuple[str, ...]) -> tuple[str, ...]:
        """Return the frozen parts, each once."""
        for part in parts:
            parse_part(part)
        return tuple(dict.fromkeys(parts))

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        """Raise a ``ValueError`` for fields that contradict each other."""
        if self.freeze and self.adapter is not None:
            raise ValueError(
                "freeze is not supported with an adapter, because all other weights are frozen anyway; drop one"
            )
        if self.learning_rate.warmup_steps > self.steps:
            raise ValueError(
                f"learning_rate.warmup_steps={self.learning_rate.warmup_steps} exceeds steps={self.steps}; lower it"
            )
        if not self.images and (self.image_tokens or self.freeze_vision_tower):
            field = "image_tokens" if self.image_tokens else "freeze_vision_tower"
            raise ValueError(f"{field} is given without images: give the images of a sequence, such as images=1")
        if self.freeze_projector and not self.freeze_vision_tower:
            raise ValueError(
                "freeze_projector without freeze_vision_tower is not supported: give both, or leave it out"
            )
        if self.ramp is not None and (sizes := len(self.ramp.sizes(self.global_batch))) > RAMP_SIZES:
            raise ValueError(
                f"ramp.step={self.ramp.step} makes {sizes} sizes of the batch, more than {RAMP_SIZES}; raise ramp.step"
            )
        return self

    def row_tokens(self, predicted: int = 0) -> int:
        """Return the int64 elements of a sequence in a batch.

        In pretraining these are its tokens and the last target; with ``has_targets`` its tokens and as many targets.

        ``predicted``: the number of further tokens that modules of multi-token prediction predict.
        """
        return 2 * self.sequence if self.has_targets else self.sequence + 1 + predicted

    @property
    def has_targets(self) -> bool:
        """Tell whether the data says which tokens are targets with a loss, as it does for all but pretraining."""
        return self.objective != "pretrain"

    @property
    def min_micro_batch(self) -> int:
        """Return the fewest sequences of a micro-batch, which divide any other number: of DPO a pair."""
        return 2 if self.objective == "dpo" else 1

    @property
    def saved_precision(self) -> Recipe:
        """Return the precision of modules that are trained in full next to an adapter (``Adapter.modules_to_save``).

        Under autocast PEFT casts the factors to fp32, and these stay in 16 bits, as the base is loaded.
        """
        if not self.precision.autocasts:
            return self.precision
        return self.precision.replace(weights_bytes=2, gradients_bytes=2, moments_bytes=(2, 2))

    def count_reduce_bytes(self, recipe: Recipe) -> int:
        """Return the bytes in which messages of data parallelism reduce a gradient of ``recipe``."""
        sizes = {"summed": recipe.summed_bytes, "backward": recipe.gradients_bytes, "fp32": 4}
        return sizes[self.stack.reduce_dtype]

    @property
    def bucket_bytes(self) -> int:
        """Return the bytes of a gradient in the buckets that are reduced (``Stack.reduce_bucket``)."""
        return min(self.precision.summed_bytes, self.count_reduce_bytes(self.precision))

    @property
    def base_format(self) -> BaseFormat | None:
        """Return how the base of adapters stores the matrices that it quantizes; None: it quantizes none."""
        return None if self.adapter is None else self.adapter.base_format

    @property
    def freezes_text(self) -> bool:
        """Tell whether weights of the text model are frozen: some parts, or all next to adapters."""
        return self.adapter is not None or bool(self.freeze)

    @property
    def freezes_weights(self) -> bool:
        """Tell whether any weights are frozen: of the text model, or those of a vision tower."""
        return self.freezes_text or self.freeze_vision_tower

    @property
    def has_reference(self) -> bool:
        """Tell whether a frozen reference runs all micro-batches forward before the model that is trained (DPO)."""
        return self.objective == "dpo"

    @property
    def copies_reference(self) -> bool:
        """Tell whether a frozen copy of all weights is kept as the reference; of adapters it is the model without."""
        return self.has_reference and self.adapter is None

    @property
    def loss_sums(self) -> int:
        """Return the numbers that a step sums over ranks with its loss: itself, and of dpo the rewards and ranks."""
        return 4 if self.objective == "dpo" else 1

    @property
    def activation_bytes(self) -> int:
        """Return the bytes per element of an activation: 4 in fp32, else 2, as fp8 and fp4 exist only in matmuls."""
        return 4 if self.precision.number_format.operand_bits == 32 else 2

    @property
    def even_batch(self) -> int:
        """Return the number that dp·mbs must divide: the greatest common divisor of all batch sizes of the run."""
        return self.global_batch if self.ramp is None else gcd(self.global_batch, self.ramp.first, self.ramp.step)

    def batch(self, taken: int) -> int:
        """Return the batch size of the step that begins after ``taken`` sequences."""
        return self.global_batch if self.ramp is None else self.ramp.size(taken, full_batch=self.global_batch)

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens that one optimizer step consumes."""
        return self.sequence * self.global_batch
