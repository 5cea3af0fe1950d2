"""The command line: load the nouns, call the verbs, print. Data goes to stdout, everything else to stderr.

A user's mistake is one line and exit code 2, a fault of the system one line and exit code 1.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fivefold.record import Fault, Mistake

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fivefold.job import Job
    from fivefold.machine.spec import Machine
    from fivefold.train.process import Process
    from fivefold.train.run import Run

app = typer.Typer(
    name="fivefold", add_completion=False, pretty_exceptions_enable=False,
    help="Plans, rehearses, trains and proves the training step of a large language model.",
)  # fmt: skip

ModelName = Annotated[str, typer.Argument(help="Catalog name, or path to a config.json, .toml or .json.")]
MachineName = Annotated[str, typer.Argument(help="NAME[:GPUS] such as h100:8, a .toml file, or local.")]
JobFile = Annotated[Path | None, typer.Option("--job", help="A .toml file of job fields.")]
Sequence = Annotated[int | None, typer.Option("--seq", help="Tokens per sequence.")]
GlobalBatch = Annotated[int | None, typer.Option("--gbs", help="Sequences per optimizer step.")]
Precision = Annotated[str | None, typer.Option("--precision", help="fp32, bf16, bf16-grad16, bf16-pure, fp16, fp8-…")]
Attention = Annotated[Literal["flash", "unfused"] | None, typer.Option("--attention", help="Attention kernel.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print data as JSON.")]


@app.command()
def predict(
    model: ModelName,
    machine: MachineName,
    layout: Annotated[str, typer.Argument(help="Such as 'dp8 zero3 mbs1'.")],
    job: JobFile = None,
    seq: Sequence = None,
    gbs: GlobalBatch = None,
    precision: Precision = None,
    attention: Attention = None,
    json: AsJson = False,
) -> None:
    """Memory, work, traffic and time of one training step, without a GPU."""
    from fivefold.layout.spec import Layout
    from fivefold.model.catalog import resolve
    from fivefold.plan.predict import predict as run
    from fivefold.show import table

    step = run(
        model=resolve(model), machine=_machine(machine), layout=Layout.parse(layout),
        job=_job(job, sequence=seq, global_batch=gbs, precision=precision, attention=attention),
    )  # fmt: skip
    _print(step.model_dump_json(indent=2) if json else table.step(step))


@app.command()
def search(
    model: ModelName,
    machine: MachineName,
    job: JobFile = None,
    seq: Sequence = None,
    gbs: GlobalBatch = None,
    precision: Precision = None,
    attention: Attention = None,
    top: Annotated[int, typer.Option(help="How many layouts to show.")] = 10,
    json: AsJson = False,
) -> None:
    """The fastest layouts that fit, and why the others lost."""
    import json as json_module

    from fivefold.model.catalog import resolve
    from fivefold.plan.search import search as run
    from fivefold.show import table

    found = run(
        model=resolve(model), machine=_machine(machine),
        job=_job(job, sequence=seq, global_batch=gbs, precision=precision, attention=attention),
    )  # fmt: skip
    if json:
        steps = [step.model_dump(mode="json") for step in found.steps[:top]]
        refused = [{"layout": layout, "reason": reason} for layout, reason in found.refused]
        _print(json_module.dumps({"steps": steps, "refused": refused}, indent=2))
    else:
        _print(table.layouts(found.steps, refused=found.refused, limit=top))


@app.command()
def train(
    run: Annotated[Path, typer.Argument(help="The run file (.toml).")],
    layout: Annotated[str | None, typer.Option(help="Instead of the run file's layout.")] = None,
    json: AsJson = False,
) -> None:
    """Train, then lay the measured step beside the predicted one. Goes on from the newest checkpoint."""
    from fivefold.layout.spec import Layout, refuse
    from fivefold.model.catalog import resolve
    from fivefold.train.run import Run

    settings = Run.load(run)
    model, machine, process = resolve(settings.model), _machine(settings.machine), _process()
    chosen = Layout.parse(layout or _layout(settings, machine))
    refuse(chosen, model=model, job=settings.job, machine=machine)
    if not process.joined or process.rank == 0:
        _prepare(settings)
    if not process.joined and chosen.world > 1:
        from fivefold.train.process import launch

        arguments = ["train", str(run), "--layout", str(chosen), *(["--json"] if json else [])]
        launch(arguments, ranks=chosen.world)
        return
    from fivefold.check.prove import prove
    from fivefold.show.progress import TrainingLine

    line = TrainingLine(steps=settings.job.steps)
    with line, _worker(settings, process):
        proof = prove(settings, model=model, machine=machine, layout=chosen, process=process, report=line.report)
    if process.rank == 0:
        _print_proof(settings, proof, json=json)
    if proof.outcome.stopped:
        raise SystemExit(1)


@app.command()
def data(
    run: Annotated[Path, typer.Argument(help="The run file (.toml) whose [data] is prepared.")],
    json: AsJson = False,
) -> None:
    """Read, tokenize and pack a corpus into the run's folder (train does it too, if it is not done)."""
    from fivefold.train.run import Run

    index = _prepare(Run.load(run))
    if json:
        _print(index.model_dump_json(indent=2))
        return
    for split in ("train", "heldout"):
        part = index.part(split)
        _print(f"{split:8} {part.documents:>9,} documents {part.tokens:>14,} tokens")


