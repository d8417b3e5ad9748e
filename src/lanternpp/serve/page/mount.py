"""The page in the server's app: nothing of Gradio is reachable but what the page itself asks for."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from lanternpp.errors import InputError
from lanternpp.pipeline import Pipeline
from lanternpp.serve.batcher import Batcher

# What the page asks for: itself, Gradio's own scripts and styles, and its two ends of a queue.
OPEN = re.compile(
    r"/(|config|theme\.css|favicon\.ico|robots\.txt|manifest\.json|(assets|static|svelte)/.+"
    r"|gradio_api/(queue/join|queue/data|heartbeat/[^/]+|cancel|reset|startup-events|app_id|theme\.css))/?"
)
NOT_HERE = b'{"error":{"message":"nothing is here; the page is at /, the API at /v1","type":"not_found"}}'


def require() -> None:
    """InputError where the library of the page is missing."""
    try:
        os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
        import gradio  # noqa: F401
    except ImportError:
        raise InputError(
            "the page needs gradio; run pip install 'lanternpp[serve]', or pass --no-page"
        ) from None


def mount_page(
    app: Any, batcher: Batcher, pipe: Pipeline, limit: int = 1000, deadline: float | None = None
) -> None:
    """Serve the page at / of a FastAPI app; call it last, for it answers whatever no other route takes.

    limit: characters of a prompt. deadline: seconds from a press until its pictures must be finished.
    Raises InputError where gradio is missing.
    """
    require()
    import gradio as gr

    from lanternpp.serve.page.layout import build_page

    theme = gr.themes.Base(
        primary_hue=gr.themes.colors.orange,
        neutral_hue=gr.themes.colors.stone,
        font=["system-ui", "sans-serif"],
        font_mono=["ui-monospace", "monospace"],
    )
    gr.mount_gradio_app(
        app,
        build_page(batcher, pipe, limit, deadline),
        path="/",
        footer_links=[],
        run_history=False,
        show_error=False,
        ssr_mode=False,
        enable_monitoring=False,
        mcp_server=False,
        pwa=False,
        max_file_size=0,
        theme=theme,
        css=(Path(__file__).parent / "style.css").read_text(encoding="utf-8"),
    )
    mounted = app.router.routes[-1]
    mounted.app = Gate(mounted.app)


class Gate:
    """Answers 404 to whatever the page does not ask for: uploads, files, proxies and a second API."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One ASGI call."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] == "lifespan" or (scope["type"] == "http" and OPEN.fullmatch(path or "/")):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(NOT_HERE))]
            await send({"type": "http.response.start", "status": 404, "headers": headers})
            await send({"type": "http.response.body", "body": NOT_HERE})
        else:
            await send({"type": "websocket.close", "code": 1008})
