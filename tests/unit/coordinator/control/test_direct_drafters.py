"""γ control of drafters in the verifier's process: what they may lose, and what a plain step counts for."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from coordinator.control.estimator import (
    BEGINNING,
    CREDIT,
    DIRECT_CREDIT,
    DIRECT_DEBT,
    KNOWN_STEPS,
    MAX_CREDIT,
    SMOOTHING,
    WINDOW,
    BestDrafter,
    Estimator,
    PairEstimate,
    PairHistory,
)
from coordinator.control.gamma import DECIDE_EVERY_SETTLED, REFERENCE_EVERY, RESTS_AFTER, Controller
from coordinator.control.goodput import net_throughput
from coordinator.control.throughput_model import PLAIN, Mode, SpeculationPlan, throughput
from outrider.base.decayed_mean import DecayedMean
from outrider.protocol.cost_curve import CostCurve
from outrider.protocol.speculation import FinishReason, TokenKind, Verdict, VerifyTimings

COST = CostCurve.line(4.0, 0.5)
DIRECT = BestDrafter(0.0, 0.3, 2.0, shares_cores=True)
USELESS = BestDrafter(0.0, 50.0, 50.0, shares_cores=True)


def plain(step_ms: float = 4.0, wait_ms: float = 0.5) -> Verdict:
    timings = VerifyTimings(wait_us=int(wait_ms * 1000), step_us=int(step_ms * 1000))
    return Verdict(0, (1,), 0, TokenKind.PLAIN, timings=timings)


def checked(accepted: int = 1, *, proposed: int = 2, wait_ms: float = 1.6) -> Verdict:
    timings = VerifyTimings(wait_us=int(wait_ms * 1000), step_us=5000)
    return Verdict(0, (1,) * (accepted + 1), accepted, TokenKind.BONUS, proposed, timings=timings)


def linked(known: deque[tuple[float, float]], *, trust: bool = True) -> Estimator:
    made = Estimator(8)
    made.pair.link(trust=trust)
    made.attach_verifier(COST, 0, known)
    return made


@pytest.mark.parametrize("trust", [False, True])
def test_a_trusted_drafter_may_lose_more_and_owes_less(trust: bool) -> None:
    pair = PairEstimate(8)
    pair.link(trust=trust)
    pair.lend(0.0)
    assert pair.credit == (DIRECT_CREDIT if trust else CREDIT)
    pair.lend(-5.0)
    assert pair.credit == pytest.approx(DIRECT_CREDIT - DIRECT_DEBT if trust else CREDIT - 5.0)


def test_plain_steps_are_known_from_other_sessions_of_the_verifier() -> None:
    known: deque[tuple[float, float]] = deque(maxlen=WINDOW)
    first = linked(known)
    assert not first.plain_known
    for _ in range(KNOWN_STEPS):
        first.observe(plain(), PLAIN, 0.0, DIRECT)
    second = linked(known)
    assert second.plain_known
    for _ in range(BEGINNING):
        second.observe(plain(step_ms=40.0), PLAIN, 0.0, DIRECT)  # its opening delays them
    assert {step_ms for step_ms, _ in known} == {4.0}
    second.observe(plain(step_ms=8.0), PLAIN, 0.0, DIRECT)
    assert known[-1] == (8.0, 0.5)


def test_plain_steps_count_by_their_time_though_the_published_one_has_changed_between_two_sessions() -> None:
    """A verifier publishes its curve at the pace of its latest steps: with guesses, or beside other load."""
    known: deque[tuple[float, float]] = deque(maxlen=WINDOW)
    first = linked(known)
    for _ in range(WINDOW):
        first.observe(plain(step_ms=4.0), PLAIN, 0.0, DIRECT)
    second = linked(known)
    second.attach_verifier(COST.scaled(1.5), 0, known)
    assert second.conditions(DIRECT).verify_ms(0) == pytest.approx(4.0)
    assert second.conditions(DIRECT).verify_ms(8) == pytest.approx(COST.at(9))


def test_a_plain_step_counts_with_its_pause_and_rare_long_ones_with_twice_the_usual() -> None:
    made = linked(deque(maxlen=WINDOW))
    for step_ms in (4.0, 4.0, 4.0, 400.0):
        made.observe(plain(step_ms), PLAIN, 0.0, DIRECT)
    conditions = made.conditions(DIRECT)
    assert conditions.between_ms == pytest.approx(0.5)
    assert throughput(conditions, PLAIN) == pytest.approx(1000 / (5.0 + 0.5)), "(3 x 4 + 8) / 4 ms, and the pause"
    apart = Estimator(8)
    apart.attach_verifier(COST)
    for step_ms in (4.0, 4.0, 4.0, 400.0):
        apart.observe(plain(step_ms), PLAIN, 0.0, DIRECT)
    assert throughput(apart.conditions(DIRECT), PLAIN) == pytest.approx(1000 / 4.5), "by the median"


def test_a_drafter_rests_after_some_plain_steps() -> None:
    made = linked(deque(maxlen=WINDOW))
    control = Controller(8, made)
    resting = []
    for _ in range(RESTS_AFTER + 4):
        control.decide(USELESS)
        control.observe(plain(), USELESS)
        resting.append(control.resting)
    assert not any(resting[: RESTS_AFTER - 1])
    assert resting[-1], "its hidden states would cost plain steps time"


def test_the_plain_step_that_is_measured_between_guesses_has_none() -> None:
    """Guesses of the plan before are still on their way when the plain one begins."""
    known: deque[tuple[float, float]] = deque(maxlen=WINDOW)
    made = linked(known)
    made.pair.start_from(PairHistory(acceptance=[0.9] * 8, draft_ms=0.3))
    control = Controller(8, made)
    proposed, without = 0, []
    for step in range(4 * REFERENCE_EVERY):
        before = known[-1] if known else None
        if proposed:
            timings = VerifyTimings(wait_us=1000, step_us=4500)
            control.observe(Verdict(step, (1, 1), 1, TokenKind.BONUS, proposed, timings=timings), DIRECT)
        else:
            control.observe(plain(step_ms=4.0 + step / 100), DIRECT)
            without.append(known[-1] != before)
        proposed = control.plan.gamma  # steering takes a step
        control.decide(DIRECT)
    assert proposed, "it pays"
    assert sum(without[BEGINNING + KNOWN_STEPS :]) >= 2, "one in every so many steps was measured"
    assert len(without) <= 0.1 * 4 * REFERENCE_EVERY, "each costs what guesses would have gained"


def test_the_first_guesses_do_not_tell_what_later_ones_take() -> None:
    """The drafter reads the prompt for the first one, and the next ones are slow too."""
    made, own = linked(deque(maxlen=WINDOW)), PairEstimate(8)
    own.link(trust=True)
    own.start_from(PairHistory(acceptance=[0.5], draft_ms=0.3))
    for step in range(BEGINNING + 8):
        late = step < BEGINNING
        own.observe_draft(4, 8000 if late else 1200)
        own.observe_verdict(2, 1, due=True)
        made.observe(checked(wait_ms=9.0 if late else 1.6), SpeculationPlan(2), 20.0, DIRECT)
        if late:
            assert made.conditions(DIRECT).network_ms == DIRECT.round_trips_ms
            assert own.draft_ms.value == 0.3
    assert made.conditions(DIRECT).network_ms == pytest.approx(1.0), "1.6 ms, less two guesses"
    own.observe_draft(4, 400_000)
    assert own.draft_ms.value < 0.4, "other load has delayed this one"


def test_waits_are_known_from_other_sessions_of_the_drafter() -> None:
    """The first ones of each session are long. What came after them was learnt anew by each, from a single wait."""
    known = DecayedMean(SMOOTHING)
    for wait_ms in (1.6, 2.6):
        made = linked(deque(maxlen=WINDOW))
        made.attach_drafter(known, trust=True)
        before = made.conditions(DIRECT).network_ms
        for step in range(BEGINNING + 1):
            made.observe(checked(wait_ms=wait_ms if step == BEGINNING else 9.0), SpeculationPlan(2), 20.0, DIRECT)
        assert made.conditions(DIRECT).network_ms == known.value
    assert before == pytest.approx(1.0), "1.6 ms, less two guesses"
    assert known.value == pytest.approx(1.0 + SMOOTHING)


def test_speculation_that_has_gained_stays_where_plain_decoding_is_hardly_faster() -> None:
    """A few rejected guesses made it wait for sixteen plain steps, of a text that had gained as many."""
    made = linked(deque([(4.0, 0.5)] * WINDOW, maxlen=WINDOW))
    made.pair.start_from(PairHistory(acceptance=[0.5] * 8, draft_ms=0.3))
    per_s = {each: throughput(made.conditions(DIRECT), each) for each in map(SpeculationPlan, range(9))}
    plan = max(per_s, key=per_s.__getitem__)
    ratio = 0.98 * per_s[PLAIN] / per_s[plan]
    plans = []
    for credit in (DIRECT_CREDIT - 0.1, MAX_CREDIT):  # with more than the first one, a probe would begin
        made.pair.start_from(PairHistory(acceptance=[0.5] * 8, draft_ms=0.3, paces={Mode.TURNS.value: ratio}))
        control = Controller(8, made, single=True)
        control.plan, made.pair.credit = plan, credit
        assert throughput(made.conditions(DIRECT), plan) == pytest.approx(0.98 * per_s[PLAIN])
        control.decide(DIRECT)
        plans.append(control.plan)
    assert plans == [PLAIN, plan]


def test_the_last_token_of_an_answer_tells_nothing_of_waits() -> None:
    """Its step waits for no guess. Half the waits of short answers were such ones."""
    known = DecayedMean(SMOOTHING, 1.0)
    made = linked(deque(maxlen=WINDOW))
    made.attach_drafter(known, trust=True)
    made.pair.checked = BEGINNING
    control = Controller(8, made)
    control.plan, control.wait_timeout_ms, control._since_plan = SpeculationPlan(2), 20.0, 1
    control.observe(replace(plain(wait_ms=0.1), finish_reason=FinishReason.LENGTH), DIRECT)
    assert known.value == 1.0
    assert made.pair.proposal_rate.value == 1.0, "nor of guesses"
    control.observe(plain(wait_ms=0.1), DIRECT)
    assert known.value < 1.0
    assert made.pair.proposal_rate.value < 1.0


def test_a_long_wait_of_an_earlier_session_is_forgotten_while_steps_are_plain() -> None:
    """Where no guess could make up for it, nothing was measured, and no later session drafted."""
    known = DecayedMean(SMOOTHING, 500.0)  # beside the prompt of another session, say
    guessed = False
    for _ in range(24):
        made = linked(deque([(4.0, 0.5)] * WINDOW, maxlen=WINDOW))
        made.attach_drafter(known, trust=True)
        made.pair.start_from(PairHistory(acceptance=[0.9] * 8, draft_ms=0.3))
        control = Controller(8, made)
        for _ in range(128):
            control.decide(replace(DIRECT, round_trips_ms=1.9))
            guessed |= control.plan.gamma > 0
            if not guessed:
                control.observe(plain(), DIRECT)
    assert guessed


def test_what_a_session_has_gained_pays_for_no_other() -> None:
    """Its credit holds what it gains itself, also where the others lose more: such a plan stayed for good."""
    made = linked(deque([(4.0, 0.5)] * WINDOW, maxlen=WINDOW))
    plans = []
    for others in (0, 2):
        made.attach_verifier(COST, others, deque([(4.0, 0.5)] * WINDOW, maxlen=WINDOW))
        made.pair.start_from(PairHistory(acceptance=[0.9] * 8, draft_ms=0.3))
        conditions = made.conditions(DIRECT)
        net = {each: net_throughput(conditions, each) for each in map(SpeculationPlan, range(1, 9))}
        plan = max(net, key=net.__getitem__)
        half = net_throughput(conditions._replace(throughput_ratios={Mode.TURNS: 0.5}), plan)
        ratio = 1.0 - (net[plan] - 0.98 * throughput(conditions, PLAIN)) / (2 * (net[plan] - half))
        made.pair.start_from(PairHistory(acceptance=[0.9] * 8, draft_ms=0.3, paces={Mode.TURNS.value: ratio}))
        control = Controller(8, made, single=True)
        control.plan, made.pair.credit = plan, MAX_CREDIT
        assert net_throughput(made.conditions(DIRECT), plan) == pytest.approx(0.98 * throughput(conditions, PLAIN))
        control.decide(DIRECT)
        plans.append(control.plan.gamma > 0)
    assert plans == [True, False]


@pytest.mark.parametrize("direct", [False, True])
def test_a_few_failures_weigh_less_than_the_texts_before(direct: bool) -> None:
    """Answers of one kind differ by a tenth; eight guesses of a half fail by chance."""
    pair = PairEstimate(8)
    if direct:
        pair.link(trust=True)
    pair.start_from(PairHistory(acceptance=[0.5] * 8))
    for _ in range(8):
        pair.observe_verdict(2, 0, due=True)
    assert (pair.acceptance[0] > 0.33) == direct
    for _ in range(60):
        pair.observe_verdict(2, 0, due=True)
    assert pair.acceptance[0] < 0.1


def test_a_step_that_began_before_the_plan_was_known_says_nothing_of_the_drafter() -> None:
    made = linked(deque([(4.0, 0.5)] * WINDOW, maxlen=WINDOW))
    made.pair.start_from(PairHistory(acceptance=[0.9] * 8, draft_ms=0.3))
    control = Controller(8, made)
    control.decide(DIRECT)
    assert control.plan.gamma
    control.observe(plain(), DIRECT)
    assert made.pair.proposal_rate.value == 1.0
    control.observe(plain(), DIRECT)
    assert made.pair.proposal_rate.value < 1.0, "this one had waited"


def test_alone_a_session_looks_again_after_few_plain_steps() -> None:
    made = linked(deque(maxlen=WINDOW))
    control = Controller(8, made)
    since = longest = 0
    for _ in range(6 * DECIDE_EVERY_SETTLED):
        since = 0 if control.due else since + 1
        longest = max(longest, since)
        control.decide(USELESS)
        control.observe(plain(), USELESS)
    assert control.resting
    assert longest < DECIDE_EVERY_SETTLED
