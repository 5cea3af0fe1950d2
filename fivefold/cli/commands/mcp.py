"""``fivefold mcp``: tools for coding assistants, over the Model Context Protocol. Does not import torch."""

from __future__ import annotations

from fivefold.cli.request_options import accept_request
from fivefold.errors import UserError
from fivefold.requests.commands import McpOptions


@accept_request(McpOptions)
def mcp(request: McpOptions) -> None:
    """Serve predict, search, compare, ask, explain, read and write as tools of the Model Context Protocol.

    It needs `pip install 'fivefold[mcp]'`. A coding assistant starts this command and communicates with it over stdin
    and stdout. It writes no file, unless --write is given: then the tool `write` creates files below FOLDER.
    """
    from fivefold.cli.tools import serve

    if not request.folder.is_dir():
        raise UserError(f"{request.folder} is not a folder; name the folder that the tools may write to")
    serve(request.folder, writes=request.write)
