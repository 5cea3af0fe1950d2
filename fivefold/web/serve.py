"""Serves the page on 127.0.0.1 until interrupted, and opens the browser."""

from __future__ import annotations

import errno
import socket
import threading
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import uvicorn

from fivefold.errors import UserError
from fivefold.web.app import FIRST, create
from fivefold.web.guard import BODY_BYTES

HOST = "127.0.0.1"


def serve(folder: Path, *, port: int, browser: bool, local: Path, say: Callable[[str], None]) -> None:
    """Serve the page for the files below ``folder``; ``port`` 0: any free port."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; name the one whose runs and files the page may read")
    listener = _listen(port)
    port = listener.getsockname()[1]
    address = f"http://{HOST}:{port}/"
    say(f"{address} shows {folder.resolve()}; end it with Ctrl-C")
    threading.Thread(target=_request_first_page, args=[port], daemon=True).start()
    if browser:
        threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()
    config = uvicorn.Config(
        create(folder, local=local),
        log_level="warning",
        access_log=False,
        timeout_keep_alive=30,
        limit_concurrency=64,
        timeout_graceful_shutdown=2,
        server_header=False,
        h11_max_incomplete_event_size=BODY_BYTES,  # a question with a pasted config is long
    )
    with listener:
        uvicorn.Server(config).run(sockets=[listener])


def _request_first_page(port: int) -> None:
    """Request the first page once: the browser then finds the catalogs and templates loaded."""
    with suppress(OSError, HTTPException):
        connection = HTTPConnection(HOST, port, timeout=30)
        connection.request("GET", FIRST)
        connection.getresponse().read()
        connection.close()


def _listen(port: int) -> socket.socket:
    """Return a socket that listens on ``port`` of the loopback address."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen()  # a connection made before the server has started waits
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} is taken; name another with --port, or --port 0 for any") from None
        raise
    return listener
