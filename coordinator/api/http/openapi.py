"""OpenAPI document: request bodies from their models, replies and all possible statuses."""

from __future__ import annotations

from importlib.metadata import version

from pydantic import BaseModel

from coordinator.api.http.bodies import ChatBody, CompletionBody
from coordinator.api.http.shapes import REFS, REPLIES, Json, an_object, ref
from coordinator.sessions.idempotency import MAX_KEY_CHARACTERS

_CHAT: Json = {"messages": [{"role": "user", "content": "Name three rivers."}], "max_tokens": 64, "seed": 7}
_COMPLETION: Json = {"prompt": "Three rivers are", "max_tokens": 16, "temperature": 0}
_STATUSES = {
    400: "The request is invalid; the error names the field and its limit",
    401: "The key is missing or wrong",
    404: "The model does not exist",
    405: "The method is not allowed",
    408: "The body arrived too slowly",
    409: "The idempotency key was used for another request, or the target has changed",
    413: "The body is too large",
    415: "The body is not declared as JSON",
    429: "No capacity: try again after Retry-After",
    500: "Internal error",
    502: "A worker was lost and no other could continue",
    503: "No worker is ready, or the server is shutting down: try again after Retry-After",
    504: "A deadline passed",
}
_RETRY = (429, 503)


def document() -> Json:
    """Return the OpenAPI document."""
    schemas = {**REPLIES}
    for body in (ChatBody, CompletionBody):
        schemas |= _schemas(body)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Outrider",
            "version": version("outrider"),
            "description": "OpenAI's API over lossless, disaggregated speculative decoding. "
            "Fields marked as ignored change nothing; other fields are rejected.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{}, {"key": []}],
        "paths": {
            "/v1/chat/completions": {"post": _generates("Answer a chat", ChatBody, "ChatCompletion", _CHAT)},
            "/v1/completions": {"post": _generates("Continue a text", CompletionBody, "Completion", _COMPLETION)},
            "/v1/models": {"get": _gets("The served model", "ModelList", 503)},
            "/v1/models/{model}": {
                "get": {
                    **_gets("One model", "Model", 404, 503),
                    "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}],
                }
            },
            "/fleet": {"get": _gets("The coordinator and its workers", "Fleet")},
            "/health": {"get": _open(_gets("Liveness of this process", "Status"))},
            "/ready": {"get": _open(_gets("Readiness to answer requests", "Status", 503))},
            "/metrics": {"get": _plain("Counters and gauges for Prometheus", "text/plain")},
            "/openapi.json": {"get": _plain("This document", "application/json")},
            "/docs": {"get": _plain("This document as a page", "text/html")},
        },
        "components": {
            "schemas": schemas,
            "responses": {str(status): _error(status) for status in _STATUSES},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "If the server has keys."}},
        },
    }


def _schemas(body: type[BaseModel]) -> Json:
    schema = body.model_json_schema(ref_template=REFS, by_alias=True)
    return {**schema.pop("$defs", {}), body.__name__: schema}


def _generates(summary: str, body: type[BaseModel], reply: str, example: Json) -> Json:
    content = {"application/json": {"schema": ref(body.__name__), "example": example}}
    return {
        "summary": summary,
        "parameters": [
            {
                "name": "Idempotency-Key",
                "in": "header",
                "description": "Requests with the same key generate once; repeats get the first answer.",
                "schema": {"type": "string", "maxLength": MAX_KEY_CHARACTERS, "pattern": "^[!-~]*$"},
            }
        ],
        "requestBody": {"required": True, "content": content},
        "responses": {
            "200": {
                "description": "The answer; with stream: server-sent events that end in [DONE]",
                "content": {
                    "application/json": {"schema": ref(reply)},
                    "text/event-stream": {"schema": _events(f"{reply}Chunk")},
                },
            },
            **_errors(400, 401, 404, 408, 409, 413, 415, 429, 502, 503, 504),
        },
    }


def _gets(summary: str, reply: str, *statuses: int) -> Json:
    content = {"application/json": {"schema": ref(reply)}}
    return {
        "summary": summary,
        "responses": {"200": {"description": summary, "content": content}, **_errors(401, *statuses)},
    }


def _plain(summary: str, media: str) -> Json:
    return {
        "summary": summary,
        "responses": {"200": {"description": summary, "content": {media: {}}}, **_errors(401)},
    }


def _open(operation: Json) -> Json:
    """Return the operation without authentication."""
    responses = {status: reply for status, reply in operation["responses"].items() if status != "401"}
    return {**operation, "security": [], "responses": responses}


def _errors(*statuses: int) -> Json:
    return {str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted({405, 500, *statuses})}


def _error(status: int) -> Json:
    reply: Json = {"description": _STATUSES[status], "content": {"application/json": {"schema": ref("Error")}}}
    if status in _RETRY:
        reply["headers"] = {"Retry-After": {"description": "Seconds", "schema": {"type": "integer"}}}
    return reply


def _events(chunk: str) -> Json:
    """Return the schema of a server-sent event."""
    part = {"type": "string", "contentMediaType": "application/json", "contentSchema": ref(chunk)}
    error = {"type": "string", "contentMediaType": "application/json", "contentSchema": ref("Error")}
    return an_object({"data": {"anyOf": [part, error, {"const": "[DONE]"}]}})
