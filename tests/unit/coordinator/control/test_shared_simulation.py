"""Sessions that share a verifier in virtual time: its steps last as long as all their tokens need."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.control.gamma import FixedChoices
from coordinator.control.simulation.verifier import SharedSimulation, Simulation
from coordinator.control.simulation.world import World
from outrider.protocol.cost_curve import CostCurve

GPU = CostCurve((1, 64, 128), (25.0, 25.0, 50.0))  # flat to 64 tokens of a batch, then linear
NEAR = World(acceptance=0.8, gain=0.6, draft_ms=1.0, cost=GPU)
PLAIN = FixedChoices(gamma=0)


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
    results = SharedSimulation([NEAR] * sessions, fixed=PLAIN).run(40 * step_ms)
    assert {result.tokens for result in results} == {40}


def test_guesses_of_one_session_lengthen_the_steps_of_all() -> None:
    steep = replace(NEAR, cost=CostCurve.line(10.0, 5.0))
    pair = SharedSimulation([steep, steep])
    guessing, _ = pair.verifier.sessions
    pair.verifier.sessions[1].controller = Simulation(steep, fixed=PLAIN).controller
    pair.run(1000.0)
    assert max(count for _, count in guessing.proposed) > 0
    _, beside = pair.run(1000.0)
    assert beside.tokens < 1000 / steep.cost.at(2) - 1
