"""JSON schemas of replies, for the OpenAPI document and for tests."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
REFS = "#/components/schemas/{model}"


def ref(name: str) -> Json:
    return {"$ref": REFS.format(model=name)}


def an_object(required: Json, optional: Json | None = None) -> Json:
    return {"type": "object", "required": sorted(required), "properties": {**required, **(optional or {})}}


def _maybe(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


_TEXT: Json = {"type": "string"}
_WHOLE: Json = {"type": "integer"}
_NUMBER: Json = {"type": "number"}
_MAYBE_TEXT: Json = {"type": ["string", "null"]}

# --- metrics and usage ---------------------------------------------------------------------------------------

_USAGE = an_object(
    {
        "prompt_tokens": _WHOLE,
        "completion_tokens": _WHOLE,
        "total_tokens": _WHOLE,
        "prompt_tokens_details": an_object({"cached_tokens": _WHOLE}),
        "completion_tokens_details": an_object({"reasoning_tokens": _WHOLE}),
    }
)
_METRICS = an_object(
    {
        "speculative_decoding": an_object(
            {
                "mean_acceptance_length": {**_NUMBER, "description": "1 + accepted tokens per speculative step"},
                "draft_acceptance_rate": {**_NUMBER, "description": "Accepted tokens per guessed token; 0 without any"},
                "acceptance_histogram": {
                    **_list(_WHOLE),
                    "description": "[j]: steps that accepted j guesses; num_spec_tokens + 1 entries",
                },
                "num_spec_steps": {**_WHOLE, "description": "Steps that had guesses to check"},
                "num_accepted_draft_tokens": _WHOLE,
                "num_draft_tokens": {**_WHOLE, "description": "Guessed tokens, along the longest path of each step"},
                "num_spec_tokens": {**_WHOLE, "description": "Tokens of the longest guess that a step checked"},
            }
        ),
        "outrider": an_object(
            {
                "tokens_per_second": _NUMBER,
                "time_to_first_token_ms": _NUMBER,
                "steps": _WHOLE,
                "mean_gamma": _NUMBER,
                "drafter": _TEXT,
                "plans": _list(an_object({"plan": _TEXT, "steps": _WHOLE})),
                "bytes_per_accepted_token": _NUMBER,
                "failovers": _WHOLE,
                "drafter_losses": _WHOLE,
                "seed": {
                    **_WHOLE,
                    "description": "Given or drawn; it reproduces the text in greedy and coupled mode",
                },
                "session_id": _TEXT,
            }
        ),
    }
)
_SPECULATION = an_object(
    {
        "kinds": _list({"enum": ["accepted", "recovered", "bonus", "plain"]}),
        "characters": {**_list(_WHOLE), "description": "Characters of the chunk's text, per token"},
        "token_ids": _list(_WHOLE),
        "plan": _TEXT,
        "gamma": _WHOLE,
    }
)

# --- answers ---------------------------------------------------------------------------------------------------------

_TOKEN = {"token": _TEXT, "logprob": _NUMBER, "bytes": _list(_WHOLE)}
_CHAT_LOGPROBS = _maybe(
    an_object(
        {"content": _list(an_object({**_TOKEN, "top_logprobs": _list(an_object(_TOKEN))})), "refusal": {"type": "null"}}
    )
)
_LOGPROBS = _maybe(
    an_object(
        {
            "tokens": _list(_TEXT),
            "token_logprobs": _list(_NUMBER),
            "top_logprobs": _list({"type": "object", "additionalProperties": _NUMBER}),
            "text_offset": _list(_WHOLE),
        }
    )
)
_MESSAGE = an_object({"role": {"const": "assistant"}, "content": _TEXT, "refusal": {"type": "null"}})
_DELTA = an_object({}, {"role": {"const": "assistant"}, "content": _TEXT, "refusal": {"type": "null"}})
_FINISH: Json = {"enum": ["stop", "length"]}
_MODEL = {
    "id": _TEXT,
    "object": {"const": "model"},
    "created": _WHOLE,
    "owned_by": _TEXT,
    "root": {**_TEXT, "description": "The target's own name, if served under another"},
    "max_model_len": _WHOLE,
    "fingerprint": _TEXT,
}


def _answer(kind: str, choice: Json) -> Json:
    choices = _list(an_object({"index": _WHOLE, "finish_reason": _FINISH, **choice}))
    return an_object({**_head(kind), "choices": choices, "usage": _USAGE}, {"metrics": _METRICS})


def _chunk(kind: str, choice: Json) -> Json:
    part = an_object({"index": _WHOLE, "finish_reason": _maybe(_FINISH), **choice}, {"speculation": _SPECULATION})
    last = {"usage": _maybe(_USAGE), "metrics": _METRICS}
    return an_object({**_head(kind), "choices": _list(part)}, last)


def _head(kind: str) -> Json:
    return {
        "id": _TEXT,
        "object": {"const": kind},
        "created": _WHOLE,
        "model": _TEXT,
        "system_fingerprint": {
            **_TEXT,
            "description": "Equal fingerprints, prompts, parameters and seeds give equal texts",
        },
    }


REPLIES: Json = {
    "ChatCompletion": _answer("chat.completion", {"message": _MESSAGE, "logprobs": _CHAT_LOGPROBS}),
    "ChatCompletionChunk": _chunk("chat.completion.chunk", {"delta": _DELTA, "logprobs": _CHAT_LOGPROBS}),
    "Completion": _answer("text_completion", {"text": _TEXT, "logprobs": _LOGPROBS}),
    "CompletionChunk": _chunk("text_completion", {"text": _TEXT, "logprobs": _LOGPROBS}),
    "Model": an_object(_MODEL),
    "ModelList": an_object({"object": {"const": "list"}, "data": _list(ref("Model"))}),
    "Fleet": an_object(
        {
            "version": _TEXT,
            "coordinator_id": _TEXT,
            "sessions": _WHOLE,
            "durable": {"type": "boolean", "description": "Sessions survive this coordinator"},
            "workers": _list(
                an_object(
                    {
                        "worker_id": _TEXT,
                        "role": {"enum": ["verifier", "drafter"]},
                        "address": _TEXT,
                        "kind": _TEXT,
                        "capacity": _WHOLE,
                        "draining": {"type": "boolean"},
                        "round_trip_ms": _NUMBER,
                        "model": {"type": "object"},
                        "load": {"type": "object"},
                    }
                )
            ),
        }
    ),
    "Status": an_object({"status": _TEXT}),
    "Error": an_object(
        {"error": an_object({"message": _TEXT, "type": _TEXT, "param": _MAYBE_TEXT, "code": _MAYBE_TEXT})}
    ),
}
