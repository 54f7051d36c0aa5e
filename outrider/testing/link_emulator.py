"""A bad network on one machine: a TCP port that forwards to another with delay, jitter, a bandwidth, cuts and stalls.

    async with Link("127.0.0.1", 50051, Shape(delay_ms=20)) as link:
        ...  # connect to link.address; link.stall(), link.heal(), link.cut() on the way

For tests and experiments; by hand: `python -m outrider.testing.link_emulator --to
127.0.0.1:50051 --delay-ms 20`. Order is kept. What is under way waits for its
own due time only, so delay does not limit throughput. Delays are kept to
about a millisecond, which is what asyncio's timers can do.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
import struct
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Self

import typer

from outrider.base.endpoint import allowed, split
from outrider.protocol.errors import InvalidRequest

CHUNK = 64 * 1024
_LINGER_0 = struct.pack("ii", 1, 0)  # closing then sends RST instead of FIN
_AHEAD_S = 0.005  # how far the sender may be ahead of a bandwidth: more would be a queue that no wire has


@dataclass(frozen=True, slots=True)
class LinkShape:
    """What the network is like, each way. Replace `EmulatedLink.shape` to change it in the middle of things."""

    delay_ms: float = 0.0
    jitter_ms: float = 0.0  # added to the delay, uniform in [0, jitter_ms]
    bytes_per_s: float = 0.0  # shared by all connections; 0: no limit
    window_bytes: int = 32 * 1024 * 1024  # at most this much under way per connection

    def __post_init__(self) -> None:
        for name in ("delay_ms", "jitter_ms", "bytes_per_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidRequest.of(name, getattr(self, name), "at least 0")
        if self.window_bytes < CHUNK:
            raise InvalidRequest.of("window_bytes", self.window_bytes, f"at least {CHUNK}")

    @property
    def chunk(self) -> int:
        """Bytes to take at once: with a bandwidth, about what passes in the time that a sender may be ahead."""
        if not self.bytes_per_s:
            return CHUNK
        return int(min(CHUNK, max(256, self.bytes_per_s * _AHEAD_S)))


class EmulatedLink:
    """Listens while it is entered. `up` is what clients sent and the target got, `down` the other way."""

    def __init__(
        self,
        target_host: str,
        target_port: int,
        shape: LinkShape | None = None,
        *,
        listen_host: str = "127.0.0.1",
        listen_port: int = 0,
        seed: int = 0,
    ) -> None:
        self.shape = shape or LinkShape()
        self.host = listen_host
        self.port = listen_port
        self.up = LinkLane()
        self.down = LinkLane()
        self.accepted = 0
        self.random = random.Random(seed)
        self._target = (target_host, target_port)
        self._server: asyncio.Server | None = None
        self._pipes: set[_Pipe] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._refusing = False

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        tasks = [pipe.task for pipe in self._pipes]
        self.cut(refuse=True)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def connections(self) -> int:
        """Open now."""
        return len(self._pipes)

    def cut(self, *, refuse: bool = False) -> None:
        """Reset every connection, both ends. New ones are taken, or reset at once until `heal`."""
        self._refusing = refuse
        for pipe in list(self._pipes):
            pipe.reset()

    def stall(self) -> None:
        """Half-open: connections stay, nothing passes, neither end is told. New ones get no answer either."""
        self._flowing.clear()

    def heal(self) -> None:
        """After a stall what was held goes on, as TCP would send it again; after a refusing cut, take connections."""
        self._refusing = False
        self._flowing.set()

    async def flowing(self) -> None:
        await self._flowing.wait()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = asyncio.current_task()
        assert task is not None
        pipe = _Pipe(self, task, writer)
        self._pipes.add(pipe)
        try:
            await self._carry(pipe, reader)
        except asyncio.CancelledError:
            pass  # by `reset`; Python 3.11 would report a cancelled callback of a server as an error
        finally:
            pipe.reset()
            self._pipes.discard(pipe)

    async def _carry(self, pipe: _Pipe, reader: asyncio.StreamReader) -> None:
        if self._refusing:
            return
        await self.flowing()
        try:
            await pipe.carry(reader, *await asyncio.open_connection(*self._target))
        except OSError:
            await self.flowing()  # one end has reset, or is not there; in a stall the other must not learn it


class LinkLane:
    """One direction of a link: when its wire is free again, and what has passed."""

    def __init__(self) -> None:
        self.num_bytes = 0  # delivered
        self._free_at = 0.0

    async def wait_for_room(self) -> None:
        """Until a sender may put more on the wire: TCP slows it down from there."""
        loop = asyncio.get_running_loop()
        while (early := self._free_at - _AHEAD_S - loop.time()) > 0:
            await asyncio.sleep(early)

    def book(self, size: int, link: EmulatedLink) -> float:
        """Put so many bytes on the wire; when they are at its other end."""
        shape = link.shape
        self._free_at = max(asyncio.get_running_loop().time(), self._free_at)
        if shape.bytes_per_s:
            self._free_at += size / shape.bytes_per_s
        return self._free_at + (shape.delay_ms + link.random.uniform(0, shape.jitter_ms)) / 1000


class _Pipe:
    """One connection through a link: two streams each way, and the task that carries between them."""

    def __init__(self, link: EmulatedLink, task: asyncio.Task[None], client: asyncio.StreamWriter) -> None:
        self.task = task
        self._link = link
        self._writers = [client]

    async def carry(
        self, from_client: asyncio.StreamReader, from_target: asyncio.StreamReader, target: asyncio.StreamWriter
    ) -> None:
        """Until both directions have ended, or one has broken."""
        client = self._writers[0]
        self._writers.append(target)
        flights = (
            _Flight(self._link, self._link.up, from_client, target),
            _Flight(self._link, self._link.down, from_target, client),
        )
        jobs = [asyncio.create_task(job) for flight in flights for job in (flight.take(), flight.deliver())]
        try:
            await asyncio.gather(*jobs)
            for writer in self._writers:
                writer.close()
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    def reset(self) -> None:
        """Send RST to both ends; harmless on what is closed already."""
        for writer in self._writers:
            if writer.transport.is_closing():
                continue
            with contextlib.suppress(OSError):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)
            writer.transport.abort()
        if self.task is not asyncio.current_task():
            self.task.cancel()


class _Flight:
    """What is under way in one direction of one connection."""

    def __init__(
        self, link: EmulatedLink, lane: LinkLane, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._link = link
        self._lane = lane
        self._reader = reader
        self._writer = writer
        self._under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        self._num_bytes = 0
        self._room = asyncio.Event()

    async def take(self) -> None:
        """From the sender onto the wire. No bytes are its end."""
        data = b"-"
        while data:
            await self._wait_for_room()
            data = await self._reader.read(self._link.shape.chunk)
            self._num_bytes += len(data)
            self._under_way.put_nowait((self._lane.book(len(data), self._link), data))

    async def deliver(self) -> None:
        """From the wire to the receiver, each chunk when it is due and never before the one ahead of it."""
        loop = asyncio.get_running_loop()
        while True:
            due, data = await self._under_way.get()
            if (early := due - loop.time()) > 0:
                await asyncio.sleep(early)
            await self._link.flowing()
            if not data:
                self._writer.write_eof()
                return
            self._writer.write(data)
            self._lane.num_bytes += len(data)
            await self._writer.drain()
            self._num_bytes -= len(data)
            self._room.set()

    async def _wait_for_room(self) -> None:
        await self._link.flowing()
        await self._lane.wait_for_room()
        while self._num_bytes > self._link.shape.window_bytes - CHUNK:
            self._room.clear()
            await self._room.wait()


def main(
    to: Annotated[str, typer.Option(help="host:port to forward to.")],
    listen: Annotated[str, typer.Option(help="host:port to listen on; port 0 takes a free one.")] = "127.0.0.1:0",
    delay_ms: Annotated[float, typer.Option(min=0, help="One way, so a round trip takes twice that.")] = 0.0,
    jitter_ms: Annotated[float, typer.Option(min=0, help="At most this is added to each delay.")] = 0.0,
    kib_per_s: Annotated[float, typer.Option(min=0, help="Bandwidth each way; 0: no limit.")] = 0.0,
    cut_every_s: Annotated[float, typer.Option(min=0, help="Reset every connection this often; 0: never.")] = 0.0,
    stall_every_s: Annotated[float, typer.Option(min=0, help="Stop passing anything this often; 0: never.")] = 0.0,
    stall_for_s: Annotated[float, typer.Option(min=0, help="How long a stall lasts.")] = 1.0,
    allow_remote: Annotated[bool, typer.Option("--allow-remote", help="Permit addresses of other machines.")] = False,
) -> None:
    """Forward a port over a bad network until interrupted."""
    try:
        allowed(to, allow_remote=allow_remote)
        allowed(listen, allow_remote=allow_remote, lowest_port=0)
        shape = LinkShape(delay_ms, jitter_ms, 1024 * kib_per_s)
        target, (listen_host, listen_port) = split(to), split(listen, lowest_port=0)
    except InvalidRequest as error:
        raise typer.BadParameter(error.message) from error
    link = EmulatedLink(*target, shape, listen_host=listen_host, listen_port=listen_port)
    asyncio.run(_run(link, cut_every_s, stall_every_s, stall_for_s))


async def _run(link: EmulatedLink, cut_every_s: float, stall_every_s: float, stall_for_s: float) -> None:
    leave = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, leave.set)
    async with link:
        typer.echo(f"listening at {link.address}")
        troubles = [
            asyncio.create_task(_cut(link, cut_every_s)),
            asyncio.create_task(_stall(link, stall_every_s, stall_for_s)),
        ]
        await leave.wait()
        for trouble in troubles:
            trouble.cancel()
    typer.echo(f"{link.accepted} connections, {link.up.num_bytes} bytes up, {link.down.num_bytes} bytes down")


async def _cut(link: EmulatedLink, every_s: float) -> None:
    while every_s:
        await asyncio.sleep(every_s)
        link.cut()


async def _stall(link: EmulatedLink, every_s: float, for_s: float) -> None:
    while every_s:
        await asyncio.sleep(every_s)
        link.stall()
        await asyncio.sleep(for_s)
        link.heal()


if __name__ == "__main__":
    typer.run(main)
