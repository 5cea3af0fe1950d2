"""A resumed run is the uninterrupted one to the bit, under any layout; what stops a save costs no finished one."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.errors import RunFailure, UserError
from fivefold.job import Job, LearningRate, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.trainer.build import Built, build
from fivefold.trainer.checkpoint import checkpoint_folder
from fivefold.trainer.checkpoint.checkpoint import Checkpoint, RunProgress, find_latest, load, read, save
from fivefold.trainer.optimizers.optimizer import clip, compute_learning_rate, sum_over_ranks
from tests.selection import mark_share

MODEL = Model(name="odd", layers=2, width=24, heads=4, kv_heads=2, head_dim=6, ffn=50, vocab=83)
FEW_ROWS = Model(name="few", layers=1, width=5, heads=1, kv_heads=1, head_dim=2, ffn=9, vocab=7)  # of 4 ranks, 1 empty
JOB = Job(
    sequence=16,
    global_batch=4,
    precision=get_recipe("fp32"),
    steps=6,
    learning_rate=LearningRate(kind="cosine", peak=1e-2, warmup_steps=2),
)
State = dict[str, tuple[int, list[Tensor]]]


def start(layout: Layout, *, model: Model = MODEL, job: Job = JOB) -> Built:
    torch.manual_seed(1000 + dist.get_rank())
    return build(model=model, layout=layout, job=job, device=torch.device("cpu"))


def train(built: Built, layout: Layout, *, first: int, last: int, model: Model = MODEL, job: Job = JOB) -> list[float]:
    """Losses of steps ``first`` … ``last`` - 1; every step draws from torch's generator, as dropout would."""
    losses, micro = [], layout.micro_batches(job)
    for step in range(first, last):
        tokens = torch.randint(0, model.vocab, (4, 17), generator=torch.Generator().manual_seed(step))
        total = torch.zeros(())
        for part in tokens.view(micro, layout.dp, layout.mbs, 17)[:, built.ranks.rank]:
            loss = built.module(part[:, :-1], part[:, 1:], scale=(1 + 0.1 * float(torch.rand(()))) / 64)
            loss.backward()
            total += loss.detach()
        for unit in built.units:
            unit.gradients.finish()
        for group in built.optimizer.param_groups:
            group["lr"] = compute_learning_rate(job.learning_rate, step=step, steps=job.steps)
        norm, (loss,) = sum_over_ranks(built.shards, total, ranks=built.ranks)
        clip(built.shards, norm, largest=1.0)
        losses.append(float(loss))
        built.optimizer.step()
        for unit in built.units:
            unit.on_optimizer_step()
    return losses


def progress(step: int) -> RunProgress:
    return RunProgress(step=step, samples=4 * step, tokens=64 * step, facts={"best": 0.1 * step})


def state(built: Built) -> State:
    """Of this rank: first row, weight, moments and step count of every weight."""
    result = {}
    for shard in built.shards:
        moments = built.optimizer.state[shard.weight] if shard.rows else {}
        result[shard.name] = (shard.first_row, [shard.weight.detach().clone(), *(v.clone() for v in moments.values())])
    return result


