"""Which guesses are sent on to the verifier, and what a drafter that leaves is charged."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from coordinator.control.estimator import CREDIT, DIRECT_CREDIT, READING, PairEstimate, PairHistory
from coordinator.control.goodput import PAYING_NODES
from coordinator.control.throughput_model import PLAIN, Conditions, Mode, SpeculationPlan, draft_wait_timeout_ms
from coordinator.persistence.pair_history import PairHistoryStore
from coordinator.persistence.session_record import SessionRecord, SessionRequest, SpeculationOptions
from coordinator.persistence.store import Store
from coordinator.sessions.drafter_stream import DrafterStream
from coordinator.sessions.drafting import (
    DIRECT_LEVEL,
    DIRECT_START,
    DIRECT_TOKEN,
    DIRECT_WAIT_MS,
    Drafting,
    DraftingContext,
    _best_drafter,
)
from coordinator.sessions.stats import RequestStats
from coordinator.sessions.streams import VerifierStream
from coordinator.sessions.verdicts import Refusal
from coordinator.workers.choosers import DrafterChooser
from coordinator.workers.fleet_keys import FleetKeys
from coordinator.workers.worker_connection import WorkerConnection
from coordinator.workers.worker_pool import WorkerPool
from outrider.observability.metrics import CoordinatorMetrics
from outrider.observability.tracing import Span
from outrider.protocol import convert
from outrider.protocol.cost_curve import UNKNOWN_COST, CostCurve
from outrider.protocol.errors import InvalidRequest, OutriderError
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo, WorkerLoad
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import FinishReason, TokenKind, Verdict, VerifySteering, VerifyTimings
from outrider.settings.coordinator import CoordinatorSettings
from outrider.speculation.tree import GuessTree
from outrider.v1 import common_pb2 as common
from outrider.v1 import verifier_pb2 as verify

PROMPT = (1, 2)
MODEL = ModelInfo("m", "f", vocab_size=100)


class Session:
    """A session's drafting, and the trees that its guesses make with and without what is dropped."""

    def __init__(
        self,
        committed: Sequence[int] = (),
        temperature: float = 0.0,
        drafters: int = 1,
        *,
        single: bool = False,
        device: str = "",
        speculation: SpeculationOptions | None = None,
    ) -> None:
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=500)
        request = SessionRequest(PROMPT, params, speculation or SpeculationOptions())
        self.record = SessionRecord("s", request, tokens=list(committed))
        self.whole = [*PROMPT, *committed]
        self.relayed: list[common.Guess] = []
        self.trees = [GuessTree(self.whole, single=single, max_nodes=200, max_ahead=50) for _ in range(2)]
        context: Any = DraftingContext(worker_pool=None, pairs=None, gamma_max=4, drafters=drafters)  # type: ignore[arg-type]
        stats = RequestStats(CoordinatorMetrics(Mode).of("target"))
        self.drafting = Drafting(self.record, MODEL, context, stats)
        worker = WorkerInfo("d", Role.DRAFTER, "127.0.0.1:1", replace(MODEL, device=device))
        self.connection = WorkerConnection(worker, lambda: FleetKeys().access(Role.DRAFTER))
        self.pair = PairEstimate(4)
        self.drafters = [
            DrafterStream(self.connection, self.record, MODEL, Span(), source, self.pair, PLAIN)
            for source in range(1, max(1, drafters) + 1)
        ]
        self.drafter = self.drafters[0]
        for drafter in self.drafters:
            stats.record_drafter(drafter.source, "model")

    def guess(self, guess: common.Guess) -> None:
        """Take what is relayed, as the verifier does."""
        self.relayed.append(guess)
        self.trees[0].add(convert.guess_from_proto(guess))

    def waited(self, position: int, wait_ms: float) -> None:
        """Learn from a verdict without guesses, after a wait."""
        timings = VerifyTimings(wait_us=int(wait_ms * 1000))
        verdict = Verdict(position, (20,), 0, TokenKind.BONUS, timings=timings)
        self.drafting._observe_direct(self.drafter, verdict, 0)

    def steer(self, steering: VerifySteering) -> None:
        """Take no notice: these guesses change no plan."""

    def send(
        self, position: int, first_id: int, tokens: Sequence[int], parent: int = 0, parents: Any = (), source: int = 1
    ) -> bool:
        """Return whether a drafter's guess is sent on."""
        guess = common.Guess(
            position=position, first_id=first_id, tokens=tokens, parent=parent, parents=parents, source=source
        )
        before = len(self.relayed)
        self.drafting._relay(self, self.drafters[source - 1], guess)
        self.trees[1].add(convert.guess_from_proto(guess))
        return len(self.relayed) > before

    def commit(self, tokens: Sequence[int]) -> None:
        self.record.tokens += tokens
        self.whole += tokens
        for tree in self.trees:
            tree.commit(tokens)

    def paths(self, tree: GuessTree) -> set[tuple[int, ...]]:
        block = tree.block(200, 50)
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(block.tokens, block.shape.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        return set(paths)


@pytest.mark.parametrize(
    ("fields", "sent_on"),
    [
        ({"position": 5, "tokens": [9, 9]}, True),
        ({"position": 3, "tokens": [20, 30, 9]}, True),
        ({"position": 3, "tokens": [9, 30, 9]}, False),
        ({"position": 3, "tokens": [9, 20], "parents": [0, 0]}, True),
        ({"position": 3, "tokens": [9, 20], "parents": [0, 1]}, False),
        ({"position": 1, "tokens": [2, 10, 20, 30, 9]}, False),
    ],
    ids=["in time", "late and right", "late and wrong", "one of two right", "right at another place", "of the prompt"],
)
async def test_late_guesses_are_sent_on_if_they_are_right(fields: dict[str, Any], *, sent_on: bool) -> None:
    session = Session([10, 20, 30])
    assert session.send(first_id=1, **fields) is sent_on
    await session.connection.close()


async def test_what_hangs_from_a_guess_that_was_dropped_is_dropped_too() -> None:
    session = Session([10, 20, 30])
    assert not session.send(3, 1, [9])
    assert not session.send(4, 2, [30], parent=1)
    assert session.send(5, 3, [7])
    assert session.send(6, 4, [8], parent=3)
    await session.connection.close()


async def test_nothing_more_after_a_guess_that_was_dropped_is_dropped_too() -> None:
    session = Session([10, 20, 30])
    session.drafting._verifier = session
    session.drafting._attached[1] = session.drafter
    session.drafter.joined, session.drafter.plan = True, SpeculationPlan(4)
    assert not session.send(3, 1, [9, 9])
    assert not session.send(5, 0, [], parent=2)
    assert session.send(5, 0, [])
    await session.connection.close()


async def test_an_empty_guess_holds_until_the_next_commit_and_no_longer() -> None:
    """One for a position far ahead would end all waits up to there: those of its own session."""
    session = Session([10, 20, 30])
    session.drafting._verifier = session
    session.drafting._attached[1] = session.drafter
    session.drafter.joined, session.drafter.plan = True, SpeculationPlan(4)
    assert session.send(5, 1, [40, 50, 60])
    assert session.send(8, 0, [], parent=3)
    assert session.trees[0].passed_at == 5
    session.commit([40])
    assert session.trees[0].passed_at < len(session.whole)
    assert session.send(6, 0, []), "what is said later is heard"
    assert session.trees[0].passed_at == 6
    await session.connection.close()


async def test_a_parent_that_was_never_guessed_is_left_to_the_verifier_to_refuse() -> None:
    session = Session([10, 20, 30])
    assert not session.send(3, 1, [9])
    with pytest.raises(InvalidRequest, match=r"guess\.parent"):
        session.send(4, 9, [7], parent=8)
    assert [guess.first_id for guess in session.relayed] == [9]
    await session.connection.close()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("drafters", "single"), [(1, False), (1, True), (3, False)], ids=["trees", "chains", "three"])
