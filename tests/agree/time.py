"""Compare predicted and measured step times of random models, layouts and jobs on this computer.

    python -m tests.agree.time --groups 20 --folder runs/agree-time --markdown docs/explanation/measurements/010-time.md

A group is one model and job under several layouts. Of each case the run's units are measured (``calibrate --for``) and
the run is trained, in turns of a few seconds, as the machine's speed drifts by a third; the prediction then comes from
the planner. Every pass is a line of FOLDER/casesN.jsonl; called again, it goes on. ``--world 4``: on four processes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.calibration import calibrate, count_cores
from fivefold.calibration import profile as profiles
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.validity import refuse
from fivefold.machine.spec import Machine
from fivefold.machine.toml import read, write
from fivefold.model.experts import MoE
from fivefold.model.latent_attention import MLA
from fivefold.model.spec import Model
from fivefold.planner.predict import get_planner
from fivefold.sweeps.trial import prepare
from fivefold.text_files import read_file, read_lines
from fivefold.trainer.run import Run
from fivefold.trainer.supported import check_supported
from tests.agree.turns import run_in_turns, turn, unfrozen

ONE = ("dp1", "dp1 ac=full", "dp1 ac=selective")
TWO = (
    "dp2 zero0", "dp2 zero1", "dp2 zero2", "dp2 zero3", "tp2", "tp2 nosp", "cp2", "cp2 cp=ulysses", "pp2", "pp2 gpipe",
    "pp2 zb1p", "pp2 zb2p", "pp2 v2 interleaved", "pp2 v2 zbv", "pp2 v2 dualpipev", "pp2 dualpipe", "dp2 zero1 ep2",
    "dp2 zero3 ep2",
)  # fmt: skip
FOUR = ("dp4 zero1", "dp4 zero3", "dp2 tp2 zero1", "tp4", "pp4", "dp2 pp2 zero1", "tp2 pp2", "dp2 cp2 zero2", "cp2 tp2")
STEPS = 26  # of a run
FIRST = 4  # steps that do not count: warm-up, and the metered one
PATIENCE_SECONDS = 480.0
MAX_SCATTER, PASSES = (
    0.05,
    3,
)  # a case whose calmest pass scatters by more is run again, up to so often; the calmest counts


class Case(NamedTuple):
    """A model, job and layout; ``group``: of cases that share the first two."""

    group: int
    number: int
    model: Model
    job: Job
    layout: Layout


class Answer(NamedTuple):
    """Seconds per step; ``noise``: half the distance of the quartiles of the run's steps, relative."""

    group: int
    number: int
    model: str
    job: str
    layout: str
    predicted: float
    measured: float
    noise: float
    plain: float  # predicted after ``calibrate`` without ``--for``
    parts: dict[str, float]

    @property
    def error(self) -> float:
        """Relative, signed."""
        return self.predicted / self.measured - 1

    @property
    def counted_error(self) -> float:
        """The part of the error that the noise does not explain."""
        return max(0.0, abs(self.error) - self.noise)


def cases(*, seed: int, groups: int, each: int, world: int) -> Iterator[Case]:
    """``groups`` drawn models and jobs with ``each`` legal layouts of each."""
    for group in range(groups):
        chance = random.Random(f"{seed} {world} {group}")
        model, job = _model(chance, group), _job(chance)
        names = [*ONE, *TWO] if world < 4 else [*FOUR]
        chance.shuffle(names)
        legal = (
            layout for name in names for layout in _find_legal(f"{name} mbs{chance.choice((1, 2, 4))}", model, job)
        )
        for number, layout in enumerate(itertools.islice(legal, each)):
            yield Case(group, number, model, job, layout)


def _find_legal(text: str, model: Model, job: Job) -> Iterator[Layout]:
    """The layout, if the trainer runs it."""
    try:
        layout = Layout.parse(text)
        refuse(layout, model=model, job=job)
        check_supported(layout, job, model=model)
    except ValueError:
        return
    yield layout


def _model(chance: random.Random, group: int) -> Model:
    pick, kind = chance.choice, ("dense", "experts", "latent")[group % 3]
    heads = pick((4, 8))
    fields: dict[str, Any] = {
        "layers": pick((4, 6, 8)),
        "width": pick((128, 192, 256, 384)),
        "heads": heads,
        "head_dim": pick((32, 64)),
        "kv_heads": pick((2, heads)),
        "ffn": pick((384, 512, 768)),
    }
    if kind == "latent":
        mla = MLA(q_rank=pick((None, 96)), kv_rank=64, nope_dim=32, rope_dim=16, v_dim=32)
        fields |= {"mla": mla, "kv_heads": heads}
    if kind == "experts" or (kind == "latent" and pick((True, False))):
        fields["moe"] = MoE(experts=8, topk=2, ffn=pick((128, 192)), shared_experts=pick((0, 1)), balance="free")
    return Model(name=f"{kind}{group}", vocab=512, **fields)


