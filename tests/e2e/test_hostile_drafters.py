"""Drafters that lie, flood, stall or say nothing: their own session loses a bounded share, others are left alone.

The verifier is paced, so that its time and not this machine's is what sessions share.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import drafter_pb2 as draft
from outrider.v1 import drafter_pb2_grpc as drafter_rpc
from tests.cluster import Cluster, Output, ask, client, generate, registered_drafter
from tests.conftest import Models

pytestmark = pytest.mark.timeout(180)

LENGTH = 120
LONG = 300
ROUNDS = 7
TRIES = 5
WARM_ROUNDS = 2
PACE = "1:15,64:15"
FLOOD_S = 0.0001
OTHERS = ("lies", "mute", "long", "deep", "wide", "busy", "full", "claims", "claims nothing", "teases")


NONSENSE = [7, 7, 7, 7]
_WIDEST = common.Distribution(id_deltas=[1] * 64, weights=[65536 - 63, *[1] * 63])
# Messages with which a commit is answered: tokens, and what else they carry.
ANSWERS: dict[str, Callable[[], list[tuple[list[int], dict[str, Any]]]]] = {
    "large": lambda: [([7] * 2_000_000, {})],  # as much as fits into a message of gRPC's usual limit, and more
    "long": lambda: [([7] * 20_000, {})],  # as much as a drafter's messages may be, not as a guess may
    "deep": lambda: [(NONSENSE, {"parents": [0] * 20_000})],
    "wide": lambda: [([7] * 64, {"draft_probs": [_WIDEST] * 64})],
    "busy": lambda: [([token], {}) for token in range(100)],  # a little less than what counts as a flood
    "full": lambda: [(list(range(start, start + 64)), {"parents": [0] * 64}) for start in (0, 64, 128, 192)],
    "claims": lambda: [(NONSENSE, {"draft_us": 2**32 - 1})],
    "claims nothing": lambda: [(NONSENSE, {"draft_us": 0})],
    "teases": lambda: [([7], {"draft_us": 2**32 - 1})],  # where more were wanted
}


class Hostile(drafter_rpc.DrafterServicer):
    """Takes every session and serves it ill."""

    def __init__(self, manner: str) -> None:
        self.manner = manner
        self.sent = 0
        self.opened = 0

    async def Probe(self, request: common.ProbeRequest, context: Any) -> common.ProbeReply:
        return common.ProbeReply()

    async def Draft(self, requests: AsyncIterator[draft.DraftRequest], context: Any) -> AsyncIterator[draft.DraftReply]:
        opening = (await anext(requests)).open
        self.opened += 1
        if self.manner == "mute":
            await asyncio.sleep(3600)
        yield draft.DraftReply(opened=draft.DraftOpened())
        position = len(opening.tokens)
        if self.manner == "stalls":
            yield self._reply(position, [1])
            await asyncio.sleep(3600)
        while self.manner == "floods":
            yield self._reply(position, [self.sent % 200])
            await asyncio.sleep(FLOOD_S)
        async for request in requests:
            if request.HasField("committed"):
                position = request.committed.position + len(request.committed.tokens)
                for reply in self._after(position):
                    yield reply

    def _after(self, position: int) -> Iterator[draft.DraftReply]:
        """Its answer to a commit."""
        for tokens, fields in ANSWERS.get(self.manner, lambda: [(NONSENSE, {})])():
            yield self._reply(position, tokens, **fields)

    def _reply(self, position: int, tokens: list[int], **fields: Any) -> draft.DraftReply:
        self.sent += len(tokens)
        first = self.sent - len(tokens) + 1
        given = {"draft_us": 100} | fields
        return draft.DraftReply(guess=common.Guess(position=position, first_id=first, tokens=tokens, **given))


@contextmanager
def running(models: Models, folder: Path) -> Iterator[Cluster]:
    fleet = Cluster(folder)
    fleet.add_coordinator()
    fleet.add_verifier(models.target, "--pace", PACE)
    fleet.add_drafter("model", models.draft)
    fleet.start()
    yield fleet
    fleet.stop()


@pytest.fixture(scope="module")
def fleet(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(models, tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.fixture
def fresh(models: Models, tmp_path: Path) -> Iterator[Cluster]:
    """Yield a cluster whose coordinator holds no memory of other tests."""
    with running(models, tmp_path) as fleet:
        yield fleet


@asynccontextmanager
async def hostile(fleet: Cluster, manner: str) -> AsyncIterator[Hostile]:
    service = Hostile(manner)
    async with registered_drafter(fleet, service, "hostile"):
        yield service


def request(seed: int, length: int, **wishes: Any) -> pb.GenerateRequest:
    return ask("Once upon a time there were two sessions, ", seed=seed, max_tokens=length, ignore_eos=True, **wishes)


async def side_by_side(fleet: Cluster, other: dict[str, Any], length: int = LENGTH) -> tuple[Output, Output]:
    """One session that is drafted well, and another beside it."""
    async with client(fleet.address) as stub:
        mine, others = await asyncio.gather(
            generate(stub, request(1, length, drafter="model", gamma=4)), generate(stub, request(2, length, **other))
        )
    return mine, others


@pytest.mark.parametrize(
    "manner",
    ["floods", "stalls", "large", *(pytest.param(manner, marks=pytest.mark.prove) for manner in OTHERS)],
)
async def test_a_hostile_drafter_costs_its_own_session_little_and_others_nothing(fleet: Cluster, manner: str) -> None:
    """Alternate plain and hostile rounds until one is within the bounds: what a drafter costs shows in each of them.

    Tests in other processes slow down single rounds only. Each round has a new drafter: one that has broken the
    protocol is shunned, for longer each time.
    """
    texts, kept = [], list[tuple[float, ...]]()  # of each round; shares of the speed: a neighbour's, its own session's
    while len(kept) < TRIES and not (kept and kept[-1][0] > 0.8 and kept[-1][1] > 0.75):
        async with hostile(fleet, manner) as service:
            honest = await side_by_side(fleet, {"gamma": 0})
            beside = await side_by_side(fleet, {"drafter": "hostile"})
        assert service.sent or manner == "mute", "it was given a chance"
        assert manner != "floods" or service.sent < 10_000, "it was hung up on"
        texts += [[each.token_ids for each in outputs] for outputs in (honest, beside)]
        speeds = zip(beside, honest, strict=True)
        kept.append(tuple(new.stats.tokens_per_second / old.stats.tokens_per_second for new, old in speeds))
    assert all(text == texts[0] for text in texts), "it cannot change a text"
    assert kept[-1][0] > 0.8, f"{manner}: a neighbour, and its own session, came down to {kept}"
    assert kept[-1][1] > 0.75, f"{manner}: a neighbour, and its own session, came down to {kept}"


async def test_the_limits_leave_room_for_a_drafter_that_keeps_a_tree_ahead(fleet: Cluster) -> None:
    """It sends a message per subtree: more than a thousand in a second, and here more than come without a hit."""
    ahead = {"drafter": "model", "gamma": 8, "branches": 3, "ahead": True}
    async with client(fleet.address) as stub:
        plain = await generate(stub, request(1, LENGTH, gamma=0))
        output = await generate(stub, request(1, 5 * LENGTH, **ahead))
    assert output.token_ids[:LENGTH] == plain.token_ids
    assert output.stats.drafter_losses == 0
    assert output.stats.accepted_tokens > 5 * LENGTH / 3, "its guesses arrive in time"
    assert sum(drafter.guessed for drafter in output.stats.drafters) > 3_000


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc")
@pytest.mark.parametrize("manner", ["lies", "floods", "stalls", "mute", "large", "deep"])
async def test_neighbours_of_a_hostile_drafter_lose_three_percent_at_most(fresh: Cluster, manner: str) -> None:
    """Alternate plain and hostile rounds, so that other load affects both alike.

    The coordinator's memory is the kernel's peak. That of plain rounds is taken before there is a hostile drafter,
    because freed memory may stay with the process.
    """
    coordinator = fresh.coordinators[0]
    coordinator.peak_memory_mb(anew=True)
    for _ in range(WARM_ROUNDS):
        await side_by_side(fresh, {"gamma": 0}, LONG)
    plain_mb = coordinator.peak_memory_mb()
    ratios = []
    async with hostile(fresh, manner):
        for _ in range(ROUNDS):
            with_plain, _ = await side_by_side(fresh, {"gamma": 0}, LONG)
            with_hostile, _ = await side_by_side(fresh, {"drafter": "hostile"}, LONG)
            assert with_hostile.token_ids == with_plain.token_ids
            ratios.append(with_hostile.stats.tokens_per_second / with_plain.stats.tokens_per_second)
    hostile_mb = coordinator.peak_memory_mb()
    neighbour = statistics.median(ratios)
    print(
        f"{manner}: a neighbour keeps {neighbour:.3f} of its speed ({min(ratios):.3f} to {max(ratios):.3f}), "
        f"the coordinator's peak is {hostile_mb:.0f} MB, {plain_mb:.0f} in plain rounds"
    )
    assert neighbour >= 0.97
    assert hostile_mb <= 1.2 * plain_mb
