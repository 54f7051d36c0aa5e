"""Sessions of one HTTP request: prepared, started and followed together."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from coordinator.admission.waiting.urgency import urgency
from coordinator.api.http.bodies import DEFAULT_TOKENS, ChatOptions, CompletionBody, GenerationBody
from coordinator.api.http.failures import FIELD_NAMES
from coordinator.api.preprocess import ClientRequest, Input, admission, prepare
from coordinator.persistence.session_record import SessionRequest, SpeculationOptions
from coordinator.sessions.output import Token, follow
from coordinator.sessions.session import Session
from coordinator.sessions.session_manager import SessionManager
from coordinator.workers.target import Target
from outrider.protocol.errors import Cancelled, InvalidRequest
from outrider.protocol.fieldwise import from_plain
from outrider.protocol.sampling_params import MAX_SEED, Grammar, SamplingParams
from outrider.protocol.speculation import FinishReason
from outrider.settings.coordinator import CoordinatorSettings

SILENCE_S = 15.0  # as the standard of server-sent events advises
Progress = AsyncGenerator[tuple[int, list[Token]], None]


async def progress(sessions: Sequence[Session], silence_s: float | None = None) -> Progress:
    """Yield choices with new tokens, without them at their end; -1 in a silence before first ones.

    Raise the error of one that fails.
    """
    silence_s = silence_s if urgency().deadline == float("inf") else None  # a late answer gets a status
    async with contextlib.aclosing(follow([session.output for session in sessions], 0, silence_s)) as updates:
        async for number, _, tokens in updates:
            ended = sessions[number] if number >= 0 and not tokens else None
            if ended and ended.error is not None:
                raise ended.error
            if ended and ended.record.finish_reason is FinishReason.CANCELLED:
                raise Cancelled(f"session {ended.record.session_id} was cancelled", field="session_id")
            yield number, tokens


@contextlib.asynccontextmanager
async def start_answer(
    sessions: SessionManager, requests: Sequence[SessionRequest], target: Target, key: str
) -> AsyncIterator[list[Session]]:
    """Start sessions for all requests; stop them on exit."""
    with contextlib.ExitStack() as stack:
        running: list[Session] = []
        for number, request in enumerate(requests):
            with admission(sessions.metrics):
                session = await sessions.begin(request, target, f"{key}\n{number}" if key and number else key)
            stack.enter_context(sessions.followed(session))
            running.append(session)
        await asyncio.gather(*(session.opened() for session in running))
        yield running


async def requests_of(
    body: GenerationBody, size: int, inputs: Sequence[ClientRequest], target: Target, settings: CoordinatorSettings
) -> list[SessionRequest]:
    """Return a request per choice, in the order of the inputs of `size` bytes, after the same checks as over gRPC."""
    count, most = body.choices * len(inputs), settings.max_request_sessions
    if count > most:
        raise InvalidRequest.of("n" if body.choices > 1 else "prompt", f"{count} answers", f"at most {most} a request")
    requests: list[SessionRequest] = []
    for number, request in enumerate(inputs):
        try:
            ready = replace(await prepare(request, size, target, settings), drawn_seed=body.seed is None)
        except InvalidRequest:
            if len(inputs) > 1:
                FIELD_NAMES.get({}).update(dict.fromkeys(("prompt", "tokens.ids"), f"prompt.{number}"))
            raise
        seed = ready.params.seed
        assert seed is not None
        seeds = ((seed + number) % (MAX_SEED + 1) for number in range(body.choices))
        requests += [replace(ready, params=replace(ready.params, seed=each)) for each in seeds]
    return requests


def input_of(
    body: ChatOptions | CompletionBody, given: Input, target: Target, settings: CoordinatorSettings
) -> ClientRequest:
    """Return the input; what the body leaves out takes its defaults. JSON's readers keep 53 bits of a seed."""
    wishes, grammar = _given(body.speculation or ()), _grammar(body)
    may_end = not body.ignore_eos or body.stop or body.stop_token_ids or grammar or getattr(body, "tools", None)
    if (least := body.min_tokens or 0) > (0 if may_end else body.limit or 0):
        raise InvalidRequest.of("min_tokens", least, "0, or at most max_tokens where only that ends the output")
    if body.limit == 0:
        raise InvalidRequest.of("max_tokens", 0, "at least 1; 0 needs echo")
    params = {
        **(_given(asdict(target.info.sampling).items()) if settings.sampling_defaults == "model" else {}),
        **_given(body),
        **wishes,
        "seed": (secrets.randbits(53) if body.seed is None else body.seed) % (MAX_SEED + 1),
        "stop": [body.stop] if isinstance(body.stop, str) else body.stop or [],
        "logprobs": body.num_logprobs,
        "grammar": grammar,
        **({} if body.limit is None else {"max_tokens": body.limit}),
    }
    params["top_k"] = max(0, params.get("top_k", 0))
    default_tokens = DEFAULT_TOKENS if isinstance(body, CompletionBody) else settings.default_chat_tokens
    return ClientRequest(
        params=from_plain(SamplingParams, params),
        input=given,
        speculation=from_plain(SpeculationOptions, wishes),
        cache_salt=body.cache_salt or "",
        max_tokens_given=body.limit is not None,
        default_tokens=None if least else default_tokens,
    )


def _given(body: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in body if value is not None}


def _grammar(body: GenerationBody) -> Grammar | None:
    given, wanted = body.structured_outputs, body.response_format
    FIELD_NAMES.get({}).setdefault("params.grammar", "structured_outputs" if given else "response_format")
    if given is not None:
        schema = "" if given.json_ is None else json.dumps(given.json_)
        pattern = given.regex or "|".join(map(re.escape, given.choice or ()))
        return Grammar(json_schema=schema, json_object=bool(given.json_object), regex=pattern)
    if wanted is None or wanted.type == "text":
        return None
    if wanted.regex is not None:
        return Grammar(regex=wanted.regex)
    if wanted.json_schema is not None and wanted.json_schema.schema_ is not None:
        return Grammar(json_schema=json.dumps(wanted.json_schema.schema_))
    return Grammar(json_object=True)
