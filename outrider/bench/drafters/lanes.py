"""Several ways to draft for one target at the same time: a coordinator for each, one verifier for all.

A coordinator and a Redis of its own keep what one lane learns from the others. Who does not speak costs nothing.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import grpc

from outrider.base.rpc_status import error_from_rpc
from outrider.bench.drafters.comparison import PLAIN, Question, TimedAnswer
from outrider.client.sync import Client, Finished, Tokens
from outrider.launch.stack import LaunchPlan, Stack
from outrider.protocol import convert
from outrider.protocol.errors import InvalidRequest, PeerLost, Unavailable
from outrider.protocol.fleet import WorkerInfo
from outrider.protocol.sampling_params import SamplingParams, Verification
from outrider.runtime.embedded_redis import embedded_redis
from outrider.security.channels import Channels
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc

_TIMEOUT_S = 600.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class DrafterLane:
    """`drafters`: kinds, and models where they need one. Several guess for the same session."""

    name: str
    drafters: tuple[tuple[str, str], ...] = ()


PLAIN_LANE = DrafterLane(PLAIN)


def parse(text: str) -> list[DrafterLane]:
    """`ngram,model:path,suffix&model:path`: lanes by commas, those who share one by &."""
    names = [name.strip() for name in text.split(",")]
    lanes = []
    for name in names:
        parts = [part.partition(":") for part in name.split("&")]
        if not all(kind for kind, _, _ in parts):
            raise InvalidRequest.of("--drafters", text, "KIND or KIND:MODEL, separated by commas or joined by &")
        lanes.append(DrafterLane(name, tuple((kind, model) for kind, _, model in parts)))
    if len(set(names)) < len(names):
        raise InvalidRequest.of("--drafters", text, "each drafter once")
    return lanes


def check_kinds(lanes: Sequence[DrafterLane], known: Sequence[str]) -> None:
    for lane in lanes:
        for kind, _ in lane.drafters:
            if not set(kind.split("+")) <= set(known):
                raise InvalidRequest.of("--drafters", kind, f"one of {', '.join(known)}, or several joined by +")


class Lanes(Stack):
    """Like any stack, but for who reports to whom."""

    def __init__(self, plan: LaunchPlan, lanes: Sequence[DrafterLane], redis: Sequence[str], folder: Path) -> None:
        # The drafters of each lane are started here.
        super().__init__(replace(plan, drafters=()), "", folder)
        self.lanes = lanes
        self._redis_of = redis

    def start_coordinators(self) -> None:
        for i, (lane, url) in enumerate(zip(self.lanes, self._redis_of, strict=True)):
            most = max(1, len(lane.drafters))
            self._spawn(f"coordinator-{i + 1}", "coordinator", redis_url=url, http_port=-1, drafters_per_session=most)

    def start_workers(self) -> None:
        """The verifier reports to the first lane, a drafter to its own."""
        super().start_workers()
        pairs = [(at, drafter) for at, lane in self.addressed() for drafter in lane.drafters]
        for i, (at, (kind, model)) in enumerate(pairs):
            common = {"device": self.plan.drafter_device, "dtype": self.plan.dtype, "threads": self.plan.threads}
            self._spawn(f"drafter-{i + 1}", "drafter", coordinators=at, kind=kind, model=model, **common)

    def wait_verifier(self) -> WorkerInfo:
        """Until the first lane knows it."""
        with Client(self.endpoints[:1]) as client:
            return self._wait_workers(client, 1)[0]

    def wait_registered(self, tick: Callable[[], None] = lambda: None) -> None:
        for at, lane in self.addressed():
            with Client([at]) as client:
                self._wait_workers(client, 1 + len(lane.drafters), tick)

    def addressed(self) -> Iterator[tuple[str, DrafterLane]]:
        return zip(self.endpoints, self.lanes, strict=True)

    def _wait_workers(
        self, client: Client, wanted: int, tick: Callable[[], None] = lambda: None
    ) -> Sequence[WorkerInfo]:
        while True:
            self._raise_for_dead(self.children)
            with contextlib.suppress(PeerLost, Unavailable):  # it is starting
                workers = client.server().workers
                if len(workers) >= wanted:
                    return workers
            tick()
            time.sleep(_POLL_S)


@contextlib.contextmanager
def introduced(worker: WorkerInfo, address: str, access: Channels) -> Iterator[None]:
    """Keep a worker registered with a coordinator that it does not report to itself: it reports to one at a time."""
    leaving = threading.Event()

    def report() -> Iterator[pb.RegisterRequest]:
        yield pb.RegisterRequest(worker=convert.worker_to_proto(worker))
        leaving.wait()  # it stays for as long as the stream does; how it fares, the coordinator asks it

    with access.channel(address) as channel:
        call = rpc.RegistryStub(channel).Register(report())
        try:
            _accepted(call)
            yield
        finally:
            leaving.set()
            call.cancel()


def _accepted(replies: Iterator[pb.RegisterReply]) -> None:
    try:
        next(replies)
    except grpc.RpcError as error:
        raise error_from_rpc(error) from error


@contextlib.contextmanager
def open_lanes(
    plan: LaunchPlan, lanes: Sequence[DrafterLane], tick: Callable[[Stack], None] = lambda _: None
) -> Iterator[dict[str, Client]]:
    """Start everything, yield a client of each lane, stop everything."""
    with contextlib.ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="outrider-")))
        redis = [exits.enter_context(embedded_redis()) for _ in lanes]
        running = Lanes(plan, lanes, redis, folder)
        exits.callback(running.stop)
        running.start_coordinators()
        running.wait_ready(running.children, lambda: tick(running))
        running.start_workers()
        running.wait_ready(running.children, lambda: tick(running))
        verifier = running.wait_verifier()
        for address in running.endpoints[1:]:
            exits.enter_context(introduced(verifier, address, running.fleet_access))
        running.wait_registered(lambda: tick(running))
        yield {
            lane.name: exits.enter_context(Client([address], timeout_s=_TIMEOUT_S))
            for address, lane in running.addressed()
        }


def ask(client: Client, question: Question, gamma: int | None) -> TimedAnswer:
    """One answer, and when its tokens came."""
    tokens: list[int] = []
    times: list[tuple[int, float]] = []
    began = time.perf_counter()
    # A salt that nobody else has: no lane may find a prompt cached, or an answer remembered, from one before it.
    salt = secrets.token_hex()
    for reply in client.generate(tokens=question.prompt, params=sampling(question), gamma=gamma, cache_salt=salt):
        if isinstance(reply, Tokens):
            tokens += reply.token_ids
            times.append((len(tokens), time.perf_counter() - began))
        elif isinstance(reply, Finished):
            return TimedAnswer(tuple(tokens), tuple(times), reply.stats)
    raise AssertionError("a stream ends with Finished or raises")


def sampling(question: Question) -> SamplingParams:
    return SamplingParams(
        temperature=0.0 if question.mode == "greedy" else 1.0,
        verification=Verification[question.mode.upper()],
        seed=question.seed,
        max_tokens=question.max_tokens,
    )
