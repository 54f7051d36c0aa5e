"""γ control: what verdicts teach, and the plan that follows from it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.control import estimator as estimator_module
from coordinator.control import gamma
from coordinator.control.estimator import (
    CREDIT,
    BestDrafter,
    CostLine,
    Estimator,
    PairEstimate,
    PairHistory,
    ThroughputRatios,
)
from coordinator.control.gamma import Controller, FixedChoices
from coordinator.control.goodput import PAYING_NODES, paying_nodes
from coordinator.control.simulation.verifier import Simulation
from coordinator.control.simulation.world import World
from coordinator.control.throughput_model import PLAIN, Conditions, Mode, PlanChoice, SpeculationPlan, throughput
from coordinator.sessions.drafting import share_cores
from outrider.protocol.cost_curve import CostCurve
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo
from outrider.protocol.speculation import MAX_GAMMA, TokenKind, Verdict, VerifySteering, VerifyTimings

GAMMA_MAX = 16
TIMEOUT_MS = 100.0
FREE = FixedChoices()
FLAT = CostCurve.line(40.0, 0.0)
STEEP = CostCurve.line(40.0, 10.0)
TREE = SpeculationPlan(4, 3)
TREE_AHEAD = SpeculationPlan(16, 3, ahead=True, budget=16)


def verdict(
    accepted: int = 0,
    offered: int = 0,
    *,
    nodes: int | None = None,
    rows: int | None = None,
    step_ms: float = 40.0,
    wait_ms: float = 0.0,
    left: int = 0,
    beside: int = 0,
) -> Verdict:
    nodes = offered if nodes is None else nodes
    missed = TokenKind.RECOVERED if accepted < offered else TokenKind.BONUS
    return Verdict(
        position=0,
        tokens=(0,) * (accepted + 1),
        accepted=accepted,
        last=missed if offered else TokenKind.PLAIN,
        proposed=offered,
        timings=VerifyTimings(
            wait_us=int(wait_ms * 1000),
            step_us=int(step_ms * 1000),
            batch_tokens=1 + nodes if rows is None else rows,
            session_tokens=1 + nodes,
        ),
        nodes=nodes,
        remaining_depth=left,
        accepted_from_branch=beside,
    )


class Controlled(Controller):
    """A controller with its estimator."""

    def __init__(
        self, gamma_max: int, fixed: FixedChoices = FREE, *, single: bool = False, positions: int | None = None
    ) -> None:
        self.estimator = Estimator(gamma_max if positions is None else positions)
        super().__init__(gamma_max, self.estimator, fixed, single=single)


def drafter_of(estimator: Estimator, round_trips_ms: float = 0.0, *, shares_cores: bool = False) -> BestDrafter:
    """The only drafter of a session: what is known of the pair is known of it."""
    pair = estimator.pair
    return BestDrafter(round_trips_ms, pair.draft_ms.value, pair.level_ms.value or None, shares_cores)


def conditions(estimator: Estimator, round_trips_ms: float) -> Conditions:
    return estimator.conditions(drafter_of(estimator, round_trips_ms))


def seen(estimator: Estimator, verdict: Verdict, *, plan: SpeculationPlan, wait_timeout_ms: float) -> bool:
    return estimator.observe(verdict, plan, wait_timeout_ms, drafter_of(estimator))


def decide(made: Controlled, round_trips_ms: float, *, shares_cores: bool = False) -> VerifySteering | None:
    return made.decide(drafter_of(made.estimator, round_trips_ms, shares_cores=shares_cores))


def observe(made: Controlled, verdict: Verdict) -> None:
    made.observe(verdict, drafter_of(made.estimator))


# --- the cost line ---------------------------------------------------------------------------------------------------


def line_of(
    one: float, more: float, rows: Callable[[random.Random], int], jitter: float = 0.0, count: int = 400
) -> tuple[float, float]:
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
    assert more == pytest.approx(40.0 * estimator_module.PRIOR_TOKEN_SHARE)


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


# --- what guesses show -----------------------------------------------------------------------------------------------


def test_acceptance_is_learnt_per_position() -> None:
    estimator = Estimator(3)
    for _ in range(200):
        seen(estimator, verdict(1, 3), plan=SpeculationPlan(3), wait_timeout_ms=TIMEOUT_MS)
    first, second, _ = estimator.pair.acceptance
    assert first > 0.95
    assert second < 0.05


def test_a_place_that_was_never_tried_is_judged_by_its_neighbour() -> None:
    pair = PairEstimate(8)
    for _ in range(200):
        pair.observe_verdict(2, 2, due=True)
    assert pair.acceptance[7] == pytest.approx(pair.acceptance[1])
    assert pair.acceptance[1] > 0.9


@pytest.mark.parametrize(("accepted", "better"), [(1, True), (0, False)])
def test_places_that_were_not_tried_follow_those_before_away_from_the_history(accepted: int, better: bool) -> None:
    """Else a session with γ 1, after others whose guesses failed, would never find out that longer ones hold."""
    pair = PairEstimate(4)
    known = [0.5, 0.4, 0.4]
    pair.start_from(PairHistory(acceptance=known))
    assert pair.acceptance == pytest.approx((*known, 0.4))
    for _ in range(30):
        pair.observe_verdict(1, accepted, due=True)
    first, *later = pair.acceptance
    assert (first > 0.8) is better
    assert later == pytest.approx([0.4 * first / 0.5] * 3)


def test_a_history_without_any_accepted_guess_is_followed_too() -> None:
    """It may be of a coordinator with fewer positions."""
    pair = PairEstimate(4)
    pair.start_from(PairHistory(acceptance=[0.0]))
    assert pair.acceptance == (0.0, 0.0, 0.0, 0.0)
    for _ in range(30):
        pair.observe_verdict(4, 4, due=True)
    assert min(pair.acceptance) > 0.7


def test_an_accepted_guess_that_stood_beside_was_a_miss_of_the_first() -> None:
    pair = PairEstimate(2)
    for _ in range(200):
        pair.observe_verdict(2, 2, due=True, from_branches=1)
    first, second = pair.acceptance
    assert first > 0.95
    assert second < 0.05


@pytest.mark.parametrize("ahead", [False, True], ids=["in turns", "ahead"])
def test_runners_up_that_hold_are_a_gain(ahead: bool) -> None:
    pair = PairEstimate(4)
    for _ in range(200):
        pair.observe_tree(verdict(2, 2, nodes=6, beside=1), ahead=ahead)
    gain, other = (
        (pair.ahead_gain.value, pair.tree_gain.value) if ahead else (pair.tree_gain.value, pair.ahead_gain.value)
    )
    assert gain > 0.95
    assert other == pytest.approx(estimator_module.PRIOR_GAIN), "nothing was seen of it"


def test_a_miss_is_none_though_in_turns_something_was_left() -> None:
    pair = PairEstimate(4)
    for _ in range(200):
        pair.observe_tree(verdict(1, 2, nodes=6, left=3), ahead=False)
    assert pair.tree_gain.value < 0.05


@pytest.mark.parametrize("left", [0, 3])
def test_ahead_a_miss_is_made_good_by_what_is_at_hand(left: int) -> None:
    pair = PairEstimate(4)
    for _ in range(200):
        pair.observe_tree(verdict(1, 2, nodes=6, left=left), ahead=True)
    assert pair.ahead_gain.value > 0.95 if left else pair.ahead_gain.value < 0.05


def test_branches_say_how_many_rows_a_level_takes() -> None:
    pair = PairEstimate(4)
    for _ in range(100):
        pair.observe_tree(verdict(2, 4, nodes=12), ahead=True)
    assert pair.nodes_per_level.value == pytest.approx(3.0, rel=0.01)
    pair.observe_tree(verdict(), ahead=True)
    assert pair.nodes_per_level.value == pytest.approx(3.0, rel=0.01), "a step without guesses says nothing"


def test_chains_say_nothing_about_trees() -> None:
    estimator = Estimator(4)
    for _ in range(50):
        seen(estimator, verdict(2, 4), plan=SpeculationPlan(4), wait_timeout_ms=TIMEOUT_MS)
    known = conditions(estimator, 0.0)
    assert (known.tree_gain, known.ahead_gain, known.nodes_per_level) == (
        pytest.approx(estimator_module.PRIOR_GAIN),
        pytest.approx(estimator_module.PRIOR_GAIN),
        estimator_module.PRIOR_TREE_ROWS,
    )


def test_the_session_learns_from_trees_by_the_plan_in_force() -> None:
    in_turns, ahead = Estimator(4), Estimator(16)
    for _ in range(100):
        seen(in_turns, verdict(4, 4, nodes=12, beside=1), plan=TREE, wait_timeout_ms=TIMEOUT_MS)
        seen(ahead, verdict(4, 4, nodes=12, beside=1), plan=TREE_AHEAD, wait_timeout_ms=0.0)
    assert in_turns.pair.tree_gain.value > 0.8 > in_turns.pair.ahead_gain.value
    assert ahead.pair.ahead_gain.value > 0.8 > ahead.pair.tree_gain.value
    assert conditions(ahead, 0.0).nodes_per_level == pytest.approx(3.0, rel=0.01)


def test_drafting_is_learnt_per_token_of_a_chain_and_per_level_of_a_tree() -> None:
    pair = PairEstimate(4)
    for _ in range(100):
        pair.observe_draft(4, 8_000)
        pair.observe_draft(2, 10_000, tree=True)
    assert pair.draft_ms.value == pytest.approx(2.0, rel=0.01)
    assert pair.level_ms.value == pytest.approx(5.0, rel=0.01)


def test_what_goes_out_without_its_time_says_nothing_about_drafting() -> None:
    pair = PairEstimate(4)
    pair.observe_draft(4, 8_000)
    before = pair.draft_ms.value
    pair.observe_draft(4, 0)
    pair.observe_draft(0, 8_000)
    assert pair.draft_ms.value == before


# --- what is remembered ----------------------------------------------------------------------------------------------


REMEMBERED = PairHistory(
    acceptance=[0.9, 0.3, 0.2, 0.1],
    offer_rate=0.7,
    draft_ms=2.5,
    tree_gain=0.55,
    ahead_gain=0.65,
    tree_rows=3.5,
    level_ms=4.5,
    paces={Mode.TURNS.value: 0.9, Mode.TREE_AHEAD_WAITING.value: 1.2},
    gained=-1.5,
)


def test_what_a_pair_has_shown_goes_through_the_store_and_back() -> None:
    """Every field, also one that is added some day."""
    for name, value in asdict(PairHistory()).items():
        assert getattr(REMEMBERED, name) != value, "an example says something about each"
    pair = PairEstimate(4)
    pair.start_from(PairHistory(**json.loads(json.dumps(asdict(REMEMBERED)))))
    again = pair.history()
    assert again.acceptance == pytest.approx(REMEMBERED.acceptance)
    assert again.tree_gain == pytest.approx(REMEMBERED.tree_gain)
    assert again.ahead_gain == pytest.approx(REMEMBERED.ahead_gain)
    assert pair.credit == CREDIT - 1.5
    rest = replace(again, acceptance=REMEMBERED.acceptance, tree_gain=0.55, ahead_gain=0.65, gained=-1.5)
    assert rest == REMEMBERED


def test_a_session_starts_from_the_pairs_history() -> None:
    estimator = Estimator(6)
    estimator.pair.start_from(REMEMBERED)
    known = conditions(estimator, 11.0)
    assert known.acceptance[:4] == pytest.approx((0.9, 0.3, 0.2, 0.1))
    assert len(known.acceptance) == 6
    assert (known.proposal_rate, known.draft_ms, known.level_ms) == (0.7, 2.5, 4.5)
    assert (known.tree_gain, known.ahead_gain) == (pytest.approx(0.55), pytest.approx(0.65))
    assert known.nodes_per_level == 3.5
    assert known.network_ms == 11.0
    assert known.throughput_ratios == {Mode.TURNS: 0.9, Mode.TREE_AHEAD_WAITING: 1.2}


def test_a_pair_that_learns_leaves_what_was_remembered_alone() -> None:
    pair = PairEstimate(4)
    pair.start_from(REMEMBERED)
    pair.ratios.add(Mode.TURNS, 0.3)
    for _ in range(50):
        pair.observe_verdict(4, 4, due=True)
    assert REMEMBERED.paces[Mode.TURNS.value] == 0.9
    assert REMEMBERED.acceptance == [0.9, 0.3, 0.2, 0.1]


def test_what_a_session_shows_outweighs_what_was_remembered() -> None:
    pair = PairEstimate(4)
    pair.start_from(replace(REMEMBERED, acceptance=[0.1] * 4))
    for _ in range(50):
        pair.observe_verdict(4, 4, due=True)
    assert min(pair.acceptance) > 0.9


# --- links, steps, others --------------------------------------------------------------------------------------------


def test_the_link_is_what_waiting_costs_beside_drafting() -> None:
    estimator = Estimator(4)
    for _ in range(100):
        estimator.pair.observe_draft(4, 8_000)
        seen(estimator, verdict(4, 4, wait_ms=20.0), plan=SpeculationPlan(4), wait_timeout_ms=TIMEOUT_MS)
    known = conditions(estimator, 999.0)
    assert known.draft_ms == pytest.approx(2.0, rel=0.05)
    assert known.network_ms == pytest.approx(12.0, rel=0.15)


def test_beside_a_tree_it_is_by_the_levels() -> None:
    estimator = Estimator(4)
    for _ in range(100):
        estimator.pair.observe_draft(4, 12_000, tree=True)
        seen(estimator, verdict(4, 4, nodes=12, wait_ms=20.0), plan=TREE, wait_timeout_ms=TIMEOUT_MS)
    assert conditions(estimator, 999.0).network_ms == pytest.approx(8.0, rel=0.15)


def test_waits_ahead_say_nothing_about_the_link() -> None:
    """Most of it may have passed while the step before was under way."""
    estimator = Estimator(4)
    seen(
        estimator,
        verdict(2, 2, wait_ms=1.0),
        plan=SpeculationPlan(16, ahead=True, budget=8, awaited=2),
        wait_timeout_ms=TIMEOUT_MS,
    )
    assert conditions(estimator, 70.0).network_ms == 70.0


def test_guesses_that_were_at_hand_do_not_begin_the_measurement_of_the_link() -> None:
    """They were drafted by a plan ahead, before this one. A link of 0 ms would be known from then on."""
    estimator = Estimator(4)
    estimator.pair.observe_draft(4, 8_000)
    seen(estimator, verdict(4, 4, wait_ms=0.5), plan=SpeculationPlan(4), wait_timeout_ms=TIMEOUT_MS)
    assert conditions(estimator, 7.0).network_ms == 7.0
    seen(estimator, verdict(4, 4, wait_ms=20.0), plan=SpeculationPlan(4), wait_timeout_ms=TIMEOUT_MS)
    assert conditions(estimator, 7.0).network_ms == pytest.approx(12.0)


def test_a_step_that_was_not_to_wait_says_nothing_about_the_drafter() -> None:
    estimator = Estimator(4)
    seen(estimator, verdict(0, 0), plan=SpeculationPlan(3), wait_timeout_ms=0.0)
    assert conditions(estimator, 7.0).proposal_rate == 1.0
    assert conditions(estimator, 7.0).network_ms == 7.0


def test_a_step_that_waited_in_vain_does() -> None:
    estimator = Estimator(4)
    for _ in range(100):
        seen(estimator, verdict(0, 0, wait_ms=9.0), plan=SpeculationPlan(3), wait_timeout_ms=TIMEOUT_MS)
    assert conditions(estimator, 7.0).proposal_rate < 0.05
    assert conditions(estimator, 7.0).network_ms == pytest.approx(9.0)


def test_a_drafter_that_says_nothing_to_the_end_of_patience_is_silent() -> None:
    """One that has no guess says so, and costs a link's time only."""
    passing, silent = Estimator(4), Estimator(4)
    for _ in range(5):
        assert not seen(passing, verdict(wait_ms=9.0), plan=SpeculationPlan(3), wait_timeout_ms=TIMEOUT_MS)
        assert seen(silent, verdict(wait_ms=TIMEOUT_MS), plan=SpeculationPlan(3), wait_timeout_ms=TIMEOUT_MS)
    assert conditions(passing, 7.0).timeout_rate == 0.0
    assert conditions(silent, 7.0).timeout_rate > 0.9
    for _ in range(10):
        assert not seen(silent, verdict(3, 3, wait_ms=9.0), plan=SpeculationPlan(3), wait_timeout_ms=TIMEOUT_MS)
    assert conditions(silent, 7.0).timeout_rate < 0.1


