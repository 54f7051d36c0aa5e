"""Sessions that share a verifier in virtual time: its steps last as long as all their tokens need."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import product, zip_longest

import pytest

from coordinator.control.estimator import PairHistory
from coordinator.control.gamma import FixedChoices
from coordinator.control.simulation.session import SimulatedSession, SimulationResult
from coordinator.control.simulation.verifier import SimulatedVerifier, Simulation
from coordinator.control.simulation.world import SimulatedWorld, World
from outrider.protocol.cost_curve import CostCurve

GPU = CostCurve((1, 64, 128), (25.0, 25.0, 50.0))  # flat to 64 tokens of a batch, then linear
NEAR = World(acceptance=0.8, gain=0.6, draft_ms=1.0, cost=GPU)
PLAIN = FixedChoices(gamma=0)


class SharedSimulation:
    """Sessions of several worlds on one verifier."""

    def __init__(
        self,
        worlds: Sequence[World],
        gamma_max: int = 16,
        fixed: Sequence[FixedChoices] = (),
        history: PairHistory | None = None,
        seed: int = 0,
    ) -> None:
        """Open the sessions in turn; `fixed` are the choices of the first ones, the others have none."""
        verifier = self.verifier = SimulatedVerifier()
        for number, (world, choices) in enumerate(zip_longest(worlds, fixed, fillvalue=None)):
            assert world is not None, "more choices than sessions"
            own = SimulatedWorld(world, seed * len(worlds) + number, verifier.events)
            others = len(verifier.sessions)
            verifier.sessions.append(SimulatedSession(own, verifier.wake, gamma_max, choices, history, others))
        verifier.wake()

    def run(self, ms: float) -> list[SimulationResult]:
        """Run for a time, and return the counters of each session."""
        events, sessions = self.verifier.events, self.verifier.sessions
        started, before = events.now, [len(session.committed) for session in sessions]
        for session in sessions:
            session.result = SimulationResult()
        while events.now < started + ms:
            events.run_next()
        for session, count in zip(sessions, before, strict=True):
            session.result.ms = events.now - started
            session.result.tokens = len(session.committed) - count
        return [session.result for session in sessions]


def test_a_session_that_shares_with_none_is_as_one_with_its_own_verifier() -> None:
    alone = Simulation(NEAR, seed=3)
    shared = SharedSimulation([NEAR], seed=3)
    (result,) = shared.run(2000.0)
    alone.run(result.tokens)
    assert alone.committed == shared.verifier.sessions[0].committed
    assert alone.plans == shared.verifier.sessions[0].plans
    assert alone.proposed == shared.verifier.sessions[0].proposed


@pytest.mark.parametrize(("sessions", "step_ms"), [(8, 25.0), (96, 37.5)])
def test_plain_sessions_share_steps_that_last_as_long_as_all_their_tokens_need(sessions: int, step_ms: float) -> None:
    results = SharedSimulation([NEAR] * sessions, fixed=[PLAIN] * sessions).run(40 * step_ms)
    assert {result.tokens for result in results} == {40}


def test_fixed_guesses_of_one_session_lengthen_the_steps_of_all() -> None:
    steep = replace(NEAR, cost=CostCurve.line(10.0, 5.0))
    _, beside = SharedSimulation([steep, steep], fixed=[FixedChoices(gamma=6), PLAIN]).run(1500.0)
    assert beside.tokens < 0.8 * 1500 / steep.cost.at(2)


# --- what a shared step checks pays -----------------------------------------------------------------------------------

WARM_MS = 3000.0
KINDS = {"even": (0.8,), "mixed": (0.9, 0.7, 0.5, 0.3)}


def times_plain(worlds: Sequence[World], ms: float, fixed: FixedChoices | None) -> tuple[float, float]:
    """Return the speed of all sessions over plain decoding, and of the slowest one."""
    simulation = SharedSimulation(worlds, fixed=[] if fixed is None else [fixed] * len(worlds))
    simulation.run(WARM_MS if fixed is None else 500.0)
    plain = 1000.0 / worlds[0].cost.at(len(worlds))
    speeds = [result.tokens_per_s / plain for result in simulation.run(ms)]
    return statistics.fmean(speeds), min(speeds)


def test_a_full_verifier_checks_nothing_and_no_session_loses() -> None:
    narrow = replace(NEAR, cost=CostCurve((1, 4, 8), (25.0, 25.0, 50.0)))
    mean, least = times_plain([replace(narrow, acceptance=acceptance) for acceptance in (0.9, 0.3) * 3], 4000.0, None)
    assert mean > 0.98
    assert least > 0.97


CPU = CostCurve((1, 4, 8, 16, 32, 64), (14.0, 24.0, 34.0, 42.0, 56.0, 90.0))
CHAT = World(acceptance=0.45, gain=0.5, draft_ms=2.5, overhead_ms=3.0, cost=CPU, shared=True, burden=1.1)


def test_sessions_that_share_their_cores_with_a_drafter_lose_nothing_by_guesses_that_seldom_hold() -> None:
    history = PairHistory(acceptance=[CHAT.acceptance] * 3, draft_ms=CHAT.draft_ms, level_ms=CHAT.draft_ms)
    results = SharedSimulation([CHAT] * 8, history=history).run(300 * CPU.at(8))
    assert min(result.tokens_per_s for result in results) > 0.98 * 1000 / CPU.at(8)


@pytest.mark.prove
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("sessions", "gains"), [(1, 3.5), (8, 2.4), (32, 1.6), (128, 0.98)])
def test_sessions_of_a_gpu_are_faster_than_plain_and_than_every_fixed_gamma(
    sessions: int, gains: float, kind: str
) -> None:
    """Adaptive sessions: none is below plain, and all together are not below the best fixed γ, in turns or ahead."""
    acceptances = (KINDS[kind] * sessions)[:sessions]
    worlds = [replace(NEAR, acceptance=acceptance) for acceptance in acceptances]
    mean, least = times_plain(worlds, 4000.0, None)
    found = {"plain": 1.0}
    for gamma, ahead in product((1, 2, 4, 8), (False, True)):
        choice = FixedChoices(gamma=gamma, ahead=ahead)
        found[f"{gamma}{' ahead' * ahead}"] = times_plain(worlds, 2000.0, choice)[0]
    best = max(found, key=found.__getitem__)
    print(f"{sessions} {kind}: {mean:.3f} x plain, slowest {least:.3f}; best fixed γ {best}: {found[best]:.3f}")
    assert mean >= max(gains, 0.97 * found[best])
    assert least > 0.97
