"""Access checks in front of every request: who may send it, how large it is, and what a page may load.

Host must be a loopback name, of any port, because a port may be forwarded here (DNS rebinding); Origin must be that
same host (CSRF). Another site may link to a page, but not load from it.
A body has at most ``BODY_BYTES``, a dropped file ``MAX_FILE_BYTES``. The content security policy allows no inline
script, no style but the sheet of the pages, no other host.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fivefold.web.dropped import MAX_FILE_BYTES
from fivefold.web.static_files import STYLES_HASH

BODY_BYTES = 2**20  # a config.json has a few thousand bytes
DROPPED_PATH = "/files"  # receives files that are dropped on a page, which have a limit of their own
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
POLICY = (
    f"default-src 'none'; script-src 'self'; style-src '{STYLES_HASH}'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Guard:
    """ASGI middleware that rejects, with one line of JSON, requests that do not come from this server's own pages."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        limit = MAX_FILE_BYTES + 1 if scope.get("path") == DROPPED_PATH else BODY_BYTES
        refusal = next(iter(self._list_refusals(headers, limit)), None)
        if refusal is not None:
            code, line = refusal
            await JSONResponse({"detail": line}, status_code=code, headers=HEADERS)(scope, receive, send)
            return
        left = limit

        async def receive_limited() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:  # a body without a stated length: end it here
                return {"type": "http.disconnect"}
            return message

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self.app(scope, receive_limited, send_with_headers)

    def _list_refusals(self, headers: Headers, limit: int) -> Iterable[tuple[int, str]]:
        """Yield status and reason for each rule of the page's security that a request breaks."""
        host = headers.get("host", "")
        if not _is_loopback(host):
            yield 403, "this address is not the page's own; open it as fivefold web printed it"
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            yield 403, "the request comes from another site"
        site = headers.get("sec-fetch-site", "none")
        mode = headers.get("sec-fetch-mode", "navigate")
        if site not in ("none", "same-origin") and mode != "navigate":
            yield 403, "the request comes from another site"
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > limit:
            yield 413, f"the body is longer than {limit:,} bytes"


def _is_loopback(host: str) -> bool:
    """Tell whether ``host``, perhaps with a port, is one of this computer's loopback names."""
    try:
        parts = urlsplit(f"//{host}")
        hostname, _ = parts.hostname, parts.port  # raises if the port is invalid
    except ValueError:
        return False
    return hostname in LOOPBACK and parts.netloc == host and parts.username is None