def test_a_silent_drafter_is_not_waited_for_again() -> None:
    made = controller(FixedChoices(ahead=False))
    decide(made, 4.0)
    assert made.plan.gamma
    for _ in range(4):
        observe(made, verdict(wait_ms=made.wait_timeout_ms))
        decide(made, 4.0)
    assert made.wait_timeout_ms == 0.0, "at once, not at the next choice only"


def test_prompts_of_others_do_not_spoil_the_cost_line() -> None:
    estimator = Estimator(4)
    for _ in range(50):
        seen(estimator, verdict(), plan=PLAIN, wait_timeout_ms=0.0)
    seen(estimator, verdict(rows=512, step_ms=3000.0), plan=PLAIN, wait_timeout_ms=0.0)
    assert conditions(estimator, 0.0).verify_ms(0) == pytest.approx(40.0, rel=0.02)


def test_a_published_curve_is_taken_at_the_pace_of_our_own_steps() -> None:
    estimator = Estimator(4)
    estimator.attach_verifier(CostCurve.line(20.0, 1.0))
    assert conditions(estimator, 0.0).verify_ms(4) == pytest.approx(24.0)
    for _ in range(100):
        seen(estimator, verdict(step_ms=40.0), plan=PLAIN, wait_timeout_ms=0.0)
    assert conditions(estimator, 0.0).verify_ms(4) == pytest.approx(48.0)
    estimator.attach_verifier(CostCurve.line(5.0, 0.0))
    assert conditions(estimator, 0.0).verify_ms(4) == pytest.approx(5.0), "another machine, its own pace"


