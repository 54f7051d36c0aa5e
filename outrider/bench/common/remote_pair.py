"""Remote pair: toy models behind throttled engines in real processes, with a link emulator before the drafter."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.bench.common.report import import_on_use
from outrider.client.sync import Client
from outrider.launch.services import KINDS, ServiceSpec
from outrider.launch.stack import LaunchPlan, Stack, common_settings
from outrider.protocol.errors import StartupError
from outrider.protocol.fleet import Role
from outrider.runtime.embedded_redis import embedded_redis
from outrider.testing.link_emulator import EmulatedLink

_TIMEOUT_S = 300.0
_RTT_TOLERANCE = 0.15  # share of the round trip within which the coordinator must measure it
_RTT_NOISE_MS = 5.0
_RTT_TIMEOUT_S = 15.0
_BUSY_FACTOR, _BUSY_MS = 1.5, 15.0  # accepted at the timeout: probes on a busy machine are slow


@dataclass(frozen=True, slots=True)
class ToyPair:
    """Target and perturbed copy. `gain` is the share of failed guesses whose token is among two runners-up."""

    target: Path
    draft: Path
    acceptance: float
    gain: float


@dataclass(frozen=True, slots=True)
class ThrottledTimes:
    verify: str  # format of --pace
    draft_ms: float
    blur: str = ""  # of the drafter, format of --blur


@dataclass(frozen=True, slots=True)
class ReferenceAnswers:
    """Reference output of the target for a prompt and the first seeds. The acceptance of a pair is set on it."""

    prompt: tuple[int, ...] = (1, 2, 3)
    count: int = 2
    tokens: int = 200


def make_pair(folder: Path, acceptance: float, answers: ReferenceAnswers | None = None) -> ToyPair:
    """Perturb a copy of the target until its first guesses have about this acceptance."""
    pairing = import_on_use("torch", "models", "outrider.bench.network.toy_pair")
    pair: ToyPair = pairing.make_pair(folder, acceptance, answers or ReferenceAnswers())
    return pair


class SpawningStack(Stack):
    """Stack with processes that no plan has."""

    def spawn(self, name: str, service: str, /, **settings: Any) -> None:
        """Start a process outside the plan."""
        self._start(ServiceSpec(name, service, KINDS[service](**common_settings(self.plan, service), **settings)))


class RemoteStack(SpawningStack):
    """Local verifier, and a drafter behind the link emulator."""

    def __init__(self, plan: LaunchPlan, pair: ToyPair, times: ThrottledTimes, redis: str, folder: Path) -> None:
        super().__init__(plan, redis, folder)
        self._pair = pair
        self._times = times
        self.drafter_port = _free_port()
        self.link_port = 0

    def start_workers(self) -> None:
        common = {"coordinators": ",".join(self.endpoints), "device": "cpu", "threads": 1}
        self.spawn("verifier", "verifier", target=str(self._pair.target), pace=self._times.verify, **common)
        drafter = {"kind": "model", "model": str(self._pair.draft)}
        drafter |= {"pace": f"1:{self._times.draft_ms:g}", "blur": self._times.blur}
        where = {"port": self.drafter_port, "advertise": f"127.0.0.1:{self.link_port}"}
        self.spawn("drafter", "drafter", **drafter, **where, **common)


class Network:
    """Link emulator on an event loop in its own thread, since the client blocks."""

    def __init__(self, port: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.link = EmulatedLink("127.0.0.1", port)
        asyncio.run_coroutine_threadsafe(self.link.__aenter__(), self._loop).result()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.link.__aexit__(None, None, None), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@dataclass(frozen=True, slots=True)
class RemoteSetup:
    """Running services of a remote pair, with a client."""

    client: Client
    network: Network
    endpoints: tuple[str, ...]

    def wait_for_round_trip(self, rtt_ms: float) -> None:
        """Wait until the coordinator measures about this round trip to the drafter."""
        deadline = time.monotonic() + _RTT_TIMEOUT_S
        while time.monotonic() < deadline:
            measured = [w.round_trip_ms for w in self.client.server().workers if w.role is Role.DRAFTER]
            if measured and abs(measured[0] - rtt_ms) <= max(_RTT_NOISE_MS, _RTT_TOLERANCE * rtt_ms):
                return
            time.sleep(0.2)
        if measured and rtt_ms <= measured[0] <= _BUSY_FACTOR * rtt_ms + _BUSY_MS:
            return
        raise StartupError(f"the coordinator measures {measured} ms to the drafter, not {rtt_ms:g} ms")


@contextlib.contextmanager
def remote_setup(pair: ToyPair, times: ThrottledTimes) -> Iterator[RemoteSetup]:
    """Start all processes, yield when they are ready, then stop them."""
    with contextlib.ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="outrider-")))
        redis = exits.enter_context(embedded_redis())
        plan = LaunchPlan(target=str(pair.target), drafters=(("model", str(pair.draft)),), port=0)
        running = RemoteStack(plan, pair, times, redis, folder)
        network = Network(running.drafter_port)
        exits.callback(network.close)
        running.link_port = network.link.port
        exits.callback(running.stop)
        running.start()
        client = exits.enter_context(Client(running.endpoints, timeout_s=_TIMEOUT_S))
        yield RemoteSetup(client, network, tuple(running.endpoints))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
