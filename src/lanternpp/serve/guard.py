"""Middleware before the app: API keys, accepted hosts and origins, a limit on bodies, security headers. Plain ASGI."""

from __future__ import annotations

import hmac
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lanternpp.serve.error_responses import error_response
from lanternpp.serve.server_config import ServerConfig

HEADERS = {  # added to every answer that does not set them itself
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}


class Guard(ABC):
    """Middleware that passes a request on or refuses it."""

    def __init__(self, app: ASGIApp):
        self.app = app

    @abstractmethod
    def refuse(self, scope: Scope) -> ASGIApp | None:
        """The answer to a request that is refused; None: pass it on."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it. A refused WebSocket is closed, since it cannot be answered."""
        answer = self.refuse(scope) if scope["type"] in ("http", "websocket") else None
        if answer is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            await answer(scope, receive, send)


class Keys(Guard):
    """Accepts requests with one of the keys as a bearer token, which no browser sends by itself.

    `scope["state"]["client"]` is then "key N", N the number of that key. Without keys, every request is accepted.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], open: Sequence[str]):
        """open: paths that need no key."""
        super().__init__(app)
        self.keys, self.open = [key.encode() for key in keys], open

    def refuse(self, scope: Scope) -> ASGIApp | None:
        """401 without a key, or with a wrong one."""
        if not self.keys or scope["path"] in self.open:
            return None
        which = self._which(bearer_token(Headers(scope=scope).get("authorization", "")))
        if which is not None:
            scope.setdefault("state", {})["client"] = f"key {which}"
            return None
        message = "this server needs one of its API keys, as Authorization: Bearer KEY"
        return error_response(401, message, "invalid_api_key", WWW_Authenticate="Bearer")

    def _which(self, key: bytes) -> int | None:
        """The number of this key, or None. All keys are compared, in constant time, so that the time reveals nothing."""
        same = [hmac.compare_digest(key, known) for known in self.keys]
        return same.index(True) if any(same) else None


def bearer_token(authorization: str) -> bytes:
    """The key in an Authorization header; empty where it has none."""
    scheme, _, value = authorization.partition(" ")
    return value.strip().encode() if scheme.lower() == "bearer" else b""


class Hosts(Guard):
    """Accepts requests whose Host header is one of the server's names. This prevents DNS rebinding: a page of another site
    that points its own host name at this server.

    A name is a host name, an address, `*.` and the end of a host name, or `*` for any.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str]):
        super().__init__(app)
        self.names = [name.lower() for name in names]

    def refuse(self, scope: Scope) -> ASGIApp | None:
        """400 for any other name."""
        if self._known(host_name(Headers(scope=scope))):
            return None
        message = "the Host header is not a name of this server; --allow-host NAME adds one"
        return error_response(400, message, "unknown_host")

    def _known(self, name: str) -> bool:
        return any(
            name == known or (known.startswith("*.") and name.endswith(known[1:])) or known == "*"
            for known in self.names
        )


class Origins(Guard):
    """Refuses requests that pages of other sites send through a visitor's browser: they can neither draw nor read.

    A browser sends the site of the page in `Origin`, or, with requests that have no body, whether it is another site in
    `Sec-Fetch-Site`. Only the server's own page is accepted: its origin is the Host header, with either scheme, since a
    proxy may add TLS. Links from anywhere to the server work, and programs other than browsers send neither header. No
    answer has a CORS header.
    """

    def refuse(self, scope: Scope) -> ASGIApp | None:
        """403 for a page of another site."""
        if not cross_site(Headers(scope=scope)):
            return None
        message = "this server does not answer pages of other sites; a proxy must pass the Host header on"
        return error_response(403, message, "foreign_origin")


def cross_site(headers: Headers) -> bool:
    """Whether a page of another site sent the request."""
    if origins := headers.getlist("origin"):
        return any(origin.lower() not in own_origins(headers.get("host", "")) for origin in origins)
    elsewhere = headers.get("sec-fetch-site") in ("cross-site", "same-site")
    return elsewhere and headers.get("sec-fetch-mode") != "navigate"


def own_origins(host: str) -> set[str]:
    """The values of `Origin` for pages of this host; browsers leave out the default port of a scheme."""
    host = host.lower()
    return {f"http://{host.removesuffix(':80')}", f"https://{host.removesuffix(':443')}"}


def host_name(headers: Headers) -> str:
    """The name in the Host header, without its port."""
    try:
        return urlsplit("//" + headers.get("host", "")).hostname or ""
    except ValueError:  # an incomplete IPv6 address
        return ""


class BodyLimit:
    """Refuses bodies above a limit with 413, whether or not Content-Length announces them."""

    def __init__(self, app: ASGIApp, max_bytes: int):
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, counting the bytes that are received."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        message = f"the body is larger than {self.max_bytes} bytes; send less"
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self.max_bytes:
            answer = error_response(413, message, "body_too_large", Connection="close")
            await answer(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            part = await receive()
            received += len(part.get("body", b""))
            if received > self.max_bytes:
                raise HTTPException(413, message, {"Connection": "close"})
            return part

        await self.app(scope, counted, send)


class SafeHeaders:
    """Adds the security headers to every answer."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and add the headers to its answer."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self.app(scope, receive, sent)


def guards(config: ServerConfig, page: Iterable[str] = ()) -> list[tuple[Any, dict[str, Any]]]:
    """The middleware that a server needs, each with its options, in the order of `add_middleware`: the last runs first.

    page: paths that need no key.
    """
    found: list[tuple[Any, dict[str, Any]]] = [
        (BodyLimit, {"max_bytes": config.max_body_bytes}),
        (Keys, {"keys": config.keys, "open": ("/healthz", *page)}),
        (Origins, {}),
    ]
    if config.hosts:
        found.append((Hosts, {"names": config.hosts}))
    return [*found, (SafeHeaders, {})]
