"""The app: the routes of the API (OpenAI's images and models, health, metrics), the page, and the middleware before them."""

from __future__ import annotations

import asyncio
import logging
import warnings
from dataclasses import dataclass, replace
from typing import IO, Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import APIRouter, FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute

from lanternpp.api.options import DrawOptions
from lanternpp.api.pipeline import Pipeline
from lanternpp.api.results import check_output, versions
from lanternpp.models.base import PromptWarning, prompt_warnings
from lanternpp.serve import page, schemas
from lanternpp.serve.batcher import Batcher
from lanternpp.serve.config import EDITS, ServerConfig
from lanternpp.serve.error_responses import error_response, install_error_handlers, response_for
from lanternpp.serve.guard import Guard
from lanternpp.serve.metrics import CONTENT_TYPE
from lanternpp.serve.new_thread import run_in_new_thread
from lanternpp.serve.request_mapping import RequestMapper
from lanternpp.serve.schemas import ImagesRequest, Refusal
from lanternpp.serve.streaming import PictureStream
from lanternpp.serve.tickets import CLOSED, EXPIRED, FULL, FinishedImage, Ticket


def operation_id(route: APIRoute) -> str:
    """Return the id of a route in the OpenAPI document, as OpenAI names its own: createImage."""
    first, *words = route.name.split("_")
    return first + "".join(map(str.capitalize, words))


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the error responses of a route, for the OpenAPI document."""
    return {status: {"model": Refusal} for status in statuses}


IMAGES_ROUTE: dict[str, Any] = {
    "response_model": schemas.ImagesResponse,
    "responses": {
        200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}},
        **refusals(400, 401, 403, 404, 413, FULL, 500, CLOSED, EXPIRED),
    },
}
EDIT_FORM = {  # the schema of a form, whose further fields are those of ImagesRequest
    "type": "object",
    "required": ["image", "prompt"],
    "properties": {"image": {"type": "string", "format": "binary"}, "prompt": {"type": "string"}},
}
MAX_FILES, MAX_FIELDS = 16, 100  # of a form


@dataclass(frozen=True)
class ServerSpec:
    """The options that select a model, and the configuration of the server that draws with it."""

    options: DrawOptions
    config: ServerConfig

    def load_model(self) -> Pipeline:
        """Read the model, and compile it if the settings ask for it. Raises InputError, also where the method cannot be used."""
        pipe = Pipeline.from_pretrained(**self.options.pretrained)
        check_output(pipe.target)
        settings = self.config.settings(pipe, None, {})
        pipe.new_engine(settings)  # raises InputError where the model lacks a part that the method needs
        if settings.compile:
            for exponent in range(self.config.slots.bit_length()):
                pipe.warm(replace(settings, batch_size=1 << exponent))
        return pipe

    def start(self) -> tuple[Batcher, FastAPI]:
        """Read the model; return a batcher, which the caller must close, and the app that uses it. Raises InputError."""
        pipe = run_in_new_thread(self.load_model)
        # Clients' prompts and pictures are not the operator's concern.
        warnings.simplefilter("ignore", PromptWarning)
        warnings.filterwarnings("ignore", module="PIL")
        batcher = Batcher(pipe, self.config)
        return batcher, create_app(batcher)


def create_app(batcher: Batcher) -> FastAPI:
    """Build the ASGI app that uses a batcher, which the caller must close."""
    app = FastAPI(
        title="lanternpp",
        version=versions()["lanternpp"],
        summary="Pictures by speculative decoding, over the OpenAI Images API",
        docs_url=None,  # FastAPI's pages load scripts from other hosts
        redoc_url=None,
        generate_unique_id_function=operation_id,
    )
    # A client's broken form is answered with an error and is no warning to the operator.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    config = batcher.config
    app.include_router(router(batcher))
    install_error_handlers(app)
    if config.page:
        app.routes.extend(page.routes(batcher.pipe, config))
    app.add_middleware(Guard, config=config, answered=batcher.metrics.answered)
    correct_openapi(app, bool(config.keys))
    return app


def correct_openapi(app: FastAPI, keys: bool) -> None:
    """Correct FastAPI's OpenAPI document: an invalid body gets 400, not 422; with `keys`, routes need an API key."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        models = document["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            models.pop(name, None)
        if keys:
            document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
            document["paths"]["/healthz"]["get"]["security"] = []
        return document

    app.openapi = openapi  # type: ignore[method-assign]