async def test_the_verifiers_tree_is_the_same_without_them(drafters: int, seed: int, *, single: bool) -> None:
    """Two tokens, so that chance makes many guesses right. Commits come between messages."""
    chance, session = random.Random(seed), Session(drafters=drafters, single=single)
    guessed: list[dict[int, int]] = [{} for _ in range(drafters)]  # by drafter and node id: a token's position
    for _ in range(200):
        source = chance.randint(1, drafters)
        positions = guessed[source - 1]
        parent = chance.choice([0, 0, 0, *list(positions)[-3:]])
        position = positions[parent] + 1 if parent else max(2, len(session.whole) - chance.randrange(6))
        tokens = chance.choices([50, 60], k=chance.randint(1, 4))
        branching = not single and chance.random() < 0.5
        parents = [chance.randint(0, i) for i in range(len(tokens))] if branching else []
        first_id = max(positions, default=0) + 1
        session.send(position, first_id, tokens, parent, parents, source)
        for i in range(len(tokens)):
            above = parents[i] if parents else i
            positions[first_id + i] = positions[first_id + above - 1] + 1 if above else position
        assert session.paths(session.trees[0]) == session.paths(session.trees[1])
        if chance.random() < 0.3:
            session.commit(chance.choices([50, 60], k=chance.randint(1, 3)))
    assert 50 < len(session.relayed) < 180, "some were dropped"
    await session.connection.close()