def are_equal(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(
        len(a[name][1]) == len(b[name][1]) and all(map(torch.equal, a[name][1], b[name][1])) for name in a
    )


def combine_ranks(states: Sequence[State]) -> dict[str, list[Tensor]]:
    """Join the full weights and moments from all ranks' rows; step counts must agree."""
    whole = {}
    for name in states[0]:
        parts = sorted({rank[name][0]: rank[name][1] for rank in states if len(rank[name][1]) > 1}.items())
        rows = [tensors for _, tensors in parts]
        steps = {float(next(t for t in tensors if t.ndim == 0)) for tensors in rows}
        assert len(steps) == 1
        whole[name] = [torch.cat(same) for same in zip(*([t for t in r if t.ndim] for r in rows), strict=True)]
        whole[name].append(torch.tensor(steps.pop()))
    return whole


def refusal(action: Callable[[], object]) -> str:
    try:
        action()
    except (UserError, RunFailure) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# Resuming


def run_and_resume(directory: Path, layout: Layout, job: Job) -> tuple[bool, ...]:
    def train_on(built: Built, first: int, last: int) -> list[float]:
        return train(built, layout, first=first, last=last, job=job)

    straight = start(layout, job=job)
    losses = train_on(straight, 0, 6)
    drawn, final = torch.rand(3), state(straight)
    half = start(layout, job=job)
    earlier = train_on(half, 0, 3)
    before = state(half)
    path = save(directory, built=half, progress=progress(3), model=MODEL, layout=layout, job=job)
    resumed = start(layout, job=job)
    train_on(resumed, 4, 5)
    with torch.no_grad():  # gathers weights, which are stale once others are loaded
        resumed.module(torch.zeros(1, 8).long(), torch.zeros(1, 8).long(), scale=1.0)
    came = load(path, built=resumed, model=MODEL.replace(name="renamed", source="elsewhere"), job=job)
    restored = are_equal(state(resumed), before)
    later = train_on(resumed, 3, 6)
    return (
        restored,
        came == progress(3),
        earlier + later == losses,
        are_equal(state(resumed), final),
        torch.equal(torch.rand(3), drawn),
        are_equal(state(half), before),
        path == find_latest(directory),
    )


@pytest.mark.long  # as test_resuming_under_the_same_layout_is_bitwise_equal
@pytest.mark.parametrize(
    ("layout", "precision"),
    mark_share(3, [("dp2 zero1 mbs1", "bf16"), ("dp1 mbs4", "fp32"), ("dp2 zero3 mbs2", "fp32")]),
)
def test_a_resumed_run_is_the_uninterrupted_one(forked, tmp_path: Path, layout: str, precision: str) -> None:
    job = JOB.replace(precision=get_recipe(precision))
    for rank in forked(Layout.parse(layout).world, run_and_resume, tmp_path / "runs" / "a", Layout.parse(layout), job):
        assert rank == (True,) * 7


def train_and_save(directory: Path) -> list[State]:
    """Written in four shards; read back, in the same processes, in two groups of two."""
    layout, other = Layout.parse("dp4 zero3 mbs1"), Layout.parse("dp4 zero2/2 mbs1")
    built = start(layout, model=FEW_ROWS)
    train(built, layout, first=0, last=2, model=FEW_ROWS)
    path = save(directory, built=built, progress=progress(2), model=FEW_ROWS, layout=layout, job=JOB)
    return [state(built), load_and_save(path, directory, other)]


def load_and_save(path: Path, directory: Path, layout: Layout) -> State:
    built = start(layout, model=FEW_ROWS)
    done = load(path, built=built, model=FEW_ROWS, job=JOB)
    save(directory, built=built, progress=done, model=FEW_ROWS, layout=layout, job=JOB)
    return state(built)


@pytest.mark.long  # as test_every_layout_resumes_from_any_other
def test_any_layout_loads_the_checkpoint_of_another(forked, tmp_path: Path) -> None:
    four, two_by_two = zip(*forked(4, train_and_save, tmp_path / "run"), strict=True)
    written, results = combine_ranks(four), [two_by_two]
    for text in ("dp2 zero1 mbs1", "dp1 mbs1"):  # each reads what the one before has written
        layout, path = Layout.parse(text), find_latest(tmp_path / "run")
        results.append(forked(layout.world, load_and_save, path, tmp_path / "run", layout))
    assert float(written["embed.tokens.weight"][-1]) == 2
    for ranks in results:
        whole = combine_ranks(ranks)
        assert whole.keys() == written.keys()
        assert all(torch.equal(a, b) for name in written for a, b in zip(written[name], whole[name], strict=True))


def save_before_any_step(directory: Path) -> bool:
    layout = Layout.parse("dp1 mbs4")
    plain, kept = start(layout), start(layout)
    path = save(directory, built=kept, progress=progress(0), model=MODEL, layout=layout, job=JOB)
    loaded = start(layout)
    load(path, built=loaded, model=MODEL, job=JOB)
    for built in (plain, kept, loaded):
        torch.manual_seed(3)
        train(built, layout, first=0, last=2)
    return are_equal(state(plain), state(kept)) and are_equal(state(plain), state(loaded))


def test_a_checkpoint_is_saved_before_the_first_step(forked, tmp_path: Path) -> None:
    assert forked(1, save_before_any_step, tmp_path) == [True]


# The folder


def save_many(directory: Path) -> list[list[str]]:
    layout = Layout.parse("dp1 mbs4")
    built, names = start(layout), []

    def save_step(step: int, keep: int) -> None:
        save(directory, built=built, progress=progress(step), model=MODEL, layout=layout, job=JOB, keep=keep)
        names.append(sorted(path.name for path in directory.iterdir()))

    (directory / "step-00000007.tmp-dead").mkdir(parents=True)
    (directory / "step-00000007.tmp-dead" / "__0_0.distcp").write_bytes(b"half")
    for step in (8, 9, 10, 11):
        save_step(step, keep=2)
    save_step(11, keep=2)  # a resumed run that ends at once saves the same step again
    save_step(9, keep=1)  # a run that went back: later checkpoints are not its to delete
    shutil.copytree(directory / "step-00000011", directory / "step-00000011.replaced")
    shutil.rmtree(directory / "step-00000011")  # killed between the two renames of a replacement
    assert find_latest(directory) == directory / "step-00000011.replaced"
    save_step(11, keep=9)
    return names


def test_old_checkpoints_are_deleted_and_leftovers_too(forked, tmp_path: Path) -> None:
    [names] = forked(1, save_many, tmp_path / "run")
    steps = [[int(name.removeprefix("step-")) for name in result] for result in names]
    assert steps == [[8], [8, 9], [9, 10], [10, 11], [10, 11], [9, 10, 11], [9, 10, 11]]


def test_latest_sees_only_complete_checkpoints(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "nowhere") is None
    for name in ("step-00000005", "step-00000040", "step-00000012.tmp-1a2b3c4d", "step-7", "other"):
        (tmp_path / name).mkdir()
    assert find_latest(tmp_path) is None
    for name in ("step-00000005", "step-00000012.tmp-1a2b3c4d", "step-7"):
        (tmp_path / name / "checkpoint.json").write_text("{}")
    assert find_latest(tmp_path) == tmp_path / "step-00000005"


def test_a_half_deleted_checkpoint_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_folder.shutil, "rmtree", lambda *_, **__: None)  # killed before it could
    for step in (1, 2):
        final = tmp_path / checkpoint_folder.format_folder_name(step)
        record = Checkpoint(
            torch="", device="cpu", model=MODEL, layout=Layout(), job=JOB, progress=progress(step), files=()
        )
        checkpoint_folder.finish(checkpoint_folder.begin(final), final, checkpoint=record, keep=1)
    first, second = sorted(path.name for path in tmp_path.iterdir())
    assert first.startswith("step-00000001.tmp-")
    assert (second, read(tmp_path / second)) == ("step-00000002", record)


