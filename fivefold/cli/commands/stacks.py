"""``fivefold stacks``: the catalog of stacks. Does not import torch."""

from __future__ import annotations

from fivefold.cli.options import show
from fivefold.cli.request_options import accept_request
from fivefold.requests.commands import StacksOptions


@accept_request(StacksOptions)
def stacks(request: StacksOptions) -> None:
    """List the training software that predictions support, or those that contain a word: names for --stack."""
    from fivefold.rendering import catalogs
    from fivefold.requests.catalogs import dump_entries, list_stacks

    entries = list_stacks(request.word)
    if request.as_json:
        show(dump_entries(entries))
        return
    show(catalogs.list_stacks(entries))