class Remembering:
    """What a drafter that leaves is remembered by."""

    def __init__(self) -> None:
        self.reading: float | None = -1.0

    def remember(self, own: PairEstimate, session: PairEstimate, *, alone: bool, reading: float | None) -> None:
        self.reading = reading
        assert alone


@pytest.mark.parametrize(
    ("shares_cores", "direct", "beside_others", "temperature", "reading"),
    [
        (False, False, False, 0.0, None),
        (True, False, False, 0.0, READING),
        (True, True, False, 0.0, 0.0),
        (True, True, False, 1.0, READING),
        (True, True, True, 0.0, None),
    ],
    ids=["on other cores", "apart", "in the verifier's process", "the same, at temperature 1", "beside other sessions"],
)
async def test_a_drafter_that_leaves_owes_its_reading_where_it_took_the_verifiers_cores(
    *, shares_cores: bool, direct: bool, beside_others: bool, temperature: float, reading: float | None
) -> None:
    session = Session(temperature=temperature)
    drafting, histories = session.drafting, Remembering()
    session.drafter.direct, session.drafter.shares_cores = direct, shares_cores
    session.drafter.joined = True
    drafting._estimator.shared = beside_others
    drafting._attached[1], drafting._histories[1] = session.drafter, histories  # type: ignore[assignment]
    drafting._sources = 1
    drafting._selection.add(1, 0.0, 1.0)
    drafting._leave(session.drafter)
    assert histories.reading == reading
    assert not drafting._attached
    assert not drafting._histories
    await session.connection.close()


async def test_a_drafter_that_never_opened_owes_nothing_for_reading() -> None:
    session, histories = Session(), Remembering()
    drafting = session.drafting
    session.drafter.direct = session.drafter.shares_cores = True
    drafting._attached[1], drafting._histories[1] = session.drafter, histories  # type: ignore[assignment]
    drafting._sources = 1
    drafting._selection.add(1, 0.0, 1.0)
    drafting._leave(session.drafter)
    assert histories.reading is None
    await session.connection.close()


class Refusing:
    """A session call that ends before the session is open."""

    def send(self, message: bytes) -> bool:
        return True

    async def read(self) -> bytes | None:
        return None

    def cancel(self) -> None:
        """Do nothing: it has ended."""

    async def close(self) -> None:
        """Do nothing: it has ended."""