@app.command()
def calibrate(
    ranks: Annotated[str, typer.Option(help="Process counts to measure, such as 1,2.")] = "1,2",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer points.")] = False,
    out: Annotated[Path | None, typer.Option(help="Machine file to write; without it, what 'local' means.")] = None,
    json: AsJson = False,
) -> None:
    """Measure this computer: matmul, attention, memory, collectives. From then on it is 'local'."""
    from fivefold.check.calibrate import calibrate as run
    from fivefold.machine.toml import write
    from fivefold.show.progress import bar

    counts = tuple(int(word) for word in ranks.split(",") if word.strip().isdigit())
    if not counts or len(counts) != len(ranks.split(",")):
        raise Mistake(f"--ranks {ranks!r} is not a list of process counts; write 1,2")
    with bar("calibrating") as progress:
        machine = run(ranks=counts, quick=quick, progress=progress)
    path = out or _local()
    path.parent.mkdir(parents=True, exist_ok=True)
    write(machine, path)
    _say(f"wrote {path}")
    _print(machine.model_dump_json(indent=2) if json else _summary(machine))


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
    charts: Annotated[
        bool, typer.Option("--charts", help="Also draw loss.svg, memory.svg and compare.svg there.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Predicted beside measured of a finished run, and its pictures."""
    from fivefold.record import read_lines
    from fivefold.show import charts as draw
    from fivefold.show.compare import compare, read_pair, table

    predicted, measured = read_pair(folder / "step.json")
    rows = compare(predicted, measured)
    if json:
        import json as json_module

        _print(json_module.dumps([row.model_dump(mode="json") for row in rows], indent=2))
    else:
        _print(table(rows))
    if charts:
        for name, chart in (
            (
                "loss",
                draw.loss_curve(read_lines(folder / "log.jsonl"), subtitle=f"{measured.model}, {measured.layout}"),
            ),
            ("memory", draw.memory_bars([predicted, measured])),
            ("compare", draw.compare_bars(rows)),
        ):
            draw.save(chart, folder / f"{name}.svg")
            _say(f"drew {folder / name}.svg")


_UsageError: Any = typer.BadParameter.__base__  # click's, wherever this typer keeps its click


def main() -> None:
    """Run the command line; every foreseen failure is one line on stderr."""
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], standalone_mode=False))
    except _UsageError as error:
        _fail(error.format_message(), code=2)
    except Mistake as error:
        _fail(str(error), code=2)
    except Fault as error:
        _fail(str(error), code=1)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted; nothing was left half-done", code=1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _fail(line: str, *, code: int) -> None:
    if line:
        _say(f"fivefold: {' '.join(line.split())}")
    sys.exit(code)


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _print(what: str | RenderableType) -> None:
    if isinstance(what, str):
        print(what)
        return
    from rich.console import Console

    Console().print(what)


