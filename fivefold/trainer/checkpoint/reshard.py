"""A shard for torch.distributed.checkpoint: boxes of a full tensor, so that any layout can load what another saved.

Implements the protocol ``_Checkpointable``, which DTensor uses too (torch/distributed/_checkpointable.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fivefold.trainer.parallel.shard import Box


class BoxTensor(Tensor):
    """A wrapper that describes ``rows`` as ``boxes`` of a full tensor of ``shape``, without storage of that shape."""

    boxes: list[Box]
    rows: Tensor
    parts: list[Tensor]

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], boxes: Iterable[Box], rows: Tensor) -> BoxTensor:
        """Wrap ``rows``; each box gives its offsets in the full tensor and its slices in ``rows``."""
        size = torch.Size(shape)
        tensor: BoxTensor = torch.Tensor._make_wrapper_subclass(cls, size, dtype=rows.dtype, device=rows.device)
        tensor.boxes, tensor.rows = list(boxes), rows.detach()
        tensor.parts = [tensor.rows[box.rows].view(box.sizes) for box in tensor.boxes]  # experts: [1, …]
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Raise ``NotImplementedError`` for every torch operation: this tensor only describes data."""
        raise NotImplementedError(f"{func} on boxes of a tensor")

    def __create_write_items__(self, fqn: str, _object: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(part), size=self.size()
                ),
            )
            for chunk, part in zip(self.__create_chunk_list__(), self.parts, strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes)) for box in self.boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for box, part in zip(self.boxes, self.parts, strict=True):
            if index.offset is None or torch.Size(box.offsets) == torch.Size(index.offset):
                return part
        raise ValueError(f"{index} is not of this rank")