def test_the_rows_of_others_are_part_of_our_steps() -> None:
    estimator = Estimator(4)
    estimator.attach_verifier(CostCurve.line(40.0, 1.0))
    for _ in range(100):
        seen(estimator, verdict(2, 4, rows=15, step_ms=54.0), plan=SpeculationPlan(4), wait_timeout_ms=TIMEOUT_MS)
    assert conditions(estimator, 0.0).other_tokens == pytest.approx(10.0, rel=0.01)
    assert conditions(estimator, 0.0).verify_ms(4) == pytest.approx(54.0, rel=0.01)


def test_zeros_everywhere_do_not_raise() -> None:
    controller = Controlled(GAMMA_MAX, positions=0)
    controller.estimator.pair.observe_draft(0, 0)
    for _ in range(60):
        observe(controller, Verdict(0, (), 0, TokenKind.NONE, timings=VerifyTimings(batch_tokens=0, session_tokens=0)))
        decide(controller, 0.0)
    assert 0 <= controller.plan.gamma <= GAMMA_MAX


# --- the controller --------------------------------------------------------------------------------------------------


def controller(
    fixed: FixedChoices = FREE, *, cost: CostCurve = FLAT, acceptance: float = 0.8, gamma_max: int = GAMMA_MAX
) -> Controlled:
    """With a drafter known to be quick and right so often."""
    made = Controlled(gamma_max, fixed)
    made.estimator.attach_verifier(cost)
    made.estimator.pair.start_from(PairHistory(acceptance=[acceptance] * 16, draft_ms=2.0))
    return made