def _job(chance: random.Random) -> Job:
    sequence = chance.choice((128, 256, 512))
    return Job(
        sequence=sequence, global_batch=max(4, 2048 // sequence), precision=chance.choice(("fp32", "bf16")), steps=STEPS
    )


def select_calmest(passes: Iterable[Answer]) -> list[Answer]:
    """Of each case the pass with the least noise, in the order of the cases."""
    best: dict[tuple[int, int], Answer] = {}
    for item in passes:
        key = item.group, item.number
        if key not in best or item.noise < best[key].noise:
            best[key] = item
    return [best[key] for key in sorted(best)]


def list_unsettled(drawn: list[Case], passes: list[Answer]) -> Iterator[Case]:
    """Cases without a pass, then those whose passes were all noisy; ``passes`` may grow meanwhile."""
    for times in range(PASSES):
        for case in drawn:
            noises = [item.noise for item in passes if (item.group, item.number) == (case.group, case.number)]
            if len(noises) == times and min(noises, default=1.0) > MAX_SCATTER:
                yield case


def answer(case: Case, *, machine: Path, folder: Path) -> Answer | str:
    """Measure and train one case; what failed, in a line."""
    here = folder / f"case-{case.group}-{case.number}"
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir(parents=True)
    known = read(machine)
    run = prepare(here, model=case.model, machine=known, layout=case.layout, job=case.job, steps=STEPS)
    commands = (
        [sys.executable, "-m", "tests.agree.time", "--profile", str(run)],
        [sys.executable, "-m", "fivefold", "train", str(run)],
    )
    plain = get_planner(case.model, known, case.job).estimate(case.layout).step_time
    seconds = turn(plain.seconds)
    codes = run_in_turns(*commands, log=here / "log.txt", timeout=PATIENCE_SECONDS, seconds=seconds)
    if any(codes):
        return f"exit codes {codes}: {(here / 'log.txt').read_text()[-300:]!r}"
    lines = [line["seconds"] for line in read_lines(here / "run" / "log.jsonl") if "seconds" in line]
    steps = sorted(unfrozen(lines[FIRST:], seconds=seconds))
    measured = statistics.median(steps[: (len(steps) + 1) // 2])  # the least disturbed half
    low, _, high = statistics.quantiles(steps, n=4)
    step = get_planner(case.model, read(here / "profiled.toml"), case.job).estimate(case.layout).step_time
    parts = {
        "compute": step.compute,
        "bubble": step.bubble,
        "optimizer": step.optimizer,
        "host": step.host,
        **step.exposed,
    }
    shutil.rmtree(here)
    return Answer(
        case.group,
        case.number,
        case.model.name,
        f"seq{case.job.sequence} {case.job.precision.name}",
        str(case.layout),
        step.seconds,
        measured,
        (high - low) / 2 / measured,
        plain.seconds,
        {name: seconds for name, seconds in parts.items() if seconds},
    )


def profile(run: Path) -> None:
    """Measure the units of the run in the file, for as long as it trains."""
    profiles.SECONDS, profiles.STEPS = 6.0, 9
    said = Run.load(run)
    machine = profiles.profile_layout(
        model=Model.read(read_file(Path(said.model)), origin=said.model),
        layout=Layout.parse(said.layout),
        job=said.job,
        machine=read(Path(said.machine)),
        cores=count_cores(),
    )
    write(machine, run.with_name("profiled.toml"))


def kendall(answers: Iterable[Answer]) -> tuple[int, int]:
    """Pairs of layouts of one job in the right order, and all pairs that differ by more than their noise."""
    right = pairs = 0
    for one, other in itertools.combinations(answers, 2):
        apart = abs(one.measured - other.measured) / min(one.measured, other.measured)
        if one.group == other.group and apart > one.noise + other.noise:
            pairs += 1
            right += (one.measured < other.measured) == (one.predicted < other.predicted)
    return right, pairs


def regret(answers: list[Answer]) -> list[float]:
    """Of each group: measured seconds of the layout with the best prediction, over those of the best."""
    groups: dict[int, list[Answer]] = {}
    for item in answers:
        groups.setdefault(item.group, []).append(item)
    return [
        min(group, key=lambda entry: entry.predicted).measured / min(entry.measured for entry in group) - 1
        for group in groups.values()
    ]


def summary(answers: list[Answer]) -> list[str]:
    """What the issue asks for, as lines."""
    errors = sorted(abs(item.error) for item in answers)
    right, pairs = kendall(answers)
    late = regret(answers)
    return [
        f"{len(answers)} cases: error median {statistics.median(errors):.1%}, nine tenths within "
        f"{errors[int(0.9 * (len(errors) - 1))]:.1%}, largest {errors[-1]:.1%}; bias "
        f"{statistics.fmean(item.error for item in answers):+.1%}; noise of a run (median) "
        f"{statistics.median(item.noise for item in answers):.1%}",
        f"beyond the noise: median {statistics.median(item.counted_error for item in answers):.1%}, largest "
        f"{max(item.counted_error for item in answers):.1%}",
        f"Kendall's tau between layouts of one job {2 * right / max(1, pairs) - 1:.2f} over {pairs} pairs; regret of "
        f"the predicted best {statistics.fmean(late):.1%} in the mean, {max(late):.1%} at most, over {len(late)} jobs",
        *summarize_plain(answers),
    ]


def summarize_plain(answers: list[Answer]) -> list[str]:
    """The same without ``--for``: predicted from the small runs that ``calibrate`` trains."""
    plain = [item._replace(predicted=item.plain) for item in answers]
    errors, late = sorted(abs(item.error) for item in plain), regret(plain)
    return [
        f"after plain calibrate: error median {statistics.median(errors):.1%}, nine tenths within "
        f"{errors[int(0.9 * (len(errors) - 1))]:.1%}, largest {errors[-1]:.1%}; bias "
        f"{statistics.fmean(item.error for item in plain):+.1%}; regret {statistics.fmean(late):.1%} in the mean, "
        f"{max(late):.1%} at most"
    ]


def table(answers: list[Answer]) -> list[str]:
    """Markdown."""
    lines = ["| model | job | layout | predicted | measured | error | noise | plain calibrate |", "|" + "---|" * 8]
    return lines + [
        f"| {a.model} | {a.job} | {a.layout} | {a.predicted * 1e3:.0f} ms | {a.measured * 1e3:.0f} ms | "
        f"{a.error:+.1%} | {a.noise:.1%} | {a.plain / a.measured - 1:+.0%} |"
        for a in answers
    ]


def options(description: str | None, *, groups: int) -> argparse.ArgumentParser:
    """Which cases, where their journal is, and for how long; ``groups``: how many by default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=groups)
    parser.add_argument("--each", type=int, default=4, help="layouts of a group")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/agree-time"))
    parser.add_argument("--minutes", type=float, default=1e9, help="end after so many; the same command goes on")
    parser.add_argument("--markdown", type=Path)
    return parser


def main() -> None:
    """See the module."""
    parser = options(__doc__, groups=20)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--profile", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.profile:
        profile(given.profile)
        return
    given.folder.mkdir(parents=True, exist_ok=True)
    machine = given.folder / f"machine{given.world}.toml"
    if not machine.exists():
        write(_calibrate(given.world), machine)
    path = given.folder / f"cases{given.world}.jsonl"
    passes = [Answer(**line) for line in read_lines(path)] if path.exists() else []
    end = time.monotonic() + 60 * given.minutes
    drawn = list(cases(seed=given.seed, groups=given.groups, each=given.each, world=given.world))
    for case in list_unsettled(drawn, passes):
        if time.monotonic() > end:
            break
        result = answer(case, machine=machine.resolve(), folder=Path(tempfile.gettempdir()) / "agree-time")
        if isinstance(result, str):
            print(f"{case.model.name} {case.layout}: {result}", flush=True)
            continue
        passes.append(result)
        with path.open("a") as file:
            file.write(json.dumps(result._asdict()) + "\n")
        print(
            f"{result.model:10} {result.job:12} {result.layout:30} {result.error:+6.1%}  noise {result.noise:.1%}"
            f"  {result.measured * 1e3:.0f} ms",
            flush=True,
        )
    known = select_calmest(passes)
    print(*summary(known), sep="\n")
    if given.markdown:
        given.markdown.write_text("\n".join([*summary(known), "", *table(known), ""]))


def _calibrate(world: int) -> Machine:
    return calibrate(ranks=tuple(sorted({1, 2, world})))


if __name__ == "__main__":
    main()
