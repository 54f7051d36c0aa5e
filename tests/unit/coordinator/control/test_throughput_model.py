"""The modes to speculate, and what each would bring."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.control import gamma, throughput_model
from coordinator.control.gamma import choose_plan
from coordinator.control.goodput import net_throughput
from coordinator.control.throughput_model import (
    BRANCHES,
    MAX_TREE_NODES,
    MAX_WAIT_TIMEOUT_MS,
    MIN_WAIT_TIMEOUT_MS,
    PLAIN,
    Conditions,
    Mode,
    SpeculationPlan,
    draft_wait_ms,
    draft_wait_timeout_ms,
    expected_tokens,
    mean_acceptance,
    throughput,
)
from outrider.protocol.cost_curve import CostCurve
from outrider.protocol.speculation import MAX_BRANCHES, MAX_GAMMA, MAX_NODES

FAIR = Conditions(
    acceptance=(0.8,) * 16, proposal_rate=1.0, draft_ms=2.0, network_ms=4.0, cost=CostCurve.line(40.0, 1.0)
)
FLAT = FAIR._replace(cost=CostCurve.line(40.0, 0.0))
PLAIN_RATE = 25.0  # tokens per second of both

ALL = tuple(throughput_model.candidate_plans(16))
CHAINS_IN_TURNS = tuple(plan for plan in throughput_model.candidate_plans(16, (1,)) if not plan.ahead)

chances = st.floats(0.0, 1.0)
costs = st.builds(CostCurve.line, st.floats(0.01, 500.0), st.floats(0.0, 50.0))
any_conditions = st.builds(
    Conditions,
    acceptance=st.lists(chances, min_size=1, max_size=16).map(tuple),
    proposal_rate=chances,
    draft_ms=st.floats(0.0, 100.0),
    network_ms=st.floats(0.0, 500.0),
    cost=costs,
    other_tokens=st.floats(0.0, 64.0),
    tree_gain=chances,
    ahead_gain=chances,
    nodes_per_level=st.floats(1.0, 16.0),
    level_ms=st.none() | st.floats(0.0, 100.0),
    timeout_rate=chances,
    between_ms=st.just(0.0),
    other_sessions=st.just(0.0),
    other_tokens_per_ms=st.just(0.0),
    shortfall_rate=st.just(0.0),
    throughput_ratios=st.just({}),
    shares_cores=st.just(False),
    shared=st.just(False),
)
any_paces = st.dictionaries(st.sampled_from([mode for mode in Mode if mode is not Mode.PLAIN]), st.floats(0.3, 1.5))
any_plan = st.sampled_from(ALL)
few = settings(max_examples=40, deadline=None)


def chosen_gamma(conditions: Conditions) -> int:
    return choose_plan(conditions, CHAINS_IN_TURNS).plan.gamma


def chance(held: float) -> Conditions:
    """Cheap rows, no link, and every guess holds with this chance."""
    return FLAT._replace(acceptance=(held,) * 16, network_ms=0.0)


# --- tokens per step -------------------------------------------------------------------------------------------------


@given(st.floats(0.0, 0.999), st.integers(0, 20))
def test_expected_tokens_is_the_geometric_sum(acceptance: float, n: int) -> None:
    assert expected_tokens((acceptance,), n) == pytest.approx((1 - acceptance ** (n + 1)) / (1 - acceptance))


def test_expected_tokens_by_position() -> None:
    assert expected_tokens((0.5, 0.2), 0) == 1.0
    assert expected_tokens((0.5, 0.2), 2) == pytest.approx(1 + 0.5 + 0.5 * 0.2)
    assert expected_tokens((0.5, 0.2), 3) == pytest.approx(1 + 0.5 + 0.5 * 0.2 + 0.5 * 0.2 * 0.2)


@given(st.lists(chances, min_size=8, max_size=16))
def test_the_mean_acceptance_lies_between_the_worst_place_and_the_best(acceptance: list[float]) -> None:
    """Nearly: rows are counted up to a length only."""
    mean = mean_acceptance(acceptance)
    assert 0.96 * min(acceptance) - 1e-9 <= mean <= min(throughput_model.MAX_ACCEPTANCE, max(acceptance)) + 1e-9


@pytest.mark.parametrize("held", [0.0, 0.3, 0.8, 0.9])
def test_the_mean_of_equal_places_is_their_chance(held: float) -> None:
    assert mean_acceptance((held,) * 16) == pytest.approx(held, abs=1e-3)


def test_certainty_is_never_believed() -> None:
    assert mean_acceptance((1.0,) * 64) <= throughput_model.MAX_ACCEPTANCE < 1.0


# --- in turns --------------------------------------------------------------------------------------------------------


def test_plain_is_a_token_per_step() -> None:
    assert throughput(FAIR, PLAIN) == pytest.approx(1000 / 40)
    assert throughput(FAIR._replace(other_tokens=10.0), PLAIN) == pytest.approx(1000 / 50), (
        "others' rows share our steps"
    )


def test_rate_counts_waiting_and_rows() -> None:
    assert throughput(FAIR._replace(acceptance=(0.5,)), SpeculationPlan(2)) == pytest.approx(
        1000 * 1.75 / (4 + 2 * 2 + 40 + 2 * 1)
    )


def test_a_drafter_that_often_has_nothing_costs_a_link_each_time() -> None:
    half = FAIR._replace(acceptance=(1.0,), proposal_rate=0.5)
    assert throughput(half, SpeculationPlan(1)) == pytest.approx(1000 * 1.5 / (0.5 * 6 + 0.5 * 4 + 40 + 0.5 * 1))


def test_a_tree_holds_where_a_runner_up_does_and_costs_all_its_rows() -> None:
    tree = FAIR._replace(acceptance=(0.5,), tree_gain=0.4, level_ms=3.0)
    held = 0.5 + 0.4 * 0.5
    assert throughput(tree, SpeculationPlan(2, 3)) == pytest.approx(
        1000 * (1 + held + held**2) / (4 + 2 * 3 + 40 + 6 * 1)
    )
    without = tree._replace(level_ms=None)
    assert throughput(without, SpeculationPlan(2, 3)) == pytest.approx(
        1000 * (1 + held + held**2) / (4 + 2 * 2 + 40 + 6 * 1)
    )


def test_more_branches_hold_more_often() -> None:
    held = [FAIR.acceptance_of(SpeculationPlan(4, branches))[0] for branches in (1, *BRANCHES)]
    assert held[0] == 0.8
    assert held == sorted(set(held))
    full = FAIR._replace(tree_gain=1.0, ahead_gain=1.0)
    assert max(full.acceptance_of(SpeculationPlan(4, MAX_BRANCHES))) <= 1.0


def test_a_silent_drafter_costs_all_patience_and_brings_a_plain_token() -> None:
    plan = SpeculationPlan(2)
    patience = draft_wait_timeout_ms(FAIR, plan)
    late = 1000 / (40 + patience)
    assert throughput(FAIR._replace(timeout_rate=1.0), plan) == pytest.approx(late)
    assert throughput(FAIR._replace(timeout_rate=0.5), plan) == pytest.approx((throughput(FAIR, plan) + late) / 2)
    assert throughput(FAIR._replace(timeout_rate=1.0), PLAIN) == PLAIN_RATE


# --- ahead -----------------------------------------------------------------------------------------------------------


def test_ahead_and_waiting_by_hand() -> None:
    """A miss after 1 / (1 − ½) = 2 tokens; 2 guesses are waited for, then blocks of 8 come without a pause."""
    later = 1 / (1 - 0.5**9)
    steps = 1 + 0.5**3 * later
    expected = 1000 * 2 / (steps * 40 + 2 * 2)
    assert throughput(chance(0.5), SpeculationPlan(16, ahead=True, budget=8, awaited=2)) == pytest.approx(
        expected, rel=1e-3
    )
    linked = chance(0.5)._replace(network_ms=10.0)
    expected = 1000 * 2 / (steps * 40 + 10 + 2 * 2)
    assert throughput(linked, SpeculationPlan(16, ahead=True, budget=8, awaited=2)) == pytest.approx(expected, rel=1e-2)


def test_ahead_without_waiting_by_hand() -> None:
    """After a miss one plain token passes before the drafter has caught up, if it guessed that one: two on average."""
    later = 1 / (1 - 0.5**9)
    expected = 1000 * (2 + 2) / (2 * 40 + 40 * (1 + 0.5**9 * later))
    assert throughput(chance(0.5), SpeculationPlan(16, ahead=True, budget=8)) == pytest.approx(expected, rel=1e-3)


def test_ahead_a_drafter_that_is_as_fast_as_the_verifier_at_least_is_no_help() -> None:
    for draft_ms in (40.0, 41.0, 500.0):
        slow = FLAT._replace(draft_ms=draft_ms)
        assert throughput(slow, SpeculationPlan(16, ahead=True, budget=8)) == pytest.approx(PLAIN_RATE)
    assert throughput(FLAT._replace(draft_ms=500.0), SpeculationPlan(16, ahead=True, budget=8, awaited=4)) < PLAIN_RATE


def test_a_long_link_is_hidden_by_drafting_ahead() -> None:
    far = FLAT._replace(network_ms=100.0)
    in_turns = max(throughput(far, SpeculationPlan(g)) for g in range(1, 17))
    assert throughput(far, SpeculationPlan(16, ahead=True, budget=8)) > 1.2 * in_turns
    assert choose_plan(far, ALL).plan.ahead


def test_a_tree_ahead_adds_what_it_has_at_hand() -> None:
    for want in (0, 2):
        chain, tree = (
            throughput(FLAT._replace(ahead_gain=0.6), SpeculationPlan(16, b, ahead=True, budget=16, awaited=want))
            for b in (1, 3)
        )
        assert tree > 1.2 * chain


def test_a_tree_ahead_fits_fewer_levels_in_its_rows() -> None:
    tree = SpeculationPlan(16, 3, ahead=True, budget=4, awaited=2)
    assert throughput(FLAT._replace(nodes_per_level=4.0), tree) < throughput(FLAT._replace(nodes_per_level=1.0), tree)


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ALL, ids=lambda plan: plan.label)
def test_guesses_that_never_hold_bring_nothing(plan: SpeculationPlan) -> None:
    nothing = FLAT._replace(acceptance=(0.0,) * 16, tree_gain=0.0, ahead_gain=0.0)
    assert throughput(nothing, plan) <= PLAIN_RATE * (1 + 1e-9)


@pytest.mark.parametrize("plan", [plan for plan in ALL if plan.gamma and not plan.ahead], ids=lambda plan: plan.label)
def test_guesses_that_always_hold_bring_all_of_them_in_turns(plan: SpeculationPlan) -> None:
    wait = 4.0 + 2.0 * plan.gamma
    assert throughput(FLAT._replace(acceptance=(1.0,) * 16), plan) == pytest.approx(
        1000 * (plan.gamma + 1) / (40 + wait)
    )


def test_ahead_guesses_that_always_hold_come_as_fast_as_they_are_drafted() -> None:
    sure = FLAT._replace(acceptance=(1.0,) * 16, draft_ms=10.0)
    for want in (0, 1, 2, 4):
        assert 0.9 * 1000 / 10 < throughput(sure, SpeculationPlan(16, ahead=True, budget=16, awaited=want)) <= 1000 / 10


@pytest.mark.parametrize("plan", ALL, ids=lambda plan: plan.label)
def test_at_the_end_of_the_world_what_waits_brings_nothing_and_what_does_not_is_plain(plan: SpeculationPlan) -> None:
    far = throughput(FLAT._replace(network_ms=1e7), plan)
    if plan.gamma == 0 or (plan.ahead and plan.awaited == 0):
        assert far == pytest.approx(PLAIN_RATE, rel=0.01)
    else:
        assert far < 0.01 * PLAIN_RATE


def test_absurd_conditions_do_not_raise() -> None:
    nothing = CostCurve.line(0.0, 0.0)
    for conditions in (
        Conditions((0.0,), 0.0, 0.0, 0.0, nothing),
        Conditions((1.0,), 1.0, 0.0, 0.0, nothing),
        Conditions((1.0,), 1.0, 1e9, 1e9, CostCurve.line(1e9, 1e9)),
        Conditions((0.0,), 1.0, 1e9, 0.0, CostCurve.line(1e-9, 0.0)),
    ):
        for current in (
            None,
            PLAIN,
            SpeculationPlan(3),
            SpeculationPlan(64, 8),
            SpeculationPlan(16, ahead=True, budget=8),
        ):
            choice = choose_plan(conditions, throughput_model.candidate_plans(MAX_GAMMA), current)
            assert math.isfinite(choice.tokens_per_s)
            choice.plan.for_verifier(choice.wait_timeout_ms).check()


@few
@given(any_conditions, any_paces, any_plan)
def test_a_rate_is_a_number_that_can_be(
    conditions: Conditions, paces: dict[Mode, float], plan: SpeculationPlan
) -> None:
    found = throughput(conditions._replace(throughput_ratios=paces), plan)
    assert math.isfinite(found)
    assert found >= 0.0
    bare, pace = throughput(conditions, plan), paces.get(plan.mode, 1.0)
    if bare <= throughput(conditions, PLAIN):
        pace = min(1.0, pace)  # luck is no reason to leave plain
    assert found == pytest.approx(bare * pace), "what a way brought scales it"


# --- more of this, less of that --------------------------------------------------------------------------------------


def falls(rates: Sequence[float]) -> bool:
    return all(b <= a * (1 + 1e-9) for a, b in pairwise(rates))


@given(any_conditions, any_plan, st.lists(chances, min_size=3, max_size=3))
def test_what_holds_more_often_is_not_slower(conditions: Conditions, plan: SpeculationPlan, held: list[float]) -> None:
    flat = conditions._replace(cost=CostCurve.line(conditions.cost.at(1), 0.0))
    rates = [throughput(flat._replace(acceptance=(each,)), plan) for each in sorted(held, reverse=True)]
    assert falls(rates)


@given(any_conditions, any_plan, st.lists(st.floats(0.0, 500.0), min_size=3, max_size=3))
def test_a_longer_link_is_never_faster(conditions: Conditions, plan: SpeculationPlan, links: list[float]) -> None:
    """Where guessing is better than plain: the further off the drafter is, the fewer are the steps with dear rows."""
    plain = throughput(conditions, PLAIN)
    assert falls([max(plain, throughput(conditions._replace(network_ms=each), plan)) for each in sorted(links)])


@given(any_conditions, any_plan, st.lists(st.floats(0.0, 100.0), min_size=3, max_size=3))
def test_a_slower_drafter_is_never_faster(conditions: Conditions, plan: SpeculationPlan, drafts: list[float]) -> None:
    """Where guessing is better than plain: a drafter too slow for it is counted as plain, whatever its rows cost."""
    same, plain = conditions._replace(level_ms=None), throughput(conditions, PLAIN)
    assert falls([max(plain, throughput(same._replace(draft_ms=each), plan)) for each in sorted(drafts)])


@given(any_conditions, any_plan, st.floats(0.0, 50.0))
def test_dearer_rows_are_never_faster(conditions: Conditions, plan: SpeculationPlan, more: float) -> None:
    dearer = CostCurve.line(conditions.cost.at(1), conditions.cost.at(2) - conditions.cost.at(1) + more)
    assert falls([throughput(conditions, plan), throughput(conditions._replace(cost=dearer), plan)])


# --- the choice ------------------------------------------------------------------------------------------------------


def test_nothing_is_guessed_when_nothing_is_accepted() -> None:
    assert chosen_gamma(FAIR._replace(acceptance=(0.0,) * 8)) == 0
    nothing = FAIR._replace(acceptance=(0.0,) * 8, tree_gain=0.0, ahead_gain=0.0)
    assert choose_plan(nothing, ALL).plan == PLAIN


def test_plain_wins_when_the_drafter_is_too_slow_or_too_far() -> None:
    assert chosen_gamma(FAIR._replace(draft_ms=100.0)) == 0
    assert chosen_gamma(FAIR._replace(network_ms=1000.0)) == 0
    assert choose_plan(FAIR._replace(draft_ms=100.0, level_ms=None), ALL).plan == PLAIN


def test_gamma_grows_with_acceptance() -> None:
    chosen = [chosen_gamma(FAIR._replace(acceptance=(a / 20,))) for a in range(21)]
    assert chosen == sorted(chosen)
    assert chosen[0] == 0
    assert chosen[-1] == 16
    assert len(set(chosen)) > 5


def test_gamma_falls_with_the_cost_of_drafting_and_of_rows() -> None:
    slower = [FAIR._replace(draft_ms=float(ms)) for ms in range(0, 60, 3)]
    steeper = [FAIR._replace(cost=CostCurve.line(40.0, float(ms))) for ms in range(0, 60, 3)]
    for conditions in (slower, steeper):
        chosen = [chosen_gamma(each) for each in conditions]
        assert chosen == sorted(chosen, reverse=True)
        assert chosen[0] > chosen[-1] == 0


def test_a_longer_link_asks_for_longer_guesses_until_it_is_too_long() -> None:
    near, far = (chosen_gamma(FAIR._replace(network_ms=link)) for link in (0.0, 60.0))
    assert 0 < near < far


def test_gamma_stops_where_the_curve_turns_up() -> None:
    """A line through the first points would ask for all."""
    turn = CostCurve((1, 6, 7, 17), (40.0, 41.0, 80.0, 480.0))
    assert chosen_gamma(FAIR._replace(acceptance=(0.95,) * 16, cost=turn)) == 5
    assert chosen_gamma(FAIR._replace(acceptance=(0.95,) * 16, cost=turn, other_tokens=3.0)) == 2


def test_a_way_that_brought_little_is_left_for_another() -> None:
    first = choose_plan(FLAT, ALL).plan
    second = choose_plan(FLAT._replace(throughput_ratios={first.mode: 0.5}), ALL).plan
    assert first.mode != second.mode


@few
@given(any_conditions, any_paces, st.integers(0, 24))
def test_the_choice_is_the_best_and_never_below_plain(
    conditions: Conditions, paces: dict[Mode, float], gamma_max: int
) -> None:
    conditions = conditions._replace(throughput_ratios=paces)
    candidates = list(throughput_model.candidate_plans(gamma_max))
    choice = choose_plan(conditions, candidates)
    assert choice.plan in candidates
    assert (
        choice.tokens_per_s
        == throughput(conditions, choice.plan)
        == max(throughput(conditions, plan) for plan in candidates)
    )
    assert choice.tokens_per_s >= throughput(conditions, PLAIN)
    assert choice.wait_timeout_ms == draft_wait_timeout_ms(conditions, choice.plan)


@few
@given(any_conditions, any_plan)
def test_hysteresis_keeps_the_current_unless_another_is_clearly_better(
    conditions: Conditions, current: SpeculationPlan
) -> None:
    choice = choose_plan(conditions, ALL, current)
    best = max(throughput(conditions, plan) for plan in ALL)
    if throughput(conditions, current) * gamma.HYSTERESIS > best and throughput(conditions, current) >= throughput(
        conditions, PLAIN
    ):
        assert choice.plan == current
    else:
        assert choice.tokens_per_s == best
    assert choice.tokens_per_s >= best / gamma.HYSTERESIS * (1 - 1e-12)
    assert choice.tokens_per_s >= throughput(conditions, PLAIN), "never slower than plain by choice"


@few
@given(any_conditions, st.integers(17, 99))
def test_a_current_plan_that_is_no_longer_allowed_is_left(conditions: Conditions, current: int) -> None:
    assert choose_plan(conditions, ALL, SpeculationPlan(current)).plan in ALL


# --- all there is to choose from -------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma_max", [0, 1, 2, 3, 4, 8, 16, MAX_GAMMA])
def test_the_plans_are_sane(gamma_max: int) -> None:
    found = list(throughput_model.candidate_plans(gamma_max))
    assert found[0] == PLAIN
    assert len(set(found)) == len(found)
    assert len({plan.label for plan in found}) == len(found), "a label tells which"
    for plan in found[1:]:
        assert 1 <= plan.gamma <= (min(MAX_GAMMA, 2 * gamma_max) if plan.ahead else gamma_max)
        assert plan.branches in (1, *BRANCHES)
        if plan.ahead:
            assert plan.gamma >= gamma_max, "it is never too early"
            assert plan.budget in throughput_model.BUDGETS_AHEAD
            assert 0 <= plan.awaited <= min(plan.budget, plan.gamma)
        else:
            assert plan.branches == 1 or plan.gamma * plan.branches <= MAX_TREE_NODES
            assert (plan.budget, plan.awaited) == (0, 0)
    modes = {plan.mode for plan in found}
    if gamma_max >= 4:
        assert modes == set(Mode)
    if gamma_max == 0:
        assert modes == {Mode.PLAIN}


def test_the_plans_can_be_narrowed() -> None:
    assert {plan.branches for plan in throughput_model.candidate_plans(16, (1,))} == {1}
    assert {plan.branches for plan in throughput_model.candidate_plans(16, (2,)) if plan.gamma} == {2}
    assert any(plan.ahead and plan.branches == 2 for plan in throughput_model.candidate_plans(16, (2,))), (
        "also ahead, when it is asked for"
    )


@pytest.mark.parametrize(
    ("plan", "mode"),
    [
        (PLAIN, Mode.PLAIN),
        (SpeculationPlan(4), Mode.TURNS),
        (SpeculationPlan(4, 2), Mode.TREE_TURNS),
        (SpeculationPlan(16, ahead=True, budget=8), Mode.AHEAD),
        (SpeculationPlan(16, ahead=True, budget=8, awaited=2), Mode.AHEAD_WAITING),
        (SpeculationPlan(16, 3, ahead=True, budget=8), Mode.TREE_AHEAD),
        (SpeculationPlan(16, 3, ahead=True, budget=8, awaited=2), Mode.TREE_AHEAD_WAITING),
    ],
    ids=lambda value: value.label if isinstance(value, SpeculationPlan) else "",
)
def test_a_plan_knows_its_way(plan: SpeculationPlan, mode: Mode) -> None:
    assert plan.mode is mode


@few
@given(
    any_conditions,
    st.sampled_from(
        [
            *throughput_model.candidate_plans(MAX_GAMMA),
            *(SpeculationPlan(MAX_GAMMA, b) for b in range(1, MAX_BRANCHES + 1)),
        ]
    ),
)
def test_both_ends_take_what_a_plan_asks_of_them(conditions: Conditions, plan: SpeculationPlan) -> None:
    drafter, verifier = plan.for_drafter(), plan.for_verifier(draft_wait_timeout_ms(conditions, plan))
    drafter.check()
    verifier.check()
    assert (drafter.gamma, drafter.branches, drafter.eager) == (plan.gamma, plan.branches, plan.ahead)
    assert 0 <= plan.nodes <= MAX_NODES


def test_the_verifier_waits_for_what_the_plan_wants() -> None:
    assert SpeculationPlan(5).for_verifier(3.5).gamma == 5
    assert SpeculationPlan(5).for_verifier(3.5).draft_wait_us == 3500
    assert SpeculationPlan(5).for_verifier(3.5).nodes == 0, "it checks all there are"
    waits = SpeculationPlan(16, 3, ahead=True, budget=8, awaited=2).for_verifier(3.5)
    assert (waits.gamma, waits.nodes) == (2, 8)
    goes_on = SpeculationPlan(16, 3, ahead=True, budget=8).for_verifier(0.0)
    assert (goes_on.gamma, goes_on.draft_wait_us) == (0, 0)


@pytest.mark.parametrize("wait_ms", [12_000.0, 1e15, math.inf])
def test_a_verifier_is_asked_to_wait_no_longer_than_it_may(wait_ms: float) -> None:
    """The wait depends on the step times that it reports."""
    SpeculationPlan(5).for_verifier(wait_ms).check()


# --- patience --------------------------------------------------------------------------------------------------------


@few
@given(any_conditions, any_plan)
def test_patience_covers_the_wait_and_is_bounded(conditions: Conditions, plan: SpeculationPlan) -> None:
    patience = draft_wait_timeout_ms(conditions, plan)
    awaited = plan.awaited if plan.ahead else plan.gamma
    if awaited == 0:
        assert patience == 0.0
        return
    assert MIN_WAIT_TIMEOUT_MS <= patience <= MAX_WAIT_TIMEOUT_MS
    assert patience >= min(draft_wait_ms(conditions, awaited, plan.branches), MAX_WAIT_TIMEOUT_MS)


# --- several sessions ------------------------------------------------------------------------------------------------

FULL = CostCurve((1, 17, 33, 65, 129, 257), (40.0, 40.0, 80.0, 160.0, 320.0, 640.0))  # full at 17 rows


def crowd(taken: Sequence[SpeculationPlan], number: int) -> Conditions:
    """What one of several sessions sees that step together, all in turns."""
    lone = FAIR._replace(cost=FULL)
    others = [plan for i, plan in enumerate(taken) if i != number]
    rows = sum(1 + plan.gamma for plan in taken)
    tokens = sum(expected_tokens(lone.acceptance, plan.gamma) for plan in others)
    return lone._replace(
        other_tokens=rows - 1 - taken[number].gamma,
        other_sessions=len(others),
        other_tokens_per_ms=tokens / FULL.at(rows),
    )


def goodput(taken: Sequence[SpeculationPlan]) -> float:
    """Tokens of all sessions per millisecond."""
    rows = sum(1 + plan.gamma for plan in taken)
    wait = max(draft_wait_ms(FAIR, plan.gamma) if plan.gamma else 0.0 for plan in taken)
    return sum(expected_tokens(FAIR.acceptance, plan.gamma) for plan in taken) / (FULL.at(rows) + wait)


@pytest.mark.parametrize("sessions", [1, 2, 4, 8, 16, 24])
@pytest.mark.parametrize(
    "begun", [SpeculationPlan(), SpeculationPlan(4), SpeculationPlan(16)], ids=lambda plan: plan.label
)
def test_sessions_that_share_a_verifier_leave_each_other_room(sessions: int, begun: SpeculationPlan) -> None:
    """Each decides for itself, one after the other; together they come to what is best for all."""
    taken = [begun] * sessions
    for _ in range(12):
        for number in range(sessions):
            conditions = crowd(taken, number)
            taken[number] = choose_plan(conditions, CHAINS_IN_TURNS, taken[number]).plan
    best = max(goodput([SpeculationPlan(gamma)] * sessions) for gamma in range(17))
    assert goodput(taken) >= 0.93 * best
    assert sum(1 + plan.gamma for plan in taken) <= max(20, 2 * sessions)


def test_a_row_that_delays_nobody_is_free() -> None:
    beside = FAIR._replace(cost=FULL, other_tokens=3.0, other_sessions=2.0, other_tokens_per_ms=0.2)
    assert net_throughput(beside, SpeculationPlan(4)) == pytest.approx(throughput(beside, SpeculationPlan(4)))
    crowded = beside._replace(other_tokens=16.0, other_sessions=16.0, other_tokens_per_ms=0.4)
    assert net_throughput(crowded, SpeculationPlan(4)) < net_throughput(crowded, PLAIN)


def test_guesses_in_turns_come_after_the_others_have_begun_a_step() -> None:
    """However near the drafter is: its session is in every second step."""
    near = FAIR._replace(cost=CostCurve.line(40.0, 0.0), network_ms=0.0, draft_ms=0.1)
    beside = near._replace(other_tokens=7.0, other_sessions=7.0)
    alone, shared = (net_throughput(each, SpeculationPlan(4)) for each in (beside, beside._replace(shared=True)))
    assert shared == pytest.approx(alone / 2, rel=0.02)