class OneDrafter:
    """A worker pool that always chooses the same drafter, and says when it was asked for a third one."""

    def __init__(self, drafter: WorkerConnection) -> None:
        self.drafter = drafter
        self.asked = 0
        self.asked_again = asyncio.Event()
        self.workers = SimpleNamespace(of=lambda role: [])

    async def wait_for(self, *_: Any, **__: Any) -> WorkerConnection:
        self.asked += 1
        if self.asked == 3:
            self.asked_again.set()
            await asyncio.Event().wait()
        return self.drafter


class SameProcess(VerifierStream):
    """A stream to the verifier in a drafter's process, which is not open."""

    def send(self, message: verify.VerifyRequest) -> None:
        """Take no notice."""


class NoPairs:
    """A Redis without pair histories."""

    up = True

    async def pair(self, target: str, drafter: str) -> PairHistory | None:
        return None


def beside_a_refusing_drafter(monkeypatch: pytest.MonkeyPatch) -> tuple[Session, OneDrafter]:
    session = Session()
    drafting, pool = session.drafting, OneDrafter(session.connection)
    monkeypatch.setattr(session.connection, "start_session", lambda metadata: Refusing())
    pairs = PairHistoryStore(cast(Store, cast(Any, NoPairs())))
    drafting._context = replace(drafting._context, worker_pool=cast(WorkerPool, cast(Any, pool)), pairs=pairs)
    return session, pool


async def test_a_direct_drafter_that_does_not_open_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    session, pool = beside_a_refusing_drafter(monkeypatch)
    drafting = session.drafting
    drafting._chooser = DrafterChooser(drafting._context.worker_pool, MODEL, "", lambda drafter: True)
    verifier = SameProcess(session.connection, session.record, MODEL, Span(), VerifySteering())
    async with drafting.attached_to(verifier):
        await asyncio.wait_for(pool.asked_again.wait(), 5.0)
    assert (drafting._sources, drafting._stats.drafter_losses) == (2, 0), "it was never attached"
    assert verifier._sent.direct
    assert not drafting._attached
    await session.connection.close()


async def test_a_full_drafter_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    session, pool = beside_a_refusing_drafter(monkeypatch)
    drafting = session.drafting

    async def full(call: Refusing) -> bytes | None:
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, nothing, nothing, details="full")

    monkeypatch.setattr(Refusing, "read", full)
    drafting._chooser = DrafterChooser(drafting._context.worker_pool, MODEL, "", lambda drafter: True)
    verifier = SameProcess(session.connection, session.record, MODEL, Span(), VerifySteering())
    async with drafting.attached_to(verifier):
        await asyncio.wait_for(pool.asked_again.wait(), 5.0)
    assert (drafting._sources, drafting._stats.drafter_losses) == (2, 0)
    await session.connection.close()


async def test_a_drafter_whose_guesses_a_verifier_refuses_serves_the_sessions_of_others() -> None:
    """The verifier may refuse what is valid, and must not take the drafter from all sessions."""
    session, pool = Session(drafters=0), WorkerPool(FleetKeys(), CoordinatorSettings())
    worker = WorkerInfo("d", Role.DRAFTER, "127.0.0.1:1", MODEL)
    session.drafter.connection = drafter = await pool.workers.put(worker)
    session.drafter._call = SimpleNamespace(cancel=lambda: None)
    mine, beside, elsewhere = (DrafterChooser(pool, MODEL, "", lambda _: True) for _ in range(3))
    session.drafting._chooser, beside.verifier, elsewhere.verifier = mine, "v", "other"
    at = WorkerConnection(
        WorkerInfo("v", Role.VERIFIER, "127.0.0.1:2", MODEL), lambda: FleetKeys().access(Role.DRAFTER)
    )
    async with session.drafting.attached_to(cast(VerifierStream, SimpleNamespace(connection=at, steer=print))):
        session.drafting._attached[1] = session.drafter
        session.drafting.receive(Refusal(1, InvalidRequest("wrong", field="guess.tokens")))
        assert session.drafter._cancelled_by is not None
        mine.record_loss(drafter, session.drafter._cancelled_by)
    chosen = [pool.choose(Role.DRAFTER, each._fits) for each in (mine, beside, elsewhere)]
    assert chosen == [None, None, drafter]
    assert pool.shunned.violations[Role.DRAFTER] == 1
    for connection in (at, session.connection):
        await connection.close()
    await pool.workers.close()