def promised(made: Controlled, round_trips_ms: float, plan: SpeculationPlan) -> float:
    return throughput(conditions(made.estimator, round_trips_ms), plan)


def test_what_is_chosen_is_the_best_of_all() -> None:
    made = controller()
    steering = decide(made, 4.0)
    assert steering == made.plan.for_verifier(made.wait_timeout_ms)
    assert made.plan.gamma > 0
    assert promised(made, 4.0, made.plan) == max(choice.tokens_per_s for choice in made.best_per_mode())


def test_the_best_of_every_way_is_shown() -> None:
    made = controller()
    assert made.best_per_mode() == [], "nothing was chosen yet"
    decide(made, 4.0)
    shown = made.best_per_mode()
    assert sorted(choice.plan.mode for choice in shown) == sorted(Mode)
    for choice in shown:
        assert choice.tokens_per_s == promised(made, 4.0, choice.plan)
    assert controller(FixedChoices(gamma=4)).best_per_mode() == [], "there was nothing to choose"


def test_tallies_tell_what_each_plan_brought() -> None:
    made = controller()
    observe(made, verdict(step_ms=40.0, wait_ms=1.0))
    decide(made, 4.0)
    chosen = made.plan
    for _ in range(3):
        observe(made, verdict(3, 4, step_ms=40.0, wait_ms=10.0))
    plain, tally = made.tallies[PLAIN], made.tallies[chosen]
    assert (plain.steps, plain.tokens, plain.ms) == (1, 1, 41.0)
    assert (tally.steps, tally.tokens, tally.ms) == (3, 12, 150.0)
    assert tally.expected == pytest.approx(3 * promised(controller(), 4.0, chosen))


def test_between_two_choices_some_verdicts_pass() -> None:
    made = controller()
    decide(made, 4.0)
    before = made.plan
    for _ in range(gamma.DECIDE_EVERY - 1):
        observe(made, verdict(0, 4, wait_ms=999.0))
        assert decide(made, 4.0) is None
    assert made.plan == before


def test_nothing_is_said_when_nothing_changes() -> None:
    made = controller(FixedChoices(gamma=4))
    assert decide(made, 3.0) is not None
    assert decide(made, 3.0) is None


def test_without_a_drafter_there_is_nothing_to_wait_for() -> None:
    for made in (controller(), controller(FixedChoices(gamma=5))):
        decide(made, 3.0)
        assert made.plan.gamma
        assert made.decide(None) == VerifySteering(gamma=0, draft_wait_us=0, nodes=0)
        assert made.plan == PLAIN
        assert made.decide(None) is None, "said once"
        assert decide(made, 3.0) is not None, "and taken back at once when one comes"
        assert made.plan.gamma


