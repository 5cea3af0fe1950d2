"""``fivefold size``: the parameters of a model."""

from __future__ import annotations

from fivefold.api.functions import size as count
from fivefold.cli.options import show
from fivefold.cli.request_options import accept_request
from fivefold.requests.commands import SizeOptions


@accept_request(SizeOptions)
def size(request: SizeOptions) -> None:
    """Print the parameters of a model."""
    show(f"{count(request.model)} {request.unit}")
