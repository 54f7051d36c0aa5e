"""Session calls to one worker: they share a stream, if the worker has `Sessions`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from outrider.base.aio import WriteTimer, background, cancel_all
from outrider.multiplex.calls import MultiplexedCall, OwnCall, SessionCall, rpc_error
from outrider.multiplex.frames import MAX_BATCH_BYTES, FrameQueue
from outrider.multiplex.stream import MAX_ENDING, MultiplexedStream, check_batch, check_window
from outrider.protocol.errors import InvalidRequest, ProtocolViolation
from outrider.v1 import multiplex_pb2 as pb

log = structlog.get_logger(__name__)

MAX_HEADER_BYTES = 1024  # with its key
WRITE_TIMEOUT_S = 30.0  # for a batch, from its first frame to its place in the connection
FRAMES_AT_ONCE = 32  # then what else is ready has its turn: of hundreds of sessions one would wait for all at each step

Metadata = Sequence[tuple[str, str]]


class SharedStream:
    """Stream to a worker that carries sessions once the worker has answered."""

    def __init__(self, channel: grpc.aio.Channel, max_message_bytes: int) -> None:
        self.channel = channel
        self.ready = False
        self._max_message_bytes = max_message_bytes
        self._window = 0
        self._frames = FrameQueue()
        self.streams: dict[int, MultiplexedStream] = {}  # those too that one side has ended
        self._last = 0

    def start(self, metadata: Metadata) -> MultiplexedCall:
        self._last += 1
        stream = MultiplexedCall(self._last, self.streams, self._frames, self._window, self._max_message_bytes)
        # A header beyond the worker's limits would end the sessions of all.
        sound = [(key, text) for key, text in metadata if len(key) + len(text.encode()) <= MAX_HEADER_BYTES]
        size = sum(len(key) + len(text.encode()) for key, text in sound)
        headers = [pb.StreamHeader(key=key, header=text) for key, text in sound]
        self._frames.add(self._last, size).open.CopyFrom(pb.OpenStream(headers=headers))
        return stream

    async def run(self, call: Any) -> None:
        """Carry sessions until the call ends; raise the reason. The sessions raise it too."""
        failure: Exception = rpc_error(grpc.StatusCode.UNAVAILABLE, "the connection was closed")
        try:
            async with background(self._write(call)):
                self._window = check_window(await _batch(call))
                self.ready = True
                while True:
                    await self._receive(await _batch(call))
        except InvalidRequest as error:
            failure = ProtocolViolation(f"shared stream: {error.message}")
            raise failure from error
        except grpc.aio.AioRpcError as error:
            # Its status is about the shared stream: for a session, a worker was lost.
            failure = rpc_error(grpc.StatusCode.UNAVAILABLE, error.details() or error.code().name)
            raise
        finally:
            self.ready = False
            call.cancel()
            for stream in list(self.streams.values()):
                stream.fail(failure)

    async def _receive(self, batch: pb.SessionFrames) -> None:
        read_at = time.monotonic()
        for number, frame in enumerate(check_batch(batch), 1):
            stream = self.streams.get(frame.stream)
            if stream is None or frame.HasField("open"):
                raise InvalidRequest.of("frame.stream", frame.stream, "a stream that is open")
            stream.receive(frame)
            if not number % FRAMES_AT_ONCE or (batch.ping and number == len(batch.frames)):
                await asyncio.sleep(0)  # a ping is answered once the sessions have dealt with its batch
        self._frames.take_marks(batch, time.monotonic() - read_at)
        if len(self.streams) > MAX_ENDING and sum(stream.end_sent for stream in self.streams.values()) > MAX_ENDING:
            raise InvalidRequest.of("streams", "not ended", "ended by both sides")

    async def _write(self, call: Any) -> None:
        timer = WriteTimer(WRITE_TIMEOUT_S)
        try:
            async with timer.timeout:
                while (batch := await self._frames.next()) is not None:
                    timer.began = self._frames.made_at
                    await call.write(batch)
                    timer.began = None
        except TimeoutError:
            log.warning("shared stream ended: worker does not read", seconds=WRITE_TIMEOUT_S)
            call.cancel()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            return  # the reader raises the error
        finally:
            timer.handle.cancel()


class WorkerCalls:
    """Session calls to one worker. The shared stream is opened again when it is lost or the channel changes."""

    def __init__(self, service: str, method: str, max_message_bytes: int) -> None:
        """Set the worker's service, its method for one session, and the maximum size of its messages."""
        self._service = service
        self._method = method
        self._max_message_bytes = max_message_bytes
        self._shares = True  # as far as is known
        self._shared: SharedStream | None = None
        self._running: set[asyncio.Task[None]] = set()

    @property
    def shared(self) -> SharedStream | None:
        """Return the shared stream, if it is open."""
        return self._shared if self._shared is not None and self._shared.ready else None

    def keep_open(self, channel: grpc.aio.Channel) -> None:
        """Open the shared stream unless it is open on this channel or the worker has none."""
        if self._shares and (self._shared is None or self._shared.channel is not channel):
            self._shared = SharedStream(channel, self._max_message_bytes)
            running = asyncio.create_task(self._run(self._shared))
            self._running.add(running)
            running.add_done_callback(self._running.discard)

    def start(self, channel: grpc.aio.Channel, metadata: Metadata) -> SessionCall:
        """Start the call of a session, within the shared stream if one is open on this channel."""
        if (shared := self.shared) is not None and shared.channel is channel:
            return shared.start(metadata)
        call: Any = channel.stream_stream(f"/{self._service}/{self._method}")
        return OwnCall(call(metadata=metadata))

    async def close(self) -> None:
        self._shares = False
        await cancel_all(list(self._running))

    async def _run(self, shared: SharedStream) -> None:
        # Batches are decoded here: a large one would need many times its size as messages.
        call: Any = shared.channel.stream_stream(f"/{self._service}/Sessions", pb.SessionFrames.SerializeToString)
        try:
            await shared.run(call())
        except grpc.aio.UsageError:
            log.debug("shared stream not opened: channel closed")
        except grpc.aio.AioRpcError as error:
            self._shares = self._shares and error.code() is not grpc.StatusCode.UNIMPLEMENTED
            refused = error.code() is grpc.StatusCode.INVALID_ARGUMENT  # it says that we violated the protocol
            report = log.warning if refused else log.debug
            report("shared stream ended", status=error.code().name, error=error.details())
        except ProtocolViolation as error:
            self._shares = False
            log.warning("shared stream ended: protocol violation", error=error.message)
        finally:
            if self._shared is shared:
                self._shared = None


async def _batch(call: Any) -> pb.SessionFrames:
    data = await call.read()
    if data is grpc.aio.EOF:
        raise rpc_error(grpc.StatusCode.UNAVAILABLE, "the worker has ended the stream")
    if len(data) > MAX_BATCH_BYTES:
        raise InvalidRequest.of("batch", f"{len(data)} bytes", f"at most {MAX_BATCH_BYTES}")
    try:
        return pb.SessionFrames.FromString(data)
    except DecodeError as error:
        raise InvalidRequest.of("batch", "no message", "a batch of frames") from error