async def all_finished(request: Request, tickets: list[Ticket]) -> list[FinishedImage]:
    """Wait for all pictures of a request. If one fails or the client disconnects (status 499), all are cancelled at once."""
    disconnect = asyncio.ensure_future(disconnected(request))
    disconnect.add_done_callback(lambda _: [ticket.cancel() for ticket in tickets])
    try:
        return await asyncio.gather(*(ticket.finished() for ticket in tickets))
    finally:
        disconnect.cancel()  # which cancels the pictures too: after an error of one, the others are not drawn


async def disconnected(request: Request) -> None:
    """Wait until the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def client_of(request: Request) -> str:
    """Return the name by which clients take turns: the number of their API key, else their address."""
    key = getattr(request.state, "client", None)
    return key or (request.client.host if request.client else "")


def router(batcher: Batcher) -> APIRouter:
    """Build all routes of the API."""
    mapper, routes = RequestMapper(batcher), APIRouter()
    # Requests that wait to encode their prompts must not use up the threads that encode finished pictures.
    prompt_encoders = CapacityLimiter(1)
    card = schemas.ModelCard(id=batcher.pipe.name)

    def unknown_model(name: str | None) -> JSONResponse:
        message = f"model {name!r} is not served here; use {card.id!r}"
        return error_response(404, message, "model_not_found", "model")

    @routes.post("/v1/images/generations", **IMAGES_ROUTE)
    async def create_image(request: Request, body: ImagesRequest) -> Response:
        """Draw pictures of a prompt, as OpenAI's Images API does."""
        return await draw(request, body)

    @routes.post(
        EDITS,
        openapi_extra={
            "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": EDIT_FORM}}}
        },
        **IMAGES_ROUTE,
    )
    async def create_image_edit(request: Request) -> Response:
        """Draw what a prompt says of the pictures in the form, which has the fields of `generations` too."""
        async with request.form(max_files=MAX_FILES, max_fields=MAX_FIELDS) as form:
            return await draw(request, *mapper.edit(form))

    async def draw(request: Request, body: ImagesRequest, files: tuple[IO[bytes], ...] = ()) -> Response:
        if body.model not in (None, card.id):
            return unknown_model(body.model)
        try:
            # In a thread, since checking the settings may compute with the model's tensors.
            tickets = await run_sync(mapper.tickets, body, client_of(request), files)
            batcher.accept(tickets)
            try:
                with prompt_warnings() as target_warnings:
                    await run_sync(batcher.encode, tickets, limiter=prompt_encoders)
            except BaseException:  # also where the encoding has not begun
                for ticket in tickets:
                    ticket.cancel()
                raise
            if body.stream:
                return PictureStream(mapper, body, tickets, target_warnings)
            images = await all_finished(request, tickets)
            return JSONResponse(await run_in_threadpool(mapper.answer, body, tickets, images))
        except Exception as error:
            return response_for(error)

    @routes.get("/v1/models", responses=refusals(401, 403))
    async def list_models() -> schemas.ModelList:
        """The one model that is served."""
        return schemas.ModelList(data=[card])

    @routes.get(
        "/v1/models/{model:path}", response_model=schemas.ModelCard, responses=refusals(401, 403, 404)
    )
    async def retrieve_model(model: str) -> schemas.ModelCard | JSONResponse:
        """The model, if it is the one that is served."""
        return card if model == card.id else unknown_model(model)

    @routes.get(
        "/healthz", response_model=schemas.Health, responses={503: {"model": schemas.Health}, **refusals(403)}
    )
    async def health() -> JSONResponse:
        """200; 503 as soon as the server has begun to shut down."""
        closed, running, queued = batcher.closed, batcher.running, batcher.queued
        health = schemas.Health(status="draining" if closed else "ok", running=running, queued=queued)
        return JSONResponse(health.model_dump(), 503 if closed else 200)

    @routes.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **refusals(401, 403)},
    )
    async def metrics() -> Response:
        """Requests, queue, batch size, codes per pass, seconds, for Prometheus."""
        return Response(batcher.metrics.text(), media_type=CONTENT_TYPE)

    return routes
