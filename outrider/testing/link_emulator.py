"""Link emulator: a TCP proxy with delay, jitter, limited bandwidth, resets and stalls.

    async with EmulatedLink("127.0.0.1", 50051, LinkShape(delay_ms=20)) as link:
        ...  # connect to link.address, then call link.stall(), link.heal() or link.cut()

From a shell: `python -m outrider.testing.link_emulator --to 127.0.0.1:50051
--delay-ms 20`. Order is kept. Data in transfer waits for its own due time only,
so delay does not limit throughput. Delays are exact to about a millisecond, the resolution of asyncio's timers.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
import struct
from dataclasses import dataclass
from typing import Annotated, Self

import typer

from outrider.base.aio import background
from outrider.base.endpoint import allowed, bracketed, split
from outrider.protocol.errors import InvalidRequest

CHUNK = 64 * 1024
_LINGER_0 = struct.pack("ii", 1, 0)  # close with RST instead of FIN
_AHEAD_S = 0.005  # the sender's lead over the bandwidth; more would emulate a queue


@dataclass(frozen=True, slots=True)
class LinkShape:
    """Properties of the network in each direction. Assign `EmulatedLink.shape` to change them while it runs."""

    delay_ms: float = 0.0
    jitter_ms: float = 0.0  # added to the delay, uniform in [0, jitter_ms]
    bytes_per_s: float = 0.0  # shared by all connections; 0: no limit
    window_bytes: int = 32 * 1024 * 1024  # in transfer per connection

    def __post_init__(self) -> None:
        for name in ("delay_ms", "jitter_ms", "bytes_per_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidRequest.of(name, getattr(self, name), "at least 0")
        if self.window_bytes < CHUNK:
            raise InvalidRequest.of("window_bytes", self.window_bytes, f"at least {CHUNK}")

    @property
    def chunk(self) -> int:
        """Return the bytes to read at once: with a bandwidth, about those that pass within _AHEAD_S."""
        return int(min(CHUNK, max(256, self.bytes_per_s * _AHEAD_S))) if self.bytes_per_s else CHUNK


class EmulatedLink:
    """Proxy that listens while it is entered. `up` is the direction from clients to the target, `down` the reverse."""

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
        self.up = LinkDirection()
        self.down = LinkDirection()
        self.accepted = 0
        self.random = random.Random(seed)
        self._target = (target_host, target_port)
        self._server: asyncio.Server | None = None
        self._pipes: set[_Pipe] = set()
        self.flowing = asyncio.Event()
        self.flowing.set()
        self._refusing = False

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        tasks = [pipe.task for pipe in self._pipes]
        self.cut(refuse=True)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def address(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"

    @property
    def connections(self) -> int:
        """Return the number of open connections."""
        return len(self._pipes)

    def cut(self, *, refuse: bool = False) -> None:
        """Reset every connection at both ends. New ones are accepted, or with `refuse` reset until `heal`."""
        self._refusing = refuse
        for pipe in list(self._pipes):
            pipe.reset()

    def stall(self) -> None:
        """Stop all data without closing connections. New connections get no answer either."""
        self.flowing.clear()

    def heal(self) -> None:
        """End a stall, delivering held data as TCP would retransmit it; after a refusing `cut`, accept connections."""
        self._refusing = False
        self.flowing.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = asyncio.current_task()
        assert task is not None
        pipe = _Pipe(self, task, writer)
        self._pipes.add(pipe)
        try:
            await self._carry(pipe, reader)
        except asyncio.CancelledError:
            pass  # `reset` cancels; Python 3.11 would report it as an error of the server's callback
        finally:
            pipe.reset()
            self._pipes.discard(pipe)

    async def _carry(self, pipe: _Pipe, reader: asyncio.StreamReader) -> None:
        if self._refusing:
            return
        await self.flowing.wait()
        try:
            await pipe.carry(reader, *await asyncio.open_connection(*self._target))
        except OSError:
            await self.flowing.wait()  # one end reset or is unreachable; a stall hides that from the other


class LinkDirection:
    """One direction of a link: the time at which it is free, and its byte count."""

    def __init__(self) -> None:
        self.num_bytes = 0  # delivered
        self._free_at = 0.0

    async def wait_for_budget(self) -> None:
        """Wait until a sender may send more; TCP's flow control does the rest."""
        loop = asyncio.get_running_loop()
        while (early := self._free_at - _AHEAD_S - loop.time()) > 0:
            await asyncio.sleep(early)

    def reserve(self, size: int, link: EmulatedLink) -> float:
        """Reserve the link for this many bytes; return their arrival time."""
        shape = link.shape
        self._free_at = max(asyncio.get_running_loop().time(), self._free_at)
        if shape.bytes_per_s:
            self._free_at += size / shape.bytes_per_s
        return self._free_at + (shape.delay_ms + link.random.uniform(0, shape.jitter_ms)) / 1000


