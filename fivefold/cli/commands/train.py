"""``fivefold train``: predicts, trains, and compares the measured step with the prediction."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.cli import trace_compare
from fivefold.cli.corpus import hold_folder, prepare_corpus
from fivefold.cli.errors import find_launcher
from fivefold.cli.first_calibration import calibrate_if_needed
from fivefold.cli.options import print_line, show
from fivefold.cli.request_options import accept_request
from fivefold.errors import UserError
from fivefold.requests.commands import TrainOptions
from fivefold.requests.machines import load_machine
from fivefold.text_files import read_text
from fivefold.trainer.faults.signals import shorten_errors
from fivefold.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.layout.spec import Layout
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model
    from fivefold.step import Step
    from fivefold.trainer.run import Run


@accept_request(TrainOptions)
def train(request: TrainOptions) -> None:
    """Train, then compare the measured step with the prediction. Resumes from the newest checkpoint."""
    from fivefold.layout.remarks import list_remarks
    from fivefold.layout.spec import Layout
    from fivefold.layout.validity import refuse
    from fivefold.model.catalog import resolve
    from fivefold.trainer.run import Run

    overrides = {"layout": request.layout, "machine": request.machine, "trace_steps": request.trace}
    force, slurm = request.force, request.slurm
    settings = Run.load(request.run).replace(**{name: value for name, value in overrides.items() if value is not None})
    model = resolve(settings.model)
    if find_launcher() is None:
        _check_inputs_exist(settings, model=model)
        settings.check_data(model)
        if not (slurm or force):
            _check_states_fit(settings, model=model)
    machine = calibrate_if_needed(partial(_resolve_machine, settings), allowed=not (request.no_calibrate or slurm))
    layout = Layout.parse(_resolve_layout(settings, machine), machine=machine)
    machine = _resolve_machine(settings) if settings.measure else machine  # includes the measurements just made
    refuse(layout, model=model, job=settings.job, machine=machine)
    _check_supported(layout, settings, model=model)
    if find_launcher() is None:
        _check_folder(settings, model=model, file=request.run)
        used = machine.replace(ranks=layout.world)  # a run may use a part of the machine
        for remark in list_remarks(model, used, settings.job, layout):
            print_line(f"fivefold: {remark}")
    if not slurm:  # a Slurm job starts on other chips than this computer's
        if find_launcher() is None and not force:
            _check_host(settings, layout, machine=machine, file=request.run)
        settings = settings.replace(job=_choose_kernels(settings.job, model=model))
    settings.check(layout)
    settings.check_data(model)
    if find_launcher() is None and not force:
        _check_fits(settings, layout, model=model, machine=machine, runs_here=not slurm)
    options = ["--machine", request.machine] if request.machine is not None else []
    if slurm:
        from fivefold.cli.slurm import submit

        print_line(submit(settings, path=request.run, layout=layout, machine=machine, force=force, words=options))
        return
    with hold_folder(settings.folder):
        # The launcher prepares it before it starts ranks; under torchrun the first rank does it while the others wait.
        if find_launcher() is None:
            prepare_corpus(settings, model)
            if line := settings.describe_excess(model):
                print_line(f"fivefold: {line}")
        if layout.world > 1 and "RANK" not in os.environ:
            options += ["--json"] if request.as_json else []
            options += ["--trace", str(request.trace)] if request.trace else []
            _launch_ranks(settings, layout, words=["train", str(request.run), "--layout", str(layout), *options])
        else:
            _train_here(settings, layout, model=model, machine=machine, json=request.as_json)


def _launch_ranks(run: Run, layout: Layout, *, words: list[str]) -> None:
    """Start every rank on this host with the command ``words``, and wait for them."""
    from fivefold.trainer.process import launch

    launch(words, ranks=layout.world, folder=run.folder, restarts=run.faults.max_restarts)


def _check_supported(layout: Layout, run: Run, *, model: Model) -> None:
    """Reject what the trainer does not support; it imports torch, so it comes after the checks that do not need it."""
    from fivefold.trainer.supported import check_supported

    check_supported(layout, run.job, model=model)


def _choose_kernels(job: Job, *, model: Model) -> Job:
    """Return ``job`` with kernels that run here; raises ``UserError`` if its precision or kernels do not."""
    from fivefold.trainer.model.kernels.choice import check_kernels
    from fivefold.trainer.model.precision import check_chip

    check_chip(job, model=model)
    job, remark = check_kernels(job)
    if remark and find_launcher() is None:
        print_line(remark)
    return job


def _train_here(settings: Run, layout: Layout, *, model: Model, machine: Machine, json: bool) -> None:
    """Train as one rank of ``layout``; rank 0 prints the outcome."""
    answer = Path(os.environ["TORCHELASTIC_ERROR_FILE"]) if find_launcher() is not None else None
    with shorten_errors(settings.folder, rank=int(os.environ.get("RANK", 0)), answer=answer):
        from fivefold.cli.hosts import choose_interface, count_restarts, keeps_store
        from fivefold.profiling.closed_loop import prove
        from fivefold.rendering.progress import TrainingLine
        from fivefold.trainer.checkpoint.checkpoint_folder import find_latest
        from fivefold.trainer.logs.run_log import note
        from fivefold.trainer.model.precision import describe_other_format
        from fivefold.trainer.process import Process

        choose_interface(os.environ)
        process = Process.from_environment(os.environ)
        line = TrainingLine(steps=settings.job.steps)
        if process.rank == 0 and keeps_store(os.environ):
            print_line(
                "no new host can take a lost one's place: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun"
            )
        if process.rank == 0 and (precision := describe_other_format(settings.job)):
            print_line(precision)
        if process.rank == 0 and find_launcher() is None and (restarts := count_restarts(os.environ)):
            newest = find_latest(settings.folder / "checkpoints") or "the beginning"
            note(settings.folder, text=f"all ranks were started again ({restarts}) from {newest}")
        with line:
            proof = prove(settings, model=model, machine=machine, layout=layout, process=process, report=line.report)
        if process.rank == 0:
            if settings.trace_steps and proof.measured is not None and not proof.outcome.stopped:
                trace_compare.add(
                    settings, layout, model=model, machine=machine, steps=(proof.predicted, proof.measured)
                )
            if not proof.outcome.stopped:
                write_report(settings, layout, model=model, machine=machine)
            print_proof(settings, proof, json=json)


def _resolve_machine(run: Run) -> Machine:
    """Return the run's machine; for ``layout = "auto"`` under torchrun, with as many ranks as torchrun has started."""
    machine = load_machine(run.machine)
    if run.layout == "auto" and "WORLD_SIZE" in os.environ:
        return machine.replace(ranks=int(os.environ["WORLD_SIZE"]))
    return machine


