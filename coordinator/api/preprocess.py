"""From a client's request to one with everything resolved: text to tokens, defaults, seed; all limits checked."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace

from coordinator.persistence.session_record import SessionRequest, SpeculationOptions
from coordinator.settings import CoordinatorSettings
from coordinator.workers.target import Target
from outrider.protocol import convert
from outrider.protocol.checks import check_salt, check_tokens
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.speculation import MAX_BRANCHES, MAX_GAMMA, MAX_PATIENCE_US
from outrider.v1 import coordinator_pb2 as pb

MAX_MESSAGES = 1_000
LARGE_BYTES = 16 * 1024


async def prepare(
    request: pb.GenerateRequest, target: Target, settings: CoordinatorSettings, *, default_tokens: int | None = None
) -> SessionRequest:
    """`default_tokens`: how long an answer may be where the request does not say and the context leaves as many."""
    if request.ByteSize() > LARGE_BYTES or request.params.HasField("grammar"):
        # Tokenising megabytes takes seconds, compiling a grammar may take one: other streams go on meanwhile.
        return await asyncio.to_thread(resolve, request, target, settings, default_tokens)
    return resolve(request, target, settings, default_tokens)


def resolve(
    request: pb.GenerateRequest, target: Target, settings: CoordinatorSettings, default_tokens: int | None = None
) -> SessionRequest:
    params = convert.params_from_proto(request.params)
    params.check(target.info.vocab_size)
    wish = _wish(request.speculation)
    prompt = _prompt(request, target, settings.max_prompt_kib * 1024)
    room = target.info.context_length - len(prompt)
    if room < 1:
        raise InvalidRequest.of(
            "prompt", f"{len(prompt)} tokens", f"under the context of {target.info.context_length} tokens"
        )
    if default_tokens is not None and not request.params.HasField("max_tokens"):
        params = replace(params, max_tokens=min(default_tokens, room))
    if params.max_tokens > room and not request.params.HasField("max_tokens"):
        raise InvalidRequest.of(
            "prompt",
            f"{len(prompt)} tokens",
            f"at most {target.info.context_length - params.max_tokens} to leave room for {params.max_tokens} output "
            "tokens; or set params.max_tokens",
        )
    if params.max_tokens > room:
        raise InvalidRequest.of(
            "params.max_tokens",
            params.max_tokens,
            f"at most {room}: the context is {target.info.context_length} tokens and the prompt has {len(prompt)}",
        )
    drawn_seed = params.seed is None
    if drawn_seed:
        params = params.with_seed(secrets.randbits(64))
    check_salt("cache_salt", request.cache_salt)
    if params.grammar is not None:
        target.grammars.guide(params)  # nobody is to be told later, in the middle of a stream
    return SessionRequest(prompt, params, wish, request.cache_salt, drawn_seed)


def _wish(speculation: pb.Speculation) -> SpeculationOptions:
    gamma = speculation.gamma if speculation.HasField("gamma") else None
    patience = speculation.patience_us if speculation.HasField("patience_us") else None
    if gamma is not None and gamma > MAX_GAMMA:
        raise InvalidRequest.of("speculation.gamma", gamma, f"in [0, {MAX_GAMMA}]")
    if patience is not None and patience > MAX_PATIENCE_US:
        raise InvalidRequest.of("speculation.patience_us", patience, f"in [0, {MAX_PATIENCE_US}]")
    branches = speculation.branches if speculation.HasField("branches") else None
    if branches is not None and not 1 <= branches <= MAX_BRANCHES:
        raise InvalidRequest.of("speculation.branches", branches, f"in [1, {MAX_BRANCHES}]")
    ahead = speculation.ahead if speculation.HasField("ahead") else None
    return SpeculationOptions(gamma, patience, speculation.drafter, branches, ahead)


def _prompt(request: pb.GenerateRequest, target: Target, limit: int) -> tuple[int, ...]:
    kind = request.WhichOneof("input")
    if kind == "prompt":
        _check_size("prompt", len(request.prompt.encode()), limit)
        if not request.prompt:
            raise InvalidRequest.of("prompt", "empty", "some text")
        tokens = target.encode(request.prompt)
    elif kind == "chat":
        messages = [{"role": message.role, "content": message.content} for message in request.chat.messages]
        if not 1 <= len(messages) <= MAX_MESSAGES:
            raise InvalidRequest.of("chat.messages", f"{len(messages)} messages", f"1 to {MAX_MESSAGES} messages")
        _check_size("chat.messages", sum(len(message["content"].encode()) for message in messages), limit)
        tokens = target.encode_chat(messages)
    elif kind == "tokens":
        tokens = tuple(request.tokens.ids)
        _check_size("tokens.ids", len(tokens), limit)
        check_tokens("tokens.ids", tokens, target.info.vocab_size)
    else:
        raise InvalidRequest.of("input", "absent", "one of prompt, chat, tokens")
    if not tokens:
        raise InvalidRequest.of(kind, "no tokens", "at least one token")
    return tokens


def _check_size(field: str, size: int, limit: int) -> None:
    if size > limit:
        raise InvalidRequest.of(field, f"{size} bytes", f"at most {limit} bytes")
