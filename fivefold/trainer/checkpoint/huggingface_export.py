"""Exports a checkpoint of any layout as a Hugging Face folder, atomically, with one file's tensors in memory at a time.

step-00000100/ ── the tensors of one file ──> FOLDER.tmp-…/model-00001-of-00009.safetensors, … ── rename ──> FOLDER

Of a run with adapters it writes the factors, as peft stores them, or the weights of its base with them merged.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from fivefold.atomic_file import sync
from fivefold.errors import RunFailure, UserError
from fivefold.model.huggingface.tensors import (
    TensorPart,
    list_constants,
    list_tensors,
)
from fivefold.model.huggingface.write import to_config
from fivefold.model.spec import Model
from fivefold.model.weights import list_router_tensors, list_weights
from fivefold.record import Record
from fivefold.trainer.checkpoint import checkpoint_folder, merged_adapter, peft_adapter
from fivefold.trainer.checkpoint.checkpoint_folder import Checkpoint
from fivefold.trainer.checkpoint.huggingface_import import CONFIG, INDEX, SINGLE
from fivefold.trainer.checkpoint.merged_adapter import MergedFolder
from fivefold.trainer.checkpoint.reshard import BoxTensor
from fivefold.trainer.parallel.shard import Box
from fivefold.units import show_bytes

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BIAS, TABLE = ".moe.bias", ".moe.table"
Report = Callable[[str, int, int], None]
Read = Callable[[dict[str, Tensor]], None]  # fills tensors by their names in a checkpoint
Fused = list[TensorPart]  # the parts that are stored in one tensor of the folder


class Exported(Record):
    """The result of an export: the folder and what was written to it.

    ``holds``: all weights, those of the base with adapters merged into them, or only the factors of adapters.
    """

    folder: str
    family: str
    step: int
    dtype: str
    tensors: int
    files: int
    bytes: int
    holds: Literal["weights", "merged weights", "adapters"] = "weights"


def find(source: Path) -> Path:
    """Find the checkpoint: ``source`` itself, or the newest in a run's folder or a folder of checkpoints."""
    if (source / checkpoint_folder.MANIFEST).is_file():
        return source
    for folder in (source / "checkpoints", source):
        if (newest := checkpoint_folder.find_latest(folder)) is not None:
            return newest
    if not source.exists():
        raise UserError(f"{source}: no such folder; give the folder of a run or of one of its checkpoints")
    raise UserError(f"{source} holds no complete checkpoint; give the folder of a run or of one of its checkpoints")


def export(
    checkpoint: Path,
    folder: Path,
    *,
    dtype: str | None = None,
    file_bytes: int,
    report: Report,
    merge: bool = False,
    base: Path | None = None,
) -> Exported:
    """Write the weights of ``checkpoint`` to the new ``folder``, in files of up to ``file_bytes`` each.

    ``dtype``: bf16 or fp32; None: fp32 for factors of adapters, else bf16. Routing biases of experts stay fp32, as
    published. ``merge``: write the weights of ``base`` (None: the folder that the checkpoint names) with the adapters
    added, instead of the adapters. Raises ``UserError`` if the folder exists, the checkpoint is damaged or no family
    has this model, and ``RunFailure`` if writing fails.
    """
    if folder.exists():
        raise UserError(f"{folder} exists already; remove it or give another folder")
    manifest = checkpoint_folder.read(checkpoint)
    if manifest.job.adapter is None and (merge or base):
        raise UserError(f"{checkpoint} holds all weights and no adapter; drop {'--merge' if merge else '--base'}")
    if manifest.job.adapter is not None and not merge:
        return _export_adapter(checkpoint, folder, manifest, dtype=dtype or "fp32", base=base)
    dtype = dtype or "bf16"
    config = to_config(manifest.model) | {"torch_dtype": {"bf16": "bfloat16", "fp32": "float32"}[dtype]}
    family, torch_dtype = config["model_type"], DTYPES[dtype]
    for number, file in enumerate(manifest.files):
        report("checks", number, len(manifest.files))
        checkpoint_folder.verify(checkpoint, (file,))
    merged = merged_adapter.open_checkpoint(checkpoint, manifest, base=base) if merge else None
    read = partial(_read_checkpoint, checkpoint) if merged is None else partial(_fill_from_merged, merged)
    wanted = dict[str, list[TensorPart]]()
    for part in list_tensors(manifest.model, family=family, copies=True):
        wanted.setdefault(part.name, []).append(part)
    files = list(_divide_into_files(list(wanted.values()), torch_dtype, file_bytes=file_bytes))
    constants = list_constants(manifest.model, family=family)
    further = {name: torch.tensor(value, dtype=torch_dtype) for name, value in constants.items()}
    total = sum(_count_bytes(fused, torch_dtype) for fused in wanted.values())
    total += sum(tensor.nbytes for tensor in further.values())
    with _create_folder(folder, checkpoint=checkpoint, total=total) as temporary:
        model = manifest.model
        _write(temporary, read, files, config, further, total=total, model=model, dtype=torch_dtype, report=report)
    return Exported(
        folder=str(folder),
        family=family,
        step=manifest.progress.step,
        dtype=dtype,
        tensors=len(wanted) + len(further),
        files=len(files),
        bytes=total,
        holds="weights" if merged is None else "merged weights",
    )


