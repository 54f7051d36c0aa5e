"""Drafter setups for one target, running at the same time: one coordinator for each, one verifier for all.

Each setup has its own coordinator and Redis, so that it does not share pair histories. Idle setups cost nothing.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import grpc

from outrider.base.rpc_status import error_from_rpc
from outrider.bench.common.remote_pair import SpawningStack
from outrider.bench.common.timed_output import timed
from outrider.bench.drafters.comparison import PLAIN, BenchRequest, TimedAnswer
from outrider.client.sync import Client
from outrider.launch.stack import LaunchPlan, Stack, workers
from outrider.protocol import convert
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.fleet import WorkerInfo
from outrider.protocol.sampling_params import SamplingParams, Verification
from outrider.runtime.embedded_redis import embedded_redis
from outrider.security.api_keys import ApiKeys
from outrider.security.channels import Channels
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc

_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class DrafterSetup:
    """Drafters (kind, model or empty) that guess together for each session."""

    name: str
    drafters: tuple[tuple[str, str], ...] = ()


PLAIN_SETUP = DrafterSetup(PLAIN)


def parse(text: str) -> list[DrafterSetup]:
    """Parse `ngram,model:path,suffix&model:path`: setups by commas, drafters of one setup by &."""
    names = [name.strip() for name in text.split(",")]
    setups = []
    for name in names:
        parts = [part.partition(":") for part in name.split("&")]
        if not all(kind for kind, _, _ in parts):
            raise InvalidRequest.of("--drafters", text, "KIND or KIND:MODEL, separated by commas or joined by &")
        setups.append(DrafterSetup(name, tuple((kind, model) for kind, _, model in parts)))
    if len(set(names)) < len(names):
        raise InvalidRequest.of("--drafters", text, "each drafter once")
    return setups


def check_kinds(setups: Sequence[DrafterSetup], known: Sequence[str]) -> None:
    for setup in setups:
        for kind, _ in setup.drafters:
            if not set(kind.split("+")) <= set(known):
                raise InvalidRequest.of("--drafters", kind, f"one of {', '.join(known)}, or several joined by +")


class SetupStack(SpawningStack):
    """Stack with a coordinator for each setup."""

    def __init__(
        self,
        plan: LaunchPlan,
        setups: Sequence[DrafterSetup],
        redis: Sequence[str],
        folder: Path,
        exits: contextlib.ExitStack,
    ) -> None:
        """Prepare the processes; `exits` ends the verifier's further registrations."""
        # start_workers starts the drafters of each setup.
        super().__init__(replace(plan, drafters=()), "", folder)
        self.setups = setups
        self._exits = exits
        self._redis_of = redis

    def start_coordinators(self) -> None:
        for i, (setup, url) in enumerate(zip(self.setups, self._redis_of, strict=True)):
            count = max(1, len(setup.drafters))
            self.spawn(f"coordinator-{i + 1}", "coordinator", redis_url=url, http_port=-1, drafters_per_session=count)

    def start_workers(self) -> None:
        """Start the verifier, registered with the first setup, and each drafter, registered with its own."""
        super().start_workers()
        for i, (address, setup) in enumerate(self.addressed()):
            plan = replace(self.plan, drafters=setup.drafters, together=self.plan.together and len(setup.drafters) == 1)
            for spec in workers(plan, [address]):
                if spec.kind == "drafter" or plan.together:
                    self._start(replace(spec, name=f"{spec.name}-of-setup-{i}"))

    def wait_registered(self, tick: Callable[[Stack], None]) -> None:
        """Register the verifier with the other coordinators too, and wait for every drafter."""
        (first, _), *others = self.addressed()
        verifier = self.wait_workers(first, 1, tick)[0]
        access = Channels(self.access.tls, ApiKeys.parse(self.plan.fleet_key, "fleet_key").first)
        with_own = self.plan.together  # verifiers, where a setup has one drafter
        for address in (address for address, setup in others if not with_own or len(setup.drafters) > 1):
            self._exits.enter_context(registered(verifier, address, access))
        for address, setup in self.addressed():
            self.wait_workers(address, 1 + len(setup.drafters), tick)

    def addressed(self) -> Iterator[tuple[str, DrafterSetup]]:
        return zip(self.endpoints, self.setups, strict=True)


@contextlib.contextmanager
def registered(worker: WorkerInfo, address: str, channels: Channels) -> Iterator[None]:
    """Keep a worker registered with a further coordinator: it registers itself with one at a time."""
    leaving = threading.Event()

    def requests() -> Iterator[pb.RegisterRequest]:
        yield pb.RegisterRequest(worker=convert.worker_to_proto(worker))
        leaving.wait()  # registered as long as the stream is open; the coordinator probes the worker itself

    with channels.channel(address) as channel:
        call = rpc.RegistryStub(channel).Register(requests())
        try:
            _check_accepted(call)
            yield
        finally:
            leaving.set()
            call.cancel()


def _check_accepted(replies: Iterator[pb.RegisterReply]) -> None:
    try:
        next(replies)
    except grpc.RpcError as error:
        raise error_from_rpc(error) from error


@contextlib.contextmanager
def start_setups(
    plan: LaunchPlan, setups: Sequence[DrafterSetup], tick: Callable[[Stack], None] = lambda _: None
) -> Iterator[dict[str, Client]]:
    """Start all processes, yield a client by the name of each setup, then stop all processes."""
    with contextlib.ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="outrider-")))
        redis = [exits.enter_context(embedded_redis()) for _ in setups]
        running = SetupStack(plan, setups, redis, folder, exits)
        exits.callback(running.stop)
        running.start(tick)
        yield {
            setup.name: exits.enter_context(Client([address], timeout_s=_TIMEOUT_S))
            for address, setup in running.addressed()
        }


def measure(client: Client, request: BenchRequest, gamma: int | None) -> TimedAnswer:
    """Generate one answer with the arrival times of its tokens."""
    began = time.perf_counter()
    # A fresh salt: no setup may find a prompt or an answer of another one in a cache.
    salt = secrets.token_hex()
    output = timed(client.generate(tokens=request.prompt, params=sampling(request), gamma=gamma, cache_salt=salt))
    counts = accumulate(count for _, count in output.arrivals)
    times = tuple((count, at - began) for count, (at, _) in zip(counts, output.arrivals, strict=True))
    return TimedAnswer(output.tokens, times, output.finished.stats)


def sampling(request: BenchRequest) -> SamplingParams:
    return SamplingParams(
        temperature=0.0 if request.mode == "greedy" else 1.0,
        verification=Verification[request.mode.upper()],
        seed=request.seed,
        max_tokens=request.max_tokens,
    )
