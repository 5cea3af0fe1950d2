"""The job as a record: what is trained how, apart from the model, the machine and the layout."""

from __future__ import annotations

from math import gcd
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, model_validator

from fivefold.bounded_types import RAMP_SIZES, ElementBytes, KeptBytes, Seed, Sequences, Steps, Tokens
from fivefold.record import Mistake, Record, nearest
from fivefold.stack.catalog import STACKS, named
from fivefold.stack.spec import FACTS, Stack
from fivefold.units import Dtype, ceil_div, power_of_two
from fivefold.update import NOT_SUPPORTED, LearningRate, Optimizer, Ramp

LOSS_CHUNK_ELEMENTS = 2**22  # logits that the loss kernel widens to fp32 at once
KERNEL_ELEMENTS = 4096  # of a program of one of Triton's kernels: of a tile of rows at most so many, or one row
NORM_PROGRAMS = 256  # of a norm's backward in Triton: each sums the weight's gradient over its rows
LOSS_CHUNK_ROWS = 1024  # whose logits a chunked loss makes at once: enough that a matmul is not bound by memory


def tile_rows(rows: int, width: int) -> int:
    """Rows of a tile of a kernel over whole rows: a power of two, of as many as there are."""
    return min(max(1, KERNEL_ELEMENTS // power_of_two(width)), power_of_two(rows))


def norm_programs(rows: int, width: int) -> int:
    """Programs of a norm's backward in Triton, each of which writes a row of partial sums."""
    return max(1, min(NORM_PROGRAMS, ceil_div(rows, tile_rows(rows, width))))


Offloaded = Literal["optimizer", "activations"]
Scaling = Literal["tensorwise", "rowwise", "tiles", "blocks", "blocks16"]
# Elements that share one fp32 scale (of blocks, one byte): DeepSeek-V3 §3.3 (tiles 1x128, weights 128x128); OCP MX
# (1x32); NVFP4 (1x16, and an fp32 scale of the whole matrix: arXiv:2509.25149).
SCALED_ELEMENTS: dict[Scaling, int] = {"tiles": 128, "blocks": 32, "blocks16": 16}


class Recipe(Record):
    """Numeric precision as bytes per parameter (``docs/notation.md`` §2); 0 = is not kept.

    ``accumulated_bytes`` > 0: gradients are summed in that width over micro-batches and ranks, and the
    ``gradients_bytes`` of one weight exist only until they are added.
    """

    name: str  # as in ``--precision``
    compute: Dtype  # of the matrix multiplications
    weights_bytes: ElementBytes  # of a weight as gathered and multiplied
    gradients_bytes: ElementBytes  # of the gradient of a weight
    master_bytes: KeptBytes = 0  # of the copy that the optimizer updates
    accumulated_bytes: KeptBytes = 0  # of the gradient accumulation buffer
    moments_bytes: tuple[KeptBytes, KeptBytes] = (4, 4)  # of each of the two moments of Adam
    loss_scaling: bool = False  # dynamic loss scaling (fp16)
    scaling: Scaling = "tensorwise"  # of the operands of fp8 and fp4 matmuls
    wide_gradients: bool = False  # weights' gradients are products of operands that were not cast
    gathers: Literal["weights", "fp8"] = "weights"  # what ZeRO sends of the matrices of blocks
    half: Literal["bf16", "fp16"] = (
        "bf16"  # format of masters, sums and moments of two bytes; moments of fp16 have scales
    )
    dispatches: Literal["rows", "fp8"] = "rows"  # what is sent to experts, and to them of gradients, in tiles

    @model_validator(mode="after")
    def _payloads(self) -> Self:
        """What travels in fp8 is what the matmuls' own casts would make of it."""
        scaled = self.compute == "fp8" and self.scaling in ("tensorwise", "tiles")
        if self.gathers == "fp8" and not (scaled and self.master_bytes):
            raise ValueError(
                f"gathers='fp8' needs a master copy and fp8 matmuls by tensor or by tiles, not {self.compute} with "
                f"scaling={self.scaling!r} and master_bytes={self.master_bytes}; take 'fp8-wire', or gathers='weights'"
            )
        if self.dispatches == "fp8" and not (self.compute == "fp8" and self.scaling == "tiles"):
            raise ValueError(
                f"dispatches='fp8' needs fp8 matmuls on tiles, not {self.compute} with scaling={self.scaling!r}; take "
                "'fp8-tiles-wire', or dispatches='rows'"
            )
        return self

    @property
    def holds_casts(self) -> bool:
        """Whether matrices of blocks are held as the matmuls' casts, with their scales; other weights in 16 bits."""
        return self.weights_bytes == 1 and self.gathers == "fp8"

    @property
    def wide_bytes(self) -> int:
        """Width of weights that no matmul casts, and of their gradients: embedding, head, norms, routers, biases."""
        return 2 if self.holds_casts else self.weights_bytes

    @property
    def sends_masters(self) -> bool:
        """Whether ZeRO can gather from the copy that is updated as it lies: weights have its format."""
        return self.updated_bytes == self.wide_bytes and not (self.holds_casts and self.half == "fp16")

    @property
    def table_gradients_bytes(self) -> int:
        """Width of the gradients of weights whose matmul is not in fp8; of one byte are those of fp8 products alone."""
        return max(2, self.gradients_bytes)

    @property
    def scaled_moments(self) -> tuple[bool, bool]:
        """Whether AdamW's moments have an fp32 scale for each block of a row."""
        first, second = (size == 1 or (size == 2 and self.half == "fp16") for size in self.moments_bytes)
        return first, second

    @property
    def autocasts(self) -> bool:
        """Whether matmuls read 16-bit casts of fp32 weights, under PyTorch's autocast."""
        return self.compute in ("bf16", "fp16") and self.weights_bytes == 4

    @property
    def narrow(self) -> bool:
        """Whether matmuls read operands that were cast below 16 bits."""
        return self.compute in ("fp8", "fp4")

    @property
    def total_bytes(self) -> int:
        """Bytes per parameter of all that the recipe names, as published tables count them."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.master_bytes
            + self.accumulated_bytes
            + sum(self.moments_bytes)
        )

    def reduced(self, *, in_fp32: bool) -> Recipe:
        """The recipe; unless ``in_fp32``, with gradients that are summed and reduced as wide as they are made."""
        if in_fp32 or self.accumulated_bytes <= self.gradients_bytes:
            return self
        return self.replace(name=f"{self.name}-grad16", accumulated_bytes=0)

    @property
    def summed_bytes(self) -> int:
        """Width in which gradients are summed and reduced, and so the gradient that is a state."""
        return self.accumulated_bytes or self.gradients_bytes

    @property
    def updated_bytes(self) -> int:
        """Width of the copy that the optimizer updates."""
        return self.master_bytes or self.weights_bytes


# 16-bit weights at rest, cast for each matmul: Transformer Engine's recipes in Megatron-Core, torchao's float8.
FP8_OVER_BF16: tuple[tuple[str, Dtype, Scaling], ...] = (
    ("fp8", "fp8", "tensorwise"),
    ("fp8-rowwise", "fp8", "rowwise"),
    ("fp8-tiles", "fp8", "tiles"),
    ("mxfp8", "fp8", "blocks"),
    ("nvfp4", "fp4", "blocks16"),
)

# docs/notation.md §2. Sources: fp32, bf16, fp16: ZeRO (arXiv:1910.02054 §3.1); fp8-deepseek: DeepSeek-V3
# (arXiv:2412.19437 §3.3); fp8-nanotron: Ultra-Scale Playbook, table of fp8 recipes; fp8-lm: FP8-LM O3
# (arXiv:2310.18313).
RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="fp32", compute="fp32", weights_bytes=4, gradients_bytes=4),
        Recipe(name="tf32", compute="tf32", weights_bytes=4, gradients_bytes=4),
        Recipe(
            name="bf16",
            compute="bf16",
            weights_bytes=2,
            gradients_bytes=2,
            master_bytes=4,
            accumulated_bytes=4,
        ),
        Recipe(name="bf16-grad16", compute="bf16", weights_bytes=2, gradients_bytes=2, master_bytes=4),
        Recipe(name="bf16-pure", compute="bf16", weights_bytes=2, gradients_bytes=2),
        Recipe(name="fp16", compute="fp16", weights_bytes=2, gradients_bytes=2, master_bytes=4, loss_scaling=True),
        Recipe(name="bf16-autocast", compute="bf16", weights_bytes=4, gradients_bytes=4),
        Recipe(name="fp16-autocast", compute="fp16", weights_bytes=4, gradients_bytes=4, loss_scaling=True),
        Recipe(name="fp8-te", compute="fp8", weights_bytes=4, gradients_bytes=4),
        *(
            Recipe(
                name=name,
                compute=compute,
                scaling=scaling,
                weights_bytes=2,
                gradients_bytes=2,
                master_bytes=4,
                accumulated_bytes=4,
            )
            for name, compute, scaling in FP8_OVER_BF16
        ),
        Recipe(
            name="fp8-rowwise-gw",  # torchao's rowwise_with_gw_hp
            compute="fp8",
            scaling="rowwise",
            wide_gradients=True,
            weights_bytes=2,
            gradients_bytes=2,
            master_bytes=4,
            accumulated_bytes=4,
        ),
        Recipe(
            name="fp8-deepseek",
            compute="fp8",
            scaling="tiles",
            weights_bytes=1,
            gradients_bytes=2,
            master_bytes=4,
            accumulated_bytes=4,
            moments_bytes=(2, 2),
            gathers="fp8",
            dispatches="fp8",
        ),
        Recipe(
            name="fp8-nanotron",
            compute="fp8",
            weights_bytes=1,
            gradients_bytes=1,
            master_bytes=2,
            accumulated_bytes=4,
            moments_bytes=(1, 1),
            gathers="fp8",
        ),
        Recipe(
            name="fp8-lm",
            compute="fp8",
            weights_bytes=1,
            gradients_bytes=1,
            master_bytes=2,
            accumulated_bytes=2,
            moments_bytes=(1, 2),
            half="fp16",
            loss_scaling=True,
            gathers="fp8",
        ),
    )
}

# What travels in fp8 besides: gathers as in torchao's FSDP2 (pytorch/ao: torchao/float8), dispatches as in DeepSeek-V3.
RECIPES["fp8-wire"] = RECIPES["fp8"].replace(name="fp8-wire", gathers="fp8")
RECIPES["fp8-tiles-wire"] = RECIPES["fp8-tiles"].replace(name="fp8-tiles-wire", gathers="fp8", dispatches="fp8")


def _stack(asked: object, changes: dict[str, Any]) -> Stack | dict[str, Any]:
    """A stack by name, as a record, or as a table that may name one, with ``changes``; a table that is no stack as is,
    for pydantic to say which of its fields is wrong.
    """
    stack = named(asked) if isinstance(asked, str) else asked
    if isinstance(stack, Stack):
        if not changes:
            return stack
        stack = stack.model_dump()
    if not isinstance(stack, dict):
        raise Mistake(f"stack is {asked!r}; name one of {', '.join(STACKS)}, or give a table of its fields")
    name = stack.get("name")
    table = (STACKS[name].model_dump() if isinstance(name, str) and name in STACKS else {}) | stack | changes
    try:
        return Stack.model_validate(table)
    except ValidationError:
        return table


def recipe(name: str) -> Recipe:
    """The recipe called ``name``."""
    if name not in RECIPES:
        raise nearest(name, list(RECIPES), kind="precision")
    return RECIPES[name]


class Job(Record):
    """One training run, whatever it runs on. Fields of its ``stack`` may be given as if they were its own."""

    inlined: ClassVar[tuple[str, ...]] = ("stack",)
    not_supported: ClassVar[dict[str, str]] = NOT_SUPPORTED

    sequence: Tokens = 4096  # tokens per sequence (T)
    global_batch: Sequences = 8  # sequences per optimizer step
    precision: Recipe = RECIPES["bf16"]  # name of a recipe such as ``bf16`` or ``fp8-tiles``
    # apart: no token attends to one of another document that is packed into its sequence; counted alike by the planner
    documents: Literal["joined", "apart"] = "joined"
    # fp8, fp4 and tf32 where there is no kernel for them: operands are cast as for one and multiplied in fp32
    emulate: bool = False
    imbalance: float = Field(1.0, ge=1, le=2**20)  # tokens of the fullest expert rank over the even share
    offload: tuple[Offloaded, ...] = ()  # kept in host memory, under every layout
    optimizer: Optimizer = Optimizer()  # update rule and its settings
    learning_rate: LearningRate = LearningRate()  # schedule of the learning rate
    ramp: Ramp | None = None  # how the batch grows to ``global_batch``, which is all that is planned
    steps: Steps = 1000  # optimizer steps of the run
    seed: Seed = 0  # of initial weights and of the order of the data
    stack: Stack = Stack()  # the software that runs it

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, values: object) -> object:
        """A stack and a recipe by name, or with some of their fields changed."""
        if not isinstance(values, dict):
            return values
        try:
            changes = {key: value for key, value in values.items() if key in FACTS}
            stack = _stack(values.get("stack", {}), changes)
            values = {key: value for key, value in values.items() if key not in FACTS} | {"stack": stack}
            asked = values.get("precision", "bf16")
            if isinstance(asked, str):
                values["precision"] = recipe(asked).reduced(
                    in_fp32=not isinstance(stack, Stack) or stack.reduce_in_fp32
                )
            elif isinstance(asked, dict) and isinstance(name := asked.get("name"), str) and name in RECIPES:
                values["precision"] = RECIPES[name].model_dump() | asked
        except Mistake as error:
            raise ValueError(str(error)) from None
        return values

    @model_validator(mode="after")
    def _legal(self) -> Self:
        if self.learning_rate.warmup_steps > self.steps:
            raise ValueError(f"learning_rate.warmup_steps={self.learning_rate.warmup_steps} exceeds steps={self.steps}")
        if self.ramp is not None and (sizes := len(self.ramp.sizes(self.global_batch))) > RAMP_SIZES:
            raise ValueError(f"ramp.step={self.ramp.step} makes {sizes} sizes of the batch, more than {RAMP_SIZES}")
        return self

    @property
    def even_batch(self) -> int:
        """What dp·mbs must divide: of the global batch and of all on the way to it."""
        return self.global_batch if self.ramp is None else gcd(self.global_batch, self.ramp.first, self.ramp.step)

    def batch(self, taken: int) -> int:
        """Sequences of the step that begins after ``taken`` of them."""
        return self.global_batch if self.ramp is None else self.ramp.size(taken, whole=self.global_batch)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step consumes."""
        return self.sequence * self.global_batch
