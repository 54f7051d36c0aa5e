"""A drafter far away: a paced pair of tiny models as real processes, with a link of our own between them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from outrider.bench.common.report import needs
from outrider.client.sync import Client
from outrider.launch.stack import LaunchPlan, Stack
from outrider.protocol.errors import StartupError
from outrider.protocol.fleet import Role
from outrider.runtime.embedded_redis import embedded_redis
from outrider.testing.link_emulator import EmulatedLink, LinkShape

_TIMEOUT_S = 300.0
_SETTLED = 0.15  # a round trip is known when it is measured within this share
_NOISE_MS = 5.0
_SETTLE_S = 15.0
_BUSY_SHARE, _BUSY_MS = 1.5, 15.0


@dataclass(frozen=True, slots=True)
class ToyPair:
    """A target and a near copy of it. `acceptance` of its first guesses, `gain`: of the misses, how many have the truth
    among the two runners-up."""

    target: Path
    draft: Path
    acceptance: float
    gain: float


@dataclass(frozen=True, slots=True)
class Paces:
    verify: str  # as --pace takes it
    draft_ms: float
    blur: str = ""  # of the drafter, as --blur takes it


@dataclass(frozen=True, slots=True)
class Answers:
    """Texts in which a pair is to guess as well as asked: what the target says to this prompt with the first seeds."""

    prompt: tuple[int, ...] = (1, 2, 3)
    count: int = 2
    tokens: int = 200


def make_pair(folder: Path, acceptance: float, answers: Answers | None = None) -> ToyPair:
    """Blur a copy of the target until its first guesses hold about so often."""
    pairing = needs("torch", "models", "outrider.bench.network.toy_pair")
    pair: ToyPair = pairing.make_pair(folder, acceptance, answers or Answers())
    return pair


class RemoteStack(Stack):
    """A verifier here, a drafter behind a link."""

    def __init__(self, plan: LaunchPlan, pair: ToyPair, paces: Paces, redis: str, folder: Path) -> None:
        super().__init__(plan, redis, folder)
        self._pair = pair
        self._paces = paces
        self.drafter_port = _free_port()
        self.link_port = 0

    def start_workers(self) -> None:
        common = {"coordinators": ",".join(self.endpoints), "device": "cpu", "threads": 1}
        self._spawn("verifier", "verifier", target=str(self._pair.target), pace=self._paces.verify, **common)
        drafter = {"kind": "model", "model": str(self._pair.draft)}
        drafter |= {"pace": f"1:{self._paces.draft_ms:g}", "blur": self._paces.blur}
        where = {"port": self.drafter_port, "advertise": f"127.0.0.1:{self.link_port}"}
        self._spawn("drafter", "drafter", **drafter, **where, **common)


class Network:
    """The link, on a loop of its own beside a client that blocks."""

    def __init__(self, port: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.link = EmulatedLink("127.0.0.1", port)
        asyncio.run_coroutine_threadsafe(self.link.__aenter__(), self._loop).result()

    def become(self, shape: LinkShape) -> None:
        self.link.shape = shape

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.link.__aexit__(None, None, None), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@dataclass(frozen=True, slots=True)
class RemoteSetup:
    client: Client
    network: Network
    endpoints: tuple[str, ...]

    def settle(self, rtt_ms: float) -> None:
        """Wait until the coordinator has seen that the link is different."""
        deadline = time.monotonic() + _SETTLE_S
        while time.monotonic() < deadline:
            measured = [w.round_trip_ms for w in self.client.server().workers if w.role is Role.DRAFTER]
            if measured and abs(measured[0] - rtt_ms) <= max(_NOISE_MS, _SETTLED * rtt_ms):
                return
            time.sleep(0.2)
        if measured and rtt_ms <= measured[0] <= _BUSY_SHARE * rtt_ms + _BUSY_MS:
            return  # a busy machine answers late
        raise StartupError(f"the coordinator measures {measured} ms to the drafter, not {rtt_ms:g} ms")


@contextlib.contextmanager
def far(pair: ToyPair, paces: Paces, tick: Callable[[Stack], None] = lambda _: None) -> Iterator[RemoteSetup]:
    """Start everything, yield when it is ready, stop everything."""
    with contextlib.ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="outrider-")))
        redis = exits.enter_context(embedded_redis())
        plan = LaunchPlan(target=str(pair.target), drafters=(("model", str(pair.draft)),), port=0)
        running = RemoteStack(plan, pair, paces, redis, folder)
        network = Network(running.drafter_port)
        exits.callback(network.close)
        running.link_port = network.link.port
        exits.callback(running.stop)
        running.start_coordinators()
        running.wait_ready(running.children, lambda: tick(running))
        running.start_workers()
        running.wait_ready(running.children, lambda: tick(running))
        running.wait_registered(lambda: tick(running))
        client = exits.enter_context(Client(running.endpoints, timeout_s=_TIMEOUT_S))
        yield RemoteSetup(client, network, tuple(running.endpoints))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
