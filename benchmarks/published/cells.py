"""The cells of a row as our nouns: hardware, model, schedule, recomputation, precision, counts.

A cell that is missing, malformed or names what we have no name for raises a ``UserError`` of one line: the row is left
out by it, and ``published --excluded`` prints it. Nothing is guessed from a cell that was not understood.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, NamedTuple

from benchmarks.published.case import machine
from fivefold.errors import UserError
from fivefold.job import Recipe, get_recipe
from fivefold.layout.schedule.pipeline_schedule import PIPELINE_SCHEDULES, ScheduleName
from fivefold.machine import catalog as machines
from fivefold.machine.spec import Machine
from fivefold.model import catalog as models
from fivefold.model.spec import Model

Row = dict[str, str]

NO_STAGES = "virtual stages are not printed"
LARGEST = 10**8  # of any count in a row


def integer(row: Row, key: str) -> int:
    """Return the integer in a cell; 0 where the source is silent."""
    text = row.get(key, "")
    if not text:
        return 0
    if not (text.isascii() and text.isdigit()) or int(text) > LARGEST:
        raise UserError(f"{key} is {text!r}, which is no whole number up to {LARGEST:g}")
    return int(text)


def read_required_integer(row: Row, key: str) -> int:
    """Return the integer in a cell, 1 or more, without which there is no run to predict."""
    value = integer(row, key)
    if value < 1:
        raise UserError(f"{key} is {row[key]!r}" if row.get(key) else f"{key} is not printed")
    return value


def degree(row: Row, key: str) -> int:
    """Return a degree of parallelism; 1 where the source is silent."""
    return read_required_integer(row, key) if row.get(key) else 1


def number(row: Row, key: str) -> float:
    """Return the figure in a cell; 0.0 where the source is silent."""
    text = row.get(key, "")
    try:
        value = float(text or 0)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UserError(f"{key} is {text!r}, which is no figure")
    return value


def sharding(row: Row, *, silent: int) -> int:
    """Return the ZeRO stage: ``3``, ``1 (8 GPUs)``."""
    text = row.get("zero", "")
    match = re.fullmatch(r"([0-3])( \(.*\))?", text)
    if text and not match:
        raise UserError(f"zero is {text!r}, which is no stage of ZeRO")
    return int(match[1]) if match else silent


def chip(text: str) -> str:
    """Return the catalog's chip in ``A100-80GB``, ``DGX-GB300``, ``H200 SXM 141GB``.

    Its memory must be the one printed.
    """
    if not text:
        raise UserError("the hardware is not printed")
    words = set(re.findall(r"[a-z0-9]+", re.sub(r"rtx[ -]?", "rtx", text.lower())))
    matches = [name for name in machines.list_names() if name in words]
    if len(matches) != 1 or re.search(r"not (named|certain)", text):
        raise UserError(f"hardware {text!r} is no chip of our catalog")
    if "pcie" in words:
        matches = [f"{matches[0]}-pcie"] if f"{matches[0]}-pcie" in machines.list_names() else []
    else:
        matches += [
            name for name in machines.list_names() if name.startswith(f"{matches[0]}-") and not name.endswith("pcie")
        ]
    memory = re.search(r"(\d+) ?(gi?b)\b(?!/s)", text.lower())
    unit = 2**30 if memory and memory[2] == "gib" else 1e9
    fits = [
        name
        for name in matches
        if not memory or abs(machine(name, 1).chip.memory_bytes / unit / int(memory[1]) - 1) < 0.1
    ]
    if not fits:
        raise UserError(f"hardware {text!r}: our catalog has no such part")
    return fits[0]


def read_machine(row: Row, *, nic_gigabits: float | None = None, source: str = "") -> Machine:
    """Return the machine of a row: as many GPUs as it prints, of the hardware that it prints."""
    return machine(
        chip(row.get("hardware", "")), read_required_integer(row, "gpus"), nic_gigabits=nic_gigabits, source=source
    )


@cache
def _model_patterns() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """Return patterns for the spellings of catalog names in tables; Llama 3.1 has the weight shapes of Llama 3."""
    rest = r"(?: (?:\d\d\.\d\d|[A-Z]{1,2}\d{3}))*"  # a release, a chip
    patterns = []
    for name in models.list_names():
        parts = re.findall(r"[a-z]+|\d+(?:\.\d+)?", name)
        text = "[ _-]?".join(
            r"3(?:\.1)?" if name.startswith("llama3-") and part == "3" else re.escape(part) for part in parts
        )
        patterns.append((name, re.compile(text + rest, re.IGNORECASE)))
    return tuple(patterns)


# Names that leave out what the catalog's have.
SHORT_NAMES = {
    "Nemotron 3 Nano": "nemotron3-nano-30b-a3b",
    "Nemotron V3 Nano 30B": "nemotron3-nano-30b-a3b",
    "Nemotron 3 Super": "nemotron3-super-120b-a12b",
    "Nemotron V3 Super 120B": "nemotron3-super-120b-a12b",
    "Nemotron 3 Ultra": "nemotron3-ultra-550b-a55b",
    "Nemotron V3 Ultra 550B": "nemotron3-ultra-550b-a55b",
}


def find_model(text: str) -> Model:
    """Return the catalog's model in ``Llama 3.1 70b 24.09``, ``LLAMA3_70B``, ``Qwen3_30B_a3B``."""
    text = SHORT_NAMES.get(text.replace("_", " "), text)
    match = next((name for name, pattern in _model_patterns() if pattern.fullmatch(text)), None)
    if match is None:
        raise UserError(f"model {text!r} is not in our catalog")
    return models.resolve(match)