class _Pipe:
    """One proxied connection and its task."""

    def __init__(self, link: EmulatedLink, task: asyncio.Task[None], client: asyncio.StreamWriter) -> None:
        self.task = task
        self._link = link
        self._writers = [client]

    async def carry(
        self, from_client: asyncio.StreamReader, from_target: asyncio.StreamReader, target: asyncio.StreamWriter
    ) -> None:
        """Forward until both directions have ended, or one has failed."""
        client = self._writers[0]
        self._writers.append(target)
        transfers = (
            _Transfer(self._link, self._link.up, from_client, target),
            _Transfer(self._link, self._link.down, from_target, client),
        )
        async with background(*(job for each in transfers for job in (each.take(), each.deliver()))) as jobs:
            await asyncio.gather(*jobs)
            for writer in self._writers:
                writer.close()

    def reset(self) -> None:
        """Send RST to both ends that are still open."""
        for writer in (each for each in self._writers if not each.transport.is_closing()):
            with contextlib.suppress(OSError):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)
            writer.transport.abort()
        if self.task is not asyncio.current_task():
            self.task.cancel()


class _Transfer:
    """Data in transfer in one direction of one connection."""

    def __init__(
        self, link: EmulatedLink, direction: LinkDirection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._link = link
        self._direction = direction
        self._reader = reader
        self._writer = writer
        self._in_flight: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        self._num_bytes = 0
        self._budget = asyncio.Event()

    async def take(self) -> None:
        """Queue each chunk that the sender writes, with its due time, until its end."""
        data = b"-"
        while data:
            await self._link.flowing.wait()
            await self._direction.wait_for_budget()
            while self._num_bytes > self._link.shape.window_bytes - CHUNK:
                self._budget.clear()
                await self._budget.wait()
            data = await self._reader.read(self._link.shape.chunk)
            self._num_bytes += len(data)
            self._in_flight.put_nowait((self._direction.reserve(len(data), self._link), data))

    async def deliver(self) -> None:
        """Write each chunk to the receiver when it is due, in order."""
        loop = asyncio.get_running_loop()
        while True:
            due, data = await self._in_flight.get()
            if (early := due - loop.time()) > 0:
                await asyncio.sleep(early)
            await self._link.flowing.wait()
            if not data:
                self._writer.write_eof()
                return
            self._writer.write(data)
            self._direction.num_bytes += len(data)
            await self._writer.drain()
            self._num_bytes -= len(data)
            self._budget.set()


def main(
    to: Annotated[str, typer.Option(help="host:port to forward to.")],
    listen: Annotated[str, typer.Option(help="host:port to listen on; port 0 takes a free one.")] = "127.0.0.1:0",
    delay_ms: Annotated[float, typer.Option(min=0, help="Delay in each direction: half a round trip.")] = 0.0,
    jitter_ms: Annotated[float, typer.Option(min=0, help="Largest random addition to each delay.")] = 0.0,
    kib_per_s: Annotated[float, typer.Option(min=0, help="Bandwidth each way; 0: no limit.")] = 0.0,
    cut_every_s: Annotated[float, typer.Option(min=0, help="Reset every connection this often; 0: never.")] = 0.0,
    stall_every_s: Annotated[float, typer.Option(min=0, help="Stall all data this often; 0: never.")] = 0.0,
    stall_for_s: Annotated[float, typer.Option(min=0, help="Duration of a stall.")] = 1.0,
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
        async with background(_cut(link, cut_every_s), _stall(link, stall_every_s, stall_for_s)):
            await leave.wait()
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
