"""The streams of a session, to its verifier and to its drafters, as something to send to and iterate over.

What is sent goes through a queue, so that a stalled peer never stalls the
session. Losing the peer raises PeerLost, whatever gRPC calls it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

import grpc
from google.protobuf.message import Message

from coordinator.persistence.session_record import SessionRecord
from coordinator.sessions.verdicts import Asked, Refusal, VerdictReader
from coordinator.workers.liveness import Debt
from coordinator.workers.worker_pool import WorkerConnection, worker_error
from outrider.observability.request_context import current
from outrider.observability.tracing import Span
from outrider.protocol import convert
from outrider.protocol.errors import OutriderError, PeerLost, ProtocolViolation
from outrider.protocol.fleet import ModelInfo, WorkerLoad
from outrider.protocol.speculation import HiddenStates, Steering, Verdict
from outrider.v1 import common_pb2 as common
from outrider.v1 import drafter_pb2 as draft
from outrider.v1 import verifier_pb2 as verify

Out = TypeVar("Out", bound=Message)
In = TypeVar("In")

OPEN_TIMEOUT_S = 30.0
MAX_UNSENT = 1024  # messages that a peer may be behind in reading
MAX_UNSENT_BYTES = 16 * 1024 * 1024  # besides the first
_MESSAGE_S = 0.004  # between two messages of a drafter, on average: 250 a second
_BURST = 128  # messages that may come at once


class WorkerStream(Generic[Out, In]):
    """A bidirectional stream whose first message goes out when it is entered."""

    def __init__(self, link: WorkerConnection, start: Callable[..., Any], opening: Out, span: Span) -> None:
        self.link = link
        self._start = start
        self._span = span
        self._outbox: asyncio.Queue[Out] = asyncio.Queue()
        self._outbox.put_nowait(opening)
        self._unsent_bytes = opening.ByteSize()
        self._most_bytes = self._unsent_bytes + MAX_UNSENT_BYTES
        self._call: Any = None
        self._writing: asyncio.Task[None] | None = None
        self._why: OutriderError | None = None  # this side has hung up

    async def __aenter__(self) -> Self:
        self._call = self._start(metadata=current().metadata(self._span))
        self.link.streams.add(self)
        self._writing = asyncio.create_task(self._write())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.link.streams.discard(self)
        if isinstance(error, OutriderError):
            self._span.failed(error.message)
        self._span.end()
        self._call.cancel()
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    def hang_up(self, why: OutriderError) -> None:
        """End the stream from this side; whoever reads it gets the error."""
        self._why = self._why or why
        self._call.cancel()

    def send(self, message: Out) -> None:
        self._unsent_bytes += message.ByteSize()
        if self._outbox.qsize() >= MAX_UNSENT or self._unsent_bytes > self._most_bytes:
            self.hang_up(PeerLost(f"{self.link.info.address} does not read what is sent to it"))
        else:
            self._outbox.put_nowait(message)

    def overdue_s(self, tick_s: float, load: WorkerLoad, timeout_s: float) -> float:
        """A drafter owes nothing."""
        return 0.0

    async def receive(self) -> In | None:
        """The peer's next message; None when it has ended the stream in order."""
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._why or worker_error(self.link.info.address, error) from error
        except asyncio.CancelledError:
            raise self._lost() from None
        if message is grpc.aio.EOF:
            code = await self._call.code()
            if code is not grpc.StatusCode.OK:
                raise self._why or worker_error(
                    self.link.info.address, cast(grpc.RpcError, await _as_error(self._call))
                )
            return None
        if message is None:  # gRPC's word for bytes that it cannot decode
            raise ProtocolViolation(f"{self.link.info.address} sent bytes that are no message")
        self.link.silence.heard()
        return cast(In, message)

    async def opened(self) -> In:
        """Wait until the peer has taken the session; what it says to that."""
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                reply: Any = await self.receive()
        except TimeoutError as error:
            raise PeerLost(f"{self.link.info.address} did not answer in {OPEN_TIMEOUT_S:g} s") from error
        if reply is None:
            raise PeerLost(f"{self.link.info.address} did not open the session")
        if reply.WhichOneof("message") != "opened":
            kind = reply.WhichOneof("message") or "empty"
            raise ProtocolViolation(f"{self.link.info.address} sent a message that is {kind}, not opened")
        return cast(In, reply)

    def _lost(self) -> BaseException:
        """A cancelled call and a cancelled task look alike: only the task's own is to be passed on."""
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            return asyncio.CancelledError()
        return self._why or PeerLost(f"the connection to {self.link.info.address} was closed")

    async def _write(self) -> None:
        while True:
            message = await self._outbox.get()
            try:
                await self._call.write(message)
                self._unsent_bytes -= message.ByteSize()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the reader learns why


