"""Serves the tools over the Model Context Protocol on stdin and stdout, with the official SDK (extra ``mcp``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from mcp import types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from fivefold.cli.tools import call_tool, list_tools
from fivefold.version import __version__

INSTRUCTIONS = (
    "Fivefold plans the training step of large language models: memory, FLOPs, communication and time of a layout, "
    "without a GPU. Models are catalog names (llama3-8b) or paths of a config.json, machines are h100:64, layouts are "
    "keywords such as 'dp8 tp8 zero1 mbs1 ac=selective'. Ask `search` for the best layouts, `predict` for one of them, "
    "`ask` for what fits, `explain` for why a run failed, `read` and `write` for configs of other trainers. An error "
    "is one line that says how to fix it."
)


def make_server(folder: Path, *, writes: bool) -> Any:
    """Make the server of the tools; ``writes``: the tool ``write`` may write files below ``folder``."""
    lock = anyio.Lock()  # answers go through sys.stdout, one after the other

    async def on_list_tools(context: Any, parameters: Any) -> Any:
        tools = [
            types.Tool(
                name=tool.name,
                description=tool.description,
                input_schema=tool.request.model_json_schema(),
                annotations=types.ToolAnnotations(
                    read_only_hint=tool.is_read_only,
                    destructive_hint=False,
                    idempotent_hint=True,
                    open_world_hint=False,
                ),
            )
            for tool in list_tools(writes=writes)
        ]
        return types.ListToolsResult(tools=tools)

    async def on_call_tool(context: Any, parameters: Any) -> Any:
        def answer() -> Any:
            return call_tool(parameters.name, parameters.arguments or {}, folder=folder, writes=writes)

        async with lock:
            reply = await anyio.to_thread.run_sync(answer)
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=reply.text)],
            structured_content=reply.data,
            is_error=reply.is_error,
        )

    return Server(
        "fivefold",
        version=__version__,
        instructions=INSTRUCTIONS,
        on_list_tools=on_list_tools,
        on_call_tool=on_call_tool,
    )


def serve(folder: Path, *, writes: bool) -> None:
    """Serve the tools until the client closes stdin."""

    async def run() -> None:
        server = make_server(folder, writes=writes)
        async with stdio_server() as (incoming, outgoing):
            await server.run(incoming, outgoing, server.create_initialization_options())

    anyio.run(run)