# --- fixed ----------------------------------------------------------------------------------------------------------


def test_a_fixed_gamma_is_kept_and_waited_for() -> None:
    made = controller(FixedChoices(gamma=5), acceptance=0.0)
    steering = decide(made, 3.0)
    assert steering is not None
    assert steering.gamma == 5
    assert steering.draft_wait_us is not None
    assert steering.draft_wait_us >= 50_000
    for _ in range(50):
        observe(made, verdict(0, 5))
        decide(made, 3.0)
    assert made.plan == SpeculationPlan(5)


def test_a_fixed_patience_is_kept() -> None:
    made = controller(FixedChoices(gamma=5, patience_us=1234))
    assert decide(made, 3.0) == VerifySteering(gamma=5, draft_wait_us=1234, nodes=0)
    free = controller(FixedChoices(patience_us=1234))
    decide(free, 3.0)
    assert free.plan.gamma
    assert free.wait_timeout_ms == 1.234


def test_a_patience_means_nothing_where_there_is_no_guess() -> None:
    made = controller(FixedChoices(gamma=0, patience_us=1234))
    decide(made, 3.0)
    assert (made.plan, made.wait_timeout_ms) == (PLAIN, 0.0)


def decided(
    fixed: FixedChoices, *, gamma_max: int = GAMMA_MAX, single: bool = False
) -> tuple[Controlled, set[SpeculationPlan]]:
    """The plans of a controller whose world turns over and over."""
    made = Controlled(gamma_max, fixed, single=single)
    made.estimator.attach_verifier(FLAT)
    found = set()
    for step in range(400):
        gain = 0.4 if step < 200 else 0.0
        held = step // 40 % 5 / 4
        made.estimator.pair.start_from(PairHistory([held] * 16, draft_ms=2.0, tree_gain=gain, ahead_gain=gain))
        observe(made, verdict())
        decide(made, 4.0 + 40.0 * (step % 5))
        found.add(made.plan)
    return made, found


def looks(plan: SpeculationPlan) -> bool:
    """Whether guesses are only taken as they come, to see whether they would pay."""
    return plan.ahead and plan.budget == 0 and plan.branches == 1


def test_left_alone_it_takes_many_a_plan() -> None:
    _, found = decided(FixedChoices())
    assert len({plan.mode for plan in found}) >= 4


@pytest.mark.parametrize(
    ("fixed", "single", "plan"),
    [
        (FixedChoices(gamma=0), False, PLAIN),
        (FixedChoices(gamma=0, branches=3, ahead=True), False, PLAIN),
        (FixedChoices(gamma=5), False, SpeculationPlan(5)),
        (FixedChoices(gamma=5, branches=3), False, SpeculationPlan(5, 3)),
        (FixedChoices(gamma=5, branches=3), True, SpeculationPlan(5)),
        (FixedChoices(gamma=5, ahead=False), False, SpeculationPlan(5)),
        (FixedChoices(gamma=MAX_GAMMA), False, SpeculationPlan(MAX_GAMMA)),
    ],
)
def test_what_is_wished_for_in_full_is_all_there_is(fixed: FixedChoices, single: bool, plan: SpeculationPlan) -> None:
    _, found = decided(fixed, single=single)
    assert found == {plan}


def test_a_wished_width_is_kept() -> None:
    _, found = decided(FixedChoices(branches=2))
    assert any(plan.branches == 2 for plan in found)
    assert all(plan == PLAIN or plan.branches == 2 or looks(plan) for plan in found)


def test_what_is_drawn_has_no_branches() -> None:
    _, found = decided(FixedChoices(branches=4), single=True)
    assert {plan.branches for plan in found} == {1}
    assert any(plan.gamma for plan in found)


def test_ahead_is_kept() -> None:
    _, found = decided(FixedChoices(ahead=True))
    assert any(plan.ahead for plan in found)
    assert all(plan.ahead for plan in found if plan.gamma)


def test_in_turns_is_kept_but_for_a_look_now_and_then() -> None:
    _, found = decided(FixedChoices(ahead=False))
    assert any(plan.gamma and not plan.ahead for plan in found)
    assert all(looks(plan) for plan in found if plan.ahead)


@pytest.mark.parametrize("wished", [1, 2, 3, 8, 32, MAX_GAMMA])
def test_ahead_with_a_gamma_leaves_the_rest_to_be_chosen(wished: int) -> None:
    made, found = decided(FixedChoices(gamma=wished, ahead=True))
    assert all(plan.ahead and plan.gamma == wished and plan.branches == 1 for plan in found)
    assert made.wants_drafter


@pytest.mark.parametrize(
    ("gamma_max", "wished", "wants"),
    [(16, None, True), (0, None, False), (16, 0, False), (0, 3, True)],
)
def test_a_drafter_is_wanted_only_where_guesses_are_allowed(gamma_max: int, wished: int | None, wants: bool) -> None:
    assert Controlled(gamma_max, FixedChoices(wished)).wants_drafter is wants


# --- what came of it -------------------------------------------------------------------------------------------------


def drive(made: Controlled, steps: int, slow: dict[Mode, float]) -> None:
    """As promised, but for modes that take so many times as long."""
    luck = random.Random(0)
    owed = 0.0
    for _ in range(steps):
        decide(made, 4.0)
        plan = made.plan
        deep = min(plan.gamma, plan.budget or plan.gamma, 8)
        held = 0
        while held < deep and luck.random() < 0.8:
            held += 1
        raw = promised(made, 4.0, plan) / made.estimator.pair.ratios.by_mode().get(plan.mode, 1.0)
        owed += (held + 1) * 1000 / raw * slow.get(plan.mode, 1.0) - 40.0
        waited = max(0.0, owed)  # and nobody knows why
        owed -= waited
        observe(made, verdict(held, deep, wait_ms=waited))


