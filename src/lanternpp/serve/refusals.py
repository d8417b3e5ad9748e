"""Answers to requests that get none: OpenAI's shape, one sentence, never a traceback."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from lanternpp.errors import InputError
from lanternpp.serve.orders import Cancelled, Closed, Expired, Full
from lanternpp.serve.schemas import Fault, Refusal

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger("lanternpp.serve")
BROKEN = "the server failed at this request; its log says how"
LONGEST = 300  # characters of a value that a sentence repeats
CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
GONE = 499  # the status of a request whose client went away; nobody reads it


def refusal(
    status: int, message: str, code: str | None = None, param: str | None = None, **headers: str
) -> JSONResponse:
    """A refusal with this status; headers by name, with _ for -."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    body = Refusal(error=Fault(message=printable(message), type=kind, param=param, code=code))
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return JSONResponse(body.model_dump(), status, headers=named)


def explain(error: Exception) -> JSONResponse:
    """The refusal for whatever drawing a picture may raise."""
    match error:
        case Full():
            return refusal(429, str(error), "queue_full", Retry_After=str(error.retry_after))
        case Closed():
            return refusal(503, str(error), "shutting_down", Retry_After="5", Connection="close")
        case Expired():
            return refusal(504, str(error), "deadline")
        case Cancelled():
            return refusal(GONE, str(error), "cancelled")
        case InputError():
            return refusal(400, str(error), "invalid_value")
    log.error("a request failed", exc_info=error)
    return refusal(500, BROKEN, "internal_error")


def refuse_invalid(errors: list[dict[str, Any]]) -> JSONResponse:
    """The refusal for a body that does not follow the schema: its first fault."""
    first = errors[0]
    place = [str(part) for part in first["loc"][1:]]
    param = place[0] if place else None
    said = first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] == "json_invalid":
        return refusal(400, f"the body is no JSON: {first.get('ctx', {}).get('error', said)}", "invalid_json")
    if param is None:
        return refusal(400, f"the body will not do: {said}; send a JSON object", "invalid_body")
    if first["type"] == "extra_forbidden":
        return refusal(400, f"field {short(param)} is unknown", "unknown_parameter", param[:LONGEST])
    if first["type"] == "missing":
        return refusal(400, f"field {param!r} is missing", "missing_parameter", param)
    return refusal(400, f"{param} {short(first.get('input'))} will not do: {said}", "invalid_value", param)


def short(value: object) -> str:
    """A value as a sentence can repeat it."""
    text = repr(value)
    return text if len(text) <= LONGEST else text[:LONGEST] + "..."


def printable(message: str) -> str:
    """A sentence that can be written as UTF-8, on one line, of a sane length."""
    clean = " ".join(message.encode("utf-8", "backslashreplace").decode().split())
    return clean if len(clean) <= 5 * LONGEST else clean[: 5 * LONGEST] + "..."


def install(app: FastAPI) -> None:
    """Let an app answer this way to what goes wrong outside its routes."""
    from fastapi.exceptions import RequestValidationError

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return refuse_invalid(list(error.errors()))

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        answer = refusal(error.status_code, str(error.detail), CODES.get(error.status_code))
        answer.headers.update(error.headers or {})
        return answer

    async def broken(request: Request, error: Exception) -> JSONResponse:
        return refusal(500, BROKEN, "internal_error")  # starlette raises it again, and uvicorn logs it

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, broken)