async def test_the_next_drafter_is_judged_by_its_own_network(monkeypatch: pytest.MonkeyPatch) -> None:
    session, _ = beside_a_refusing_drafter(monkeypatch)
    drafting = session.drafting
    estimator = drafting._estimator
    verifier = SameProcess(session.connection, session.record, MODEL, Span(), VerifySteering())
    for beside in (True, False):
        monkeypatch.setattr(drafting, "_can_link", lambda *_, beside=beside: beside)
        estimator._network_ms.add(7.0)
        with pytest.raises(OutriderError):
            await drafting._run_one_drafter(verifier, session.connection)
        assert estimator.pair.direct is beside
        assert estimator.pair.least_credit == (DIRECT_CREDIT if beside else CREDIT)
        assert not estimator._network_ms.known, "measured with another one"
        assert (estimator._network_ms is session.connection.direct_waits) is beside
    await session.connection.close()


@pytest.mark.parametrize(("since_plan", "finished", "blamed"), [(1, False, True), (0, False, False), (1, True, False)])
async def test_a_drafter_is_blamed_only_for_steps_that_could_wait(
    monkeypatch: pytest.MonkeyPatch, since_plan: int, finished: bool, blamed: bool
) -> None:
    """Later sessions took a fifth of the guesses not to come, after answers whose first and last steps had none."""
    session = Session([10])
    session.drafter.joined, session.drafter.plan = True, SpeculationPlan(2)
    session.drafting._attached[1] = session.drafter
    for name in ("commit", "steer"):  # its stream is not open
        monkeypatch.setattr(DrafterStream, name, lambda *_: 0)
    control = session.drafting.control
    control.plan, control.wait_timeout_ms, control._since_plan = SpeculationPlan(2), 5.0, since_plan
    session.record.finish_reason = FinishReason.LENGTH if finished else FinishReason.NONE
    session.drafting.commit(Verdict(3, (20,), 0, TokenKind.PLAIN, finish_reason=session.record.finish_reason))
    assert (session.pair.proposal_rate.value < 1.0) is blamed
    await session.connection.close()


@pytest.mark.parametrize("measured", [False, True])
async def test_a_draft_without_a_network_takes_time_before_it_is_measured(measured: bool) -> None:
    """Else trees look free, and all waits of a first answer end in vain."""
    session = Session([10])
    session.pair.link(trust=True)
    load = WorkerLoad(cost=CostCurve((1, 9), (6.0, 8.0)))
    verifier: Any = SimpleNamespace(connection=SimpleNamespace(info=SimpleNamespace(load=load)))
    if measured:
        session.pair.draft_ms.add(0.5)
    best = _best_drafter(verifier, session.connection, session.pair, shares_cores=True)
    token_ms = 0.5 if measured else DIRECT_TOKEN * 6.0
    assert best.draft_ms == pytest.approx(token_ms)
    assert best.level_ms == pytest.approx(DIRECT_LEVEL * token_ms)
    assert best.round_trips_ms == pytest.approx(DIRECT_WAIT_MS + DIRECT_START * token_ms), (
        "its start is not part of a token"
    )
    await session.connection.close()


async def test_a_chain_is_not_free_where_only_trees_were_drafted() -> None:
    """It was tried at once, with waits that ended before the guesses came."""
    session = Session([10])
    verifier: Any = SimpleNamespace(connection=SimpleNamespace(round_trip_ms=1.0))
    session.pair.level_ms.add(4.0)
    best = _best_drafter(verifier, session.connection, session.pair, shares_cores=False)
    assert (best.draft_ms, best.level_ms) == (4.0, 4.0)
    await session.connection.close()