def test_a_way_that_brings_less_than_promised_is_left_for_another() -> None:
    made = controller(FixedChoices(branches=1))
    decide(made, 4.0)
    first = made.plan.mode
    assert first in (Mode.AHEAD, Mode.AHEAD_WAITING)
    drive(made, 120, {first: 2.5})
    assert made.plan.mode != first
    assert made.estimator.pair.ratios.by_mode()[first] < 0.9
    remembered, recovering = made.estimator.pair.history().paces[first.value], made.estimator.pair.ratios
    assert remembered == recovering.measured[first] <= recovering.by_mode()[first], "without the recovery since then"
    assert remembered == pytest.approx(recovering.by_mode()[first], abs=0.1)


def test_a_way_that_brings_what_was_promised_has_its_pace() -> None:
    made = controller(FixedChoices(branches=1))
    decide(made, 4.0)
    first = made.plan.mode
    drive(made, 120, {})
    paces = made.estimator.pair.ratios.by_mode()
    assert first in paces
    assert all(pace == pytest.approx(1.0, abs=0.2) for pace in paces.values())


def test_a_pace_that_is_remembered_does_not_turn_at_the_first_look() -> None:
    fresh, known = controller(FixedChoices(branches=1)), controller(FixedChoices(branches=1))
    decide(fresh, 4.0)
    way = fresh.plan.mode
    known.estimator.pair.ratios = ThroughputRatios({way: 1.0})
    for made in (fresh, known):
        drive(made, gamma.SETTLING + gamma.COMPARE_STEPS + 1, {way: 2.0})
    assert fresh.estimator.pair.ratios.by_mode()[way] < known.estimator.pair.ratios.by_mode()[way] < 1.0


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0.0, 1e5), st.floats(0.0, 1e5)), min_size=60, max_size=60))
def test_no_pace_leaves_its_bounds(steps: list[tuple[int, float, float]]) -> None:
    made = controller()
    for accepted, wait_ms, step_ms in steps:
        decide(made, 4.0)
        observe(made, verdict(accepted, 4, wait_ms=wait_ms, step_ms=step_ms))
    low, high = estimator_module.RATIO_BOUNDS
    assert all(low <= pace <= high for pace in made.estimator.pair.ratios.by_mode().values())


# --- in virtual time -------------------------------------------------------------------------------------------------


GOOD = World(acceptance=0.9, gain=0.3, draft_ms=4.0, cost=CostCurve.line(40.0, 1.0), rtt_ms=4.0)
BAD = replace(GOOD, acceptance=0.0, gain=0.0)


def plain_rate(world: World) -> float:
    return 1000.0 / world.cost.at(1)


def test_speculation_stops_when_guesses_turn_bad_and_comes_back_when_they_are_good_again() -> None:
    simulation = Simulation(GOOD)
    simulation.run(200)
    assert simulation.run(200).tokens_per_s > 2.5 * plain_rate(GOOD)
    simulation.world = BAD
    simulation.run(300)
    assert simulation.run(300).tokens_per_s > 0.95 * plain_rate(BAD)
    simulation.world = GOOD
    simulation.run(300)
    assert simulation.run(200).tokens_per_s > 2.5 * plain_rate(GOOD)


def test_probing_sees_that_guesses_are_good_again_behind_a_long_link() -> None:
    """A guess that was not waited for comes some plain steps late: the look must reach beyond them."""
    far = replace(GOOD, acceptance=0.95, rtt_ms=160.0)
    simulation = Simulation(replace(BAD, rtt_ms=160.0), fixed=FixedChoices(branches=1))
    simulation.run(200)
    simulation.world = far
    simulation.run(600)
    assert simulation.run(300).tokens_per_s > 1.4 * plain_rate(far)


def test_probing_costs_little_even_where_rows_are_dear() -> None:
    """Plain wins here, and a look now and then must not eat what it saves."""
    simulation = Simulation(replace(BAD, draft_ms=1.0, rtt_ms=0.0, cost=STEEP))
    simulation.run(150)
    assert simulation.run(400).tokens_per_s > 0.95 * plain_rate(simulation.world)


@pytest.mark.parametrize("fixed", [FREE, FixedChoices(branches=1)])
def test_one_stall_of_a_drafter_does_not_end_speculation_for_good(fixed: FixedChoices) -> None:
    """With the drafting time that it leaves in the history, not even right guesses would pay."""
    simulation = Simulation(GOOD, fixed=fixed, history=PairHistory([0.9] * GAMMA_MAX, draft_ms=400.0, level_ms=400.0))
    simulation.run(100)
    assert simulation.run(200).tokens_per_s > 2.0 * plain_rate(GOOD)


def test_a_fixed_gamma_is_what_happens() -> None:
    simulation = Simulation(GOOD, fixed=FixedChoices(gamma=4))
    result = simulation.run(300)
    assert simulation.controller.plan == SpeculationPlan(4)
    assert result.checked >= result.steps - 2, "nearly every step had guesses"
    assert set(simulation.controller.tallies) == {SpeculationPlan(4)}


# --- one machine ------------------------------------------------------------------------------------------------------


def test_nobody_drafts_ahead_on_the_verifiers_own_cores_unless_told_to() -> None:
    for fixed, ahead in ((FixedChoices(), False), (FixedChoices(ahead=True), True)):
        made = controller(fixed)
        decide(made, 0.5, shares_cores=True)
        assert made.plan.ahead is ahead
        assert any(choice.plan.ahead for choice in made.best_per_mode()) is ahead


