"""``fivefold data``: reads, tokenizes and packs a corpus."""

from __future__ import annotations

from fivefold.cli.corpus import hold_folder, prepare_corpus
from fivefold.cli.options import show
from fivefold.cli.request_options import takes_request
from fivefold.requests.commands import DataOptions


@takes_request(DataOptions)
def data(request: DataOptions) -> None:
    """Read, tokenize and pack a corpus into the run's folder; `train` does it too, if it has not been done."""
    from fivefold.model.catalog import resolve
    from fivefold.trainer.run import Run

    settings = Run.load(request.run)
    with hold_folder(settings.folder):
        index = prepare_corpus(settings, resolve(settings.model))
    if request.as_json:
        show(index.model_dump_json(indent=2))
        return
    for split in ("train", "heldout"):
        part = index.part(split)
        show(f"{split:8} {part.documents:>9,} documents {part.tokens:>14,} tokens")
