"""What stands before the app: keys, a limit on bodies, and headers that keep browsers careful. Plain ASGI."""

from __future__ import annotations

import hmac
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lanternpp.serve.refusals import refusal
from lanternpp.serve.terms import Terms

HEADERS = {  # of every answer that does not say otherwise
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}


class Guard(ABC):
    """Passes a request on, or refuses it."""

    def __init__(self, app: ASGIApp):
        self.app = app

    @abstractmethod
    def refuse(self, scope: Scope) -> ASGIApp | None:
        """The answer to a request that is not passed on; None: it is."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer; a WebSocket, which takes no answer, is closed."""
        answer = self.refuse(scope) if scope["type"] in ("http", "websocket") else None
        if answer is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            await answer(scope, receive, send)


class Keys(Guard):
    """Lets in who names one of the keys as a bearer token, which no browser sends by itself.

    `scope["state"]["client"]` then says which of the keys it was. Without keys everybody is let in.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], open: Sequence[str]):
        """open: paths that want no key."""
        super().__init__(app)
        self.keys, self.open = [key.encode() for key in keys], open

    def refuse(self, scope: Scope) -> ASGIApp | None:
        """401 where no key is named, or a wrong one."""
        if not self.keys or scope["path"] in self.open:
            return None
        which = self._which(told(Headers(scope=scope).get("authorization", "")))
        if which is not None:
            scope.setdefault("state", {})["client"] = f"key {which}"
            return None
        message = "this server wants one of its API keys, as Authorization: Bearer KEY"
        return refusal(401, message, "invalid_api_key", WWW_Authenticate="Bearer")

    def _which(self, key: bytes) -> int | None:
        """The number of the key that this is. Every key is compared, in a time that tells nothing."""
        same = [hmac.compare_digest(key, own) for own in self.keys]
        return same.index(True) if any(same) else None


def told(authorization: str) -> bytes:
    """The key in an Authorization header, or nothing."""
    scheme, _, value = authorization.partition(" ")
    return value.strip().encode() if scheme.lower() == "bearer" else b""


class Hosts(Guard):
    """Lets in who calls the server by one of its names, so that no page elsewhere reaches it under a name of its own.

    A name is a host name, an address, or `*.` and the end of a host name.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str]):
        super().__init__(app)
        self.names = [name.lower() for name in names]

    def refuse(self, scope: Scope) -> ASGIApp | None:
        """400 where it is called by another name."""
        if self._known(called(Headers(scope=scope))):
            return None
        message = "this server is not called by the name in the Host header; --allow-host NAME lets it be"
        return refusal(400, message, "unknown_host")

    def _known(self, name: str) -> bool:
        return any(
            name == own or (own.startswith("*.") and name.endswith(own[1:])) or own == "*"
            for own in self.names
        )


class Origins(Guard):
    """Refuses what pages of other sites ask for through a visitor's browser: they can neither draw here nor read.

    A browser names the site whose page asks in `Origin`, or, where nothing is sent, its kind in `Sec-Fetch-Site`. Only
    the server's own page may ask: scheme aside (a proxy may add TLS), its address is the one in the Host header. Links
    to the server are followed from anywhere, and programs send neither header. No answer ever has a CORS header.
    """

    def refuse(self, scope: Scope) -> ASGIApp | None:
        """403 where a page of another site asks."""
        if not foreign(Headers(scope=scope)):
            return None
        message = "this server answers no page of another site; a proxy must pass the Host header on"
        return refusal(403, message, "foreign_origin")


def foreign(headers: Headers) -> bool:
    """Whether a page of another site asks."""
    if origins := headers.getlist("origin"):
        return any(origin.lower() not in own_origins(headers.get("host", "")) for origin in origins)
    elsewhere = headers.get("sec-fetch-site") in ("cross-site", "same-site")
    return elsewhere and headers.get("sec-fetch-mode") != "navigate"


def own_origins(host: str) -> set[str]:
    """How browsers name the site of a Host header; they leave a scheme's own port out."""
    host = host.lower()
    return {f"http://{host.removesuffix(':80')}", f"https://{host.removesuffix(':443')}"}


def called(headers: Headers) -> str:
    """The name in the Host header, without its port."""
    try:
        return urlsplit("//" + headers.get("host", "")).hostname or ""
    except ValueError:  # half an IPv6 address
        return ""


class BodyLimit:
    """Refuses bodies above a limit with 413, be their length announced or not."""

    def __init__(self, app: ASGIApp, most: int):
        self.app, self.most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, counting what is received."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        message = f"the body is larger than {self.most} bytes; send less"
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self.most:
            answer = refusal(413, message, "body_too_large", Connection="close")
            await answer(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            part = await receive()
            received += len(part.get("body", b""))
            if received > self.most:
                raise HTTPException(413, message, {"Connection": "close"})
            return part

        await self.app(scope, counted, send)


class SafeHeaders:
    """Headers of every answer."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Add them where the answer starts."""
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


def guards(terms: Terms, page: Iterable[str] = ()) -> list[tuple[Any, dict[str, Any]]]:
    """What stands before an app under these terms, with its options; the last one is asked first.

    page: paths that nobody needs a key for.
    """
    found: list[tuple[Any, dict[str, Any]]] = [
        (BodyLimit, {"most": terms.body}),
        (Keys, {"keys": terms.keys, "open": ("/healthz", *page)}),
        (Origins, {}),
    ]
    if terms.hosts:
        found.append((Hosts, {"names": terms.hosts}))
    return [*found, (SafeHeaders, {})]
