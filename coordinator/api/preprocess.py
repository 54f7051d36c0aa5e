"""Turn a request of either protocol, a `ClientRequest`, into a session request: tokens, defaults, seed, limits."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import structlog

from coordinator.admission.model_limits import limits_of
from coordinator.persistence.session_record import SessionRequest, SpeculationOptions
from coordinator.workers.chat_template import Chat
from coordinator.workers.target import Target
from outrider.base.aio import LARGE_BYTES, beside
from outrider.observability.metrics import CoordinatorMetrics
from outrider.protocol.checks import check_count, check_tokens
from outrider.protocol.errors import InvalidRequest, OutriderError
from outrider.protocol.field_limits import MOST
from outrider.protocol.sampling_params import SamplingParams
from outrider.settings.coordinator import CoordinatorSettings

log = structlog.get_logger(__name__)

_FOR_GRAMMARS = ThreadPoolExecutor(4, "grammars")  # so that other requests do not wait for a slow one

Input = str | Chat | Sequence[int] | None  # a prompt, a chat or tokens


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One request as an edge received it."""

    params: SamplingParams
    input: Input
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    cache_salt: str = ""
    max_tokens_given: bool = True
    default_tokens: int | None = None  # of `max_tokens`, where the context has room
    form: str = ""  # of calls in the answer: in another one they would be read as text


@contextlib.contextmanager
def admission(metrics: CoordinatorMetrics) -> Iterator[None]:
    """Count and log every refusal of a request before its session exists."""
    try:
        with metrics.count_refusals():
            yield
    except OutriderError as error:
        log.info("request refused", code=error.code, error=error.message)
        raise


async def prepare(request: ClientRequest, size: int, target: Target, settings: CoordinatorSettings) -> SessionRequest:
    """Return a request, resolved; `size` is that of the message or body with it, in bytes."""
    # Tokenising megabytes takes seconds and compiling a grammar up to one. Other streams continue meanwhile.
    given = (request, target, settings)
    if request.params.grammar is None:
        return await beside(size, resolve, *given)
    return await beside(max(size, LARGE_BYTES), resolve, *given, thread=_FOR_GRAMMARS)


def resolve(request: ClientRequest, target: Target, settings: CoordinatorSettings) -> SessionRequest:
    params = request.params
    params.check(target.info.vocab_size)
    request.speculation.check()
    prompt = prompt_tokens(request.input, target, settings.max_prompt_kib * 1024)
    limits, given = limits_of(settings, target), request.max_tokens_given
    params = limits.fitted(params, len(prompt), target, given=given, default=request.default_tokens)
    drawn_seed = params.seed is None
    params = replace(params, seed=secrets.randbits(64) if drawn_seed else params.seed, verification=params.mode)
    if params.grammar is not None:
        target.grammars.compile(params)  # report an invalid grammar now, not in the middle of a stream
    return SessionRequest(prompt, params, request.speculation, request.cache_salt, drawn_seed)


def prompt_tokens(given: Input, target: Target, limit: int) -> tuple[int, ...]:
    """Return the input as tokens. Raises InvalidRequest for more than `limit` bytes."""
    if given is None:
        raise InvalidRequest.of("input", "absent", "one of prompt, chat, tokens")
    if isinstance(given, str):
        kind = "prompt"
        check_count("prompt", len(given.encode()), limit, "bytes")
        if not given:
            raise InvalidRequest.of("prompt", "empty", "some text")
        tokens = target.encode(given)
    elif isinstance(given, Chat):
        kind = "chat.messages"
        if not given.messages:
            raise InvalidRequest.of("chat.messages", "0 messages", f"1 to {MOST['messages']} messages")
        check_count("chat.messages", sum(len(text.encode()) for text in given.texts()), limit, "bytes")
        tokens = target.encode_chat(given, limit)
    else:
        kind = "tokens"
        check_count("tokens.ids", len(given), limit, "ids")
        tokens = tuple(given)
        check_tokens("tokens.ids", tokens, target.info.vocab_size)
    if not tokens:
        raise InvalidRequest.of(kind, "no tokens", "at least one token")
    return tokens


def one_system(messages: Iterable[dict[str, Any]], target: Target) -> list[dict[str, Any]]:
    """Return messages with those of the system at the beginning as one, and with later ones if these are not shown."""
    given = [*messages]
    first = [*takewhile(lambda message: message["role"] == "system", given)]
    others = given[len(first) :]
    later = [message for message in others if message["role"] == "system"]
    if later and not target.shows(*(["system"] if first else []), "user", "assistant", "system", "user"):
        first += later
        others = [message for message in others if message["role"] != "system"]
    if not first:
        return others
    joined = "\n\n".join(message["content"] for message in first if message["content"])
    return [{"role": "system", "content": joined}, *others]
