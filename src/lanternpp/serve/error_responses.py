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
from lanternpp.serve.tickets import CANCELLED, CLOSED, EXPIRED, FULL

log = logging.getLogger("lanternpp.serve")
SERVER_FAILED = "the server failed at this request; its log has the error"
MAX_VALUE_CHARS = 300  # characters of a value that a message repeats
CODE_BY_STATUS = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
CODE_BY_STATUS |= {FULL: "queue_full", CANCELLED: "cancelled", CLOSED: "shutting_down", EXPIRED: "deadline"}
# Names of dials elsewhere or in earlier versions that are no fields here, each with the hint of the error message.
HINT_BY_NAME = {
    dial.spoken: f"called {dial.name!r} here" for dial in DIALS.values() if dial.spoken != dial.name
}
HINT_BY_NAME |= {old: f"now {name!r}" for old, name in RENAMED.items()}
# Messages name options of the command line, such as `--accept`; in responses the names of the fields replace them.
FIELD_BY_OPTION = {"--method": "method"} | {
    name: dial.name for dial in REQUEST_DIALS for name in (dial.option, dial.option[2:], dial.full_name)
}
FULL_NAMES = [re.escape(dial.full_name) for dial in REQUEST_DIALS if dial.names]
# A quotation, which is not replaced, or a dial with both of its names, or an option, or a word.
TOKEN = re.compile("|".join([r"(?<!\w)'[^']*'", '"[^"]*"', *FULL_NAMES, "-{0,2}[a-z][a-z_-]*"]))


def error_response(
    status: int, message: str, code: str | None = None, param: str | None = None, **headers: str
) -> JSONResponse:
    """Return a response with this status and an error as its body; keyword arguments are headers, with _ for -."""
    types = {401: "authentication_error", 429: "rate_limit_error"}
    error_type = types.get(status, "invalid_request_error" if status < 500 else "server_error")
    body = Refusal(error=Fault(message=one_line(message), type=error_type, param=param, code=code))
    http_headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return JSONResponse(body.model_dump(), status, headers=http_headers)


def response_for(error: Exception) -> JSONResponse:
    """Return the response for an error that reading a request or drawing a picture raised."""
    match error:
        case RequestValidationError():
            return validation_error_response(list(error.errors()))
        case ClientDisconnect() | HTTPException(__cause__=ClientDisconnect()):
            return error_response(CANCELLED, "the client disconnected", CODE_BY_STATUS[CANCELLED])
        case HTTPException(status_code=400, __cause__=RecursionError() | ValueError() as cause):
            # After the semicolon Python's messages have advice for programmers, which the client is not given.
            explanation = reason(cause).partition(";")[0]
            return error_response(400, f"the body is not JSON: {explanation}", "invalid_json")
        case HTTPException():
            code = CODE_BY_STATUS.get(error.status_code)
            response = error_response(error.status_code, str(error.detail), code)
            response.headers.update(error.headers or {})
            return response
        case InputError() if not isinstance(error, ModelError):
            message = TOKEN.sub(lambda token: FIELD_BY_OPTION.get(token[0], token[0]), str(error))
            # A message about a field begins with its name; a message about a dial may name it later.
            tokens = TOKEN.findall(message)
            if tokens and tokens[0] in ImagesRequest.model_fields:
                param = tokens[0]
            else:
                param = next((token for token in tokens if token in REQUESTED), None)
            return error_response(400, message, "invalid_value", param)
    log.error("a request failed", exc_info=error)
    return error_response(500, SERVER_FAILED, "internal_error")


def validation_error_response(errors: list[dict[str, Any]]) -> JSONResponse:
    """Return the response for a body that does not follow the schema, with the first of pydantic's errors."""
    error = errors[0]
    path = error["loc"][1:]  # after "body"
    explanation = error["msg"][:1].lower() + error["msg"][1:]
    if error["type"] == "json_invalid":
        explanation = error.get("ctx", {}).get("error", explanation)
        return error_response(400, f"the body is not JSON: {explanation}", "invalid_json")
    if not path:
        remedy = "send a JSON object as Content-Type: application/json"
        return error_response(400, f"the body is not valid: {explanation}; {remedy}", "invalid_body")
    param = str(path[0])
    if error["type"] == "extra_forbidden":
        message = f"field {one_line(repr(param), MAX_VALUE_CHARS)} is {HINT_BY_NAME.get(param, 'unknown')}"
        return error_response(400, message, "unknown_parameter", param[:MAX_VALUE_CHARS])
    if error["type"] == "missing":
        return error_response(400, f"field {param!r} is missing", "missing_parameter", param)
    value = one_line(repr(error.get("input")), MAX_VALUE_CHARS)
    return error_response(400, f"{param} {value} is not valid: {explanation}", "invalid_value", param)


def install_error_handlers(app: FastAPI) -> None:
    """Answer the errors outside an app's routes too: invalid bodies, unknown paths, exceptions."""

    async def respond(request: Request, error: Exception) -> JSONResponse:
        return response_for(error)

    async def respond_500(request: Request, error: Exception) -> JSONResponse:
        return error_response(500, SERVER_FAILED, "internal_error")  # uvicorn logs the error

    for error_class in (RequestValidationError, HTTPException, ClientDisconnect, InputError):
        app.add_exception_handler(error_class, respond)
    app.add_exception_handler(Exception, respond_500)
