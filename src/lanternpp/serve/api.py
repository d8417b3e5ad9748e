"""The routes: OpenAI's images and models, health, and figures."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from lanternpp.serve import schemas
from lanternpp.serve.batcher import Batcher
from lanternpp.serve.calibration import Calibration
from lanternpp.serve.desk import Desk
from lanternpp.serve.metrics import CONTENT, Metrics
from lanternpp.serve.orders import Cancelled, Drawn, Ticket, unlogged
from lanternpp.serve.refusals import explain, refusal
from lanternpp.serve.schemas import ImagesRequest, Refusal
from lanternpp.serve.streaming import PictureStream
from lanternpp.serve.terms import Terms
from lanternpp.targets.base import prompt_warnings

REASONS = {
    400: "Something in the request will not do",
    401: "No API key, or a wrong one",
    403: "A page of another site asks, by way of its visitor's browser",
    404: "No such model",
    413: "The body is too large",
    429: "The queue is full; Retry-After says when to try again",
    500: "The server failed",
    503: "The server shuts down",
    504: "Not finished by the deadline",
}


def reasons(*status: int) -> dict[int | str, dict[str, Any]]:
    """Refusals of a route, for the OpenAPI document."""
    return {code: {"model": Refusal, "description": REASONS[code]} for code in status}


async def together(request: Request, tickets: list[Ticket]) -> list[Drawn]:
    """All pictures of a request. Gives all up as soon as one fails, or the client goes away (Cancelled)."""
    pictures = asyncio.gather(*(ticket.drawn() for ticket in tickets))
    unlogged(pictures)
    gone = asyncio.ensure_future(disconnected(request))
    try:
        either: set[asyncio.Future[Any]] = {pictures, gone}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not pictures.done():
            raise Cancelled("the client went away")
        return pictures.result()
    finally:
        gone.cancel()
        pictures.cancel()
        for ticket in tickets:
            ticket.cancel()


async def disconnected(request: Request) -> None:
    """Returns when the client goes away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def client_of(request: Request) -> str:
    """Who takes turns with whom: the holders of keys, else the addresses."""
    named = getattr(request.state, "client", None)
    return named or (request.client.host if request.client else "")


def measured(calibration: Calibration | None, busy: bool) -> schemas.CalibrationState | None:
    """What is told of the measuring of trees."""
    if calibration is None:
        return None
    over: Literal["failed", "done"] = "failed" if calibration.failed else "done"
    going: Literal["paused", "measuring"] = "paused" if busy else "measuring"
    state = over if calibration.over else going
    return schemas.CalibrationState(state=state, done=calibration.done, total=calibration.total)


def router(batcher: Batcher, terms: Terms, metrics: Metrics) -> APIRouter:
    """All routes of the API."""
    desk, routes = Desk(batcher, terms), APIRouter()
    encoders = CapacityLimiter(1)  # prompts wait here, not in the threads that finished pictures need
    card = schemas.ModelCard(id=batcher.pipe.name)
    no_model = f"is not served here; use {card.id!r}"

    @routes.post(
        "/v1/images/generations",
        response_model=schemas.ImagesResponse,
        responses={
            200: {
                "description": "Pictures, or with stream events of them",
                "content": {"text/event-stream": {"schema": {"type": "string"}}},
            },
            **reasons(*REASONS),
        },
        summary="Draw pictures",
        operation_id="createImage",
    )
    async def generations(request: Request, asked: ImagesRequest) -> Response:
        """Draw pictures of a prompt, as OpenAI's Images API does."""
        if asked.model not in (None, card.id):
            return refusal(404, f"model {asked.model!r} {no_model}", "model_not_found", "model")
        try:
            orders = desk.orders(asked, client_of(request))
            # who has no place is told so before anything is encoded
            with batcher.places(len(orders)) as enter, prompt_warnings() as warned:
                tickets = await run_sync(enter, orders, limiter=encoders)
            if asked.stream:
                return PictureStream(desk, asked, tickets, warned)
            drawn = await together(request, tickets)
            return JSONResponse(await run_in_threadpool(desk.answer, asked, tickets, drawn))
        except Exception as error:
            return explain(error)

    @routes.get("/v1/models", responses=reasons(401, 403), summary="List models", operation_id="listModels")
    async def models() -> schemas.ModelList:
        """The one model that is served."""
        return schemas.ModelList(data=[card])

    @routes.get(
        "/v1/models/{model:path}",
        response_model=schemas.ModelCard,
        responses=reasons(401, 403, 404),
        summary="Look a model up",
        operation_id="retrieveModel",
    )
    async def model(model: str) -> schemas.ModelCard | JSONResponse:
        """The model, if it is the one that is served."""
        return (
            card
            if model == card.id
            else refusal(404, f"model {model!r} {no_model}", "model_not_found", "model")
        )

    @routes.get(
        "/healthz",
        response_model=schemas.Health,
        responses={503: {"model": schemas.Health, "description": "It shuts down"}, **reasons(403)},
        summary="Whether requests are taken",
        operation_id="health",
    )
    async def healthz() -> JSONResponse:
        """200, or 503 from the moment on that it shuts down."""
        stats, closed = batcher.stats, batcher.closed
        state = schemas.Health(
            status="draining" if closed else "ok",
            running=stats.running,
            queued=stats.queued,
            calibration=measured(batcher.calibration, bool(stats.running or stats.queued)),
        )
        return JSONResponse(state.model_dump(), 503 if closed else 200)

    @routes.get(
        "/metrics",
        response_class=Response,
        responses={
            200: {
                "description": "Prometheus' text format",
                "content": {"text/plain": {"schema": {"type": "string"}}},
            },
            **reasons(401, 403),
        },
        summary="Figures for Prometheus",
        operation_id="metrics",
    )
    async def figures() -> Response:
        """Requests, queue, batch size, codes per pass, seconds."""
        return Response(metrics.text(), media_type=CONTENT)

    return routes
