"""Starts a run from a Hugging Face folder: each rank memory-maps the files and copies only its local rows.

    FOLDER/  config.json  model.safetensors | model.safetensors.index.json  model-00001-of-00002.safetensors …

All names, shapes and dtypes are checked when the folder is opened, before any weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fivefold.base_format import FP8_BLOCK, BaseFormat
from fivefold.errors import UserError
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.read import find_text_model, from_config, is_rope_interleaved
from fivefold.model.huggingface.tensors import (
    COPIES,
    STACKED_SIGN,
    WRAPPED,
    TensorPart,
    list_constants,
    list_tensors,
    unwrap_name,
)
from fivefold.model.huggingface.write import find_difference
from fivefold.model.spec import Model
from fivefold.model.weights import list_weights
from fivefold.text_files import read_file
from fivefold.trainer.build import Built, start_magnitudes
from fivefold.trainer.checkpoint.checkpoint import run_on_all_ranks
from fivefold.trainer.checkpoint.published_tensors import (
    PUBLISHED_DTYPES,
    Fp8Tensor,
    Mxfp4Tensor,
    QuantizedTensor,
    read_published,
)

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
# Buffers of constants: rotary frequencies, causal masks, decays.
BUFFERS = (
    *("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "attention.bias", "attention.masked_bias"),
    *(f"self_attn.{name}" for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")),  # MiniMax-01
)
HEADS = ("lm_head.weight", "embed_out.weight")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
ROWS = 4096  # rows of a tied head that are compared at once
OTHER_SENSES = (
    "vision_tower.",
    "vision_model.",
    "multi_modal_projector.",
    "visual.",
    "model.vision_tower.",
    "model.visual.",
    "model.multi_modal_projector.",
    "model.embed_tokens_extend.",
)
TABLE, INDEX_DTYPES = ".moe.table", ("I64", "I32")  # of experts by token ids
DTYPES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, **PUBLISHED_DTYPES}  # bytes per element, with scales


@dataclass(frozen=True)
class HuggingFaceFolder:
    """An opened folder: the model of its config, and for each of our weights the tensors that hold it."""

    path: Path
    family: str
    model: Model
    parts: dict[str, list[TensorPart]]
    tensors: dict[str, Any]  # lazy safetensors slices: reads only what is indexed
    ignored: tuple[str, ...]  # tensors that the model does not use

    @classmethod
    def open(cls, path: Path, *, model: Model | None = None) -> Self:
        """Map the files of ``path``; raises ``UserError`` if ``model`` differs, or a tensor is missing or misshapen."""
        config = _read_config(path)
        stored = from_config(config, name=path.resolve().name, source=str(path))
        text = find_text_model(config, name=str(path))
        tensors = read_published(dict(_list_tensors(path)), config, path=path)
        foreign = _list_foreign(tensors) if text.wrapped else frozenset()
        tensors = _select_text_model(tensors) if text.wrapped else _add_prefix(tensors, prefix=text.family.base_prefix)
        tensors = _join_tensors(tensors, family=text.family)
        if stored.mtp and not any(_is_of_mtp(name, stored) for name in tensors):
            stored = stored.replace(mtp=None)  # transformers writes the key, but none of the tensors
        if model is not None:
            if model.mtp is None or stored.mtp is None:  # the stored MTP modules are not read, or new ones are drawn
                model = model.replace(mtp=None)
                stored = stored.replace(mtp=None)
            if mismatch := find_difference(stored, model):
                raise UserError(f"{path} holds another model, with {mismatch}; give the run model = {str(path)!r}")
        wanted = list(
            list_tensors(
                stored,
                family=text.family.model_type,
                stacked=any(STACKED_SIGN in name for name in tensors),
                interleaved=is_rope_interleaved(config, name=str(path)),
            )
        )
        fixed = list_constants(stored, family=text.family.model_type)
        _check_constants(path, tensors, fixed)
        foreign |= fixed.keys()
        ignored = _check(path, tensors, wanted, model=stored, wrapped=text.wrapped, foreign=foreign)
        ours: dict[str, list[TensorPart]] = {}
        for part in wanted:
            ours.setdefault(part.ours, []).append(part)
        return cls(path, text.family.model_type, stored, ours, tensors, ignored)

    def dtypes(self) -> dict[str, int]:
        """Count the elements stored in each dtype."""
        counts: dict[str, int] = {}
        for part in {part.name: part for several in self.parts.values() for part in several}.values():
            if part.ours.endswith(TABLE):  # of token ids, not of weights
                continue
            dtype = self.tensors[part.name].get_dtype()
            counts[dtype] = counts.get(dtype, 0) + part.numel
        return counts

    def fill(self, ours: str, tensor: Tensor) -> None:
        """Copy all of ``ours`` into ``tensor`` if the folder holds it."""
        if ours in self.parts:
            tensor.copy_(self.read(ours, offsets=(0,) * tensor.dim(), sizes=tuple(tensor.shape)))

    def read(self, ours: str, *, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Read a box of our weight ``ours`` in its stored dtype; of stacked experts [E, ., .] a box of one expert."""
        several = self.parts[ours]
        if several[0].expert is not None:
            (expert,) = range(offsets[0], offsets[0] + sizes[0])
            box = self._read(several[expert], offsets=offsets[1:], sizes=sizes[1:])
            return box[None]
        return self._read(several[0], offsets=offsets, sizes=sizes)

    def read_codes(self, ours: str, *, base: BaseFormat | None, expert: int | None = None) -> tuple[Tensor, ...] | None:
        """Return codes and scales of a matrix as the folder stores it in the format ``base``; None: it does not.

        ``expert``: of stacked experts.
        """
        several = self.parts[ours]
        part = several[expert] if expert is not None and several[0].expert is not None else several[0]
        tensor = self.tensors[part.name]
        if base is None:
            return None
        if base.name == "fp8" and isinstance(tensor, Fp8Tensor):
            return self._read_fp8(part.select_expert(expert) if expert is not None and part.experts else part, tensor)
        if base.name == "mxfp4" and isinstance(tensor, Mxfp4Tensor) and expert is not None and part.transposed:
            rows = torch.tensor(part.order())
            return tensor.blocks[expert][rows].flatten(1), tensor.scales[expert][rows]
        if isinstance(tensor, QuantizedTensor) and base == tensor.base:
            if not part.is_plain_copy or part.order() != range(part.shape[0]):
                raise UserError(
                    f"{self.path}: scales of {part.name} in {base.label} are not those of {part.ours}, whose rows have "
                    "another order; use adapter.base=bf16"
                )
            return tensor.read_parts()
        return None

    def read_matrix(self, ours: str, *, expert: int | None = None) -> Tensor:
        """Read the matrix of our weight ``ours`` in its stored dtype, or that of an expert."""
        *_, rows, columns = self.shapes[ours]
        if expert is None:
            return self.read(ours, offsets=(0, 0), sizes=(rows, columns))
        return self.read(ours, offsets=(expert, 0, 0), sizes=(1, rows, columns))[0]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each of our weights."""
        return {weight.name: weight.shape for weight in list_weights(self.model)}

    def _read_fp8(self, part: TensorPart, tensor: Fp8Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and scales in our order of rows, none of which may be of another block of scales there."""
        rows = part.order()
        blocks = [row // FP8_BLOCK for row in rows[::FP8_BLOCK]]
        is_kept = all(place // FP8_BLOCK == blocks[row // FP8_BLOCK] for row, place in enumerate(rows))
        if not is_kept or part.transposed or part.ones or part.dim:
            raise UserError(
                f"{self.path}: blocks of {part.name} in fp8 are not those of {part.ours}, whose rows have another "
                "order; use adapter.base=bf16"
            )
        codes: Tensor = tensor.codes[...]
        return codes.view(torch.uint8)[torch.tensor(rows)], tensor.scales[...][torch.tensor(blocks)]

    def _read(self, part: TensorPart, *, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Read a box of the weight of ``part``, in our order of rows; in the tensor they need not be contiguous."""
        if part.experts:
            chosen = range(offsets[0], offsets[0] + sizes[0])
            matrices = (self._read(part.select_expert(e), offsets=offsets[1:], sizes=sizes[1:]) for e in chosen)
            return torch.stack(list(matrices))
        box = list(zip(offsets, sizes, strict=True))
        is_row = len(box) == 1 and len(part.shape) == 2  # a routing bias may be stored as one row
        if is_row:
            box.insert(0, (0, 1))
        for dim in part.ones:
            box.insert(dim, (0, 1))
        if part.transposed:
            box[-1], box[-2] = box[-2], box[-1]
        start, size = box[part.dim]
        rows = part.order()[start : start + size]
        first_row = min(rows, default=0)
        box[part.dim] = first_row, max(rows, default=-1) + 1 - first_row
        slices = tuple(slice(first, first + n) for first, n in box)
        try:
            tensor: Tensor = self.tensors[part.name][slices]
        except SafetensorError as error:
            raise UserError(f"{self.path}: {part.name} cannot be read: {error}") from None
        if not isinstance(rows, range):
            tensor = tensor.index_select(part.dim, torch.tensor([row - first_row for row in rows]))
        if part.ones:
            return tensor.squeeze(part.ones)
        tensor = tensor.transpose(-1, -2) if part.transposed else tensor
        return tensor[0] if is_row else tensor


def start(path: Path, *, built: Built, model: Model) -> None:
    """Load this rank's shards from the folder ``path``. Every rank calls it; all raise the same ``UserError``."""
    run_on_all_ranks(lambda: _start(path, built=built, model=model), ranks=built.ranks)
    for unit in built.units:
        unit.on_optimizer_step()


@torch.no_grad()
def _start(path: Path, *, built: Built, model: Model) -> None:
    """Copy the rows of this rank from a Hugging Face folder into its shards, and what routers hold."""
    folder = HuggingFaceFolder.open(path, model=model)
    for shard in built.base_shards:
        if shard.stored is not None:  # the scales are those of the full weight, on every rank
            base = shard.stored
            if (
                base.name == folder.model.quantization
                and shard.name.removesuffix(".weight") in folder.model.unquantized
            ):
                raise UserError(
                    f"{path} keeps {shard.name} in 16 bits, and the run's model has it in {base.name}; give the run "
                    f"model = {str(path)!r}"
                )
            for here, there in shard.list_matrices():
                published = folder.read_codes(shard.name, base=base, expert=there)
                if published is not None:
                    shard.load_codes(*published, expert=here)
                else:
                    shard.load_matrix(folder.read_matrix(shard.name, expert=there), expert=here)
            continue
        for box in shard.boxes() if shard.name in folder.parts else ():
            tensor = folder.read(shard.name, offsets=box.offsets, sizes=box.sizes)
            shard.weight[box.rows].view(box.sizes).copy_(tensor)
    shards = [shard for unit in built.units for shard in (*unit.shards, *unit.frozen)]
    shapes = {shard.name: shard.local_weight.weight.shape for shard in shards}
    start_magnitudes(shards, read=lambda name: folder.read(name, offsets=(0, 0), sizes=shapes[name]))
    for name, tensor in built.router_tensors.items():
        folder.fill(name, tensor)


# Reading and checking the folder


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; give one with {CONFIG} and {SINGLE} or {INDEX}")
    return read_file(path / CONFIG)


def _list_files(path: Path) -> list[Path]:
    """List the safetensors files of the folder; raises ``UserError`` if one is missing."""
    if (path / INDEX).is_file():
        places = read_file(path / INDEX).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise UserError(f"{path / INDEX} has no weight_map; fetch the file again")
        files = [path / str(name) for name in sorted({str(place) for place in places.values()})]
    else:
        files = [path / SINGLE]
    for file in files:
        if not file.is_file():
            reason = f"{INDEX} names it" if len(files) > 1 else f"there is no {INDEX} either"
            raise UserError(f"{file} is missing, and {reason}; only safetensors are read")
    return files


def _list_tensors(path: Path) -> Iterator[tuple[str, Any]]:
    for file in _list_files(path):
        try:
            handle: Any = safe_open(file, framework="pt")
        except SafetensorError as error:
            raise UserError(f"{file} is damaged or incomplete ({error}); download it again") from None
        for name in handle.keys():  # noqa: SIM118  not a dictionary
            yield name, handle.get_slice(name)


def _add_prefix(tensors: dict[str, Any], *, prefix: str) -> dict[str, Any]:
    """Return ``tensors`` by the full model's names, if named as in a model without head (``h.0.ln_1.weight``)."""
    bare = prefix and not any(name.startswith(prefix) for name in tensors)
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()} if bare else tensors


class _JoinedRows:
    """The rows of several tensors, one after another, as a lazy slice of safetensors."""

    def __init__(self, pieces: list[Any]) -> None:
        self.pieces = pieces

    def get_shape(self) -> list[int]:
        _, *other_dims = self.pieces[0].get_shape()
        return [sum(piece.get_shape()[0] for piece in self.pieces), *other_dims]

    def get_dtype(self) -> str:
        return str(self.pieces[0].get_dtype())

    def __getitem__(self, slices: Any) -> Tensor:
        return torch.cat([piece[...] for piece in self.pieces])[slices]


def _join_tensors(tensors: dict[str, Any], *, family: Family) -> dict[str, Any]:
    """Return ``tensors`` as ``family`` names them, those that it has in one joined."""
    named = {}
    for name, tensor in tensors.items():
        for published, ours in family.renamed.items():
            name = name.replace(published, ours)
        named[name] = tensor
    for joined_name, pieces in family.joined.items():
        for stem in [name.removesuffix(pieces[0]) for name in named if name.endswith(pieces[0])]:
            if all(f"{stem}{piece}" in named for piece in pieces):
                named[f"{stem}{joined_name}"] = _JoinedRows([named.pop(f"{stem}{piece}") for piece in pieces])
    return named


def _list_foreign(tensors: dict[str, Any]) -> frozenset[str]:
    """Return the tensors of a multimodal model that are not of its text model, if the latter's names have a prefix."""
    foreign = frozenset(name for name in tensors if not name.startswith((*WRAPPED, *HEADS)))
    return foreign if len(foreign) < len(tensors.keys() - {*HEADS}) else frozenset()


def _select_text_model(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return ``tensors`` of a multimodal model, with the names of a text model for those of its text model."""
    return {unwrap_name(name): tensor for name, tensor in tensors.items()}


def _check(
    path: Path,
    tensors: dict[str, Any],
    wanted: list[TensorPart],
    *,
    model: Model,
    wrapped: bool = False,
    foreign: frozenset[str] = frozenset(),
) -> tuple[str, ...]:
    """Check names, shapes and dtypes; return the unused tensors that are allowed. Raises ``UserError`` for others."""
    names = {part.name for part in wanted}
    if missing := [name for name in sorted(names) if name not in tensors]:
        raise UserError(
            f"{path}: {len(missing)} of the {len(names)} tensors that its {CONFIG} implies are missing, such as "
            f"{missing[0]}; it holds {len(tensors)}"
        )
    for part in wanted:
        shape = tuple(tensors[part.name].get_shape())
        dtype = tensors[part.name].get_dtype()
        if shape != part.shape:
            raise UserError(f"{path}: {part.name} has shape {list(shape)}, but its {CONFIG} implies {list(part.shape)}")
        if dtype not in (INDEX_DTYPES if part.ours.endswith(TABLE) else DTYPES):
            raise UserError(f"{path}: {part.name} is stored as {dtype}; convert it to bf16 first")
    spare = tuple(name for name in sorted(tensors) if name not in names)
    if unknown := [
        name
        for name in spare
        if not (_can_be_unused(name, model) or name in foreign or (wrapped and name.startswith(OTHER_SENSES)))
    ]:
        raise UserError(
            f"{path} holds {len(unknown)} tensors that the model of its {CONFIG} does not have, such as {unknown[0]}; "
            f"use the {CONFIG} of these weights"
        )
    for head in set(HEADS).intersection(spare):
        _check_tied(path, tensors, head)
    return spare


def _check_constants(path: Path, tensors: dict[str, Any], fixed: dict[str, float | tuple[float, ...]]) -> None:
    """Raise a ``UserError`` if a number that the trainer has fixed is another one in the folder."""
    for name in sorted(fixed.keys() & tensors.keys()):
        stored: Tensor = tensors[name][...]
        computed = torch.tensor(fixed[name], dtype=stored.dtype)
        if not bool((stored == computed).all()):
            raise UserError(
                f"{path}: {name} is {stored.flatten().tolist()}, and the trainer supports only "
                f"{computed.flatten().tolist()}; `predict` estimates the model all the same"
            )


def _check_tied(path: Path, tensors: dict[str, Any], head: str) -> None:
    """Raise a ``UserError`` if a tied head's tensor is not the embedding's, which transformers would not tie."""
    embedding = next(tensor for name, tensor in tensors.items() if name.endswith(EMBEDDINGS))
    for start in range(0, tensors[head].get_shape()[0], ROWS):
        head_rows, embedding_rows = (tensor[start : start + ROWS] for tensor in (tensors[head], embedding))
        if not torch.equal(head_rows.to(embedding_rows.dtype), embedding_rows):
            raise UserError(
                f"{path}: {head} differs from the embedding, though its {CONFIG} ties them (tie_word_embeddings); "
                "set that to false there"
            )


def _can_be_unused(name: str, model: Model) -> bool:
    """Return whether a tensor may be unused.

    These are a tied head, frequencies and masks (old files), and in the modules of multi-token prediction the copies of
    embedding and head, or all their tensors if the model has no such modules.
    """
    if name in HEADS:
        return model.tied_embeddings
    return name.endswith(BUFFERS) or (_is_of_mtp(name, model) and (model.mtp is None or name.endswith(tuple(COPIES))))


def _is_of_mtp(name: str, model: Model) -> bool:
    """Tell whether a tensor is of a module of multi-token prediction, of which some families number the layers anew."""
    return name.startswith("mtp.") or _find_layer(name) >= model.layers


def _find_layer(name: str) -> int:
    """Return the layer of a tensor, where the modules of multi-token prediction come last; -1 if in no layer."""
    match = re.search(r"layers\.(\d+)\.", name)
    return int(match[1]) if match else -1
