"""The app: the API, the page, and the middleware before them."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI

from lanternpp.api.options import DrawOptions
from lanternpp.api.pipeline import Pipeline, versions
from lanternpp.api.results import check_output
from lanternpp.models.base import PromptWarning
from lanternpp.serve import page
from lanternpp.serve.batcher import Batcher
from lanternpp.serve.config import ServerConfig
from lanternpp.serve.error_responses import install_error_handlers
from lanternpp.serve.guard import Guard
from lanternpp.serve.metrics import Metrics
from lanternpp.serve.routes import router


@dataclass(frozen=True)
class ServerSpec:
    """What a server is made of: a model and a configuration."""

    options: DrawOptions
    config: ServerConfig

    def load_model(self) -> Pipeline:
        """Read the model, and compile where that is asked for. InputError, also where the method needs what the model lacks."""
        pipe = Pipeline.from_pretrained(**self.options.pretrained)
        check_output(pipe.target)
        settings = self.config.settings(pipe, None, {})
        pipe.new_engine(settings)
        for power in range(self.config.slots.bit_length() if settings.compile else 0):
            pipe.warm(replace(settings, batch_size=1 << power))
        return pipe

    def start(self, pipe: Pipeline) -> tuple[Batcher, FastAPI]:
        """A batcher, which the caller must close, and the app that uses it. Raises InputError."""
        warnings.simplefilter("ignore", PromptWarning)  # a prompt of a client is not the operator's concern
        batcher = Batcher(pipe, self.config)
        try:
            return batcher, create_app(batcher)
        except BaseException:
            batcher.close(False, 0)
            raise


def create_app(batcher: Batcher) -> FastAPI:
    """The ASGI app that uses a batcher, which the caller must close."""
    app = FastAPI(
        title="lanternpp",
        version=versions()["lanternpp"],
        summary="Pictures by speculative decoding, over the OpenAI Images API",
        docs_url=None,  # FastAPI's pages load scripts from other hosts
        redoc_url=None,
    )
    # A client's broken form is answered with an error and is no warning to the operator.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    config, metrics = batcher.config, Metrics(batcher)
    app.include_router(router(batcher, metrics))
    install_error_handlers(app)
    if config.page:
        app.routes.extend(page.routes(batcher.pipe, config))
    public = tuple(page.FILES) if config.page else ()
    app.add_middleware(Guard, config=config, public=public, answered=metrics.answered)
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
