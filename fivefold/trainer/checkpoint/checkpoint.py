"""Saves and loads checkpoints: all state that the next step depends on, loadable under any layout.

Every rank calls ``save`` and ``load``. Names of the tensors:

    weights/NAME   moments/NAME/exp_avg   moments/NAME/exp_avg_sq   moments/NAME/step  …
    bias/LAYER   table/LAYER   rng/RANK   scaler

torch.distributed.checkpoint (DCP) reshards: each rank declares which boxes of the full tensors its shards are.
``checkpoint_folder.py`` makes a folder appear atomically, ``async_saver.py`` saves while the training goes on.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from pydantic import JsonValue
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from fivefold.errors import RunFailure, UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.record import find_first_difference
from fivefold.trainer.build import Built
from fivefold.trainer.checkpoint import checkpoint_folder as folder
from fivefold.trainer.checkpoint.checkpoint_folder import Checkpoint, CheckpointFile, RunProgress, find_latest, read
from fivefold.trainer.checkpoint.reshard import BoxTensor
from fivefold.trainer.data.shards import Index
from fivefold.trainer.optimizers import optimizer
from fivefold.trainer.optimizers.optimized_weights import ensure_moments
from fivefold.trainer.parallel.mesh import Ranks
from fivefold.trainer.parallel.shard import WeightShard
from fivefold.trainer.run_lock import check_held
from fivefold.units import show_bytes

__all__ = ["Checkpoint", "RunProgress", "find_latest", "load", "read", "save"]

TOKENIZER, TEXT = "tokenizer", "text"  # keys in RunProgress.facts: hashes of the tokenizer and the text
State = dict[str, Tensor | BoxTensor]
T = TypeVar("T")


def save(
    directory: Path,
    *,
    built: Built,
    progress: RunProgress,
    model: Model,
    layout: Layout,
    job: Job,
    keep: int = 3,
    base: str | None = None,
) -> Path:
    """Save the state of ``built`` synchronously; return the new folder. ``base``: as in ``Checkpoint``."""
    checkpoint = Checkpoint(
        torch=torch.__version__,
        device=built.ranks.device.type,
        model=model,
        layout=layout,
        job=job,
        progress=progress,
        files=(),
        base=base,
    )
    return write(directory, collect_state_dict(built), checkpoint=checkpoint, ranks=built.ranks, keep=keep)


def collect_state_dict(built: Built) -> State:
    """Return this rank's part of the checkpoint by name; the tensors share memory with the run."""
    ensure_moments(built.optimizer, built.shards)
    return {**_list_tensors(built), **_get_generator_states(built.ranks), **_get_scaler_state(built)}