def beside_a_drafter(made: Controlled) -> None:
    """One plain step on cores that are shared with a drafter."""
    drafter = drafter_of(made.estimator, 0.5, shares_cores=True)
    made.observe(verdict(), drafter)
    made.decide(drafter)


def test_while_plain_steps_win_on_shared_cores_the_choice_takes_little_of_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = []

    def choose_plan(*arguments: Any) -> PlanChoice:
        chosen.append(arguments)
        return gamma_choose_plan(*arguments)

    gamma_choose_plan = gamma.choose_plan
    monkeypatch.setattr(gamma, "choose_plan", choose_plan)
    made = controller(FixedChoices(branches=1), acceptance=0.02)
    made.estimator.pair.credit = 0.1  # no probes for some tens of steps
    for _ in range(40):
        beside_a_drafter(made)
    assert set(made.tallies) == {PLAIN}
    assert 1 <= len(chosen) <= 1 + 40 / gamma.DECIDE_EVERY_SETTLED


def test_until_a_guess_was_checked_a_step_waits_longer_for_the_drafter_that_reads() -> None:
    """Its kind of text pays for as much. What waits longer, or after that, counts."""
    for waited, steps, counts in ((1.0, gamma.READ_STEPS, False), (1.5, 1, True), (1.0, gamma.READ_STEPS + 1, True)):
        made = controller(FixedChoices(branches=1), acceptance=0.9)
        drafter = drafter_of(made.estimator, 0.5, shares_cores=True)
        while not made.plan.gamma:
            beside_a_drafter(made)
        begun, plain_ms = made.estimator.pair.credit, verdict().timings.step_us / 1000
        assert made.wait_timeout_ms > plain_ms
        for _ in range(steps):
            made.observe(verdict(wait_ms=waited * plain_ms), drafter)
        assert (made.estimator.pair.credit < begun) is counts


def test_a_request_that_fixes_gamma_neither_gains_nor_owes() -> None:
    """Its kind of text would have it counted as a gain over plain steps that nobody expected."""
    made = controller(FixedChoices(gamma=4))
    drafter = drafter_of(made.estimator, 0.5, shares_cores=True)
    begun = made.estimator.pair.credit
    for _ in range(10):
        made.observe(verdict(3, 4), drafter)
        made.decide(drafter)
    assert made.plan.gamma == 4
    assert made.estimator.pair.credit == begun


def test_the_first_checked_guess_counts() -> None:
    made = controller(FixedChoices(branches=1), acceptance=0.9)
    drafter = drafter_of(made.estimator, 0.5, shares_cores=True)
    while not made.plan.gamma:
        beside_a_drafter(made)
    begun = made.estimator.pair.credit
    made.observe(verdict(0, 4, wait_ms=made.wait_timeout_ms), drafter)
    made.decide(drafter)
    assert made.estimator.pair.credit < begun - 1.0
    assert made.plan == PLAIN


def test_another_kind_of_text_is_followed_at_once() -> None:
    made = controller(FixedChoices(branches=1), acceptance=0.02)
    made.estimator.pair.credit = 0.1
    for _ in range(6):
        beside_a_drafter(made)
    assert made.plan == PLAIN
    made.estimator.pair.expect([0.95] * 16)
    beside_a_drafter(made)
    assert made.plan.gamma > 4


@pytest.mark.parametrize(
    ("machine", "device", "shared"),
    [
        ("here", "cpu", True),
        ("here", "", True),
        ("here", "cuda:0", False),
        ("here", "paced", False),
        ("there", "cpu", False),
        ("", "cpu", False),
    ],
)
def test_who_shares_cores(machine: str, device: str, shared: bool) -> None:
    verifier = WorkerInfo("v", Role.VERIFIER, "a:1", ModelInfo("t", "t", device="cpu"), machine="here")
    drafter = WorkerInfo("d", Role.DRAFTER, "b:1", ModelInfo("d", "d", device=device), machine=machine)
    assert share_cores(verifier, drafter) is shared


# --- beside others ---------------------------------------------------------------------------------------------------

FULL = CostCurve((1, 17, 33, 257), (40.0, 40.0, 80.0, 640.0))  # at 17 rows


def beside(others: int, steps: int, controller: Controlled) -> list[SpeculationPlan]:
    """Plain verdicts of a verifier that has so many other sessions, all plain."""
    taken = []
    for _ in range(steps):
        step_ms = FULL.at(1 + others)
        timings = VerifyTimings(
            step_us=int(1000 * step_ms),
            sessions=1 + others,
            batch_tokens=1 + others,
            session_tokens=1,
            step_tokens=1 + others,
        )
        observe(controller, Verdict(0, (0,), 0, TokenKind.PLAIN, timings=timings))
        decide(controller, 2.0)
        taken.append(controller.plan)
    return taken


def promising(sessions: int) -> Controlled:
    controller = Controlled(GAMMA_MAX, FREE)
    controller.estimator.attach_verifier(FULL, sessions)
    controller.estimator.pair.start_from(PairHistory(acceptance=[0.8] * GAMMA_MAX, draft_ms=2.0))
    decide(controller, 2.0)
    return controller


def test_a_full_verifier_is_not_given_guesses_and_an_empty_one_is() -> None:
    assert promising(sessions=0).plan.gamma > 0
    assert promising(sessions=40).plan == PLAIN


def test_a_verifier_that_fills_up_is_left_to_those_who_are_there() -> None:
    controller = promising(sessions=0)
    assert beside(40, 12, controller)[-1] == PLAIN


def test_nobody_looks_where_even_right_guesses_would_not_pay() -> None:
    assert set(beside(60, 400, promising(sessions=60))) == {PLAIN}


def test_when_the_others_leave_guesses_are_made_again() -> None:
    controller = promising(sessions=60)
    beside(60, 60, controller)
    assert beside(0, 60, controller)[-1].gamma > 0