def _local() -> Path:
    """The file that ``local`` means."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fivefold" / "local.toml"


def _machine(text: str) -> Machine:
    from fivefold.machine.catalog import resolve

    return resolve(text, local=_local())


def _job(path: Path | None, **options: Any) -> Job:
    from fivefold.job import Job
    from fivefold.record import read_file

    values = read_file(path) if path else {}
    values |= {key: value for key, value in options.items() if value is not None}
    return Job.read(values, origin=str(path) if path else "job")


def _layout(run: Run, machine: Machine) -> str:
    """The run's layout; ``auto`` is the fastest that fits."""
    if run.layout != "auto":
        return run.layout
    from fivefold.model.catalog import resolve
    from fivefold.plan.search import search as find

    found = find(model=resolve(run.model), machine=machine, job=run.job)
    if not found.steps:
        raise Mistake(f"no layout of {run.model} fits {machine.name}: {found.refused[0][0]} {found.refused[0][1]}")
    _say(f"layout {found.steps[0].layout}: the fastest of {len(found.steps)} that fit {machine.name}")
    return found.steps[0].layout


def _process() -> Process:
    """This process, by what torchrun or our own launcher put into its environment."""
    from fivefold.train.process import Process

    if "RANK" not in os.environ:
        return Process()
    names = {"rank": "RANK", "local_rank": "LOCAL_RANK", "local_ranks": "LOCAL_WORLD_SIZE", "world": "WORLD_SIZE"}
    return Process(**{field: int(os.environ[name]) for field, name in names.items()}, joined=True)


def _prepare(run: Run) -> Any:
    from fivefold.train.prepare import prepare, terminal_progress

    with terminal_progress() as progress:
        return prepare(
            run.data.corpus, tokenizer=run.data.tokenizer, directory=run.folder / "data",
            holdout=run.data.heldout, key=run.data.key, progress=progress,
        )  # fmt: skip


@contextmanager
def _worker(run: Run, process: Process) -> Iterator[None]:
    """In a process of several, only the first speaks; what nobody foresaw goes into a file, with one line here."""
    try:
        yield
    except (Mistake, Fault):
        if process.rank == 0:
            raise
        raise SystemExit(1) from None
    except Exception as error:
        path = run.folder / f"error-rank{process.rank}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(traceback.format_exc())
        raise Fault(f"rank {process.rank}: {str(error).splitlines()[0] or type(error).__name__} (see {path})") from None


def _print_proof(run: Run, proof: Any, *, json: bool) -> None:
    from fivefold.show.compare import compare, table

    outcome = proof.outcome
    if outcome.stopped:
        _say(f"stopped by {outcome.stopped} after step {outcome.step} of {run.job.steps}; saved {outcome.checkpoint}; "
             "the same command goes on from there")  # fmt: skip
        return
    _say(f"finished {outcome.step} steps; saved {outcome.checkpoint}")
    if proof.text:
        _say(f"\nsample after {run.sample!r}:\n{proof.text}\n")
    if proof.measured is None:
        _say("too few steps to measure one; a run of 5 or more closes with predicted beside measured")
        return
    if json:
        _print((run.folder / "step.json").read_text())
    else:
        _print(table(compare(proof.predicted, proof.measured)))


def _summary(machine: Machine) -> str:
    from fivefold.units import show_bytes, show_count

    peaks = ", ".join(f"{dtype} {show_count(rate)}FLOP/s" for dtype, rate in machine.chip.peak_flops.items())
    link = machine.links[-1]
    return (
        f"{machine.ranks} ranks, each {peaks}; {show_bytes(machine.chip.memory_bytes)} at "
        f"{show_bytes(machine.chip.memory_bandwidth)}/s; {link.name} {show_bytes(link.bandwidth)}/s"
    )
