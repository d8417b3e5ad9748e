"""The app: the API, the page, and the middleware before them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lanternpp.api.arguments import DrawOptions
from lanternpp.api.pipeline import Pipeline, versions
from lanternpp.api.pixels import check_output
from lanternpp.errors import InputError
from lanternpp.models.base import PromptWarning
from lanternpp.serve.batcher import Batcher
from lanternpp.serve.server_config import ServerConfig
from lanternpp.serve.startup import EXTRA

if TYPE_CHECKING:
    from fastapi import FastAPI


@dataclass(frozen=True)
class ServerSpec:
    """All that a server is made of: its model, its configuration, and the arguments of its batcher."""

    options: DrawOptions
    config: ServerConfig
    slots: int = 8  # most rows of a batch runner
    queue: int = 64  # most pictures that wait
    max_runners: int = 4
    page: bool = True

    def load_model(self) -> Pipeline:
        """Read the model, and compile where that is asked for. InputError, also where the method needs what the model lacks."""
        pipe = Pipeline.from_pretrained(**self.options.pretrained)
        check_output(pipe.target)
        settings = self.config.settings(pipe, None, {})
        pipe.new_engine(settings)
        for power in range(self.slots.bit_length() if settings.compile else 0):
            pipe.warm(replace(settings, batch_size=1 << power))
        return pipe

    def start(self, pipe: Pipeline) -> tuple[Batcher, FastAPI]:
        """A batcher, which the caller must close, and the app that uses it. Raises InputError."""
        warnings.simplefilter("ignore", PromptWarning)  # a prompt of a client is not the operator's concern
        batcher = Batcher(pipe, self.slots, self.queue, self.max_runners)
        try:
            return batcher, create_app(batcher, self.config, self.page)
        except BaseException:
            batcher.close(False, 0)
            raise


def create_app(batcher: Batcher, config: ServerConfig | None = None, page: bool = True) -> FastAPI:
    """The ASGI app that uses a batcher, which the caller must close.

    page: whether to serve the page at /. Raises InputError where a package of the extra `serve` is missing.
    """
    try:
        from fastapi import FastAPI

        from lanternpp.serve.api import router
        from lanternpp.serve.error_responses import install_error_handlers
        from lanternpp.serve.guard import guards
        from lanternpp.serve.metrics import CountRequests, Metrics
        from lanternpp.serve.page import FILES
        from lanternpp.serve.page import router as page_router
    except ImportError as error:
        raise InputError(EXTRA.format(name=error.name)) from None
    config = config or ServerConfig()
    app = FastAPI(
        title="lanternpp",
        version=versions()["lanternpp"],
        summary="Pictures by speculative decoding, over the OpenAI Images API",
        docs_url=None,  # FastAPI's pages load scripts from other hosts
        redoc_url=None,
    )
    metrics = Metrics(batcher)
    app.include_router(router(batcher, config, metrics))
    install_error_handlers(app)
    if page:
        app.include_router(page_router(batcher.pipe, config))
    for kind, options in guards(config, FILES if page else ()):
        app.add_middleware(kind, **options)
    app.add_middleware(CountRequests, metrics=metrics)  # added last, runs first
    correct_openapi(app, bool(config.keys))
    return app


def correct_openapi(app: FastAPI, keys: bool) -> None:
    """Correct the OpenAPI document of FastAPI: an invalid body gets 400, not 422; with `keys`, routes need a key."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        schemas = document["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        if keys:
            document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
            document["paths"]["/healthz"]["get"]["security"] = []
        return document

    app.openapi = openapi  # type: ignore[method-assign]
