"""The middleware before the app, in plain ASGI: API keys, accepted hosts and origins, a limit on bodies, security headers.

Hosts: the Host header must be one of the server's names. This prevents DNS rebinding, where a page of another site points
its own host name at this server. `*` in an accepted name stands for any characters.

Origins: requests that pages of other sites send through a visitor's browser can neither draw nor read. A browser sends the
site of the page in `Origin`, or, with requests that have no body, whether it is another site in `Sec-Fetch-Site`. Only
the server's own page is accepted: its origin is the Host header, with either scheme, since a proxy may add TLS. Links from
anywhere to the server work, and programs other than browsers send neither header. No answer has a CORS header.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable
from fnmatch import fnmatchcase

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lanternpp.serve import page
from lanternpp.serve.config import EDITS, ServerConfig, host_name
from lanternpp.serve.error_responses import error_response

TOO_LARGE = "the body is larger than {} bytes; send less"
# A client that takes this server for a proxy sends a whole URL.
ORIGIN = re.compile("^[a-z]+://[^/]*", re.IGNORECASE)
HEADERS = {  # added to every answer that does not set them itself
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}


class Guard:
    """Passes each request to the app or rejects it, and counts the responses."""

    def __init__(self, app: ASGIApp, config: ServerConfig, answered: Callable[[str, int], None]):
        """answered: called with the path and the status of every response."""
        self.app, self.config, self.answered = app, config, answered
        self.public = {"/healthz", *(page.FILES if config.page else ())}  # paths that need no key
        self.hosts = [name.lower() for name in config.hosts]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a rejected request; pass any other to the app, but receive no more bytes than the limit."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope = {**scope, "path": ORIGIN.sub("", scope["path"]) or "/"}
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # uvicorn leaves out the body of the answer
        num_bytes = 0  # received
        max_bytes = self.config.upload_limit if scope["path"] == EDITS else self.config.body_limit

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > max_bytes:
                raise HTTPException(413, TOO_LARGE.format(max_bytes), {"Connection": "close"})
            return message

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                self.answered(scope["path"], message["status"])
            await send(message)

        await (self._rejection(scope, max_bytes) or self.app)(scope, receive_limited, send_with_headers)

    def _rejection(self, scope: Scope, max_bytes: int) -> ASGIApp | None:
        """Return the response that rejects a request, or None; with an API key, `scope["state"]["client"]` becomes "key N"."""
        headers = Headers(scope=scope)
        name = host_name(headers.get("host", ""))
        if self.hosts and not any(fnmatchcase(name, pattern) for pattern in self.hosts):
            message = "the Host header is not a name of this server; --allow-host NAME adds one"
            return error_response(400, message, "unknown_host")
        if cross_site(headers):
            message = "this server does not answer pages of other sites; a proxy must pass the Host header on"
            return error_response(403, message, "foreign_origin")
        if self.config.keys and scope["path"] not in self.public:
            # No browser sends a bearer token by itself, so a page of another site cannot use a key of the visitor.
            scheme, _, token = headers.get("authorization", "").partition(" ")
            number = self._key_number(token.strip()) if scheme.lower() == "bearer" else None
            if number is None:
                message = "this server needs one of its API keys, as Authorization: Bearer KEY"
                return error_response(401, message, "invalid_api_key", WWW_Authenticate="Bearer")
            scope.setdefault("state", {})["client"] = f"key {number}"
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > max_bytes:
            return error_response(413, TOO_LARGE.format(max_bytes), "body_too_large", Connection="close")
        return None

    def _key_number(self, token: str) -> int | None:
        """Return the index of this API key, or None. All keys are compared in constant time, so that time reveals nothing."""
        matches = [hmac.compare_digest(token.encode(), key.encode()) for key in self.config.keys]
        return matches.index(True) if any(matches) else None


def cross_site(headers: Headers) -> bool:
    """Return whether a page of another site sent the request."""
    if origins := headers.getlist("origin"):
        host = headers.get("host", "").lower()
        # Browsers leave out the default port of a scheme.
        own_origins = {f"http://{host.removesuffix(':80')}", f"https://{host.removesuffix(':443')}"}
        return any(origin.lower() not in own_origins for origin in origins)
    other_site = headers.get("sec-fetch-site") in ("cross-site", "same-site")
    return other_site and headers.get("sec-fetch-mode") != "navigate"
