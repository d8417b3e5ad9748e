"""The middleware before the app: API keys, accepted hosts and origins, a limit on bodies, security headers. Plain ASGI.

Hosts: the Host header must be one of the server's names. This prevents DNS rebinding, where a page of another site points
its own host name at this server. `*` in an accepted name stands for anything.

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
ORIGIN = re.compile("^[a-z]+://[^/]*", re.IGNORECASE)  # requests to a proxy have a whole URL as their path
HEADERS = {  # added to every answer that does not set them itself
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}


class Guard:
    """Passes a request on or refuses it, and counts the answers."""

    def __init__(self, app: ASGIApp, config: ServerConfig, answered: Callable[[str, int], None]):
        """answered: called with the path and the status of every answer."""
        self.app, self.config, self.answered = app, config, answered
        self.public = {"/healthz", *(page.FILES if config.page else ())}  # paths that need no key
        self.hosts = [name.lower() for name in config.hosts]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that is refused; of others count the bytes that are received."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope = {**scope, "path": ORIGIN.sub("", scope["path"]) or "/"}
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # uvicorn leaves out the body of the answer
        received = 0
        most = self.config.upload_limit if scope["path"] == EDITS else self.config.body_limit

        async def counted() -> Message:
            nonlocal received
            part = await receive()
            received += len(part.get("body", b""))
            if received > most:
                raise HTTPException(413, TOO_LARGE.format(most), {"Connection": "close"})
            return part

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                self.answered(scope["path"], message["status"])
            await send(message)

        await (self._refusal(scope, most) or self.app)(scope, counted, sent)

    def _refusal(self, scope: Scope, most: int) -> ASGIApp | None:
        """The answer to a request that is refused; None: pass it on. `scope["state"]["client"]` becomes "key N".

        most: bytes of a body.
        """
        headers = Headers(scope=scope)
        name = host_name(headers.get("host", ""))
        if self.hosts and not any(fnmatchcase(name, known) for known in self.hosts):
            message = "the Host header is not a name of this server; --allow-host NAME adds one"
            return error_response(400, message, "unknown_host")
        if cross_site(headers):
            message = "this server does not answer pages of other sites; a proxy must pass the Host header on"
            return error_response(403, message, "foreign_origin")
        if self.config.keys and scope["path"] not in self.public:
            number = self._key_number(bearer_token(headers.get("authorization", "")))
            if number is None:
                message = "this server needs one of its API keys, as Authorization: Bearer KEY"
                return error_response(401, message, "invalid_api_key", WWW_Authenticate="Bearer")
            scope.setdefault("state", {})["client"] = f"key {number}"
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > most:
            return error_response(413, TOO_LARGE.format(most), "body_too_large", Connection="close")
        return None

    def _key_number(self, key: bytes) -> int | None:
        """The number of this key, or None. All keys are compared, in constant time, so that the time reveals nothing."""
        same = [hmac.compare_digest(key, known.encode()) for known in self.config.keys]
        return same.index(True) if any(same) else None


def bearer_token(authorization: str) -> bytes:
    """The key in an Authorization header; empty where it has none. No browser sends a bearer token by itself."""
    scheme, _, value = authorization.partition(" ")
    return value.strip().encode() if scheme.lower() == "bearer" else b""


def cross_site(headers: Headers) -> bool:
    """Whether a page of another site sent the request."""
    if origins := headers.getlist("origin"):
        host = headers.get("host", "").lower()
        # browsers leave out the default port of a scheme
        own = {f"http://{host.removesuffix(':80')}", f"https://{host.removesuffix(':443')}"}
        return any(origin.lower() not in own for origin in origins)
    elsewhere = headers.get("sec-fetch-site") in ("cross-site", "same-site")
    return elsewhere and headers.get("sec-fetch-mode") != "navigate"