def _export_adapter(checkpoint: Path, folder: Path, manifest: Checkpoint, *, dtype: str, base: Path | None) -> Exported:
    """Write the factors of ``checkpoint`` to the new ``folder``, as peft does."""
    adapter = manifest.job.adapter
    named = base or (None if manifest.base is None else Path(manifest.base))
    assert adapter is not None
    in_folder = named is not None and named.is_dir()
    family = peft_adapter.find_family(named) if named and in_folder else str(to_config(manifest.model)["model_type"])
    factors = merged_adapter.read_checkpoint_factors(checkpoint, manifest)
    factors = {name: factor.to(DTYPES[dtype]) for name, factor in factors.items()}
    total = sum(factor.nbytes for factor in factors.values())
    with _create_folder(folder, checkpoint=checkpoint, total=total) as temporary:
        base_name = None if named is None else str(named)
        tensors = peft_adapter.write(
            temporary, factors, model=manifest.model, family=family, adapter=adapter, base=base_name
        )
        _sync(temporary)
    return Exported(
        folder=str(folder),
        family=family,
        step=manifest.progress.step,
        dtype=dtype,
        tensors=tensors,
        files=1,
        bytes=total,
        holds="adapters",
    )


@contextmanager
def _create_folder(folder: Path, *, checkpoint: Path, total: int) -> Iterator[Path]:
    """Yield a temporary folder for ``total`` bytes of ``checkpoint``, renamed to ``folder`` at the end or removed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(folder.parent).free
    if total > free_bytes:
        raise RunFailure(f"{folder}: needs {show_bytes(total)}, but {show_bytes(free_bytes)} are free")
    temporary = folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}")
    try:
        temporary.mkdir()
        yield temporary
        os.rename(temporary, folder)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RunFailure(
            f"{folder} cannot be written: {reason} ({show_bytes(total)} in all); the partial output is removed"
        ) from None
    except (RuntimeError, CheckpointException) as error:
        raise RunFailure(f"{checkpoint} cannot be read: {str(error).splitlines()[0]}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _choose_dtype(part: TensorPart, dtype: torch.dtype) -> torch.dtype:
    if part.ours.endswith(TABLE):
        return torch.int64
    return torch.float32 if part.ours.endswith(BIAS) else dtype


def _count_bytes(fused: Fused, dtype: torch.dtype) -> int:
    return fused[0].numel * _choose_dtype(fused[0], dtype).itemsize


def _divide_into_files(wanted: list[Fused], dtype: torch.dtype, *, file_bytes: int) -> Iterator[list[Fused]]:
    """Split ``wanted`` in order into files of at most ``file_bytes``, each with at least one tensor."""
    file: list[Fused] = []
    size = 0
    for fused in wanted:
        if file and size + _count_bytes(fused, dtype) > file_bytes:
            yield file
            file, size = [], 0
        file.append(fused)
        size += _count_bytes(fused, dtype)
    yield file


def _write(
    folder: Path,
    read: Read,
    files: list[list[Fused]],
    config: dict[str, object],
    further: dict[str, Tensor],
    *,
    total: int,
    model: Model,
    dtype: torch.dtype,
    report: Report,
) -> None:
    """Write the files of ``total`` bytes, their index and the config; ``further`` tensors are in the last file."""
    names = [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    names = names if len(files) > 1 else [SINGLE]
    for number, (name, file) in enumerate(zip(names, files, strict=True)):
        report("writes", number, len(files))
        tensors = _load(read, file, model=model, dtype=dtype) | (further if name == names[-1] else {})
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if len(files) > 1:
        weight_map = {fused[0].name: name for name, file in zip(names, files, strict=True) for fused in file}
        index = {
            "metadata": {"total_size": total},
            "weight_map": weight_map | dict.fromkeys(further, names[-1]),
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _sync(folder)


def _sync(folder: Path) -> None:
    """Flush the files of ``folder`` to the disk (fsync), and the folder itself."""
    for path in (*folder.iterdir(), folder):
        sync(path)


def _load(read: Read, file: list[Fused], *, model: Model, dtype: torch.dtype) -> dict[str, Tensor]:
    """Read the tensors of one output file, by their Hugging Face names."""
    shapes = {weight.name: weight.shape for weight in list_weights(model)}
    targets: dict[str, Tensor] = {}
    tensors: dict[tuple[str, str], Tensor] = {}  # our weight, or one expert of it, by Hugging Face name and ours
    copies: dict[tuple[str, str], Tensor] = {}  # copies of a weight that is stored in several tensors
    for ours, group in groupby(sorted((part for fused in file for part in fused), key=_name_weight), key=_name_weight):
        stored, further_copies = list(group), list[TensorPart]()
        if stored[0].expert is None:
            stored, further_copies = stored[:1], stored[1:]
        shape = shapes.get(ours, stored[0].shape)
        shape = shape if stored[0].expert is None else shape[1:]
        rows = torch.empty((len(stored) * shape[0], *shape[1:]), dtype=_choose_dtype(stored[0], dtype))
        tensors |= zip(((part.name, ours) for part in stored), rows.chunk(len(stored)), strict=True)
        copies |= {(part.name, ours): rows for part in further_copies}
        if ours.endswith((BIAS, TABLE)):
            targets[checkpoint_folder.name_router_tensor(model, ours)] = rows
        else:
            targets[f"weights/{ours}"] = BoxTensor(shapes[ours], _list_boxes(stored, shape), rows)
    read(targets)
    tensors |= {key: rows.clone() for key, rows in copies.items()}
    return {fused[0].name: _assemble(fused, [tensors.pop((part.name, part.ours)) for part in fused]) for fused in file}


def _read_checkpoint(checkpoint: Path, targets: dict[str, Tensor]) -> None:
    """Fill ``targets`` from any ranks' files (DCP, no_dist)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that no process group is initialised
        load_tensors(dict(targets), storage_reader=FileSystemReader(checkpoint), no_dist=True)


