"""The OpenAPI document: bodies as they are checked, answers as they are sent, every status that can come."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from pydantic import BaseModel

from coordinator.http.bodies import ChatBody, CompletionBody

Json = dict[str, Any]
_REFS = "#/components/schemas/{model}"
_STATUSES = {
    400: "The request can never work; the error names the field and its limit",
    401: "The key is missing or wrong",
    404: "There is no such model",
    405: "Another method is needed",
    409: "The idempotency key was used for another request, or the target has changed",
    413: "The body is too large",
    415: "The body is not declared as JSON",
    429: "No room now: try again after Retry-After",
    500: "A fault of the server",
    502: "A worker was lost and no other could go on",
    503: "No worker is ready, or the server is leaving: try again after Retry-After",
    504: "A deadline passed",
}
_RETRY = (429, 503)


def document() -> Json:
    schemas = {**_RESPONSES}
    for body in (ChatBody, CompletionBody):
        schemas |= _schemas(body)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Outrider",
            "version": version("outrider"),
            "description": "OpenAI's API over lossless, disaggregated speculative decoding. "
            "Fields marked as ignored change nothing; a field that is not named here is refused.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{}, {"key": []}],
        "paths": {
            "/v1/chat/completions": {"post": _generates("Answer a chat", "ChatBody", "ChatCompletion")},
            "/v1/completions": {"post": _generates("Continue a text", "CompletionBody", "Completion")},
            "/v1/models": {"get": _gets("The model that is served", "ModelList", 503)},
            "/v1/models/{model}": {
                "get": {
                    **_gets("One model", "Model", 404, 503),
                    "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}],
                }
            },
            "/fleet": {"get": _gets("The coordinator and its workers", "Fleet")},
            "/health": {"get": _open(_gets("Whether this process lives", "Status"))},
            "/ready": {"get": _open(_gets("Whether a request could be answered", "Status", 503))},
            "/metrics": {"get": _plain("Counters and gauges for Prometheus", "text/plain")},
            "/openapi.json": {"get": _plain("This document", "application/json")},
            "/docs": {"get": _plain("This document, for people", "text/html")},
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "Where keys are set."}},
        },
    }


def _schemas(body: type[BaseModel]) -> Json:
    schema = body.model_json_schema(ref_template=_REFS, by_alias=True)
    return {**schema.pop("$defs", {}), body.__name__: schema}


def _generates(summary: str, body: str, reply: str) -> Json:
    return {
        "summary": summary,
        "parameters": [
            {
                "name": "Idempotency-Key",
                "in": "header",
                "description": "The same key never generates twice: the answer of the first request is sent again.",
                "schema": {"type": "string", "maxLength": 256, "pattern": "^[!-~]*$"},
            }
        ],
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(body)}}},
        "responses": {
            "200": {
                "description": "The answer; with stream: server-sent events that end in [DONE]",
                "content": {
                    "application/json": {"schema": _ref(reply)},
                    "text/event-stream": {"schema": {"type": "string"}},
                },
            },
            **_errors(400, 401, 404, 409, 413, 415, 429, 500, 502, 503, 504),
        },
    }


def _gets(summary: str, reply: str, *statuses: int) -> Json:
    content = {"application/json": {"schema": _ref(reply)}}
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
    """Needs no key."""
    responses = {status: reply for status, reply in operation["responses"].items() if status != "401"}
    return {**operation, "security": [], "responses": responses}


def _errors(*statuses: int) -> Json:
    return {str(status): _error(status) for status in sorted({405, *statuses})}


def _error(status: int) -> Json:
    reply: Json = {"description": _STATUSES[status], "content": {"application/json": {"schema": _ref("Error")}}}
    if status in _RETRY:
        reply["headers"] = {"Retry-After": {"description": "Seconds", "schema": {"type": "integer"}}}
    return reply


def _ref(name: str) -> Json:
    return {"$ref": _REFS.format(model=name)}


def _object(required: Json, optional: Json | None = None) -> Json:
    return {"type": "object", "required": sorted(required), "properties": {**required, **(optional or {})}}


_TEXT: Json = {"type": "string"}
_WHOLE: Json = {"type": "integer"}
_NUMBER: Json = {"type": "number"}
_MAYBE_TEXT: Json = {"type": ["string", "null"]}
_MAYBE_OBJECT: Json = {"type": ["object", "null"]}
_WHOLES: Json = {"type": "array", "items": _WHOLE}
_USAGE = _object({"prompt_tokens": _WHOLE, "completion_tokens": _WHOLE, "total_tokens": _WHOLE})
_METRICS = _object(
    {
        "speculative_decoding": _object(
            {
                "mean_acceptance_length": _NUMBER,
                "draft_acceptance_rate": _NUMBER,
                "acceptance_histogram": {**_WHOLES, "description": "[j]: steps that accepted j guesses"},
                "num_spec_steps": _WHOLE,
                "num_accepted_draft_tokens": _WHOLE,
                "num_draft_tokens": _WHOLE,
                "num_spec_tokens": _WHOLE,
            }
        ),
        "outrider": {"type": "object"},
    }
)
_ANSWER = {
    "id": _TEXT,
    "object": _TEXT,
    "created": _WHOLE,
    "model": _TEXT,
    "system_fingerprint": {**_TEXT, "description": "Equal fingerprints, prompts, parameters and seeds: equal texts"},
    "usage": _USAGE,
}
_FINISH = {"enum": ["stop", "length"]}
_MODEL = {
    "id": _TEXT,
    "object": {"const": "model"},
    "created": _WHOLE,
    "owned_by": _TEXT,
    "max_model_len": _WHOLE,
    "fingerprint": _TEXT,
}


def _choices(**fields: Json) -> Json:
    choice = {"index": _WHOLE, "logprobs": _MAYBE_OBJECT, "finish_reason": _FINISH, **fields}
    return {"choices": {"type": "array", "items": _object(choice)}}


_RESPONSES: Json = {
    "ChatCompletion": _object(
        {
            **_ANSWER,
            **_choices(message=_object({"role": {"const": "assistant"}, "content": _TEXT, "refusal": _MAYBE_TEXT})),
        },
        {"metrics": _METRICS},
    ),
    "Completion": _object({**_ANSWER, **_choices(text=_TEXT)}, {"metrics": _METRICS}),
    "Model": _object(_MODEL),
    "ModelList": _object({"object": {"const": "list"}, "data": {"type": "array", "items": _object(_MODEL)}}),
    "Fleet": _object(
        {
            "version": _TEXT,
            "coordinator_id": _TEXT,
            "sessions": _WHOLE,
            "durable": {"type": "boolean", "description": "Sessions survive this coordinator"},
            "workers": {"type": "array", "items": {"type": "object"}},
        }
    ),
    "Status": _object({"status": _TEXT}),
    "Error": _object({"error": _object({"message": _TEXT, "type": _TEXT, "param": _MAYBE_TEXT, "code": _MAYBE_TEXT})}),
}
