"""The command line: load the nouns, call the verbs, print. Data goes to stdout, everything else to stderr.

A user's mistake is one line and exit code 2, a fault of the system one line and exit code 1.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from fivefold.record import Fault, Mistake
from fivefold.train.ending import LAUNCHER, Stopped, heed_signals, one_line, tell

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fivefold.job import Job
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model
    from fivefold.train.run import Run
    from fivefold.train.shards import Index

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
Attention = Annotated[
    Literal["flash", "flash2", "flash1", "unfused"] | None, typer.Option("--attention", help="Attention kernel.")
]
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
    operations: Annotated[bool, typer.Option("--operations", help="Also list every operation.")] = False,
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
    if operations and not json:
        _print(table.operations(step))


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
    from fivefold.train.supported import check_supported

    settings = Run.load(run)
    model, machine = resolve(settings.model), _machine(settings.machine)
    chosen = Layout.parse(layout or _layout(settings, machine))
    refuse(chosen, model=model, job=settings.job, machine=machine)
    check_supported(chosen, settings.job)
    if _launcher() is None:  # which has done it already; under torchrun the first to come does it, the others wait
        _prepare(settings, model)
    if chosen.world > 1 and "RANK" not in os.environ:
        from fivefold.train.process import launch

        arguments = ["train", str(run), "--layout", str(chosen), *(["--json"] if json else [])]
        launch(arguments, ranks=chosen.world, folder=settings.folder)
        return
    with one_line(settings.folder, rank=int(os.environ.get("RANK", 0)), launched=_launcher() is not None):
        from fivefold.check.prove import prove
        from fivefold.show.progress import TrainingLine
        from fivefold.train.process import Process

        process, line = Process.of(os.environ), TrainingLine(steps=settings.job.steps)
        with line:
            proof = prove(settings, model=model, machine=machine, layout=chosen, process=process, report=line.report)
        if process.rank == 0:
            _print_proof(settings, proof, json=json)


@app.command()
def data(
    run: Annotated[Path, typer.Argument(help="The run file (.toml) whose [data] is prepared.")],
    json: AsJson = False,
) -> None:
    """Read, tokenize and pack a corpus into the run's folder (train does it too, if it is not done)."""
    from fivefold.model.catalog import resolve
    from fivefold.train.run import Run

    settings = Run.load(run)
    index = _prepare(settings, resolve(settings.model))
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
    from fivefold.show import table
    from fivefold.show.progress import bar

    counts = tuple(int(word) for word in ranks.split(",") if word.strip().isdigit())
    if not counts or len(counts) != len(ranks.split(",")):
        raise Mistake(f"--ranks {ranks!r} is not a list of process counts; write 1,2")
    with bar("calibrating") as progress:
        machine = run(ranks=counts, quick=quick, progress=progress)
    path = out or _local()
    write(machine, path)
    _say(f"wrote {path}")
    _print(machine.model_dump_json(indent=2) if json else table.machine(machine))


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
    charts: Annotated[bool, typer.Option("--charts", help="Also draw loss, memory and compare (.svg).")] = False,
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
        title, lines = f"{measured.model}, {measured.layout}", read_lines(folder / "log.jsonl")
        for name, chart in (
            ("loss", draw.loss_curve(lines, subtitle=title)),
            ("memory", draw.memory_bars([predicted, measured])),
            ("compare", draw.compare_bars(rows)),
        ):
            draw.save(chart, folder / f"{name}.svg")
            _say(f"drew {folder / name}.svg")


_UsageError: Any = typer.BadParameter.__base__  # click's, wherever this typer keeps its click


def main() -> None:
    """Run the command line; every foreseen failure is one line on stderr."""
    heed_signals(launcher=_launcher())
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], standalone_mode=False))
    except _UsageError as error:
        _fail(error.format_message().replace("Value error, ", ""), code=2)  # pydantic's preface
    except Mistake as error:
        _fail(str(error), code=2)
    except Fault as error:
        _fail(str(error), code=1)
    except Stopped as stop:
        _fail(f"stopped by {stop}; nothing is half-done, and the same command takes it up again", code=1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        _fail(f"{error.filename or 'the system'}: {error.strerror or error}", code=1)


def _fail(line: str, *, code: int) -> NoReturn:
    """Say why and exit; a process of ours says it to its launcher, which says one line for all."""
    line = " ".join(line.split())
    if line and _launcher() is not None and tell(line, to=Path(os.environ["TORCHELASTIC_ERROR_FILE"])):
        os._exit(code)  # a peer may be gone: libraries that take leave of it in an orderly exit can abort
    if line:
        _say(f"fivefold: {line}")
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


def _launcher() -> int | None:
    """The process that started this one to be one of several; None if the user or torchrun did."""
    return int(os.environ[LAUNCHER]) if LAUNCHER in os.environ else None


def _prepare(run: Run, model: Model) -> Index:
    """The run's corpus as shards, which are enough for one step and whose tokens ``model`` knows."""
    from fivefold.train.prepare import prepare, terminal_progress

    with terminal_progress() as progress:
        index = prepare(
            run.data.corpus, tokenizer=run.data.tokenizer, directory=run.folder / "data",
            holdout=run.data.heldout, key=run.data.key, progress=progress,
        )  # fmt: skip
    run.shards(model)
    return index


def _print_proof(run: Run, proof: Any, *, json: bool) -> None:
    from fivefold.show.compare import compare, table

    outcome = proof.outcome
    if outcome.stopped:
        _say(f"fivefold: stopped by {outcome.stopped} after step {outcome.step} of {run.job.steps}; "
             f"saved {outcome.checkpoint}; the same command goes on from there")  # fmt: skip
        raise SystemExit(1)
    _say(f"finished {outcome.step} steps; saved {outcome.checkpoint}")
    if proof.text:
        _say(f"\nsample after {run.sample!r}:\n{proof.text}\n")
    if proof.measured is None:
        _say("too few steps to measure one; a run of 5 or more closes with predicted beside measured")
        return
    _print((run.folder / "step.json").read_text() if json else table(compare(proof.predicted, proof.measured)))
