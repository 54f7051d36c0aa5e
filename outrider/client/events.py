"""Requests and replies of both clients as plain values."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from outrider.protocol import convert
from outrider.protocol.errors import InvalidRequest, PeerLost
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import FinishReason, TokenKind, TokenLogprobs
from outrider.protocol.statistics import GenerationStats
from outrider.v1 import coordinator_pb2 as pb


class Options(TypedDict, total=False):
    """Options of one request. `chat` or `tokens` replace its prompt."""

    model: str  # name or alias of a target; without it the default
    chat: Sequence[tuple[str, str]]  # (role, content), through the target's template
    tokens: Sequence[int]
    params: SamplingParams | None
    gamma: int | None  # None, here and down to `ahead`: adaptive
    patience_us: int | None
    drafter: str
    branches: int | None
    ahead: bool | None
    idempotency_key: str
    priority: int | None  # class, the lowest is served first; None: the API key's
    cache_salt: str  # requests with equal salts share cached prefixes


@dataclass(frozen=True, slots=True)
class Started:
    session_id: str
    seed: int
    prompt_tokens: int
    model: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """One chunk of an output: its text, and the id and kind of each token."""

    position: int
    text: str
    token_ids: tuple[int, ...]
    kinds: tuple[TokenKind, ...]
    characters: tuple[int, ...]  # of the text, by token
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    text: str  # text after the last chunk
    finish_reason: FinishReason
    stop: str
    prompt_tokens: int
    output_tokens: int
    stats: GenerationStats


Reply = Started | Tokens | Finished
_REPLIES: dict[str, type[Reply]] = {"started": Started, "chunk": Tokens, "complete": Finished}


@dataclass(frozen=True, slots=True)
class Generation:
    """Complete output of one request."""

    text: str
    token_ids: tuple[int, ...]
    kinds: tuple[TokenKind, ...]
    started: Started
    finished: Finished


def collect(replies: Iterable[Reply]) -> Generation:
    """Return the generation of a complete stream; raise PeerLost if it is not."""
    received = list(replies)
    parts = [reply for reply in received if isinstance(reply, Tokens)]
    first, last = (received[0], received[-1]) if received else (None, None)
    if not isinstance(first, Started) or not isinstance(last, Finished):
        raise PeerLost("the stream ended before the output was complete")
    return Generation(
        text="".join(part.text for part in parts) + last.text,
        token_ids=tuple(token for part in parts for token in part.token_ids),
        kinds=tuple(kind for part in parts for kind in part.kinds),
        started=first,
        finished=last,
    )


def make_request(prompt: str | None, options: Options) -> pb.GenerateRequest:
    """Return the message of a request; raise InvalidRequest for one that cannot be made."""
    if unknown := options.keys() - Options.__annotations__.keys():
        raise InvalidRequest(f"{', '.join(sorted(unknown))} is no option of a request; params has those of sampling")
    given: dict[str, Any] = {**options}
    with checked_fields():
        given |= {name: [*content] for name in ("chat", "tokens") if (content := given.get(name)) is not None}
        if sum(map(bool, (prompt is not None, given.get("chat"), given.get("tokens")))) > 1:
            raise InvalidRequest("a request has a prompt, a chat or tokens, not several of them")
        return _request(prompt, given)


@contextlib.contextmanager
def checked_fields() -> Iterator[None]:
    """Raise InvalidRequest for what a field of a message cannot hold, such as a number out of range."""
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidRequest("a text is not UTF-8" if isinstance(error, UnicodeError) else str(error)) from error


def _request(prompt: str | None, given: dict[str, Any]) -> pb.GenerateRequest:
    if isinstance(getattr(given.get("params"), "stop", None), str):  # each character would be one
        raise InvalidRequest.of("params.stop", given["params"].stop, "a list of texts")
    request = pb.GenerateRequest(
        params=convert.params_to_proto(given.get("params") or SamplingParams()),
        # With a key a request can be repeated if its answer was lost.
        idempotency_key=given.get("idempotency_key") or secrets.token_hex(16),
        speculation=pb.Speculation(**{it: given[it] for it in pb.Speculation.DESCRIPTOR.fields_by_name if it in given}),
        cache_salt=given.get("cache_salt", ""),
        model=given.get("model", ""),
        priority=given.get("priority"),
    )
    if prompt is not None:
        request.prompt = prompt
    elif chat := given.get("chat"):
        if not all(isinstance(message, tuple | list) for message in chat):  # a dict would unpack to its keys
            raise InvalidRequest("chat has messages that are no pairs (role, content)", field="chat")
        request.chat.messages.extend(pb.ChatMessage(role=role, content=content) for role, content in chat)
    else:
        request.tokens.ids.extend(given.get("tokens", ()))
    return request


def reply_from_proto(reply: pb.GenerateReply) -> Reply | None:
    """Return a reply, None for one of a newer version; raise the error that the coordinator reports in its place."""
    kind = reply.WhichOneof("message")
    if kind == "error":
        raise convert.error_from_proto(reply.error)
    if kind is None:
        return None
    return convert.incoming(_REPLIES[kind], getattr(reply, kind))
