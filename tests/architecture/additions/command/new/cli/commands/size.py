"""``fivefold size``: the parameters of a model."""

from __future__ import annotations

from fivefold.api.verbs import size as count
from fivefold.cli.options import show
from fivefold.cli.request_options import takes_request
from fivefold.requests.commands import SizeOptions


@takes_request(SizeOptions)
def size(request: SizeOptions) -> None:
    """Print the parameters of a model."""
    show(f"{count(request.model)} {request.unit}")
