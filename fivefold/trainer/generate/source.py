"""Loads a trained decoder into one process from a run, a checkpoint of any layout, or a folder of Hugging Face or peft.

RUN.toml, a run's folder  >  its newest checkpoint
a checkpoint              >  model, weights by name, the tokenizer of its run  >  a single-process decoder
a Hugging Face folder     >  model, weights by name, its own tokenizer         >  a single-process decoder
adapters (of a checkpoint, or a PEFT adapter folder)  >  those of the base's folder, with the adapters merged
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from fivefold.errors import RunFailure, UserError
from fivefold.model.spec import Model
from fivefold.model.weights import list_router_tensors, list_weights
from fivefold.text_files import read_file
from fivefold.trainer.checkpoint import checkpoint_folder, merged_adapter, peft_adapter
from fivefold.trainer.checkpoint.full_weights import build_decoder
from fivefold.trainer.checkpoint.huggingface_export import DTYPES, find
from fivefold.trainer.checkpoint.huggingface_import import CONFIG, HuggingFaceFolder
from fivefold.trainer.checkpoint.merged_adapter import MergedFolder
from fivefold.trainer.checkpoint.reshard import BoxTensor
from fivefold.trainer.data import tokenizer
from fivefold.trainer.data.tokenizer import Tokenizer
from fivefold.trainer.model.transformer import Transformer
from fivefold.trainer.parallel.shard import Box
from fivefold.trainer.run import Run

WINDOW = 4096  # tokens, for a Hugging Face model without max_position_embeddings


@dataclass(frozen=True)
class WeightSource:
    """A source of weights: checkpoint or Hugging Face folder at ``path``. ``window``: tokens of a training sequence."""

    path: Path
    model: Model
    window: int
    folder: HuggingFaceFolder | None  # the opened Hugging Face folder; None: a checkpoint
    adapted: MergedFolder | None = None  # the folder of the base with adapters merged, if the source has adapters

    @classmethod
    def find(cls, path: Path, *, base: Path | None = None) -> WeightSource:
        """Resolve ``path`` as the module describes; raises ``UserError`` if it holds no weights.

        ``base``: the folder of the weights under adapters; None: the one that their source names.
        """
        source = cls._find(path, base=base)
        if source.adapted is None and base is not None:
            raise UserError(f"{path} has no adapters; drop --base")
        return source

    @classmethod
    def _find(cls, path: Path, *, base: Path | None) -> WeightSource:
        """Open the weights in ``path``: a run file or folder, a checkpoint, a Hugging Face folder or adapters."""
        if path.suffix == ".toml":
            path = Run.load(path).folder
        if (path / CONFIG).is_file():
            folder = HuggingFaceFolder.open(path)
            return cls(path, folder.model, folder.model.positions or WINDOW, folder)
        if (path / peft_adapter.CONFIG).is_file():
            adapted = merged_adapter.open_adapter_folder(path, base=base)
            folder = adapted.base
            return cls(folder.path, folder.model, folder.model.positions or WINDOW, folder, adapted)
        checkpoint = find(path)
        manifest = checkpoint_folder.read(checkpoint)
        adapted_run = None
        if manifest.job.adapter is not None:
            adapted_run = merged_adapter.open_checkpoint(checkpoint, manifest, base=base)
        return cls(checkpoint, manifest.model, manifest.job.sequence, None, adapted_run)

    def tokenizer(self, named: Path | None = None) -> Tokenizer:
        """Load the ``named`` tokenizer, else that of the Hugging Face folder or of the run that wrote the checkpoint.

        Raises ``UserError`` if there is none, or it has more tokens than the model.
        """
        source = named or (self.path if self.folder is not None else self.path.absolute().parents[1] / "data")
        if named is None and not (source / "tokenizer.json").is_file():
            raise UserError(f"{source} holds no tokenizer.json; name one with --tokenizer (a file, or bytes)")
        loaded = tokenizer.build_tokenizer("bytes") if str(source) == "bytes" else tokenizer.load(source)
        if loaded.vocab > self.model.vocab:
            raise UserError(
                f"{source} has {loaded.vocab} tokens, but {self.model.name} only vocab={self.model.vocab}; name the "
                "model's own with --tokenizer"
            )
        return loaded

    def get_end_tokens(self, used: Tokenizer) -> frozenset[int]:
        """Return the ids of the tokens that end a text: the tokenizer's, and eos_token_id of the model's config."""
        eos_ids = read_file(self.path / CONFIG).get("eos_token_id") if self.folder is not None else None
        further_ends = eos_ids if isinstance(eos_ids, list) else [eos_ids]
        return frozenset([used.end, *(end for end in further_ends if isinstance(end, int))])

    def decoder(self, *, dtype: Literal["bf16", "fp32"] | None = None) -> Transformer:
        """Build a decoder on a GPU if there is one, else on CPU; ``dtype`` defaults to bf16 on a GPU, fp32 on CPU."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        weight_dtype = DTYPES[dtype or ("bf16" if device.type == "cuda" else "fp32")]
        return build_decoder(self.weights(dtype=weight_dtype), model=self.model).to(device)

    def weights(self, *, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return name → full weight on CPU in ``dtype``, and what routers hold."""
        tensors = {weight.name: torch.empty(weight.shape, dtype=dtype) for weight in list_weights(self.model)}
        router_tensors = {
            name: torch.zeros(shape, dtype=torch.float32 if name.endswith("bias") else torch.int32)
            for name, shape in list_router_tensors(self.model).items()
        }
        if self.adapted is not None:
            _read_folder(self.adapted.base, self.adapted, tensors, router_tensors)
        elif self.folder is not None:
            _read_folder(self.folder, self.folder, tensors, router_tensors)
        else:
            _read_checkpoint(self.path, tensors, router_tensors, model=self.model)
        return tensors | router_tensors


@torch.no_grad()
def _read_folder(
    folder: HuggingFaceFolder,
    source: HuggingFaceFolder | MergedFolder,
    tensors: dict[str, Tensor],
    router_tensors: dict[str, Tensor],
) -> None:
    """Fill weights from ``source``, and what routers hold from the Hugging Face ``folder``, by name."""
    for name, weight in tensors.items():
        for box in _list_boxes(tuple(weight.shape), separate=folder.parts[name][0].expert is not None):
            weight[box.rows] = source.read(name, offsets=box.offsets, sizes=box.sizes)
    for name, tensor in router_tensors.items():
        folder.fill(name, tensor)


def _list_boxes(shape: tuple[int, ...], *, separate: bool) -> Iterator[Box]:
    """Yield one box that covers a weight of ``shape``; ``separate``: one per expert, as Hugging Face stores them."""
    first = range(shape[0]) if separate else [0]
    for start in first:
        size = (1 if separate else shape[0], *shape[1:])
        yield Box((start, *(0 for _ in shape[1:])), size, (slice(start, start + size[0]),))


def _read_checkpoint(
    path: Path, tensors: dict[str, Tensor], router_tensors: dict[str, Tensor], *, model: Model
) -> None:
    """Fill weights and what routers hold, by name, from a checkpoint; raises ``RunFailure`` if it is unreadable."""
    checkpoint_folder.verify(path, checkpoint_folder.read(path).files)
    targets: dict[str, Tensor] = {
        f"weights/{name}": BoxTensor(tuple(weight.shape), _list_boxes(tuple(weight.shape), separate=False), weight)
        for name, weight in tensors.items()
    }
    targets |= {checkpoint_folder.name_router_tensor(model, name): held for name, held in router_tensors.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that no process group is initialised
            load_tensors(targets, storage_reader=FileSystemReader(path), no_dist=True)
    except (OSError, RuntimeError, CheckpointException) as error:
        raise RunFailure(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
