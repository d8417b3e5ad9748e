"""Error responses, in the format of OpenAI's API: one sentence for the user, never a traceback."""

from __future__ import annotations

import logging
import re
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from lanternpp.api.options import DIALS, RENAMED
from lanternpp.errors import InputError, ModelError, one_line, reason
from lanternpp.serve.schemas import REQUEST_DIALS, REQUESTED, Fault, ImagesRequest, Refusal
from lanternpp.serve.tickets import Cancelled, Closed, Expired, Full

log = logging.getLogger("lanternpp.serve")
BROKEN = "the server failed at this request; its log has the error"
MAX_VALUE_CHARS = 300  # longest value that a message repeats
CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
# Names of dials that are no fields, and what a message says of them.
OTHER_NAMES = {
    dial.spoken: f"called {dial.name!r} here" for dial in DIALS.values() if dial.spoken != dial.name
}
OTHER_NAMES |= {old: f"now {name!r}" for old, name in RENAMED.items()}
# Options of the command line that requests have as fields: what a message says of `--accept` holds for `accept`.
FIELD_OF = {"--method": "method"} | {
    said: dial.name for dial in REQUEST_DIALS for said in (dial.option, dial.option[2:], dial.full_name)
}
TWICE_NAMED = [re.escape(dial.full_name) for dial in REQUEST_DIALS if dial.names]
# What is quoted, which stays, or a dial with both names, or an option or word.
WORD = re.compile("|".join([r"(?<!\w)'[^']*'", '"[^"]*"', *TWICE_NAMED, "-{0,2}[a-z][a-z_-]*"]))
CLIENT_CLOSED = 499  # nginx's status for a client that disconnected; only the log and the metrics see it


def error_response(
    status: int, message: str, code: str | None = None, param: str | None = None, **headers: str
) -> JSONResponse:
    """A response with this status and an error as its body; keyword arguments are headers, with _ for -."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    body = Refusal(error=Fault(message=one_line(message), type=kind, param=param, code=code))
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return JSONResponse(body.model_dump(), status, headers=named)


def response_for(error: Exception) -> JSONResponse:
    """The response for an error that reading a request or drawing a picture raised."""
    match error:
        case RequestValidationError():
            return validation_error_response(list(error.errors()))
        case HTTPException(status_code=400) if isinstance(error.__cause__, RecursionError | ValueError):
            why = reason(error.__cause__).partition(";")[0]  # then advice to whoever runs Python
            return error_response(400, f"the body is not JSON: {why}", "invalid_json")
        case HTTPException():
            answer = error_response(error.status_code, str(error.detail), CODES.get(error.status_code))
            answer.headers.update(error.headers or {})
            return answer
        case Full():
            return error_response(429, str(error), "queue_full", Retry_After=str(error.retry_after))
        case Closed():
            return error_response(503, str(error), "shutting_down", Retry_After="5", Connection="close")
        case Expired():
            # OpenAI's client tries again otherwise, with as little time.
            return error_response(504, str(error), "deadline", x_should_retry="false")
        case Cancelled() | ClientDisconnect():
            return error_response(CLIENT_CLOSED, str(error), "cancelled")
        case InputError() if not isinstance(error, ModelError):
            message = WORD.sub(lambda found: FIELD_OF.get(found[0], found[0]), str(error))
            first, *rest = WORD.findall(message) or [""]
            param = first if first in ImagesRequest.model_fields else None
            param = param or next((word for word in rest if word in REQUESTED), None)
            return error_response(400, message, "invalid_value", param)
    log.error("a request failed", exc_info=error)
    return error_response(500, BROKEN, "internal_error")


def validation_error_response(errors: list[dict[str, Any]]) -> JSONResponse:
    """The response for a body that does not follow the schema: names the first of pydantic's errors."""
    first = errors[0]
    place = [str(part) for part in first["loc"][1:]]
    param = place[0] if place else None
    why = first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] == "json_invalid":
        return error_response(
            400, f"the body is not JSON: {first.get('ctx', {}).get('error', why)}", "invalid_json"
        )
    if param is None:
        remedy = "send a JSON object as Content-Type: application/json"
        return error_response(400, f"the body is not valid: {why}; {remedy}", "invalid_body")
    if first["type"] == "extra_forbidden":
        known, now = param[:MAX_VALUE_CHARS], OTHER_NAMES.get(param, "unknown")
        return error_response(
            400, f"field {one_line(repr(param), MAX_VALUE_CHARS)} is {now}", "unknown_parameter", known
        )
    if first["type"] == "missing":
        return error_response(400, f"field {param!r} is missing", "missing_parameter", param)
    value = one_line(repr(first.get("input")), MAX_VALUE_CHARS)
    return error_response(400, f"{param} {value} is not valid: {why}", "invalid_value", param)


def install_error_handlers(app: FastAPI) -> None:
    """Give an app these responses for errors outside its routes: invalid bodies, unknown paths, exceptions."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        return response_for(error)

    async def broken(request: Request, error: Exception) -> JSONResponse:
        return error_response(500, BROKEN, "internal_error")  # starlette raises it again, and uvicorn logs it

    for kind in (RequestValidationError, HTTPException, ClientDisconnect, InputError):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(Exception, broken)
