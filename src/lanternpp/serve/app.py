"""The app: routes, limits and the page."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lanternpp.arguments import DrawOptions
from lanternpp.errors import InputError
from lanternpp.pipeline import Pipeline, versions
from lanternpp.serve.batcher import Batcher
from lanternpp.serve.calibration import Calibration, Steps
from lanternpp.serve.entrance import EXTRA
from lanternpp.serve.terms import Terms
from lanternpp.targets.base import PromptWarning

if TYPE_CHECKING:
    from fastapi import FastAPI

Measure = Callable[[Pipeline, Terms, int], Steps]
log = logging.getLogger("lanternpp.serve")


@dataclass(frozen=True)
class Plan:
    """What a server draws with, its terms, and what its batcher is made with."""

    options: DrawOptions
    terms: Terms
    slots: int = 8
    queue: int = 64
    lanes: int = 4
    measure: Measure | None = None  # finds what to draw with at which size, while nobody waits
    page: bool = True

    def read(self) -> Pipeline:
        """The model; what is missing of the method is missed here. Raises InputError."""
        pipe = Pipeline.from_pretrained(**self.options.pretrained)
        pipe.new_engine(self.terms.settings(pipe, None, {}))
        return pipe

    def open(self, pipe: Pipeline, tell: Callable[[str], None] = log.info) -> tuple[Batcher, FastAPI]:
        """A batcher, which the caller closes, and the app over it. tell: as of `Calibration`. Raises InputError."""
        warnings.simplefilter("ignore", PromptWarning)  # of strangers' prompts
        trees = Calibration(self.measure(pipe, self.terms, self.slots), tell) if self.measure else None
        batcher = Batcher(pipe, self.slots, self.queue, self.lanes, calibration=trees)
        try:
            return batcher, create_app(batcher, self.terms, self.page)
        except BaseException:
            batcher.close(False, 0)
            raise


def create_app(batcher: Batcher, terms: Terms | None = None, page: bool = True) -> FastAPI:
    """The ASGI app over a batcher, which stays the caller's to close.

    page: the page at / as well. Raises InputError where a package of the extra is missing.
    """
    try:
        from fastapi import FastAPI

        from lanternpp.serve.api import router
        from lanternpp.serve.guard import guards
        from lanternpp.serve.metrics import Counted, Metrics
        from lanternpp.serve.page import FILES
        from lanternpp.serve.page import router as page_router
        from lanternpp.serve.refusals import install
    except ImportError as error:
        raise InputError(EXTRA.format(name=error.name)) from None
    terms = terms or Terms()
    app = FastAPI(
        title="lanternpp",
        version=versions()["lanternpp"],
        summary="Pictures by speculative decoding, over the OpenAI Images API",
        docs_url=None,  # these pages would load scripts from other hosts
        redoc_url=None,
    )
    metrics = Metrics(batcher)
    app.include_router(router(batcher, terms, metrics))
    install(app)
    if page:
        app.include_router(page_router(batcher.pipe, terms))
    for kind, options in guards(terms, FILES if page else ()):
        app.add_middleware(kind, **options)
    app.add_middleware(Counted, metrics=metrics)  # added last, runs first
    describe(app, bool(terms.keys))
    return app


def describe(app: FastAPI, keys: bool) -> None:
    """Make the OpenAPI document say what the app does: bodies that will not do get 400, not 422."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        document = made()
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
