"""``fivefold web``: the web page."""

from __future__ import annotations

from fivefold.cli.options import print_line
from fivefold.cli.request_options import accept_request
from fivefold.errors import UserError
from fivefold.requests.commands import WebOptions
from fivefold.requests.machines import find_local_machine_file


@accept_request(WebOptions)
def web(request: WebOptions) -> None:
    """Serve the web page on 127.0.0.1 only: plan, search, compare, dry-run, and look at runs."""
    try:
        from fivefold.web.serve import serve
    except ModuleNotFoundError as error:
        raise UserError(f"the page needs the extra web ({error.name}): pip install 'fivefold[web]'") from None
    serve(request.folder, port=request.port, browser=request.browser, local=find_local_machine_file(), say=print_line)