def apply_printed_shape(model: Model, row: Row) -> Model:
    """Return ``model`` with the layers and the vocabulary that the row prints.

    What else it prints must be the model's.
    """
    moe = model.moe
    if moe and not row.get("ep"):
        raise UserError("over how many ranks the experts lie is not printed")
    ours = {
        "hidden": model.width,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "ffn": model.ffn,
        "experts": moe.experts if moe else 0,
        "topk": moe.topk if moe else 0,
        "moe_ffn": moe.ffn if moe else 0,
    }
    for key, figure in ours.items():
        if (printed := integer(row, key)) and printed != figure:
            raise UserError(f"{key} is {printed}, where {model.name} has {figure}")
    layers = integer(row, "layers") or model.layers
    vocab = integer(row, "vocab") or model.vocab
    return model if (layers, vocab) == (model.layers, model.vocab) else model.replace(layers=layers, vocab=vocab)


def head_dim(row: Row) -> int:
    """Return width / heads. Raises ``UserError`` if heads do not divide the width."""
    width = read_required_integer(row, "hidden")
    heads = read_required_integer(row, "heads")
    if width % heads:
        raise UserError(f"hidden {width} is not divisible by heads {heads}")
    return width // heads


def build_llama(row: Row, *, name: str, **others: Any) -> Model:
    """Build a model of Llama's shape by the columns that a row prints; ``others``: further fields of the model."""
    return Model(
        name=name,
        layers=read_required_integer(row, "layers"),
        width=read_required_integer(row, "hidden"),
        heads=read_required_integer(row, "heads"),
        kv_heads=read_required_integer(row, "kv_heads"),
        head_dim=head_dim(row),
        ffn=read_required_integer(row, "ffn"),
        vocab=read_required_integer(row, "vocab"),
        **others,
    )


class ScheduleChoice(NamedTuple):
    """A schedule with its virtual stages per rank."""

    name: ScheduleName
    v: int


SCHEDULES: dict[str, ScheduleName] = {
    "gpipe": "gpipe", "1f1b": "1f1b", "zb1p": "zb1p", "zbh1": "zb1p", "zb2p": "zb2p", "zbh2": "zb2p", "zbv": "zbv",
    "interleaved": "interleaved", "interleaved1f1b": "interleaved", "1f1bi": "interleaved",
    "dualpipe": "dualpipe", "dualpipev": "dualpipev",
}  # fmt: skip


def schedule(row: Row) -> ScheduleChoice:
    """Return the pipeline schedule; if the table does not name one: 1F1B, interleaved with virtual stages."""
    pp, v, text = degree(row, "pp"), degree(row, "vp"), row.get("schedule", "")
    if pp == 1:
        return ScheduleChoice("1f1b", 1)
    match = re.fullmatch(r"(.*?)(?: vpp(\d+))?", text.lower())
    assert match is not None
    name, stages = re.sub(r"[^a-z0-9]", "", match[1]), int(match[2] or v)
    kind = SCHEDULES.get(name or "1f1b")
    if kind is None:
        raise UserError(f"schedule {text!r} is none of ours")
    if PIPELINE_SCHEDULES[kind].is_v_shaped:
        return ScheduleChoice(kind, 2)
    if PIPELINE_SCHEDULES[kind].is_interleaved and stages == 1:
        raise UserError(NO_STAGES)
    return ScheduleChoice("interleaved" if kind == "1f1b" and stages > 1 else kind, stages)


RECOMPUTED = {"none": "none", "full": "full", "selective": "selective"}


def read_recomputation(row: Row, *, silent: str | None = None, words: Mapping[str, str] = RECOMPUTED) -> str:
    """Return the recomputation as layout keywords; ``silent`` if the source leaves it to its software's default."""
    text = row.get("recompute", "")
    if not text and silent is not None:
        return silent
    if match := re.fullmatch(r"(?:full|selective) \(every (\d+)(?:st|nd|rd|th) layer\)", text):
        return f"full/{match[1]}"
    if text not in words:
        raise UserError(f"recompute is {text!r}, which no layout says" if text else "what is recomputed is not printed")
    return words[text]


SUMS = re.compile(r"[,(;]?\s*\(?fp32 grad(?:ient)?s?(?: accumulation| sums)?\)?")


def number_format(text: str) -> str:
    """Return the catalog's recipe of a cell such as ``BF16``, ``FP8-CS`` or ``bf16, fp32 gradient sums``."""
    words: set[str] = set(re.findall(r"[a-z0-9]+", SUMS.sub("", text.lower())))
    if "nvfp4" in words:
        return "nvfp4"
    if words & {"mx", "mxfp8"}:
        return "mxfp8"
    if words & {"fp8", "float8"}:
        return "fp8-rowwise" if "rowwise" in words else "fp8"
    formats = words & {"bf16", "fp16", "fp32"}
    if len(formats) != 1:
        raise UserError(f"precision {text!r} is none of ours" if text else "the precision is not printed")
    return formats.pop()


def precision(text: str, *, sums: Literal["fp32", "narrow"]) -> Recipe:
    """Return the recipe of a cell.

    Gradients are summed in fp32 where it says so, or else as the source's software does.
    """
    base_recipe = get_recipe(number_format(text))
    if sums == "narrow" and not SUMS.search(text.lower()):
        return use_16bit_gradients(base_recipe.name) if base_recipe.accumulated_bytes else base_recipe
    wide = base_recipe.accumulated_bytes == 4 or base_recipe.gradients_bytes == 4
    return base_recipe if wide else base_recipe.replace(name=f"{base_recipe.name}, fp32 gradients", accumulated_bytes=4)


def use_16bit_gradients(name: str) -> Recipe:
    """Return the recipe, with gradients summed and reduced in 16 bits (Megatron's grad_reduce_in_fp32=False)."""
    return get_recipe(name).replace(name=f"{name}-grad16", accumulated_bytes=0)
