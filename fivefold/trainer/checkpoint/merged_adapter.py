"""The weights that a run with adapters computes with: those of its base folder, with the adapters merged.

    W + s · B A        with DoRA its rows have the trained magnitudes as norms

A checkpoint of such a run holds only the trained weights and names the folder of the base. A base that the run held
in few bits is quantized and dequantized first, because the adapters were trained over these values.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from fivefold.adapter import Adapter
from fivefold.errors import RunFailure, UserError
from fivefold.model.adapted import name_leader, resolve_linear
from fivefold.model.weight import MAGNITUDE, is_quantized
from fivefold.model.weights import Weight, list_trained_weights, list_weights, strip_block
from fivefold.trainer.checkpoint import checkpoint_folder, peft_adapter
from fivefold.trainer.checkpoint.checkpoint_folder import Checkpoint
from fivefold.trainer.checkpoint.huggingface_import import HuggingFaceFolder
from fivefold.trainer.model.lora import merge_adapter
from fivefold.trainer.model.precision import Dtypes
from fivefold.trainer.model.quantized.formats import round_to


@dataclass(frozen=True)
class MergedFolder:
    """The folder of a base, of which every box that is read has its part of the adapters added.

    ``factors``: weights of adapters, and those that were trained in full next to them, which replace the base's.
    ``dequantized``: the dtype in which the run dequantized the matrices of blocks; None: they were not quantized.
    """

    base: HuggingFaceFolder
    adapter: Adapter
    factors: Mapping[str, Tensor]
    dequantized: torch.dtype | None = None

    def read(self, ours: str, *, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Read a box of our weight ``ours``: in fp32 if an adapter is merged into it, else in its stored dtype."""
        linear = ours.removesuffix(".weight")
        slices = tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))
        if (trained := self.factors.get(ours)) is not None:
            return trained[slices]
        if f"{linear}.lora_b" in self.factors:
            rows, columns = slices
            return self._merge_rows(linear, rows)[:, columns]
        if f"{ours}_lora_b" in self.factors:
            return self._merge_experts(ours, offsets=offsets, sizes=sizes)
        return self._read_base(ours, offsets=offsets, sizes=sizes)

    def _read_base(self, ours: str, *, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Read a box of the base as the run computed with it: dequantized, if it held the weight in few bits."""
        if self.dequantized is None or not is_quantized(self._weights[ours], self.adapter.base_format):
            return self.base.read(ours, offsets=offsets, sizes=sizes)
        *experts, rows, columns = (slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))
        if not experts:
            return self._dequantize_matrix(ours)[rows, columns]
        chosen = range(experts[0].start, experts[0].stop)
        return torch.stack([self._dequantize_matrix(ours, expert=expert)[rows, columns] for expert in chosen])

    def _merge_rows(self, linear: str, rows: slice) -> Tensor:
        """Return full rows of a weight with its adapter: the norms of DoRA are those of full rows."""
        ours = f"{linear}.weight"
        magnitude = self.factors.get(f"{linear}{MAGNITUDE}")
        columns = self._weights[ours].shape[1]
        weight = self._read_base(ours, offsets=(rows.start, 0), sizes=(rows.stop - rows.start, columns))
        factor_a = self.factors[f"{name_leader(self.base.model, linear)}.lora_a"]
        factor_b = self.factors[f"{linear}.lora_b"]
        is_embedding = linear == "embed.tokens"
        return merge_adapter(
            weight,
            factor_a=factor_a[:, rows] if is_embedding else factor_a,
            factor_b=factor_b if is_embedding else factor_b[rows],
            scale=resolve_linear(self.base.model, self.adapter, strip_block(linear)).scale,
            magnitude=None if magnitude is None else magnitude[rows],
            is_embedding=is_embedding,
        )

    def _merge_experts(self, ours: str, *, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Return a box of stacked experts [E, out, in] with their adapters."""
        experts, rows, columns = (slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))
        path, _, name = ours.rpartition(".")
        shared = "gate_up" if name in ("gate", "up") else name
        return merge_adapter(
            self._read_base(ours, offsets=offsets, sizes=sizes),
            factor_a=self.factors[f"{path}.{shared}_lora_a"][experts, :, columns],
            factor_b=self.factors[f"{ours}_lora_b"][experts, rows],
            scale=resolve_linear(self.base.model, self.adapter, strip_block(ours)).scale,
            magnitude=None,
        )

    @cached_property
    def _weights(self) -> dict[str, Weight]:
        return {weight.name: weight for weight in list_weights(self.base.model)}

    def _dequantize_matrix(self, ours: str, *, expert: int | None = None) -> Tensor:
        """Return a matrix that the run held in few bits, or that of an expert."""
        matrix, base = self.base.read_matrix(ours, expert=expert), self.adapter.base_format
        assert self.dequantized is not None
        assert base is not None
        if self.base.read_codes(ours, base=base, expert=expert) is not None:  # trained over as published
            return matrix.to(self.dequantized)
        return round_to(base, matrix, dtype=self.dequantized)


def open_checkpoint(path: Path, manifest: Checkpoint, *, base: Path | None = None) -> MergedFolder:
    """Open the checkpoint ``path`` of a run with adapters over ``base``, by default the folder that it names."""
    adapter = manifest.job.adapter
    assert adapter is not None
    if base is None and manifest.base is None:
        raise UserError(
            f"{path}: its adapters were trained over random weights, which no folder holds; name a base in `[start] "
            "weights` of the run file and train again, or merge them into another base with --base FOLDER"
        )
    folder = HuggingFaceFolder.open(base or Path(str(manifest.base)), model=manifest.model)
    dequantized = Dtypes(manifest.job.precision).weights if adapter.base_format else None
    return MergedFolder(folder, adapter, read_checkpoint_factors(path, manifest), dequantized)


def open_adapter_folder(path: Path, *, base: Path | None = None) -> MergedFolder:
    """Open the PEFT adapter folder ``path`` over ``base``, by default the folder that its config names."""
    adapter_folder = peft_adapter.AdapterFolder.open(path)
    folder = find_base(adapter_folder, base=base)
    return MergedFolder(folder, *adapter_folder.read_factors(folder.model, family=folder.family))


def find_base(adapter_folder: peft_adapter.AdapterFolder, *, base: Path | None) -> HuggingFaceFolder:
    """Open the folder of the base under ``adapter_folder``: ``base``, or the folder that its config names."""
    if base is None and not (adapter_folder.base and Path(adapter_folder.base).is_dir()):
        named = f"its base {adapter_folder.base} is not a folder here" if adapter_folder.base else "it names no base"
        raise UserError(f"{adapter_folder.path}: {named}; give the base with --base FOLDER")
    return HuggingFaceFolder.open(base or Path(adapter_folder.base))


def read_checkpoint_factors(path: Path, manifest: Checkpoint) -> dict[str, Tensor]:
    """Return the full trained weights of the checkpoint ``path`` in fp32; raises ``RunFailure`` if it is unreadable."""
    assert manifest.job.adapter is not None
    checkpoint_folder.verify(path, manifest.files)
    factors = {
        weight.name: torch.empty(weight.shape) for weight in list_trained_weights(manifest.model, manifest.job.adapter)
    }
    targets = {f"weights/{name}": factor for name, factor in factors.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that no process group is initialised
            load_tensors(dict(targets), storage_reader=FileSystemReader(path), no_dist=True)
    except (OSError, RuntimeError, CheckpointException) as error:
        raise RunFailure(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    return factors
