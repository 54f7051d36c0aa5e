"""A client of the coordinator over gRPC, synchronous: for the command line, load tests and programs.

`Client.generate` yields `Started`, `Tokens` and at last `Finished`; a stream
that breaks is resumed, here or on the next endpoint, without a token lost or
doubled.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import grpc

from outrider import wire
from outrider.errors import Expired, OutriderError, PeerLost, Unavailable
from outrider.messages import FinishReason, ModelInfo, SamplingParams, TokenKind, TokenLogprobs
from outrider.serving import channel_options
from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc

DEFAULT_ENDPOINT = "127.0.0.1:50050"
RESUME_FOR_S = 30.0
_RETRY_S = 0.2
_FIRST_TRIES = 2  # and one per endpoint, while nothing has been heard of a request


@dataclass(frozen=True, slots=True)
class Started:
    session_id: str
    seed: int
    prompt_tokens: int
    model: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """What came at once: text and, token by token, ids and kinds."""

    position: int
    text: str
    token_ids: tuple[int, ...]
    kinds: tuple[TokenKind, ...]
    characters: tuple[int, ...]  # of the text, that each token adds
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    text: str  # the last of it
    finish_reason: FinishReason
    stop: str
    prompt_tokens: int
    output_tokens: int
    stats: pb.Stats


Reply = Started | Tokens | Finished


@dataclass(frozen=True, slots=True)
class Generation:
    """Everything of one request."""

    text: str
    token_ids: tuple[int, ...]
    kinds: tuple[TokenKind, ...]
    started: Started
    finished: Finished


@dataclass(slots=True)
class _Progress:
    """What has arrived, to resume from."""

    started: Started | None = None
    tokens: list[int] = field(default_factory=list)


class Client:
    """`endpoints` are coordinators of one fleet; the first is used until it fails."""

    def __init__(self, endpoints: Sequence[str] = (DEFAULT_ENDPOINT,), *, timeout_s: float | None = None) -> None:
        self._timeout_s = timeout_s
        self._channels = [grpc.insecure_channel(endpoint, options=channel_options()) for endpoint in endpoints]
        self._turn = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def generate(
        self,
        prompt: str | None = None,
        *,
        chat: Sequence[tuple[str, str]] = (),
        tokens: Sequence[int] = (),
        params: SamplingParams | None = None,
        gamma: int | None = None,
        patience_us: int | None = None,
        drafter: str = "",
        branches: int | None = None,
        ahead: bool | None = None,
        idempotency_key: str = "",
        cache_salt: str = "",
    ) -> Iterator[Reply]:
        """Stream one output. Give a prompt, or a chat as (role, content) pairs, or tokens.

        Requests of equal `cache_salt` share what is cached of prompts that begin alike.
        """
        request = pb.GenerateRequest(
            params=wire.params_to_proto(params or SamplingParams()),
            # With a key a request can be sent again when the answer to it was lost.
            idempotency_key=idempotency_key or secrets.token_hex(16),
            speculation=pb.Speculation(
                gamma=gamma, patience_us=patience_us, drafter=drafter, branches=branches, ahead=ahead
            ),
            cache_salt=cache_salt,
        )
        if prompt is not None:
            request.prompt = prompt
        elif chat:
            request.chat.messages.extend(pb.ChatMessage(role=role, content=content) for role, content in chat)
        else:
            request.tokens.ids.extend(tokens)
        progress = _Progress()
        give_up = 0.0
        first_tries = _FIRST_TRIES + len(self._channels)
        while True:
            known = len(progress.tokens)
            try:
                yield from self._follow(request, progress)
                return
            except (PeerLost, Unavailable):
                first_tries -= 1
                if len(progress.tokens) > known or not give_up:
                    give_up = time.monotonic() + RESUME_FOR_S
                if time.monotonic() > give_up or (progress.started is None and first_tries == 0):
                    raise
                self._turn += 1
                time.sleep(_RETRY_S)

    def complete(self, prompt: str | None = None, **options: object) -> Generation:
        """The same, waiting for the end."""
        started: Started | None = None
        parts: list[Tokens] = []
        for reply in self.generate(prompt, **options):  # type: ignore[arg-type]
            if isinstance(reply, Started):
                started = reply
            elif isinstance(reply, Tokens):
                parts.append(reply)
            else:
                assert started is not None
                return Generation(
                    text="".join(part.text for part in parts) + reply.text,
                    token_ids=tuple(token for part in parts for token in part.token_ids),
                    kinds=tuple(kind for part in parts for kind in part.kinds),
                    started=started,
                    finished=reply,
                )
        raise PeerLost("the stream ended before the output was complete")

    def cancel(self, session_id: str) -> bool:
        with _errors():
            return self._stub().Cancel(pb.CancelRequest(session_id=session_id), timeout=10).cancelled

    def model(self) -> ModelInfo:
        with _errors():
            return wire.model_from_proto(self._stub().GetModelInfo(common.GetModelInfoRequest(), timeout=10))

    def server(self) -> pb.ServerInfo:
        with _errors():
            return self._stub().GetServerInfo(pb.GetServerInfoRequest(), timeout=10)

    def _stub(self) -> rpc.OutriderStub:
        return rpc.OutriderStub(self._channels[self._turn % len(self._channels)])

    def _follow(self, request: pb.GenerateRequest, progress: _Progress) -> Iterator[Reply]:
        """One stream: the first, or one that goes on where the last broke off."""
        if progress.started is None:
            call = self._stub().Generate(request, timeout=self._timeout_s)
        else:
            resume = pb.ResumeRequest(
                session_id=progress.started.session_id, from_position=len(progress.tokens), tail=progress.tokens
            )
            call = self._stub().Resume(resume, timeout=self._timeout_s)
        try:
            with _errors():
                for reply in call:
                    news = _reply(reply)
                    if isinstance(news, Started):
                        if progress.started is not None:
                            continue
                        progress.started = news
                    elif isinstance(news, Tokens):
                        progress.tokens.extend(news.token_ids)
                    yield news
                    if isinstance(news, Finished):
                        return
            raise PeerLost("the stream ended before the output was complete")
        finally:
            call.cancel()


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Turn gRPC's errors into ours."""
    try:
        yield
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            raise Expired("the deadline passed before the output was complete") from error
        raise wire.error_from_rpc(error) from error


def _reply(reply: pb.GenerateReply) -> Reply:
    kind = reply.WhichOneof("message")
    if kind == "started":
        started = reply.started
        return Started(started.session_id, started.seed, started.prompt_tokens, started.model)
    if kind == "chunk":
        chunk = reply.chunk
        return Tokens(
            chunk.position,
            chunk.text,
            tuple(chunk.token_ids),
            tuple(TokenKind(value) for value in chunk.kinds),
            tuple(chunk.characters),
            tuple(wire.logprobs_from_proto(entry) for entry in chunk.logprobs),
        )
    if kind == "error":
        raise wire.error_from_proto(reply.error)
    if kind != "complete":
        raise OutriderError(f"the coordinator sent a message that this client does not know: {kind}")
    complete = reply.complete
    return Finished(
        complete.text,
        FinishReason(complete.finish_reason),
        complete.stop,
        complete.prompt_tokens,
        complete.output_tokens,
        complete.stats,
    )
