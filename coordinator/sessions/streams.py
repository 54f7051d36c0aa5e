"""Streams of a session to its workers, and the one to its verifier.

Sending never waits: a stalled peer never stalls the session. The loss of a peer raises PeerLost for every gRPC status.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from copy import copy
from dataclasses import replace
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from coordinator.persistence.session_record import SessionRecord
from coordinator.sessions.hidden_states.earlier_states import EarlierReply
from coordinator.sessions.seeds import worker_params
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
In = TypeVar("In", bound=Message)

OPEN_TIMEOUT_S = 30.0
PLAIN_STEPS = 32  # of a verdict, when this process reads too slowly


class WorkerStream(Generic[Out, In]):
    """A bidirectional stream whose first message is sent on entry."""

    def __init__(self, connection: WorkerConnection, opening: Out, decode: Callable[[bytes], In], span: Span) -> None:
        """Set the first message, and how to decode the worker's."""
        self.connection = connection
        self._opening = opening
        self._decode = decode
        self._span = span
        self._call: Any = None
        self._cancelled_by: OutriderError | None = None  # copied: its traceback would have this stream

    async def __aenter__(self) -> Self:
        try:
            self._call = self.connection.start_session(current().metadata(self._span))
        except grpc.aio.UsageError as error:  # the channel has been closed since the worker was chosen
            self._span.end(lost := PeerLost(f"{self.connection.info.address} has left"))
            raise lost from error
        self.connection.streams.add(self)
        self.send(self._opening)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.connection.streams.discard(self)
        self._span.end(error)
        await self._call.close()

    def cancel(self, error: OutriderError) -> None:
        """Cancel the stream; its reader raises the error."""
        self._cancelled_by = self._cancelled_by or error
        self._call.cancel()

    def send(self, message: Out) -> None:
        if not self._call.send(message.SerializeToString()):
            self.cancel(PeerLost(f"{self.connection.info.address} does not read its messages"))

    def overdue_s(self, tick_s: float, load: WorkerLoad, timeout_s: float) -> float:
        """Return 0: a drafter need not answer."""
        return 0.0

    async def receive(self) -> In | None:
        """Return the peer's next message, or None after an orderly end of the stream."""
        try:
            data = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise copy(self._cancelled_by) or worker_error(self.connection.info.address, error) from error
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # else gRPC cancelled the read, as it does for a call that was cancelled
            raise copy(self._cancelled_by) or PeerLost(f"stream to {self.connection.info.address} was closed") from None
        if data is None:
            return None
        self.connection.silent_s = 0.0
        try:
            return self._decode(data)
        except DecodeError as error:
            raise ProtocolViolation(f"{self.connection.info.address} sent bytes that are no message") from error

    async def opened(self) -> In:
        """Wait until the peer has accepted the session and return its reply."""
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                reply = await self.receive()
        except TimeoutError as error:
            raise PeerLost(f"{self.connection.info.address} did not answer in {OPEN_TIMEOUT_S:g} s") from error
        if reply is None:
            raise PeerLost(f"{self.connection.info.address} did not open the session")
        if (kind := reply.WhichOneof("message") or "empty") != "opened":
            raise ProtocolViolation(f"{self.connection.info.address} sent a message that is {kind}, not opened")
        return reply


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
            params=convert.params_to_proto(worker_params(request.params)),
            steer=convert.verify_steering_to_proto(VerifySteering(0, states=states.states, plain_steps=PLAIN_STEPS)),
            hidden_states=bool(states.hidden_states),
            cache_salt=request.cache_salt,
            tenant=record.tenant,
        )
        super().__init__(connection, verify.VerifyRequest(open=opening), verify.VerifyReply.FromString, span)
        self._sent = SentMessages(plain_steps=PLAIN_STEPS)
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

    def expect_direct(self, source: int) -> None:
        """Expect guesses of a drafter in the verifier's process."""
        self._sent.direct, self._sent.sources = True, max(self._sent.sources, source)

    def steer(self, steering: VerifySteering) -> None:
        self._sent.messages += 1 + self._sent.states.note(steering)
        self._sent.earlier.note(steering)
        if steering.gamma is not None:  # what control learns from guesses, it learns step by step
            steering = replace(steering, plain_steps=1 if steering.gamma else PLAIN_STEPS)
        if steering.draft_wait_us is not None:
            self._deadline.wait_timeout_s = steering.draft_wait_us / 1e6
        self.send(verify.VerifyRequest(steer=convert.verify_steering_to_proto(steering)))

    def overdue_s(self, tick_s: float, load: WorkerLoad, timeout_s: float) -> float:
        return self._deadline.overdue_s(tick_s, load, timeout_s)

    async def replies(self) -> AsyncIterator[Verdict | Refusal | EarlierReply]:
        """Yield the verifier's replies; raise ProtocolViolation for one that no conforming verifier sends."""
        while (reply := await self.receive()) is not None:
            kind = reply.WhichOneof("message")
            if kind == "verdict":
                self._deadline.reset()
                self.connection.is_stuck = False
                yield self._reader.verdict(reply.verdict, time.monotonic())
            elif kind == "refused":
                yield self._reader.refusal(reply)
            elif kind == "earlier_states":
                yield self._sent.earlier.reply(reply.earlier_states)
            else:
                raise ProtocolViolation(f"{self.connection.info.address} sent a message that is {kind or 'empty'}")