@pytest.mark.parametrize("plan", [replace(TREE_AHEAD, awaited=2), TREE_AHEAD, TREE])
def test_a_session_back_at_plain_decoding_leaves_the_rest_of_its_guesses_to_the_verifier(plan: SpeculationPlan) -> None:
    controller = promising(sessions=8)
    controller.plan, controller.paying_nodes = plan, paying_nodes(plan)
    assert controller.decide(None) is not None
    assert (controller.plan, controller.paying_nodes) == (PLAIN, PAYING_NODES)
    assert controller.decide(None) is None


@pytest.mark.parametrize(("sessions", "plan"), [(8, PLAIN), (0, TREE_AHEAD)])
def test_a_session_without_guesses_or_without_others_leaves_nothing(sessions: int, plan: SpeculationPlan) -> None:
    controller = promising(sessions)
    controller.plan, controller.paying_nodes = plan, 0
    controller.decide(None)
    assert (controller.plan, controller.paying_nodes) == (PLAIN, 0)


# --- drafters that promise and do not come ---------------------------------------------------------------------------


def waited_for(control: Controlled, answers: Callable[[int], int], steps: int = 60) -> float:
    """Milliseconds that a verifier waits per step for a drafter that has so many guesses; all waits end with patience
    unless there are as many as were wanted."""
    waited = 0.0
    for step in range(steps):
        decide(control, 1.0)
        offered = answers(step)
        enough = offered >= control.plan.gamma
        wait_ms = min(5.0, control.wait_timeout_ms) if enough else control.wait_timeout_ms
        waited += wait_ms
        control.estimator.pair.observe_draft(offered, 1_000)
        observe(control, verdict(0, offered, wait_ms=wait_ms))
    return waited / steps


@pytest.mark.parametrize("offered", [0, 1])
def test_a_fixed_gamma_does_not_crawl_behind_a_drafter_that_does_not_come(offered: int) -> None:
    control = Controlled(GAMMA_MAX, FixedChoices(gamma=4))
    waited_for(control, lambda _: offered, steps=40)
    assert waited_for(control, lambda _: offered, steps=400) < 20.0, "a step takes 40 ms"


def test_a_fixed_gamma_waits_again_for_a_drafter_that_comes_back() -> None:
    control = Controlled(GAMMA_MAX, FixedChoices(gamma=4))
    waited_for(control, lambda _: 0)
    waited_for(control, lambda _: 4, steps=30)
    assert control.wait_timeout_ms >= gamma.FIXED_WAIT_TIMEOUT_MS
    assert conditions(control.estimator, 1.0).shortfall_rate < 0.1


def test_the_rules_of_shared_cores_need_a_published_cost_curve() -> None:
    """An attached engine publishes none: its plain steps cannot be told from those of its other requests."""
    estimator, drafter = Estimator(8), BestDrafter(0.0, 1.0, None, shares_cores=True)
    assert not estimator.on_shared_cores(drafter)
    assert not estimator.conditions(drafter).shares_cores
    estimator.attach_verifier(CostCurve.line(20.0, 1.0))
    assert estimator.on_shared_cores(drafter)
    assert not estimator.on_shared_cores(None)


# --- choices that are due --------------------------------------------------------------------------------------------


def settled(fixed: FixedChoices) -> Controlled:
    """A controller just after a choice, which then is not due."""
    made = Controlled(4, fixed)
    made.estimator.attach_verifier(FLAT)
    for _ in range(8):
        observe(made, verdict(4, 4, wait_ms=1.0))
        decide(made, 1.0)
    while made.due:
        observe(made, verdict(4, 4, wait_ms=1.0))
        decide(made, 1.0)
    assert made.plan.gamma
    return made


@pytest.mark.parametrize("fixed", [FREE, FixedChoices(gamma=4)])
def test_choices_are_due_now_and_then_or_at_once_where_conditions_changed(fixed: FixedChoices) -> None:
    made = settled(fixed)
    for _ in range(gamma.DECIDE_EVERY_SETTLED):
        observe(made, verdict(4, 4, wait_ms=1.0))
    assert made.due, "the regular choice"
    made = settled(fixed)
    made.decide(None)
    assert made.plan == PLAIN
    assert made.due, "a drafter is lost"
    made = settled(fixed)
    made.estimator.attach_verifier(STEEP)
    assert made.due, "another verifier"
    made = settled(fixed)
    made.estimator.pair.expect([0.1])
    assert made.due, "another kind of text"
    made = settled(fixed)
    observe(made, verdict(0, 0, wait_ms=made.wait_timeout_ms))
    assert made.due, "a wait in vain"


def test_a_fixed_length_is_looked_at_after_each_verdict_while_guesses_fall_short() -> None:
    made = settled(FixedChoices(gamma=4))
    observe(made, verdict(1, 1, wait_ms=made.wait_timeout_ms))
    assert made.due
    decide(made, 1.0)
    assert made.due, "until few waits time out"


def test_plain_steps_that_share_a_verdict_refill_the_credit_each() -> None:
    """Or a coordinator that reads late would keep its sessions from guesses many times longer."""
    ended_at = []
    for together in (1, 16):
        made = controller(FixedChoices(branches=1), acceptance=0.02)
        made.estimator.pair.credit = -1.0
        drafter = drafter_of(made.estimator, 0.5, shares_cores=True)
        made.decide(drafter)
        for _ in range(64 // together):
            step = replace(verdict(), tokens=(7,) * together)
            made.observe(step, drafter)
        ended_at.append(made.estimator.pair.credit)
    assert ended_at[0] > -1.0
    assert ended_at[1] == pytest.approx(ended_at[0])
