"""OpenAPI document: request bodies from their models, replies and all possible statuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, cast

from pydantic import TypeAdapter

from coordinator.admission.waiting.urgency import MAX_TIMEOUT_S, TIMEOUT_HEADER
from coordinator.api.http import responses
from coordinator.api.http.agents.bodies import ChatBody, DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from coordinator.api.http.agents.response_bodies import ResponsesBody
from coordinator.api.http.agents.response_events import ModelResponse, ModelResponseEvent
from coordinator.api.http.agents.tokenize import Detokenized, Tokenized
from coordinator.api.http.bodies import CompletionBody
from coordinator.api.http.messages.bodies import CountTokensBody, MessagesBody
from coordinator.api.http.messages.types import ModelMessage, ModelMessageEvent, TokenCount
from coordinator.api.http.responses import ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk
from coordinator.persistence.idempotency import MAX_KEY_CHARACTERS

Json = dict[str, Any]
REFS = "#/components/schemas/{model}"

_CHAT: Json = {"messages": [{"role": "user", "content": "Name three rivers."}], "max_tokens": 64, "seed": 7}
_COMPLETION: Json = {"prompt": "Three rivers are", "max_tokens": 16, "temperature": 0}
_ITEMS: Json = {"input": "Name three rivers.", "max_output_tokens": 64, "seed": 7}
_TURNS: Json = {"messages": [{"role": "user", "content": "Name three rivers."}]}
_TEXT: Json = {"prompt": "Three rivers are"}
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
    499: "The answer was cancelled by another call",
    500: "Internal error",
    502: "A worker was lost and no other could continue",
    503: "No worker is ready, or the server is shutting down: try again after Retry-After",
    504: "The deadline passed, or would: try again after Retry-After",
}
_KEY = "Requests with the same key generate once; repeats get the first answer."
_TIMEOUT = "Seconds: a request that cannot be answered in this time is refused at once."
_OPEN: Json = {"security": []}
_MODEL: Json = {"parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]}


def document() -> Json:
    """Return the OpenAPI document. Models stand in it as themselves until it refers to them."""
    paths: Json = {
        "/v1/chat/completions": _generates("Answer a chat", ChatBody, _CHAT, ChatCompletion, ChatCompletionChunk),
        "/v1/completions": _generates("Continue a text", CompletionBody, _COMPLETION, Completion, CompletionChunk),
        "/v1/responses": _generates("Answer items", ResponsesBody, _ITEMS, ModelResponse, ModelResponseEvent),
        "/v1/messages": _generates("Answer turns", MessagesBody, _CHAT, ModelMessage, ModelMessageEvent),
        "/v1/messages/count_tokens": _converts("Tokens of turns", (CountTokensBody,), _TURNS, TokenCount),
        "/tokenize": _converts("Tokens of a text or chat", (TokenizeTextBody, TokenizeChatBody), _TEXT, Tokenized),
        "/detokenize": _converts("Text of tokens", (DetokenizeBody,), {"tokens": [40, 41]}, Detokenized),
        "/v1/models": {"get": _gets("The served model", _json(responses.ModelList), 401, 503)},
        "/v1/models/{model}": {"get": _MODEL | _gets("One model", _json(responses.Model), 401, 404, 503)},
        "/fleet": {"get": _gets("The coordinator and its workers", _json(responses.Fleet), 401)},
        "/health": {"get": _OPEN | _gets("Liveness of this process", _json(responses.Status))},
        "/ready": {"get": _OPEN | _gets("Readiness to answer requests", _json(responses.Status), 503)},
        "/metrics": {"get": _gets("Counters and gauges for Prometheus", {"text/plain": {}}, 401)},
        "/openapi.json": {"get": _OPEN | _gets("This document", {"application/json": {}})},
        "/docs": {"get": _OPEN | _gets("This document as a page", {"text/html": {}})},
    }
    common = {str(status): _error(status) for status in _STATUSES}
    models = set[type[Any]]()
    json.dumps([paths, common], default=models.add)  # which gets all that is no JSON
    adapters: list[Any] = [(model, "validation", TypeAdapter(model)) for model in models]
    _, schemas = TypeAdapter.json_schemas(adapters, ref_template=REFS)
    made = {
        "openapi": "3.1.0",
        "info": {
            "title": "Outrider",
            "version": version("outrider"),
            "description": "OpenAI's and Anthropic's APIs over lossless, disaggregated speculative decoding. "
            "Fields marked as ignored change nothing; other fields are rejected.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "responses": common,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "If set; or x-api-key."}},
        },
    }
    referring = json.dumps(made, default=lambda model: {"$ref": REFS.format(model=model.__name__)})
    return cast(Json, json.loads(referring))


def _generates(summary: str, body: type[Any], example: Json, reply: type[Any], chunk: type[Any]) -> Json:
    part: Json = {"type": "string", "contentMediaType": "application/json"}
    parts = [part | {"contentSchema": kind} for kind in (chunk, responses.Error)]
    data = {"anyOf": [*parts, {"const": "[DONE]"}]}
    event = {"type": "object", "required": ["data"], "properties": {"data": data}}
    content = _json(reply) | {"text/event-stream": {"schema": event}}
    described = "The answer; with stream: server-sent events that end in [DONE], or in a whole response"
    operation = {
        "summary": summary,
        "parameters": [
            _header("Idempotency-Key", _KEY, type="string", maxLength=MAX_KEY_CHARACTERS, pattern="^[!-~]*$"),
            _header(TIMEOUT_HEADER, _TIMEOUT, type="number", exclusiveMinimum=0, maximum=MAX_TIMEOUT_S),
        ],
        "requestBody": {"required": True, "content": {"application/json": {"schema": body, "example": example}}},
    }
    return {"post": _gets(described, content, 400, 401, 404, 408, 409, 413, 415, 429, 499, 502, 503, 504) | operation}


def _header(name: str, description: str, **schema: Any) -> Json:
    return {"name": name, "in": "header", "description": description, "schema": schema}


def _converts(summary: str, bodies: Sequence[type[Any]], example: Json, reply: type[Any]) -> Json:
    schema = {"anyOf": [*bodies]} if len(bodies) > 1 else bodies[0]
    body: Json = {"required": True, "content": {"application/json": {"schema": schema, "example": example}}}
    return {"post": _gets(summary, _json(reply), 400, 401, 404, 408, 413, 415, 429, 503) | {"requestBody": body}}


def _gets(summary: str, content: Json, *statuses: int) -> Json:
    errors = {str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted({405, 500, *statuses})}
    return {"summary": summary, "responses": {"200": {"description": summary, "content": content}, **errors}}


def _error(status: int) -> Json:
    reply: Json = {"description": _STATUSES[status], "content": _json(responses.Error)}
    if status in (429, 503, 504):
        reply["headers"] = {"Retry-After": {"description": "Seconds", "schema": {"type": "integer"}}}
    return reply


def _json(kind: type[Any]) -> Json:
    return {"application/json": {"schema": kind}}