def _resolve_layout(run: Run, machine: Machine) -> str:
    """Return the run's layout; ``auto`` is the fastest that fits."""
    if run.layout != "auto":
        return run.layout
    from fivefold.model.catalog import resolve
    from fivefold.requests.answers import find_fastest
    from fivefold.requests.search import measure_best

    # Under torchrun all ranks get here and must agree on a layout, so they use the prediction.
    if run.measure and "RANK" not in os.environ:
        finalists, _ = measure_best(resolve(run.model), machine, run.job, count=run.measure)
        best = finalists[0]
        if best.measured_seconds is None:
            raise UserError(
                f"none of the {len(finalists)} best layouts could run; the first, {best.layout}: {best.why}"
            )
        slower = ", ".join(
            f"{finalist.layout} {show_seconds(finalist.measured_seconds or 0.0)}" for finalist in finalists[1:]
        )
        duration = show_seconds(best.measured_seconds)
        print_line(
            f"layout {best.layout}: the fastest of {len(finalists)} measured, {duration}; {slower or 'no other fits'}"
        )
        return str(best.layout)
    layout = find_fastest(resolve(run.model), machine, run.job)
    print_line(f"layout {layout}: the fastest that fits {machine.name}")
    return str(layout)


def _check_folder(run: Run, *, model: Model, file: Path) -> None:
    """Reject a folder with the log of another model's run, which this one's would be appended to.

    A checkpoint of another model is rejected when it is read, with the field that differs.
    """
    from fivefold.results.run_folder import read_prediction

    if (run.folder / "checkpoints").exists():
        return
    before = read_prediction(run.folder)
    if before is not None and before.model != model.name and before.work.parameters != model.parameters:
        raise UserError(
            f"{run.folder} holds a run of {before.model}, and {file} trains {model.name}; give {file} another folder, "
            f'such as folder = "{run.folder}-{model.name}", or remove {run.folder}'
        )


def _check_inputs_exist(run: Run, *, model: Model) -> None:
    """Reject a run file of which a file or package is missing, before this computer is measured."""
    from fivefold.trainer.data.corpus import list_files
    from fivefold.trainer.data.tokenizer import is_built_in, load

    list_files(run.data.corpus)
    if not is_built_in(run.data.tokenizer):
        load(Path(run.data.tokenizer))
    if run.logs.wandb:
        from fivefold.trainer.logs.wandb_log import import_wandb

        import_wandb()
    if run.start.weights is not None:
        from fivefold.trainer.checkpoint.huggingface_import import HuggingFaceFolder

        HuggingFaceFolder.open(run.start.weights, model=model)
        if run.start.adapter is not None:
            from fivefold.trainer.checkpoint import peft_adapter

            peft_adapter.open_as(run.start.adapter, base=run.start.weights, model=model, job=run.job)


def _check_states_fit(run: Run, *, model: Model) -> None:
    """Reject, before this computer is measured, a model whose weights and optimizer states exceed its memory."""
    from fivefold.planner.questions.least_states import count_least_state_bytes
    from fivefold.trainer.host import Host

    host, needed_bytes = Host.inspect(), int(count_least_state_bytes(model, run.job))
    if run.machine.partition(":")[0] == "local" and not host.gpus and needed_bytes > host.memory_bytes:
        raise UserError(
            f"machine {run.machine!r}: weights and optimizer states of {model.name} already take "
            f"{show_bytes(needed_bytes)}, but this host has {show_bytes(host.memory_bytes)}; use a smaller model, or "
            "--force"
        )


