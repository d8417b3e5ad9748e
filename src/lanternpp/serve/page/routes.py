"""The routes of the page: its files, which are the same on every server, and /page/setup, which describes this one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from lanternpp.api.pipeline import Pipeline
from lanternpp.serve.config import ServerConfig
from lanternpp.serve.page.setup import setup

FOLDER = Path(__file__).parent
SCRIPTS = ("api.js", "dial.js", "page.js", "side.js")
FILES = {  # path -> file and its type; served without a key, since the page asks for the key itself
    "/": ("index.html", "text/html"),
    "/page/style.css": ("style.css", "text/css"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
    **{f"/page/{name}": (name, "text/javascript") for name in SCRIPTS},
}
POLICY = (  # scripts and styles only from files of the server; pictures from its answers, as blobs
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)


def router(pipe: Pipeline, config: ServerConfig) -> APIRouter:
    """The routes of the page for a model; /page/setup is what it shows, as JSON."""
    routes, shown = APIRouter(include_in_schema=False), setup(pipe, config)

    @routes.get("/page/setup")
    async def describe() -> JSONResponse:
        return JSONResponse(shown)

    for path, (name, kind) in FILES.items():
        routes.get(path)(_answering((FOLDER / name).read_bytes(), kind))
    return routes


def _answering(content: bytes, kind: str) -> Callable[[], Response]:
    """A route that answers with a file."""
    headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}

    def answer() -> Response:
        return Response(content, media_type=kind, headers=headers)

    return answer
