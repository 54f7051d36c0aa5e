"""Streams of a session to its workers, and the one to its verifier.

Messages are sent through a queue, so that a stalled peer never stalls the
session. The loss of a peer raises PeerLost for every gRPC status.
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
from coordinator.sessions.seeds import verifier_params
from coordinator.sessions.verdicts import Refusal, SentMessages, VerdictReader
from coordinator.workers.liveness import VerdictDeadline
from coordinator.workers.worker_connection import WorkerConnection, worker_error
from outrider.observability.request_context import current
from outrider.observability.tracing import Span
from outrider.protocol import convert
from outrider.protocol.errors import OutriderError, PeerLost, ProtocolViolation
from outrider.protocol.fleet import ModelInfo, WorkerLoad
from outrider.protocol.speculation import Verdict, VerifySteering
from outrider.v1 import common_pb2 as common
from outrider.v1 import verifier_pb2 as verify

Out = TypeVar("Out", bound=Message)
In = TypeVar("In")

OPEN_TIMEOUT_S = 30.0
MAX_UNSENT = 1024  # messages in the queue
MAX_UNSENT_BYTES = 16 * 1024 * 1024  # without the first message


class WorkerStream(Generic[Out, In]):
    """A bidirectional stream whose first message is sent on entry."""

    def __init__(self, connection: WorkerConnection, start: Callable[..., Any], opening: Out, span: Span) -> None:
        self.connection = connection
        self._start = start
        self._span = span
        self._outbox: asyncio.Queue[Out] = asyncio.Queue()
        self._outbox.put_nowait(opening)
        self._unsent_bytes = opening.ByteSize()
        self._max_bytes = self._unsent_bytes + MAX_UNSENT_BYTES
        self._call: Any = None
        self._writing: asyncio.Task[None] | None = None
        self._cancelled_by: OutriderError | None = None

    async def __aenter__(self) -> Self:
        try:
            self._call = self._start(metadata=current().metadata(self._span))
        except grpc.aio.UsageError as error:  # the channel has been closed since the worker was chosen
            self._span.end()
            raise PeerLost(f"{self.connection.info.address} has left") from error
        self.connection.streams.add(self)
        self._writing = asyncio.create_task(self._write())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.connection.streams.discard(self)
        if isinstance(error, OutriderError):
            self._span.failed(error.message)
        self._span.end()
        self._call.cancel()
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    def cancel(self, error: OutriderError) -> None:
        """Cancel the stream; its reader raises the error."""
        self._cancelled_by = self._cancelled_by or error
        self._call.cancel()

    def send(self, message: Out) -> None:
        self._unsent_bytes += message.ByteSize()
        if self._outbox.qsize() >= MAX_UNSENT or self._unsent_bytes > self._max_bytes:
            self.cancel(PeerLost(f"{self.connection.info.address} does not read its messages"))
        else:
            self._outbox.put_nowait(message)

    def overdue_s(self, tick_s: float, load: WorkerLoad, timeout_s: float) -> float:
        """Return 0: a drafter need not answer."""
        return 0.0

    async def receive(self) -> In | None:
        """Return the peer's next message, or None after an orderly end of the stream."""
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._cancelled_by or worker_error(self.connection.info.address, error) from error
        except asyncio.CancelledError:
            raise self._lost() from None
        if message is grpc.aio.EOF:
            code = await self._call.code()
            if code is not grpc.StatusCode.OK:
                raise self._cancelled_by or worker_error(
                    self.connection.info.address, cast(grpc.RpcError, await _as_error(self._call))
                )
            return None
        if message is None:  # gRPC returns None for bytes that it cannot decode
            raise ProtocolViolation(f"{self.connection.info.address} sent bytes that are no message")
        self.connection.silent_s = 0.0
        return cast(In, message)

    async def opened(self) -> In:
        """Wait until the peer has accepted the session and return its reply."""
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                reply: Any = await self.receive()
        except TimeoutError as error:
            raise PeerLost(f"{self.connection.info.address} did not answer in {OPEN_TIMEOUT_S:g} s") from error
        if reply is None:
            raise PeerLost(f"{self.connection.info.address} did not open the session")
        if reply.WhichOneof("message") != "opened":
            kind = reply.WhichOneof("message") or "empty"
            raise ProtocolViolation(f"{self.connection.info.address} sent a message that is {kind}, not opened")
        return cast(In, reply)

    def _lost(self) -> BaseException:
        """Return the error of a cancelled read: CancelledError only if the task itself was cancelled."""
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            return asyncio.CancelledError()
        return self._cancelled_by or PeerLost(f"the connection to {self.connection.info.address} was closed")

    async def _write(self) -> None:
        while True:
            message = await self._outbox.get()
            try:
                await self._call.write(message)
                self._unsent_bytes -= message.ByteSize()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the reader raises the error


class VerifierStream(WorkerStream[verify.VerifyRequest, verify.VerifyReply]):
    """Stream to a verifier, with its replies checked."""

    def __init__(
        self, connection: WorkerConnection, record: SessionRecord, target: ModelInfo, span: Span, states: VerifySteering
    ) -> None:
        """Prepare the stream; `states` are the hidden states to ask for."""
        request = record.request
        opening = verify.OpenVerify(
            session_id=record.session_id,
            epoch=record.epoch,
            tokens=[*request.prompt, *record.tokens],
            prompt_length=len(request.prompt),
            params=convert.params_to_proto(verifier_params(record)),
            steer=convert.verify_steering_to_proto(VerifySteering(gamma=0, states=states.states)),
            hidden_states=bool(states.hidden_states),
            cache_salt=request.cache_salt,
            tenant=record.tenant,
        )
        super().__init__(connection, connection.verifier.Verify, verify.VerifyRequest(open=opening), span)
        self._sent = SentMessages()
        self._sent.messages = self._sent.states.note(states)
        self._deadline = VerdictDeadline(len(opening.tokens))
        self._reader = VerdictReader(record, target, self._sent, time.monotonic())

    async def opened(self) -> verify.VerifyReply:
        reply = await super().opened()
        self._reader.check_opened(reply.opened)
        return reply

    def guess(self, guess: common.Guess) -> None:
        sent = self._sent
        sent.messages += 1
        sent.sources = max(sent.sources, guess.source)
        sent.guessed_to = max(sent.guessed_to, guess.position + len(guess.tokens))
        self.send(verify.VerifyRequest(guess=guess))

    def steer(self, steering: VerifySteering) -> None:
        self._sent.messages += 1 + self._sent.states.note(steering)
        if steering.draft_wait_us is not None:
            self._deadline.wait_timeout_s = steering.draft_wait_us / 1e6
        self.send(verify.VerifyRequest(steer=convert.verify_steering_to_proto(steering)))

    def overdue_s(self, tick_s: float, load: WorkerLoad, timeout_s: float) -> float:
        return self._deadline.overdue_s(tick_s, load, timeout_s)

    async def replies(self) -> AsyncIterator[Verdict | Refusal]:
        """Yield the verifier's replies; raise ProtocolViolation for one that no conforming verifier sends."""
        while (reply := await self.receive()) is not None:
            kind = reply.WhichOneof("message")
            if kind == "verdict":
                self._deadline.reset()
                yield self._reader.verdict(reply.verdict, time.monotonic())
            elif kind == "refused":
                yield self._reader.refusal(reply)
            else:
                raise ProtocolViolation(f"{self.connection.info.address} sent a message that is {kind or 'empty'}")


async def _as_error(call: Any) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), details=await call.details()
    )