# Damage


def flip(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 4
    path.write_bytes(contents)


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (
        lambda path: os.truncate(path / "__1_0.distcp", 1000),
        r"UserError: \S+/step-00000002/__1_0.distcp holds 1000 bytes, but \d+ bytes were written; {way_out}",
    ),
    "flip": (
        lambda path: flip(path / "__1_0.distcp"),
        r"UserError: \S+/__1_0.distcp: its \d+ bytes have another SHA-256 than when written; {way_out}",
    ),
    "flipped metadata": (
        lambda path: flip(path / ".metadata"),
        r"UserError: \S+/.metadata: its \d+ bytes have another SHA-256 than when written; {way_out}",
    ),
    "missing": (
        lambda path: (path / "__0_0.distcp").unlink(),
        r"UserError: \S+/__0_0.distcp is missing, but \d+ bytes were written; {way_out}",
    ),
    "no manifest": (
        lambda path: (path / "checkpoint.json").unlink(),
        r"UserError: \S+/step-00000002 is not a complete checkpoint, because it has no checkpoint.json; {way_out}",
    ),
    "cut manifest": (
        lambda path: os.truncate(path / "checkpoint.json", 100),
        r"UserError: \S+/checkpoint.json: not valid JSON: .*; {way_out}",
    ),
    "edited manifest": (
        lambda path: rewrite(path / "checkpoint.json", device="toaster"),
        r"UserError: \S+/checkpoint.json: does not hold what was written; {way_out}",
    ),
    "newer": (
        lambda path: rewrite(path / "checkpoint.json", version=7, new_field=[]),
        r"UserError: \S+: written by a newer version 7; this one reads up to 1; upgrade fivefold",
    ),
}


