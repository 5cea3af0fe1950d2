"""``fivefold numerics``: the error of a run's precision recipe against fp32, tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.cli.corpus import prepare_corpus
from fivefold.cli.options import print_line, show
from fivefold.cli.request_options import accept_request
from fivefold.errors import UserError
from fivefold.requests.commands import NumericsOptions

if TYPE_CHECKING:
    from fivefold.model.spec import Model
    from fivefold.trainer.generate.source import WeightSource
    from fivefold.trainer.run import Run


@accept_request(NumericsOptions)
def numerics(request: NumericsOptions) -> None:
    """Run one batch in the run's precision and in fp32: underflow, overflow and error of every tensor."""
    from fivefold.diagnosis.numerics import examine
    from fivefold.model.catalog import resolve
    from fivefold.rendering import numerics as shown
    from fivefold.rendering.charts import save
    from fivefold.rendering.progress import show_progress
    from fivefold.trainer.data.loader import Loader
    from fivefold.trainer.model.precision import check_chip
    from fivefold.trainer.process import Process
    from fivefold.trainer.run import Run

    precision, sequences, chart, json = request.precision, request.sequences, request.chart, request.as_json
    settings = Run.load(request.run)
    model, job = resolve(settings.model), settings.job
    if precision is not None:
        job = type(job).read(job.model_dump() | {"precision": precision}, origin="--precision")
    if sequences > job.global_batch or job.global_batch % sequences:
        raise UserError(f"--sequences {sequences} does not divide the run's global_batch={job.global_batch}; use 1")
    if job.objective != "pretrain":
        raise UserError('numerics: compares losses of all tokens; use [job] objective = "pretrain"')
    if job.adapter is not None:
        raise UserError("numerics: does not compare adapters yet; remove [job] adapter from the run file")
    source = _choose_source(settings, request.weights, model=model)
    prepare_corpus(settings, model)
    shards = settings.shards(model)
    loader = Loader(shards, sequence=job.sequence, seed=job.seed, ahead=model.mtp_depth)
    tokens = loader.batch(0, global_batch=sequences, rank=0, ranks=1, micro_batches=1, mbs=sequences)[0]
    process = Process()
    device = process.start()
    job = job.replace(emulate=job.emulate or device.type == "cpu")
    try:
        check_chip(job, model=model)
        with show_progress("numerics") as report:
            result = examine(
                model=model,
                job=job,
                source=source,
                tokens=tokens,
                end=shards.tokenizer.end,
                device=device,
                report=report,
            )
    finally:
        process.end()
    show(result.model_dump_json(indent=2) if json else shown.render_page(result))
    if chart is not None:
        save(shown.draw_error_map(result), chart)
        print_line(f"drew {chart}")


def _choose_source(run: Run, weights: Path | None, *, model: Model) -> WeightSource | None:
    """Return the source of the weights: those named, the run's newest, or those it starts from; None: random ones."""
    from fivefold.trainer.checkpoint.checkpoint_folder import find_latest
    from fivefold.trainer.generate.source import WeightSource

    path = weights or find_latest(run.folder / "checkpoints") or run.start.weights
    if path is None:
        return None
    source = WeightSource.find(path)
    if (parameters := source.model.parameters) != model.parameters:
        raise UserError(
            f"{path} has {parameters} parameters, but {model.name} has {model.parameters}; name a checkpoint of it"
        )
    return source
