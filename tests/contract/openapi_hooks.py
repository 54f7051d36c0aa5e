"""Loaded by Schemathesis: keeps its requests small, and holds refusals of what the document allows to known rules."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import schemathesis
from schemathesis.generation.modes import GenerationMode

from coordinator.api.http.openapi import document

FEW = 2
LONGEST_S = 86_400
CONTEXT = 2048  # tokens, of the tiny target
LIMIT = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
KNOWN = {name for schema in document()["components"]["schemas"].values() for name in schema.get("properties", ())}
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
# What no JSON schema of a field can say: rules between fields, and limits that the target or the operator sets.
RULES = re.compile(
    "|".join(
        (
            r"needs logprobs|stream_options needs|best_of must equal n|are the same field|excludes stream",
            r"continue_final_message needs|tools need|tool_choice|tools must have|tools does not compile|tool_calls",
            r"arguments must be|parameters must be|tool_call_id is required|content is required",
            r"required with type|response_format|structured_outputs|verification is",
            r"must be 0 when verification is greedy|must be 0 or at least|must be a token id in|chat template",
            r"min_tokens is|is no tokens|nothing is stored|need a chat or a completion|text.format",
            r"content of role|output_config.format",
            r"max_tokens is 0, must be at least 1; 0 needs echo",
            r"answers, must be at most \d+ a request",  # as the operator has it
            r"under the context of|the context is \d+ tokens|to leave room for",
        )
    )
)


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """The same mistakes, less work. A null of any name is none, though the document allows no other names."""
    if not isinstance(body, dict):
        return body
    body.update({name: 0 for name, value in body.items() if value is None and name not in KNOWN})
    for name in (*LIMITS, "n"):
        value = body.get(name)
        if (
            isinstance(value, int)
            and not isinstance(value, bool)
            and FEW < value <= CONTEXT
            and (name != "n" or value <= 16)
        ):
            body[name] = FEW
    known = LIMIT.get(context.operation.path)
    if known is not None and all(body.get(name) is None for name in LIMITS):
        body[known] = FEW
    prompts = body.get("prompt")
    if isinstance(prompts, list) and FEW < len(prompts) <= 256:
        body["prompt"] = prompts[:FEW]
    return body


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """The same mistakes, and enough time where a timeout is none of them: 504 would look like a fault."""
    for name in [name for name in case.headers or () if name.lower() == "x-request-timeout"]:
        with contextlib.suppress(TypeError, ValueError):
            if 0 < float(case.headers[name]) <= LONGEST_S:
                case.headers[name] = str(LONGEST_S)


@schemathesis.check
def refused_for_a_reason(context: Any, response: Any, case: Any) -> None:
    positive = case.meta is not None and case.meta.generation.mode is GenerationMode.POSITIVE
    if positive and response.status_code == 400:
        message = response.json()["error"]["message"]
        assert RULES.search(message), f"the document allows it, the server does not, by no known rule: {message}"