class VerifierStream(WorkerStream[verify.VerifyRequest, verify.VerifyReply]):
    def __init__(
        self, link: WorkerConnection, opening: verify.OpenVerify, span: Span, record: SessionRecord, target: ModelInfo
    ) -> None:
        super().__init__(link, link.verifier.Verify, verify.VerifyRequest(open=opening), span)
        self._asked = Asked(features=opening.features)
        self._debt = Debt(len(opening.tokens))
        self._reader = VerdictReader(record, target, self._asked, time.monotonic())

    async def opened(self) -> verify.VerifyReply:
        reply = await super().opened()
        self._reader.opened(reply.opened)
        return reply

    def guess(self, guess: common.Guess) -> None:
        self._asked.guess(guess)
        self.send(verify.VerifyRequest(guess=guess))

    def steer(self, steering: Steering) -> None:
        steer = convert.steering_to_proto(steering)
        self._asked.steer(steer)
        if steering.patience_us is not None:
            self._debt.patience_s = steering.patience_us / 1e6
        self.send(verify.VerifyRequest(steer=steer))

    def overdue_s(self, tick_s: float, load: WorkerLoad, timeout_s: float) -> float:
        return self._debt.overdue_s(tick_s, load, timeout_s)

    async def news(self) -> AsyncIterator[Verdict | Refusal]:
        """Raises ProtocolViolation for what no honest verifier sends."""
        while (reply := await self.receive()) is not None:
            kind = reply.WhichOneof("message")
            if kind == "verdict":
                self._debt.paid()
                yield self._reader.verdict(reply.verdict, time.monotonic())
            elif kind == "refused":
                yield self._reader.refusal(reply)
            else:
                raise ProtocolViolation(f"{self.link.info.address} sent a message that is {kind or 'empty'}")


class DrafterStream(WorkerStream[draft.DraftRequest, draft.DraftReply]):
    def __init__(self, link: WorkerConnection, opening: draft.OpenDraft, source: int, span: Span) -> None:
        super().__init__(link, link.drafter.Draft, draft.DraftRequest(open=opening), span)
        self._source = source

    def committed(self, position: int, tokens: tuple[int, ...], features: HiddenStates | None) -> None:
        message = draft.Committed(position=position, tokens=tokens)
        if features is not None:
            message.features.CopyFrom(convert.features_to_proto(features))
        self.send(draft.DraftRequest(committed=message))

    def steer(self, steering: Steering) -> None:
        self.send(draft.DraftRequest(steer=convert.steering_to_proto(steering)))

    async def guesses(self) -> AsyncIterator[common.Guess]:
        """Guesses as they came, marked with whose they are: relayed without being rebuilt.

        They are read at a pace that no honest drafter reaches for long: what a flood costs is the flood's own time.
        """
        ready_at = time.monotonic()
        while (reply := await self.receive()) is not None:
            now = time.monotonic()
            ready_at = max(ready_at, now - _BURST * _MESSAGE_S) + _MESSAGE_S
            if ready_at > now:
                await asyncio.sleep(ready_at - now)
            if reply.WhichOneof("message") != "guess":
                kind = reply.WhichOneof("message") or "empty"
                raise ProtocolViolation(f"{self.link.info.address} sent a message that is {kind}, not a guess")
            guess = reply.guess
            guess.source = self._source
            yield guess


async def _as_error(call: Any) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), details=await call.details()
    )
