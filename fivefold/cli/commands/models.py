"""``fivefold models``: the catalog of models. Does not import torch."""

from __future__ import annotations

from fivefold.cli.options import print_line, show
from fivefold.cli.request_options import accept_request
from fivefold.requests.commands import ModelsOptions


@accept_request(ModelsOptions)
def models(request: ModelsOptions) -> None:
    """List the models of the catalog, or those that contain a word: names for MODEL."""
    from fivefold.rendering import catalogs
    from fivefold.requests.catalogs import dump_entries, list_families, list_models

    if request.families:
        families = list_families(request.word)
        show(dump_entries(families) if request.as_json else catalogs.list_families(families))
        return
    entries = list_models(request.word)
    if request.as_json:
        show(dump_entries(entries))
        return
    show(catalogs.list_models(entries))
    print_line("Any Hugging Face config.json and any model file (.toml) work as well.")
