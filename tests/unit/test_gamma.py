"""γ control: the choice, what it is made from, and the loop of both in virtual time."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator import gamma
from coordinator.gamma import Conditions, Controller, CostLine, Estimator, PairHistory, choose, expected_tokens, rate
from outrider.messages import CostCurve, Steering, TokenKind, Verdict, VerifyTimings

GAMMA_MAX = 16

FAIR = Conditions(acceptance=(0.8,) * 8, offer_rate=1.0, draft_ms=2.0, link_ms=4.0, cost=CostCurve.line(40.0, 1.0))

any_conditions = st.builds(
    Conditions,
    acceptance=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8).map(tuple),
    offer_rate=st.floats(0.0, 1.0),
    draft_ms=st.floats(0.0, 100.0),
    link_ms=st.floats(0.0, 500.0),
    cost=st.builds(CostCurve.line, st.floats(0.01, 500.0), st.floats(0.0, 50.0)),
)


# --- the choice ------------------------------------------------------------------------------------------------------


@given(st.floats(0.0, 0.999), st.integers(0, 20))
def test_expected_tokens_is_the_geometric_sum(acceptance: float, n: int) -> None:
    assert expected_tokens((acceptance,), n) == pytest.approx((1 - acceptance ** (n + 1)) / (1 - acceptance))


def test_expected_tokens_by_position() -> None:
    assert expected_tokens((0.5, 0.2), 0) == 1.0
    assert expected_tokens((0.5, 0.2), 2) == pytest.approx(1 + 0.5 + 0.5 * 0.2)
    assert expected_tokens((0.5, 0.2), 3) == pytest.approx(1 + 0.5 + 0.5 * 0.2 + 0.5 * 0.2 * 0.2)


def test_rate_counts_waiting_and_rows() -> None:
    one = replace(FAIR, acceptance=(0.5,))
    assert rate(one, 0) == pytest.approx(1000 / 40)
    assert rate(one, 2) == pytest.approx(1000 * 1.75 / (4 + 2 * 2 + 40 + 2 * 1))


def test_a_drafter_that_often_has_nothing_costs_a_link_each_time() -> None:
    half = replace(FAIR, acceptance=(1.0,), offer_rate=0.5)
    assert rate(half, 1) == pytest.approx(1000 * 1.5 / (0.5 * 6 + 0.5 * 4 + 40 + 0.5 * 1))


def test_nothing_is_guessed_when_nothing_is_accepted() -> None:
    assert choose(replace(FAIR, acceptance=(0.0,) * 8), GAMMA_MAX).gamma == 0


def test_plain_wins_when_the_drafter_is_too_slow_or_too_far() -> None:
    assert choose(replace(FAIR, draft_ms=100.0), GAMMA_MAX).gamma == 0
    assert choose(replace(FAIR, link_ms=1000.0), GAMMA_MAX).gamma == 0


def test_gamma_grows_with_acceptance() -> None:
    chosen = [choose(replace(FAIR, acceptance=(a / 20,)), GAMMA_MAX).gamma for a in range(21)]
    assert chosen == sorted(chosen)
    assert chosen[0] == 0
    assert chosen[-1] == GAMMA_MAX
    assert len(set(chosen)) > 5


def test_gamma_falls_with_the_cost_of_drafting_and_of_rows() -> None:
    slower = [replace(FAIR, draft_ms=float(ms)) for ms in range(0, 60, 3)]
    steeper = [replace(FAIR, cost=CostCurve.line(40.0, float(ms))) for ms in range(0, 60, 3)]
    for conditions in (slower, steeper):
        chosen = [choose(each, GAMMA_MAX).gamma for each in conditions]
        assert chosen == sorted(chosen, reverse=True)
        assert chosen[0] > chosen[-1] == 0


def test_a_longer_link_asks_for_longer_guesses_until_it_is_too_long() -> None:
    near, far = (choose(replace(FAIR, link_ms=link), GAMMA_MAX).gamma for link in (0.0, 60.0))
    assert 0 < near < far


@given(any_conditions, st.integers(0, 24))
def test_the_choice_is_never_slower_than_plain(conditions: Conditions, gamma_max: int) -> None:
    choice = choose(conditions, gamma_max)
    assert 0 <= choice.gamma <= gamma_max
    assert choice.tokens_per_s == rate(conditions, choice.gamma)
    assert choice.tokens_per_s == max(rate(conditions, g) for g in range(gamma_max + 1))
    assert choice.tokens_per_s >= rate(conditions, 0)


@given(any_conditions, st.integers(0, 16))
def test_hysteresis_keeps_the_current_unless_another_is_clearly_better(conditions: Conditions, current: int) -> None:
    choice = choose(conditions, GAMMA_MAX, current)
    best = max(rate(conditions, g) for g in range(GAMMA_MAX + 1))
    if rate(conditions, current) * gamma.HYSTERESIS > best and rate(conditions, current) >= rate(conditions, 0):
        assert choice.gamma == current
    else:
        assert choice.tokens_per_s == best
    assert choice.tokens_per_s >= best / gamma.HYSTERESIS * (1 - 1e-12)
    assert choice.tokens_per_s >= rate(conditions, 0), "never slower than plain by choice"


@given(any_conditions, st.integers(17, 99))
def test_a_current_gamma_that_is_no_longer_allowed_is_left(conditions: Conditions, current: int) -> None:
    assert choose(conditions, GAMMA_MAX, current).gamma <= GAMMA_MAX


@given(any_conditions)
def test_patience_covers_the_wait_and_is_bounded(conditions: Conditions) -> None:
    assert gamma.patience_for(conditions, 0) == 0.0
    for g in (1, 8):
        patience = gamma.patience_for(conditions, g)
        assert gamma.MIN_PATIENCE_MS <= patience <= gamma.MAX_PATIENCE_MS
        assert patience >= min(gamma.wait_ms(conditions, g), gamma.MAX_PATIENCE_MS)


def test_absurd_conditions_do_not_raise() -> None:
    nothing = Conditions((0.0,), 0.0, 0.0, 0.0, CostCurve.line(0.0, 0.0))
    choose(nothing, 0).steering().check()
    choose(nothing, 64).steering().check()
    choose(Conditions((1.0,), 1.0, 0.0, 0.0, CostCurve.line(0.0, 0.0)), 64, current=3).steering().check()
    choose(Conditions((1.0,), 1.0, 1e9, 1e9, CostCurve.line(1e9, 1e9)), 64).steering().check()


# --- the cost line ---------------------------------------------------------------------------------------------------


def line_of(one: float, more: float, rows, jitter: float = 0.0, count: int = 400) -> tuple[float, float]:
    source = random.Random(1)
    line = CostLine()
    for _ in range(count):
        n = rows(source)
        line.add(n, (one + more * (n - 1)) * (1 + jitter * source.uniform(-1, 1)))
    return line.fit()


def test_the_cost_line_is_recovered_from_noisy_steps() -> None:
    one, more = line_of(40.0, 2.0, lambda source: source.randint(1, 17), jitter=0.1)
    assert one == pytest.approx(40.0, rel=0.1)
    assert more == pytest.approx(2.0, rel=0.35)


def test_a_flat_verifier_is_seen_as_flat() -> None:
    one, more = line_of(40.0, 0.0, lambda source: source.randint(1, 17))
    assert one == pytest.approx(40.0, rel=0.05)
    assert more < 0.2


def test_with_one_kind_of_step_the_slope_is_the_prior() -> None:
    one, more = line_of(40.0, 0.0, lambda source: 1)
    assert one == pytest.approx(40.0)
    assert more == pytest.approx(40.0 * gamma.PRIOR_ROW_SHARE)


def test_the_cost_line_follows_a_machine_that_slows_down() -> None:
    line = CostLine()
    for step in range(300):
        line.add(1 + step % 5, 20.0 if step < 150 else 60.0)
    assert line.fit()[0] == pytest.approx(60.0, rel=0.05)


@given(st.lists(st.tuples(st.integers(0, 300), st.floats(0.0, 1e6)), max_size=40))
def test_any_steps_give_a_sane_line(steps: list[tuple[int, float]]) -> None:
    line = CostLine()
    for rows, ms in steps:
        line.add(rows, ms)
    one, more = line.fit()
    assert one >= -1e-6 * max([1.0, *(ms for _, ms in steps)])
    assert more >= 0.0


# --- what verdicts teach ---------------------------------------------------------------------------------------------


def verdict(
    accepted: int = 0, offered: int = 0, *, rows: int | None = None, step_ms: float = 40.0, wait_ms: float = 0.0
) -> Verdict:
    rows = 1 + offered if rows is None else rows
    return Verdict(
        position=0,
        tokens=(0,) * (accepted + 1),
        accepted=accepted,
        last=TokenKind.BONUS if accepted == offered else TokenKind.RECOVERED,
        offered=offered,
        timings=VerifyTimings(
            wait_us=int(wait_ms * 1000), step_us=int(step_ms * 1000), rows=rows, session_rows=1 + offered
        ),
    )


def test_acceptance_is_learnt_per_position() -> None:
    estimator = Estimator(3)
    for _ in range(200):
        estimator.judged(verdict(1, 3), asked=3, waited=True)
    first, second, _ = estimator.pair.acceptance
    assert first > 0.95
    assert second < 0.05


def test_a_session_starts_from_the_pairs_history() -> None:
    estimator = Estimator(4)
    estimator.pair.start_from(PairHistory([0.9, 0.3], 0.7, 2.5))
    assert estimator.pair.acceptance[:2] == pytest.approx((0.9, 0.3))
    assert len(estimator.pair.acceptance) == 4
    conditions = estimator.conditions(11.0)
    assert (conditions.offer_rate, conditions.draft_ms, conditions.link_ms) == (0.7, 2.5, 11.0)
    assert estimator.pair.history().acceptance == pytest.approx(list(estimator.pair.acceptance))


def test_the_link_is_what_waiting_costs_beside_drafting() -> None:
    estimator = Estimator(4)
    for _ in range(100):
        estimator.pair.drafted(4, 8_000)
        estimator.judged(verdict(4, 4, wait_ms=20.0), asked=4, waited=True)
    conditions = estimator.conditions(999.0)
    assert conditions.draft_ms == pytest.approx(2.0, rel=0.05)
    assert conditions.link_ms == pytest.approx(12.0, rel=0.15)


def test_a_step_that_was_not_to_wait_says_nothing_about_the_drafter() -> None:
    estimator = Estimator(4)
    estimator.judged(verdict(0, 0), asked=3, waited=False)
    assert estimator.conditions(7.0).offer_rate == 1.0
    assert estimator.conditions(7.0).link_ms == 7.0


def test_branches_make_guesses_dearer() -> None:
    estimator = Estimator(4)
    for _ in range(100):
        estimator.judged(replace(verdict(2, 4, rows=9), nodes=8), asked=4, waited=True)
    plain = replace(estimator.conditions(0.0), guess_rows=1.0)
    assert estimator.conditions(0.0).guess_rows == pytest.approx(2.0, rel=0.01)
    assert estimator.conditions(0.0).verify_ms(4) == pytest.approx(plain.verify_ms(8), rel=0.01)


def test_prompts_of_others_do_not_spoil_the_cost_line() -> None:
    estimator = Estimator(4)
    for _ in range(50):
        estimator.judged(verdict(), asked=0, waited=False)
    estimator.judged(verdict(rows=512, step_ms=3000.0), asked=0, waited=False)
    assert estimator.conditions(0.0).verify_ms(0) == pytest.approx(40.0, rel=0.02)


def test_zeros_everywhere_do_not_raise() -> None:
    estimator = Estimator(0)
    controller = Controller(GAMMA_MAX, estimator, None, None)
    estimator.pair.drafted(0, 0)
    for _ in range(60):
        controller.judged(Verdict(0, (), 0, TokenKind.NONE, timings=VerifyTimings(rows=0, session_rows=0)))
        controller.decide(0.0, attached=True)
    assert 0 <= controller.gamma <= GAMMA_MAX


# --- the controller in virtual time ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """A session of its own: each guess holds with the same chance."""

    acceptance: float
    draft_ms: float
    link_ms: float
    verify_ms: float
    row_ms: float
    jitter: float = 0.1

    def best_rate(self) -> float:
        cost = CostCurve.line(self.verify_ms, self.row_ms)
        conditions = Conditions((self.acceptance,), 1.0, self.draft_ms, self.link_ms, cost)
        return max(rate(conditions, g) for g in range(GAMMA_MAX + 1))


class Simulation:
    """Verdicts as a verifier in such a world would give them; time is a number."""

    def __init__(self, controller: Controller, seed: int = 0) -> None:
        self.controller = controller
        self.now_ms = 0.0
        self.tokens = 0
        self._luck = random.Random(seed)
        self._underway: tuple[float, int, int] | None = None  # when a guess arrives, for which token, how many

    def run(self, world: World, steps: int) -> float:
        """Tokens per second over these steps."""
        before, since = self.tokens, self.now_ms
        for _ in range(steps):
            self.step(world)
        return 1000.0 * (self.tokens - before) / (self.now_ms - since)

    def step(self, world: World) -> None:
        controller = self.controller
        controller.decide(world.link_ms, attached=True)
        offered, waited = self._wait(world)
        held = 0
        while held < offered and self._luck.random() < world.acceptance:
            held += 1
        step_ms = world.verify_ms + offered * world.row_ms
        step_ms *= 1 + world.jitter * self._luck.uniform(-1, 1)
        self.now_ms += waited + step_ms
        self.tokens += held + 1
        controller.judged(verdict(held, offered, step_ms=step_ms, wait_ms=waited))

    def _wait(self, world: World) -> tuple[int, float]:
        """Guesses at hand when the step starts, and the time waited for them."""
        asked = self.controller.gamma
        if asked and self._underway is None:
            takes = world.link_ms + asked * world.draft_ms
            takes *= 1 + world.jitter * self._luck.uniform(-1, 1)
            self._underway = (self.now_ms + takes, self.tokens, asked)
        if self._underway is None:
            return 0, 0.0
        arrives, start, count = self._underway
        waited = max(0.0, arrives - self.now_ms)
        if waited > self.controller.patience_ms:
            return 0, self.controller.patience_ms
        self._underway = None
        self.controller.estimator.pair.drafted(count, int(count * world.draft_ms * 1000))
        skipped = self.tokens - start  # committed while the guess was under way
        fits = all(self._luck.random() < world.acceptance for _ in range(skipped))
        return (max(0, count - skipped) if fits else 0), waited


def controller(fixed: int | None = None, patience_us: int | None = None) -> Controller:
    return Controller(GAMMA_MAX, Estimator(GAMMA_MAX), fixed, patience_us)


WORLDS = {
    "a good drafter": World(0.9, 1.0, 4.0, 40.0, 1.0),
    "a middling drafter": World(0.7, 2.0, 4.0, 40.0, 1.0),
    "a free drafter": World(0.5, 0.0, 1.0, 40.0, 0.5),
    "a link as long as a step": World(0.9, 1.0, 40.0, 40.0, 0.5),
    "steep rows": World(0.8, 1.0, 4.0, 40.0, 10.0),
    "a drafter that is hardly ever right": World(0.05, 2.0, 4.0, 40.0, 1.0),
    "a drafter slower than the target": World(0.8, 60.0, 4.0, 40.0, 1.0),
    "a drafter at the end of the world": World(0.6, 2.0, 400.0, 40.0, 1.0),
}


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())
def test_the_controller_comes_near_the_best_fixed_gamma(world: World) -> None:
    simulation = Simulation(controller())
    simulation.run(world, 150)
    assert simulation.run(world, 600) > 0.93 * world.best_rate()


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())
def test_a_published_cost_curve_brings_it_nearer(world: World) -> None:
    informed = controller()
    informed.estimator.priced(CostCurve.line(2 * world.verify_ms, 2 * world.row_ms))  # of a machine half as fast
    simulation = Simulation(informed)
    simulation.run(world, 150)
    assert simulation.run(world, 600) > 0.95 * world.best_rate()


def test_gamma_stops_where_the_curve_turns_up() -> None:
    """A line through the first points would ask for all."""
    turn = CostCurve((1, 6, 7, 17), (40.0, 41.0, 80.0, 480.0))
    assert choose(replace(FAIR, acceptance=(0.95,) * 16, cost=turn), GAMMA_MAX).gamma == 5
    crowded = replace(FAIR, acceptance=(0.95,) * 16, cost=turn, other_rows=3.0)
    assert choose(crowded, GAMMA_MAX).gamma == 2


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())
def test_a_session_is_hardly_slower_than_plain_from_its_first_token(world: World) -> None:
    plain = 1000.0 / world.verify_ms
    assert Simulation(controller()).run(world, 300) > 0.93 * plain


def test_speculation_stops_when_guesses_turn_bad_and_comes_back_when_they_are_good_again() -> None:
    good = World(0.9, 1.0, 4.0, 40.0, 1.0)
    bad = replace(good, acceptance=0.02)
    simulation = Simulation(controller())
    simulation.run(good, 150)
    assert simulation.controller.gamma >= 4
    simulation.run(bad, 150)
    assert simulation.run(bad, 300) > 0.95 * 1000 / bad.verify_ms
    simulation.run(good, 300)
    assert simulation.run(good, 300) > 0.9 * good.best_rate()


def test_probing_sees_that_guesses_are_good_again_behind_a_long_link() -> None:
    """A guess that was not waited for comes some plain steps late: the look must reach beyond them."""
    good = World(0.95, 1.0, 160.0, 40.0, 0.5)
    assert good.best_rate() > 1.5 * 1000 / good.verify_ms, "guessing pays here"
    simulation = Simulation(controller())
    simulation.run(replace(good, acceptance=0.02), 200)
    simulation.run(good, 1000)
    assert simulation.run(good, 300) > 0.9 * good.best_rate()


def test_gamma_is_steady_in_a_steady_world() -> None:
    """Every change is a message on every hop and a chain cut short."""
    simulation = Simulation(controller())
    simulation.run(WORLDS["a middling drafter"], 200)
    seen = []
    for _ in range(300):
        simulation.step(WORLDS["a middling drafter"])
        seen.append(simulation.controller.gamma)
    changes = sum(a != b for a, b in pairwise(seen))
    assert changes < 60


def test_a_fixed_gamma_is_kept_and_waited_for() -> None:
    control = controller(fixed=5)
    steering = control.decide(3.0, attached=True)
    assert steering is not None
    assert steering.gamma == 5
    assert steering.patience_us >= 50_000
    for _ in range(50):
        control.judged(verdict(0, 5))
        control.decide(3.0, attached=True)
    assert control.gamma == 5


def test_a_fixed_patience_is_kept() -> None:
    control = controller(fixed=5, patience_us=1234)
    assert control.decide(3.0, attached=True) == Steering(gamma=5, patience_us=1234)


def test_without_a_drafter_there_is_nothing_to_wait_for() -> None:
    control = controller(fixed=5)
    control.decide(3.0, attached=True)
    steering = control.decide(3.0, attached=False)
    assert steering == Steering(gamma=0, patience_us=0)
    assert control.decide(3.0, attached=False) is None, "said once"


def test_nothing_is_said_when_nothing_changes() -> None:
    control = controller(fixed=4)
    assert control.decide(3.0, attached=True) is not None
    assert control.decide(3.0, attached=True) is None


@pytest.mark.parametrize(
    ("gamma_max", "fixed", "wants"), [(16, None, True), (0, None, False), (16, 0, False), (0, 3, True)]
)
def test_a_drafter_is_wanted_only_where_guesses_are_allowed(gamma_max: int, fixed: int | None, wants: bool) -> None:
    assert Controller(gamma_max, Estimator(gamma_max), fixed, None).wants_drafter is wants


@settings(max_examples=25, deadline=None)
@given(
    acceptance=st.floats(0.0, 1.0),
    draft_ms=st.floats(0.0, 20.0),
    link_ms=st.floats(0.0, 60.0),
    verify_ms=st.floats(5.0, 100.0),
    row_share=st.floats(0.0, 0.05),
)
def test_in_any_world_with_cheap_rows_the_controller_is_not_below_plain(
    acceptance: float, draft_ms: float, link_ms: float, verify_ms: float, row_share: float
) -> None:
    world = World(acceptance, draft_ms, link_ms, verify_ms, verify_ms * row_share)
    simulation = Simulation(controller())
    simulation.run(world, 150)
    assert simulation.run(world, 400) > 0.93 * 1000.0 / world.verify_ms


def test_probing_costs_little_even_where_rows_are_dear() -> None:
    """Plain wins here, and a look now and then must not eat what it saves."""
    world = World(acceptance=0.0, draft_ms=0.0, link_ms=0.0, verify_ms=40.0, row_ms=10.0)
    simulation = Simulation(controller())
    simulation.run(world, 150)
    assert simulation.run(world, 400) > 0.9 * 1000.0 / world.verify_ms