def load_damaged(directory: Path) -> dict[str, str]:
    layout = Layout.parse("dp2 zero2 mbs1")
    built = start(layout)
    for step in (1, 2):
        path = save(directory, built=built, progress=progress(step), model=MODEL, layout=layout, job=JOB)
    before, answers = state(built), {}

    def answer(model: Model = MODEL, job: Job = JOB) -> str:
        return refusal(lambda: load(path, built=built, model=model, job=job))

    answers["other model"] = answer(model=MODEL.replace(ffn=60, vocab=99))
    answers["other rope"] = answer(
        model=MODEL.replace(moe={"experts": 4, "topk": 2, "ffn": 8}, rope_scaling={"kind": "yarn"})
    )
    answers["other seed"] = answer(job=JOB.replace(seed=5))
    answers["other steps"] = answer(job=JOB.replace(steps=9))
    for name, (damage, _) in DAMAGE.items():
        if built.ranks.rank == 0:
            shutil.copytree(path, directory / "kept")
            damage(path)
        dist.barrier()
        answers[name] = answer()
        dist.barrier()
        if built.ranks.rank == 0:
            shutil.rmtree(path)
            os.rename(directory / "kept", path)
    assert are_equal(state(built), before)
    return answers


def test_a_damaged_or_foreign_checkpoint_is_a_one_line_error(forked, tmp_path: Path) -> None:
    first, second = forked(2, load_damaged, tmp_path)
    assert first == second
    for name, (_, pattern) in DAMAGE.items():
        way_out = f"remove step-00000002 and resume from {tmp_path}/step-00000001"
        assert_line(first.pop(name), pattern.replace("{way_out}", way_out))
    assert first.pop("other steps") == "nothing"
    assert_line(first.pop("other model"), r"UserError: \S+ holds another model, with ffn=50 instead of 60; .*")
    assert_line(first.pop("other rope"), r"UserError: .*, with rope_scaling=None instead of RopeScaling.*")
    assert_line(first.pop("other seed"), r"UserError: \S+: was trained with seed=0, and with seed=5 would read .*")
    assert not first


def assert_line(text: str, pattern: str) -> None:
    assert re.fullmatch(pattern, text), f"{text!r} is not {pattern!r}"


def test_a_path_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere is not a complete checkpoint.*there is none before it"):
        read(tmp_path / "nowhere")


# Failures in mid-save


