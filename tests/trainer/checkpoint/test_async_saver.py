"""A checkpoint that is written during training is, to the byte, the one for which training waits."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fivefold.errors import RunFailure
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.experts import MoE
from fivefold.model.spec import Model
from fivefold.trainer.build import Built, build
from fivefold.trainer.checkpoint import checkpoint_folder
from fivefold.trainer.checkpoint.async_saver import Saver
from fivefold.trainer.checkpoint.checkpoint import Checkpoint, RunProgress, read, save
from fivefold.trainer.engine import Engine
from tests.endure.ranks import Ranks
from tests.selection import mark_share
from tests.trainer.test_faults import assert_line, losses, saved_step, set_run, workspace

__all__ = ["workspace"]

ODD = Model(name="odd", layers=2, width=24, heads=4, kv_heads=2, head_dim=6, ffn=50, vocab=83)  # no cut comes out even
MIXED = ODD.replace(name="mixed", moe=MoE(experts=4, topk=2, ffn=9, balance="free"))
JOB = Job(sequence=16, global_batch=4, precision=get_recipe("fp32"))


def start(layout: Layout, model: Model, job: Job) -> tuple[Built, Callable[[], None]]:
    """A run, and what makes one more step of it."""
    torch.manual_seed(dist.get_rank())
    built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))
    engine = Engine(built, model=model, layout=layout, job=job)

    def step() -> None:
        drawn = torch.Generator().manual_seed(built.ranks["dp"].rank)
        engine.step(torch.randint(model.vocab, (layout.micro_batches(job), layout.mbs, 17), generator=drawn))
        engine.zero_grad()

    return built, step


def manifest(step: int, *, layout: Layout, model: Model, job: Job) -> Checkpoint:
    progress = RunProgress(step=step, samples=4 * step, tokens=64 * step)
    return Checkpoint(
        torch=torch.__version__, device="cpu", model=model, layout=layout, job=job, progress=progress, files=()
    )


def save_both_ways(folder: Path, layout: Layout, model: Model, job: Job) -> bool:
    """Whether step 1, of which the first byte was written after step 3, is saved as if training had waited for it."""
    may, begin = threading.Event(), checkpoint_folder.begin
    checkpoint_folder.begin = lambda final: (may.wait(60), begin(final))[1]  # the first rank, before all write
    may.set()
    built, step = start(layout, model, job)
    step()
    progress = manifest(1, layout=layout, model=model, job=job).progress
    waited = save(folder / "waited", built=built, progress=progress, model=model, layout=layout, job=job)
    with Saver(folder / "beside", built=built, keep=3, asynchronous=True) as saver:
        may.clear()
        saver.save(manifest(1, layout=layout, model=model, job=job))
        step()  # its collectives, and those of the thread
        step()
        assert saver.newest is None
        assert not (folder / "beside" / "step-00000001").exists()
        may.set()
        saver.save(manifest(3, layout=layout, model=model, job=job))  # waits for the first
        assert saver.newest == folder / "beside" / "step-00000001"
        assert saver.wait() == folder / "beside" / "step-00000003"
    third = save(folder / "waited", built=built, progress=progress.replace(step=3), model=model, layout=layout, job=job)
    return bits(waited) == bits(folder / "beside" / "step-00000001") != bits(third) == bits(saver.newest)


def bits(path: Path) -> dict[str, str]:
    """Of each file of tensors its sha256; the table of contents names the folder."""
    return {file.name: file.sha256 for file in read(path).files if file.name != ".metadata"}


@pytest.mark.parametrize(
    ("layout", "model", "changes"),
    mark_share(
        3,
        [
            ("dp2 ep2 zero1 mbs1", MIXED, {"precision": get_recipe("fp16")}),
            ("dp2 zero3 mbs2", ODD, {"precision": get_recipe("bf16")}),
            ("tp2 mbs4", ODD, {"optimizer": {"kind": "adafactor"}}),
        ],
    ),
)
def test_an_asynchronous_save_writes_the_same_bytes(
    forked, tmp_path: Path, layout: str, model: Model, changes: dict[str, object]
) -> None:
    job = Job(**(JOB.model_dump() | changes))
    assert all(forked(2, save_both_ways, tmp_path, Layout.parse(layout), model, job))


def fail_full(_descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fill_the_disk(folder: Path) -> list[str]:
    layout = Layout.parse("dp2 zero1 mbs2")
    built, step = start(layout, ODD, JOB)
    sync, said = os.fsync, []
    with Saver(folder, built=built, keep=3, asynchronous=True) as saver:
        for number in (1, 2):
            os.fsync = fail_full if number == 2 and built.ranks.rank == 1 else sync
            saver.save(manifest(number, layout=layout, model=ODD, job=JOB))
            step()
            while number == 2 and not saver.has_failed:
                time.sleep(0.01)
            try:
                said.append(str(saver.wait()))
            except RunFailure as fault:
                said.append(str(fault))
        os.fsync = sync
        saver.save(manifest(3, layout=layout, model=ODD, job=JOB))  # whoever made room may go on
        return [*said, str(saver.wait())]


def test_a_full_disk_is_raised_by_the_next_call(forked, tmp_path: Path) -> None:
    first, second = forked(2, fill_the_disk, tmp_path)
    assert first == second
    assert (first[0], first[2]) == (f"{tmp_path}/step-00000001", f"{tmp_path}/step-00000003")
    assert_line(
        first[1],
        rf"{tmp_path}/step-00000002 cannot be written: rank 1: No space left on device \(at least .* free\); "
        rf"the last good checkpoint is {tmp_path}/step-00000001",
    )


def time_saves(folder: Path) -> tuple[float, float]:
    """Return the seconds for which a save stops training, asynchronous or not; the disk takes half a second."""
    layout = Layout.parse("dp1 mbs4")
    built, _ = start(layout, ODD, JOB)
    sync, seconds = os.fsync, []
    os.fsync = lambda descriptor: (time.sleep(0.1), sync(descriptor))[1]
    for asynchronous in (True, False):
        with Saver(folder, built=built, keep=1, asynchronous=asynchronous) as saver:
            for number in (1, 2):  # the first makes room for the copy
                begin = time.perf_counter()
                saver.save(manifest(number, layout=layout, model=ODD, job=JOB))
                took = time.perf_counter() - begin
                saver.wait()
            seconds.append(took)
    return seconds[0], seconds[1]


def test_training_does_not_wait_for_the_disk(forked, tmp_path: Path) -> None:
    [(asynchronous, waited)] = forked(1, time_saves, tmp_path)
    assert waited > 0.4  # data, table of contents, manifest, two folders
    assert asynchronous < waited / 4


@pytest.mark.long  # test_a_full_disk_is_raised_by_the_next_call has the saver
@pytest.mark.usefixtures("workspace")
def test_a_run_ends_after_a_save_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of rank 1 is full from the second checkpoint on: all ranks end, in one line, long before step 200."""
    sync = os.fsync

    def fail_later(descriptor: int) -> None:
        (fail_full if os.environ.get("RANK") == "1" and saved_step() >= 4 else sync)(descriptor)

    monkeypatch.setattr(os, "fsync", fail_later)
    set_run(layout="dp2 zero1 mbs2", job={"steps": 200})
    ranks = Ranks(2)
    assert ranks.wait(seconds=90) == {0: 1, 1: 1}
    (line,) = (line for line in ranks.read_output().splitlines() if line.startswith("fivefold: "))
    assert_line(
        line,
        r"fivefold: run/checkpoints/step-00000008 cannot be written: rank 1: No space left on device \(at least .*\); "
        r"the last good checkpoint is run/checkpoints/step-00000004",
    )
    assert saved_step() == 4
    assert 8 <= len(losses()) <= 12, "the next save at the latest"
