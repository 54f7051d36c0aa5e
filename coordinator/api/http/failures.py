"""Error responses in OpenAI's format."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextvars import ContextVar
from reprlib import Repr

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from coordinator.api.http.responses import Error
from outrider.protocol.errors import InvalidRequest, OutriderError, shorten

_BRANCH = re.compile(r"(str|int)$|constrained-|[A-Z]|.*\[")  # names that pydantic gives to a union's branches
_CLASS = re.compile(" or instance of .*")
_TYPES = {401: "authentication_error", 429: "rate_limit_error", 499: "cancelled"}
FIELD_NAMES = ContextVar[dict[str, str]]("field names")  # of the current request, by their names in gRPC
SHAPE = ContextVar[Callable[[Error, int], Error] | None]("shape of errors", default=None)  # of the current request
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
_RETRY_AFTER_MS = {429: 1000, 503: 2000, 504: 1000}  # for errors without a time

_short = Repr()
_short.maxlevel, _short.maxstring, _short.maxother, _short.maxlong = 3, 80, 80, 80


def body_of(error: OutriderError, status: int | None = None) -> Error:
    error.with_traceback(None)  # its frames are those of a session, which keeps its error: a cycle
    status = status or error.http_status
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    code = "model_not_found" if error.field == "model" and status == 404 else _CODES.get(status, error.code)
    name = next((it for grpc_name, it in FIELD_NAMES.get({}).items() if error.field.startswith(grpc_name)), error.field)
    message = error.message.replace(error.field, name)
    for grpc_name, http_name in (("params.", ""), ("tokens.ids", "prompt"), ("chat.messages", "messages")):
        message, name = message.replace(grpc_name, http_name), name.replace(grpc_name, http_name)
    told: Error = {"error": {"message": message, "type": kind, "param": name or None, "code": code}}
    return shape(told, status) if (shape := SHAPE.get()) else told


def respond(error: OutriderError, status: int | None = None) -> JSONResponse:
    status = status or error.http_status
    headers = {}
    if (retry_after_ms := error.retry_after_ms or _RETRY_AFTER_MS.get(status)) is not None:
        headers["Retry-After"] = str(math.ceil(retry_after_ms / 1000))
        headers["Retry-After-Ms"] = str(retry_after_ms)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(body_of(error, status), status, headers)


async def on_outrider_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, OutriderError)
    return respond(error)


async def on_http_error(request: Request, error: Exception) -> JSONResponse:
    """Return the response for an unknown route or method."""
    assert isinstance(error, HTTPException)
    hint = "; /docs lists the paths" if error.status_code == 404 else ""
    fault = InvalidRequest(f"{request.method} {shorten(request.scope['path'])}: {error.detail}{hint}", field="path")
    response = respond(fault, error.status_code)
    response.headers.update(error.headers or {})
    return response


def of_validation(error: ValidationError) -> InvalidRequest:
    """Return the first validation error, a type's before its fields'; for a union, that which matched furthest."""
    first = max(
        sorted(error.errors(include_url=False), key=lambda one: one["loc"][-1:] != ("type",)),
        key=lambda one: ("too_" in one["type"], len(one["loc"]), [at for at in one["loc"] if isinstance(at, int)]),
    )
    unknown = first["type"] == "extra_forbidden"  # its last part is the client's
    parts = [str(part) for part in first["loc"]]
    kept = [part for part in parts[: len(parts) - unknown] if not _BRANCH.match(part)] + parts[-1:] * unknown
    field = shorten(".".join(kept))
    if unknown:
        return InvalidRequest(f"there is no field {field}", field=field, limit="a field that is known")
    message = _CLASS.sub("", first["msg"].removeprefix("Value error, "))
    if not field:
        return InvalidRequest(message, field="body")
    value = "absent" if first["type"] == "missing" else _short.repr(first["input"])
    return InvalidRequest(f"{field} is {value}: {message}", field=field, value=value, limit=message)