def save_on_full_disk(directory: Path) -> list[str]:
    layout = Layout.parse("dp2 zero1 mbs1")
    built = start(layout)

    def attempt(step: int) -> str:
        return refusal(
            lambda: save(directory, built=built, progress=progress(step), model=MODEL, layout=layout, job=JOB)
        )

    answers = [attempt(1)]
    limits, fsync = resource.getrlimit(resource.RLIMIT_FSIZE), os.fsync
    if built.ranks.rank == 1:  # the kernel itself refuses to go on in mid-file
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    answers.append(attempt(2))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for failing_rank, failing_call in ((1, 0), (0, 0), (0, 1), (0, 2), (0, 3)):  # data, table of contents, manifest …
        calls = iter(range(100))

        def fail_full(descriptor: int, failing: tuple[int, int] = (failing_rank, failing_call), calls=calls) -> None:
            if (built.ranks.rank, next(calls)) == failing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fsync(descriptor)

        os.fsync = fail_full
        answers.append(attempt(2))
        os.fsync = fsync
        dist.barrier()
        assert [path.name for path in directory.iterdir()] == ["step-00000001"]
        dist.barrier()
    load(directory / "step-00000001", built=built, model=MODEL, job=JOB)
    return [*answers, attempt(2)]


def test_a_full_disk_on_one_rank_is_a_one_line_error_on_all(
    forked, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = forked(2, save_on_full_disk, tmp_path / "run")
    free = re.compile(r"\d+\.\d+ GiB free")  # each rank measures it, while other processes write
    assert [free.sub("", text) for text in first] == [free.sub("", text) for text in second]
    assert (first.pop(0), first.pop()) == ("nothing", "nothing")
    size = r"\(at least \d+\.\d+ KiB to write, \d+\.\d+ GiB free\)"
    rest = rf" {size}; the last good checkpoint is {tmp_path}/run/step-00000001"
    assert_line(first.pop(0), rf"RunFailure: \S+/step-00000002 cannot be written: rank 1: File too large{rest}")
    for rank, text in zip((1, 0, 0, 0, 0), first, strict=True):
        assert_line(
            text, rf"RunFailure: \S+/step-00000002 cannot be written: rank {rank}: No space left on device{rest}"
        )
    assert capfd.readouterr() == ("", "")


def save_until_killed(directory: Path, store: Path, told: Connection, begun: Synchronized) -> None:
    """Check what the last run left, say its step, and go on saving: every weight of step s holds the number s."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 1), rank=0, world_size=1)
    layout = Layout.parse("dp1 mbs4")
    built, step = start(layout), 0
    if path := find_latest(directory):
        step = load(path, built=built, model=MODEL, job=JOB).step
        assert all(bool((shard.weight == step).all()) for shard in built.shards)
    told.send(step)
    while True:
        step += 1
        for shard in built.shards:
            shard.weight.fill_(step)
        begun.value = step
        save(directory, built=built, progress=progress(step), model=MODEL, layout=layout, job=JOB, keep=1 + step % 3)


@pytest.mark.long  # test_a_run_of_two_processes_survives_every_failure kills a rank
def test_kill_9_at_any_moment_loses_no_finished_checkpoint(tmp_path: Path) -> None:
    directory, draw, unfinished = tmp_path / "run", random.Random(11), 0
    context = multiprocessing.get_context("fork")
    begun = context.Value("i", 0, lock=False)  # the step of the last save that was begun
    for attempt in range(9):
        listen, tell = context.Pipe(duplex=False)
        child = context.Process(target=save_until_killed, args=(directory, tmp_path / f"store{attempt}", tell, begun))
        all_but_last = begun.value - 1
        child.start()
        tell.close()
        taken_up, since = listen.recv(), time.monotonic()  # EOFError: what the last kill left could not be loaded
        assert taken_up >= all_but_last, "a save that had returned is lost"
        while begun.value < taken_up + 2 and child.is_alive():
            time.sleep(0.001)
        time.sleep(draw.uniform(0, time.monotonic() - since))  # about as long as one save takes
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        unfinished += any(".tmp-" in path.name for path in directory.iterdir())
    assert begun.value >= 10
    assert unfinished >= 4, "too few kills hit a save"
