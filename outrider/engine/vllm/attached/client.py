"""The client of a coordinator inside vLLM's engine core: one stream per request, in a thread of its own.

No call waits for the network. Without a coordinator the requests go on plain, and attach when there is one again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from typing import Any

import grpc
import structlog

from outrider.base.rpc_status import error_from_rpc
from outrider.engine.vllm.attached.options import AttachOptions
from outrider.engine.vllm.attached.request import AttachedRequest, as_plain
from outrider.protocol import convert
from outrider.protocol.errors import OutriderError, Overloaded, PeerLost, Unavailable
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.speculation import Verdict, joined
from outrider.runtime.worker_service import machine_id
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc
from outrider.v1 import verifier_pb2 as verify

log = structlog.get_logger(__name__)

_RETRY_S = 0.5
_MAX_RETRY_S = 10.0
_MAX_UNSENT = 1024  # messages of a stream
_GRACE_S = 5.0  # for a coordinator to end the stream of an ended request


class _RequestStream:
    """The client's side of a request: what the coordinator knows of it, or would know."""

    def __init__(self, request: AttachedRequest, tokens: list[int], salt: str = "") -> None:
        self.request = request
        self.tokens, self.salt = tokens, salt
        self.number, self.closed, self.not_before = 0, False, 0.0
        self.outbox: asyncio.Queue[verify.VerifyReply | None] | None = None  # None: no stream is open
        self.unsent: list[Verdict] = []  # without guesses
        self.call: Any = None  # the last one
        self.plain_steps = 1  # that the coordinator takes in one verdict

    def send(self, number: int, item: Verdict | verify.VerifyReply | None) -> None:
        """Send what happened while stream `number` was in use; None: the request has ended."""
        current = number == self.number
        if isinstance(item, Verdict):
            self.tokens.extend(item.tokens)
            if not current or not (item.proposed or item.remaining_depth):
                self.unsent += [item] if current else as_plain(item)
                if len(self.unsent) >= self.plain_steps:
                    self.flush()
                return
            item = verify.VerifyReply(verdict=convert.verdict_to_proto(item))
        self.flush()
        self.closed = item is None
        if self.outbox is not None and (current or self.closed):
            self.outbox.put_nowait(item)

    def flush(self) -> None:
        while self.unsent:
            part, self.unsent = self.unsent[: self.plain_steps], self.unsent[self.plain_steps :]
            if self.outbox is not None:
                self.outbox.put_nowait(verify.VerifyReply(verdict=convert.verdict_to_proto(joined(part))))


class AttachmentClient:
    """Streams of all requests to one of the coordinators."""

    def __init__(self, options: AttachOptions, model: ModelInfo, max_guesses: int, arrived: threading.Event) -> None:
        self._addresses = options.addresses
        self._channels = options.channels()
        self._model = convert.model_to_proto(model)
        self._max_guesses = max_guesses
        self._arrived = arrived  # set after each message for a request
        self._streams: dict[str, _RequestStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._channel: grpc.aio.Channel | None = None
        self._turn, self._not_before, self._retry_s, self._told = 0, 0.0, _RETRY_S, set[str]()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="outrider attachment", daemon=True).start()

    def open(self, request: AttachedRequest, tokens: Iterable[int], salt: str) -> None:
        self._loop.call_soon_threadsafe(self._start, _RequestStream(request, list(tokens), salt))

    def send(self, items: Iterable[tuple[AttachedRequest, int, Verdict | verify.VerifyReply | None]]) -> None:
        """Send what a step brought, with the number of the stream whose guesses it used; None ends a request."""
        self._loop.call_soon_threadsafe(self._send, list(items))

    def _start(self, stream: _RequestStream) -> None:
        self._streams[stream.request.name] = stream
        task = self._loop.create_task(self._keep_attached(stream))
        self._tasks.add(task)
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a request's stream failed", exc_info=error)

    def _send(self, items: Iterable[tuple[AttachedRequest, int, Verdict | verify.VerifyReply | None]]) -> None:
        for request, number, item in items:
            if (stream := self._streams.get(request.name)) is not None:
                stream.send(number, item)
                if item is None:
                    del self._streams[request.name]
                    if stream.call is not None:
                        self._loop.call_later(_GRACE_S, stream.call.cancel)

    async def _keep_attached(self, stream: _RequestStream) -> None:
        while not stream.closed:
            pause = max(self._not_before, stream.not_before) - self._loop.time()
            if pause > 0:
                await asyncio.sleep(min(pause, _RETRY_S))
                continue
            turn, lost = self._turn, OutriderError("")
            try:
                await self._run(stream)
                lost = PeerLost("the coordinator ended the stream")
            except grpc.aio.AioRpcError as error:
                lost = error_from_rpc(error)
            except (asyncio.InvalidStateError, asyncio.CancelledError):  # another request has left the channel
                lost = PeerLost("the connection was closed")
            finally:
                stream.outbox = None
                stream.request.receive(0, self._arrived)
            if not isinstance(lost, PeerLost | Unavailable):
                if not stream.not_before or not isinstance(lost, Overloaded):  # else told before
                    self._warn("requests go on without guesses", lost)
                if not isinstance(lost, Overloaded):
                    return
                stream.not_before = self._loop.time() + min(_MAX_RETRY_S, stream.number)
            elif not stream.closed:
                await self._rest(turn, lost)

    def _warn(self, event: str, error: OutriderError) -> None:
        """Log once what may happen to each request and at each attempt."""
        if error.message not in self._told:  # coordinators have errors of their own
            self._told.add(error.message)
            log.warning(event, error=error.message)

    async def _run(self, stream: _RequestStream) -> None:
        """Follow one stream until the request or the stream ends."""
        if self._channel is None:
            self._channel = self._channels.aio_channel(self._addresses[self._turn % len(self._addresses)])
        request = stream.request
        stub: Any = rpc.AttachmentStub(self._channel)
        stream.outbox, stream.unsent, stream.plain_steps = asyncio.Queue(), [], 1
        stream.number += 1
        request.receive(stream.number, self._arrived)
        opening = pb.OpenAttached(
            tokens=stream.tokens,
            prompt_length=request.prompt_length,
            params=convert.params_to_proto(request.params),
            model=self._model,
            machine=machine_id(),
            cache_salt=stream.salt,
            max_guesses=self._max_guesses,
        )
        stream.call = call = stub.Attach()
        writing = self._loop.create_task(_write(call, stream.outbox, opening))
        try:
            async for message in call:
                if message is None or stream.outbox.qsize() > _MAX_UNSENT:
                    raise asyncio.InvalidStateError("the coordinator does not read, or sends what is no message")
                self._retry_s, self._told = _RETRY_S, set()
                if message.HasField("steer"):
                    stream.flush()
                    stream.plain_steps = message.steer.plain_steps or 1
                request.receive(message, self._arrived)
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            call.cancel()

    async def _rest(self, turn: int, error: OutriderError) -> None:
        """Turn to the next coordinator after a pause, once for all requests of the lost one."""
        if turn != self._turn:
            return
        self._warn("coordinator lost, requests go on without guesses", error)
        self._turn += 1
        self._not_before = self._loop.time() + self._retry_s
        self._retry_s = min(_MAX_RETRY_S, 2 * self._retry_s)
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


async def _write(call: Any, outbox: asyncio.Queue[verify.VerifyReply | None], opening: pb.OpenAttached) -> None:
    try:
        await call.write(pb.AttachRequest(open=opening))
        while (reply := await outbox.get()) is not None:
            await call.write(pb.AttachRequest(reply=reply))
        await call.done_writing()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return  # the reader raises the error