@pytest.mark.parametrize("gamma", [1, 2, 4])
async def test_drafts_that_always_come_too_late_make_the_waits_longer(gamma: int) -> None:
    """The time of a draft without a network comes with its guesses alone: here none comes until waits are long."""
    session = Session([10], device="cuda:0")
    session.pair.link(trust=False)
    session.drafter.plan, control = SpeculationPlan(gamma=gamma), session.drafting.control
    waits = []
    for position in range(60):
        conditions = Conditions((0.5,), 1.0, session.pair.draft_ms.value, DIRECT_WAIT_MS, UNKNOWN_COST)
        control.wait_timeout_ms = draft_wait_timeout_ms(conditions, session.drafter.plan)
        waits.append(control.wait_timeout_ms)
        session.waited(position, control.wait_timeout_ms)
    assert waits[0] == waits[4] == 2.0, "the drafter may read the prompt"
    assert waits == sorted(waits)
    assert waits[-1] > 40.0
    session.waited(60, 0.5)  # the drafter had no guess, and said so
    known = session.pair.draft_ms.value
    for position in range(61, 65):
        session.waited(position, control.wait_timeout_ms)
    assert session.pair.draft_ms.value == known, "not in a row"
    await session.connection.close()


async def test_late_drafts_on_a_cpu_teach_nothing() -> None:
    session = Session([10], device="cpu")
    session.pair.link(trust=False)
    session.drafter.plan, session.drafting.control.wait_timeout_ms = SpeculationPlan(gamma=2), 2.0
    for position in range(20):
        session.waited(position, 2.0)
    assert not session.pair.draft_ms.known
    await session.connection.close()


async def test_at_another_verifier_steps_are_plain_until_a_drafter_joins() -> None:
    """It knows nothing of the plan before. Otherwise the first choice there may change nothing, and is not sent."""
    session = Session()
    drafting, control = session.drafting, session.drafting.control
    drafting._context = replace(drafting._context, drafters=0)
    control.plan, control.wait_timeout_ms = SpeculationPlan(gamma=4), 50.0
    async with drafting.attached_to(session):
        assert (control.plan, control.wait_timeout_ms) == (PLAIN, 0.0)
    await session.connection.close()


class Shared:
    """A verifier with other sessions, or none, and what it is told. It is far away, so that waits do not pay."""

    def __init__(self, others: int) -> None:
        load = WorkerLoad(sessions=1 + others, cost=CostCurve.line(20.0, 0.1))
        info = WorkerInfo(f"v{others}", Role.VERIFIER, "127.0.0.1:2", MODEL, load=load)
        self.connection = SimpleNamespace(info=info, sessions=1, round_trip_ms=60.0)
        self.told: list[VerifySteering] = []

    def guess(self, guess: common.Guess) -> None:
        pytest.fail("no drafter has guessed")

    def steer(self, steering: VerifySteering) -> None:
        self.told.append(steering)


@pytest.mark.parametrize("others", [0, 3], ids=["after one that was its own", "after another shared one"])
async def test_another_verifier_with_other_sessions_is_told_that_it_may_choose_guesses(
    monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """A plan ahead leaves it the choice of guesses. It does not know what the verifier before was told."""
    session = Session([10], speculation=SpeculationOptions(gamma=4, ahead=True))
    drafting = session.drafting
    drafting._context = replace(drafting._context, drafters=0)
    monkeypatch.setattr(session.drafter, "_call", Refusing())
    for verifier, paying_nodes in ((Shared(others), PAYING_NODES if others else None), (Shared(3), PAYING_NODES)):
        async with drafting.attached_to(verifier):
            drafting._attached[1], session.drafter.joined = session.drafter, True
            drafting._selection.add(1, 2.0, 1.0)
            drafting._steer()
            assert drafting.control.plan.ahead
            assert not drafting.control.plan.awaited
            assert [steering.paying_nodes for steering in verifier.told] == [paying_nodes]
            del drafting._attached[1]
            drafting._selection.remove(1)
    await session.connection.close()