def write(
    directory: Path,
    state: State,
    *,
    checkpoint: Checkpoint,
    ranks: Ranks,
    keep: int,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write ``directory/step-NNNNNNNN``, delete the oldest beyond ``keep``, and return the new folder.

    A failure, such as a full disk or kill -9, leaves earlier checkpoints intact; an error on one rank raises the same
    ``RunFailure`` on all. ``group``: a process group of all ranks for the collectives here, if not the
    default group of the training.
    """
    final = directory / folder.format_folder_name(checkpoint.progress.step)
    temporary = None
    try:
        temporary = _run_on_first_rank(lambda: _begin(final), ranks=ranks, group=group)
        writer = FileSystemWriter(temporary, thread_count=1, sync_files=True, single_file_per_rank=True)
        save_tensors(cast(dict[str, Any], state), storage_writer=writer, process_group=group)
        files = run_on_all_ranks(lambda: _list_written_files(temporary, rank=ranks.rank), ranks=ranks, group=group)
        sealed = checkpoint.replace(files=tuple(file for part in files for file in part))
        _run_on_first_rank(partial(_finish, temporary, final, sealed, keep), ranks=ranks, group=group)
    except (OSError, RuntimeError, CheckpointException) as error:
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        free_text = _describe_free_bytes(directory)  # before anything is removed
        sizes = f" (at least {show_bytes(size_bytes)} to write{free_text})"
        if ranks.rank == 0 and temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)  # this save's alone
        last_good = find_latest(directory)
        rest = f"the last good checkpoint is {last_good}" if last_good else "there is no checkpoint before it"
        raise RunFailure(f"{final} cannot be written: {_reason(error)}{sizes}; {rest}") from None
    return final


def build_origin(index: Index) -> dict[str, JsonValue]:
    """Return the hashes of the corpus to store in ``RunProgress.facts``; ``load`` compares them with its corpus."""
    return {TOKENIZER: index.tokenizer, TEXT: index.text}


def describe_unchecked_hashes(path: Path, progress: RunProgress) -> list[str]:
    """Return a warning if the checkpoint was written before the text's hash was stored; else an empty list."""
    return [] if TEXT in progress.facts else [f"{path}: does not say on what text it was trained; taken to be this one"]


def load(path: Path, *, built: Built, model: Model, job: Job, index: Index | None = None) -> RunProgress:
    """Restore weights, moments and random state from ``path``, written under any layout.

    Raises ``UserError`` on all ranks if the checkpoint is damaged, too new, of another model or optimizer, of another
    tokenizer or text than ``index``, or if ``job`` would read its data in another order. Random states are restored
    only if world size and device type are the same.
    """
    ranks = built.ranks
    run_on_all_ranks(lambda: _verify(path, model=model, job=job, index=index, ranks=ranks), ranks=ranks)
    checkpoint = read(path)
    run_on_all_ranks(lambda: optimizer.check_reshardable(built.optimizer, checkpoint.layout), ranks=ranks)
    ensure_moments(built.optimizer, built.shards)
    run_on_all_ranks(lambda: _check_tensors(path, _list_tensors(built).keys()), ranks=ranks)
    same_ranks = (checkpoint.layout.world, checkpoint.device) == (ranks.world, ranks.device.type)
    generators = _get_generator_states(ranks) if same_ranks else {}
    scaler = _get_scaler_state(built) if checkpoint.job.precision.loss_scaling else {}
    try:
        load_tensors({**_list_tensors(built), **generators, **scaler}, storage_reader=FileSystemReader(path))
    except (OSError, RuntimeError, CheckpointException) as error:
        raise RunFailure(f"{path} cannot be restored: {_reason(error)}") from None
    for name, state in generators.items():
        torch.cuda.set_rng_state(state, ranks.device) if name.endswith("/cuda") else torch.set_rng_state(state)
    if built.scaler is not None and scaler:
        built.scaler.restore(scaler["scaler"])
    for unit in built.units:
        unit.on_optimizer_step()
    return checkpoint.progress


def _begin(final: Path) -> Path:
    """Create and return the temporary folder. Requires the lock of the run, as leftovers of other saves are removed."""
    check_held(final.parent.parent)
    final.parent.mkdir(parents=True, exist_ok=True)
    return folder.begin(final)


def _finish(temporary: Path, final: Path, checkpoint: Checkpoint, keep: int) -> None:
    """Complete the checkpoint and remove old ones. Requires the lock of the run."""
    check_held(final.parent.parent)
    folder.finish(temporary, final, checkpoint=checkpoint, keep=keep)


def _describe_free_bytes(directory: Path) -> str:
    """Return the free bytes on the disk of ``directory`` as text for an error line; empty if they cannot be read."""
    try:
        return f", {show_bytes(shutil.disk_usage(directory).free)} free"
    except OSError:
        return ""


def _list_written_files(temporary: Path, *, rank: int) -> list[CheckpointFile]:
    """Return name, size and hash of the files that this rank has written; rank 0 also wrote DCP's metadata."""
    names = [f"__{rank}_*", *([".metadata"] if rank == 0 else [])]
    return [CheckpointFile.from_path(path) for name in names for path in sorted(temporary.glob(name))]


def _verify(path: Path, *, model: Model, job: Job, index: Index | None, ranks: Ranks) -> None:
    """Raise ``UserError`` if the checkpoint does not fit this run; each rank hashes 1/world of the files."""
    checkpoint = read(path)
    skipped = ("name", "source", "repository", "quantization", "double_quantization", "unquantized")
    if mismatch := find_first_difference(checkpoint.model, model, skip=skipped):
        raise UserError(f"{path} holds another model, with {mismatch}; give that model or start a new run")
    if (old := checkpoint.job.optimizer.kind) != (new := job.optimizer.kind):
        raise UserError(
            f"{path} holds moments of optimizer.kind={old}, which {new} cannot continue with; set "
            f"optimizer.kind={old} or start a new run"
        )
    if checkpoint.job.adapter != job.adapter:
        saved, wanted = checkpoint.job.adapter or "none", job.adapter or "none"
        raise UserError(
            f"{path}: was trained with adapter {saved}, and the job has adapter {wanted}; set [job] adapter as it was, "
            "or start a new run"
        )
    if (old_parts := checkpoint.job.freeze) != job.freeze:
        saved, wanted = (",".join(parts) or "nothing" for parts in (old_parts, job.freeze))
        raise UserError(
            f"{path}: was trained with freeze={saved}, and the job freezes {wanted}; set [job] freeze as it was, or "
            "export the checkpoint and start a new run from its weights"
        )
    for name in ("sequence", "global_batch", "ramp", "seed"):
        old, new = getattr(checkpoint.job, name), getattr(job, name)
        if old != new:
            raise UserError(
                f"{path}: was trained with {name}={old}, and with {name}={new} would read its data in another order; "
                f"set {name}={old} or start a new run"
            )
    if index is not None:
        _check_corpus(path, checkpoint.progress.facts, index)
    folder.verify(path, checkpoint.files[ranks.rank :: ranks.world])


def _check_corpus(path: Path, facts: dict[str, JsonValue], index: Index) -> None:
    """Raise ``UserError`` if tokenizer or text differ. An older checkpoint without a hash passes."""
    current = {name: str(value) for name, value in build_origin(index).items()}
    saved = {name: str(facts.get(name, value)) for name, value in current.items()}
    if saved[TOKENIZER] != current[TOKENIZER]:
        raise UserError(
            f"{path}: was trained on tokens of another tokenizer ({saved[TOKENIZER][:12]}, and these are of "
            f"{current[TOKENIZER][:12]}); prepare the corpus with that one or start a new run"
        )
    if saved[TEXT] != current[TEXT]:
        raise UserError(
            f"{path}: was trained on another text ({saved[TEXT][:12]}, and the corpus is now {current[TEXT][:12]}), or "
            f"with another share of it held out; restore the text, its order and data.heldout, or start a new run"
        )


def _check_tensors(path: Path, names: Collection[str]) -> None:
    """Raise ``UserError`` if a tensor in ``names`` is missing. As the model is the same, it can only be a moment."""
    saved_names = FileSystemReader(path).read_metadata().state_dict_metadata
    if missing := sorted(name for name in names if name not in saved_names):
        raise UserError(
            f"{path} is missing {len(missing)} tensors that the optimizer needs, such as {missing[0]}; give the "
            f"optimizer that it was trained with or start a new run"
        )


# State


def _list_tensors(built: Built) -> State:
    """Return weights, moments, step counts and the tensors of routers by name, sharing memory; no count without rows.

    Parts that the job freezes are among the weights, the base under adapters is not.
    """
    frozen = [shard for shard in built.base_shards if shard.local_weight.weight.frozen]
    tensors: State = {f"weights/{shard.name}": _wrap_boxes(shard, shard.weight) for shard in frozen}
    for shard in built.shards:
        tensors[f"weights/{shard.name}"] = _wrap_boxes(shard, shard.weight)
        for kind, part, moment in optimizer.list_moments(built.optimizer, shard):
            tensors[f"moments/{shard.name}/{kind}"] = moment if part is None else _wrap_boxes(part, moment)
    model = built.module.model
    return tensors | {folder.name_router_tensor(model, name): held for name, held in built.router_tensors.items()}


def _wrap_boxes(part: WeightShard, rows: Tensor) -> BoxTensor:
    """Wrap ``rows`` as this rank's part of the full tensor, for DCP."""
    return BoxTensor(part.local_weight.weight.shape, part.boxes(), rows)


def _get_scaler_state(built: Built) -> dict[str, Tensor]:
    """Return the state of the loss scaler, equal on all ranks; empty without one."""
    return {} if built.scaler is None else {"scaler": built.scaler.state()}


def _get_generator_states(ranks: Ranks) -> dict[str, Tensor]:
    """Return this rank's random generator states (CPU, and CUDA if used), one per rank."""
    states = {f"rng/{ranks.rank}": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        states[f"rng/{ranks.rank}/cuda"] = torch.cuda.get_rng_state(ranks.device)
    return states


# Errors on all ranks


def run_on_all_ranks(action: Callable[[], T], *, ranks: Ranks, group: dist.ProcessGroup | None = None) -> list[T]:
    """Run ``action`` on every rank; all_gather and return the results. If one rank raises, all raise the same error."""
    result: T | None = None
    failure: Exception | None = None
    cause: Exception | None = None
    try:
        result = action()
    except UserError as error:
        failure = error
    except Exception as error:
        failure = RunFailure(f"rank {ranks.rank}: {_reason(error)}")
        cause = error
    answers: list[Any] = [None] * ranks.world
    dist.all_gather_object(answers, (result, failure), group)
    for _, error_of_rank in answers:
        if error_of_rank is not None:
            raise error_of_rank from cause
    return [answer for answer, _ in answers]


def _run_on_first_rank(action: Callable[[], T], *, ranks: Ranks, group: dist.ProcessGroup | None) -> T:
    """Run ``action`` on rank 0; return its result or raise its error on all ranks."""
    return cast(T, run_on_all_ranks(lambda: action() if ranks.rank == 0 else None, ranks=ranks, group=group)[0])


def _reason(error: BaseException) -> str:
    """Return the error in one line; unwraps torch's CheckpointException to the first rank's failure."""
    if isinstance(error, CheckpointException):
        rank, (inner, _) = min(error.failures.items())
        return f"rank {rank}: {_reason(inner)}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if "gloo" in str(error) or isinstance(error, dist.DistError):
        return "a rank does not answer; it has died or hangs"
    if "inline_container" in str(error):
        return "a file was cut short; the disk is full, or files may not be so large"
    return next(iter(str(error).splitlines()), type(error).__name__)
