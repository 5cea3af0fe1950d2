"""``fivefold data``: reads, tokenizes and packs a corpus."""

from __future__ import annotations

from fivefold.cli.corpus import hold_folder, prepare_corpus
from fivefold.cli.options import show
from fivefold.cli.request_options import accept_request
from fivefold.requests.commands import DataOptions


@accept_request(DataOptions)
def data(request: DataOptions) -> None:
    """Read, tokenize and pack a corpus into the run's folder; `train` does it too, if it has not been done."""
    from fivefold.model.catalog import resolve
    from fivefold.trainer.data.samples import describe_split, show_pair, show_sample
    from fivefold.trainer.data.shards import SPLITS
    from fivefold.trainer.run import Run

    settings = Run.load(request.run)
    model = resolve(settings.model)
    settings.check_data(model)
    with hold_folder(settings.folder):
        index = prepare_corpus(settings, model)
    if request.as_json:
        show(index.model_dump_json(indent=2))
        return
    shards = settings.shards(model)
    for split in SPLITS:
        show(describe_split(settings.loader(shards, split=split)))
    ranks_pairs = settings.job.objective == "dpo"
    for number in range(min(request.samples, index.train.documents // (2 if ranks_pairs else 1))):
        show("")
        show((show_pair if ranks_pairs else show_sample)(shards, number, sequence=settings.job.sequence))
