"""The page in the server's app: nothing of Gradio is reachable but what the page itself asks for."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from lanternpp.serve.batcher import Batcher
from lanternpp.serve.refusals import refusal
from lanternpp.serve.terms import Terms

# Gradio reads these when it is imported: it tells nobody, and counts its own events for nobody.
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
os.environ.setdefault("GRADIO_ANALYTICS_CACHE_FREQUENCY", str(10**9))
import gradio as gr

from lanternpp.serve.page.layout import build_page

# What a browser asks for: the page, Gradio's scripts and styles, and the two ends of its queue.
OPEN = re.compile(
    r"/(config|theme\.css|favicon\.ico|robots\.txt|manifest\.json|(assets|static|svelte)/.+"
    r"|gradio_api/(queue/join|queue/data|heartbeat/\w+|cancel|reset|startup-events|app_id|theme\.css))?/?"
)


def mount_page(app: Any, batcher: Batcher, terms: Terms) -> None:
    """Serve the page at / of a FastAPI app; call it last, for it answers whatever no other route takes."""
    gr.mount_gradio_app(
        app,
        build_page(batcher, terms),
        path="/",
        footer_links=[],
        run_history=False,
        show_error=False,
        ssr_mode=False,
        enable_monitoring=False,
        mcp_server=False,
        pwa=False,
        max_file_size=0,
        theme=gr.themes.Base(
            primary_hue=gr.themes.colors.orange,
            neutral_hue=gr.themes.colors.stone,
            font=["system-ui", "sans-serif"],
            font_mono=["ui-monospace", "monospace"],
        ),
        css=(Path(__file__).parent / "style.css").read_text(encoding="utf-8"),
    )
    mounted = app.router.routes[-1]
    assert isinstance(mounted, Mount)
    mounted.app = Gate(mounted.app)


class Gate:
    """Answers 404 to whatever the page does not ask for: Gradio's uploads, files, proxies and its own API."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or refuse."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "http" and not OPEN.fullmatch(scope["path"]):
            answer = refusal(404, "nothing is here; the page is at /, the API at /v1", "not_found")
            await answer(scope, receive, send)
        else:
            await self.app(scope, receive, send)