def _check_host(run: Run, layout: Layout, *, machine: Machine, file: Path) -> None:
    """Reject, before any process starts, a plan for a machine that is neither this host nor the hosts of torchrun."""
    from fivefold.trainer.host import Host, check_host

    if os.environ.get("LOCAL_RANK", "0") != "0":  # the first rank of a host checks for it
        return
    host = Host.inspect()
    started = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if line := check_host(host, machine=machine, named=run.machine, layout=layout, file=file, started=started):
        print_line(f"fivefold: {line}")


MEMORY_ADVICE = "shard more (zero), cut more (tp, pp), recompute (ac=full)"


def _check_fits(run: Run, layout: Layout, *, model: Model, machine: Machine, runs_here: bool) -> None:
    """Reject a step that does not fit its machine or, with ``runs_here``, this host; warn of one that is tight."""
    from fivefold.planner.predict import predict
    from fivefold.rendering.step_view import format_verdict
    from fivefold.trainer.host import Host, check_memory

    memory = predict(model=model, machine=machine, layout=layout, job=run.job).memory
    if memory.verdict == "tight":
        print_line(f"fivefold: {format_verdict(memory)}; {MEMORY_ADVICE}")
    if memory.verdict == "does not fit":
        fullest = max(memory.stages, key=lambda stage: stage.peak_bytes)
        raise UserError(
            f"layout {str(layout)!r} would need {show_bytes(fullest.peak_bytes)} on stage {fullest.stage} "
            f"({fullest.peak_cause}), but {machine.name} has {show_bytes(machine.chip.memory_bytes)} a rank; "
            f"{MEMORY_ADVICE}, or --force"
        )
    if runs_here:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", layout.world))
        check_memory(Host.inspect(), peak_bytes=memory.peak_bytes, ranks=ranks, named=run.machine)


def write_report(run: Run, layout: Layout, *, model: Model, machine: Machine) -> None:
    """Write the run's report into its folder; an error is printed and has no other effect."""
    try:
        from fivefold.cli.commands import report
        from fivefold.planner.predict import get_planner
        from fivefold.results.run_folder import read

        if not (run.folder / "step.json").exists():
            return
        finished_run = read(run.folder)
        has_own_schedule = run.schedule is None  # the planner knows only the layout's own schedules
        drawing = (
            report.draw_step(get_planner(model, machine, run.job), layout, finished_run.predicted)
            if has_own_schedule
            else None
        )
        print_line(f"wrote {report.write_run_report(finished_run, drawing, run)}")
    except Exception as error:
        print_line(f"no report: {str(error).splitlines()[0] if str(error) else type(error).__name__}")


def print_proof(run: Run, proof: Any, *, json: bool) -> None:
    """Print the run's end, its sample, and predicted next to measured; raises ``SystemExit`` if a signal stopped it."""
    from fivefold.rendering.budget import render_page
    from fivefold.rendering.compare import render_table
    from fivefold.results.step_comparison import compare, describe_assumption

    outcome = proof.outcome
    if outcome.stopped:
        print_line(
            f"fivefold: stopped by {outcome.stopped} after step {outcome.step} of {run.job.steps}; "
            f"saved {outcome.checkpoint}; the same command continues from there"
        )
        raise SystemExit(1)
    has_trained = outcome.step > outcome.start
    if has_trained:
        print_line(f"finished {outcome.step} steps; saved {outcome.checkpoint or 'nothing'}")
    else:
        print_line(
            f"finished already: {run.folder} is at step {outcome.step} of {run.job.steps}, so nothing was trained; to "
            "train on, raise steps; to train anew, set another folder"
        )
    if proof.text:
        print_line(f"\nsample after {run.sample!r}:\n{proof.text}\n")
    pair = (proof.predicted, proof.measured) if proof.measured else _read_earlier_steps(run.folder / "step.json")
    if pair and not _is_same_run(pair[0], proof.predicted):
        if has_trained:
            pair = None
        else:
            print_line(f"its measured step is of layout {pair[1].layout} on {pair[1].machine}")
    if pair is None:
        few = "too few steps to measure one" if has_trained else "no step of it was measured"
        print_line(f"{few}; a run of 5 steps or more ends with predicted next to measured")
        return
    show(read_text(run.folder / "step.json", kind="JSON") if json else render_table(compare(*pair)))
    if not json:
        if line := describe_assumption(pair[0]):
            show(line)
        show(
            render_page(
                (pair[0], *trace_compare.read_dry_run(run.folder / "step.json"), pair[1]), findings=pair[1].findings
            )
        )


def _read_earlier_steps(path: Path) -> tuple[Step, Step] | None:
    """Return the steps that an earlier start of this run wrote; None if it wrote none."""
    from fivefold.results.step_comparison import read_pair

    try:
        return read_pair(path)
    except UserError:
        return None


def _is_same_run(earlier: Step, predicted: Step) -> bool:
    """Return whether two predictions are of one model, machine, layout and job."""
    return all(getattr(earlier, name) == getattr(predicted, name) for name in ("model", "machine", "layout", "job"))