def _fill_from_merged(merged: MergedFolder, targets: dict[str, Tensor]) -> None:
    """Fill ``targets`` from a base with adapters.

    Routing biases and tables of experts are the base's: next to adapters they are frozen.
    """
    model = merged.base.model
    router_names = {checkpoint_folder.name_router_tensor(model, name): name for name in list_router_tensors(model)}
    for name, target in targets.items():
        if isinstance(target, BoxTensor):
            for box, part in zip(target.boxes, target.parts, strict=True):
                part.copy_(merged.read(name.removeprefix("weights/"), offsets=box.offsets, sizes=box.sizes))
        else:
            merged.base.fill(router_names[name], target.zero_())


def _name_weight(part: TensorPart) -> str:
    return part.ours


def _list_boxes(several: list[TensorPart], size: tuple[int, ...]) -> Iterator[Box]:
    """Yield boxes of a full weight, or of some of its experts, stacked along dim 0; ``size``: shape of one."""
    for number, part in enumerate(several):
        slices = (slice(number * size[0], (number + 1) * size[0]), *(slice(0, n) for n in size[1:]))
        if part.expert is None:
            yield Box((0,) * len(size), size, slices)
        else:
            yield Box((part.expert, 0, 0), (1, *size), slices)


def _assemble(fused: Fused, ours: list[Tensor]) -> Tensor:
    """Assemble a tensor of the folder from our tensors that it holds, each in its rows and their order."""
    if fused[0].is_plain_copy:
        return ours[0].view(fused[0].shape)  # a routing bias may be stored as one row
    if fused[0].ones:
        return ours[0].view(fused[0].shape)
    if fused[0].experts:
        return (ours[0].mT if fused[0].transposed else ours[0]).reshape(fused[0].shape)
    full = torch.empty(fused[0].shape, dtype=ours[0].dtype)
    for part, tensor in zip(fused, ours, strict=True):
        full.index_copy_(part.dim, torch.tensor(part.order()), tensor.transpose(-1, -2) if part.transposed else tensor)
    return full
