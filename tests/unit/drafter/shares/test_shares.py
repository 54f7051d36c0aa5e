"""A drafting step takes the sessions whose guesses bring most for its time, and leaves none out for long."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter.interface import DraftRequest
from drafter.session import DraftOpening, DraftSession
from drafter.shares.shares import FEW, DraftingShares, patience, paying_sessions
from drafter.shares.standing import Standing
from outrider.protocol.cost_curve import CostCurve
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import DraftSteering

FREE = CostCurve.line(10.0, 0.0)
DEAR = CostCurve.line(6.0, 2.0)
PROMPT = (1, 2, 3)
VOCAB = 1000


def opened(name: str, *, eager: bool = True, gamma: int = 16) -> DraftSession:
    params = SamplingParams(seed=1, max_tokens=100_000)
    return DraftSession(DraftOpening(name, 0, PROMPT, 3, params, VOCAB, DraftSteering(gamma=gamma, eager=eager)))


class Drafting:
    """A loop without a network: a step takes 4 ms and 2 ms for each session, a verifier's step comes every 40 ms."""

    def __init__(self, sessions: Mapping[str, DraftSession], chances: Mapping[str, float]) -> None:
        self.sessions, self.chances = sessions, chances
        self.shares = DraftingShares()
        self.random = random.Random(1)
        self.steps: list[list[str]] = []
        self.wanting: list[list[str]] = []
        self.accepted: Counter[str] = Counter()

    def run(self, steps: int) -> None:
        left_ms = 40.0
        for _ in range(steps):
            left_ms -= self.step()
            if left_ms <= 0:
                left_ms += 40.0
                for name, session in self.sessions.items():
                    self.check(name, session)

    def step(self) -> float:
        self.wanting.append([name for name, session in self.sessions.items() if session.wants_more])
        chosen = self.shares.next_step(self.sessions)
        self.steps.append(list(chosen))
        requests: dict[DraftSession, DraftRequest] = {}
        for session in chosen.values():
            request = session.next_request()
            assert request is not None
            requests[session] = request
        if not requests:
            return 40.0
        guesses = [request.chain([7]) for request in requests.values()]
        step_ms = 4.0 + 2.0 * len(requests)
        self.shares.measure(requests, guesses, step_ms / 1000)
        for session, guess in zip(requests, guesses, strict=True):
            session.add_guess(guess, int(step_ms * 1000))
        return step_ms

    def check(self, name: str, session: DraftSession) -> None:
        new: list[int] = []
        while len(new) < session.open_guesses.guess.shape.depth:
            new.append(7 if self.random.random() < self.chances[name] else 8)
            if new[-1] == 8:
                break
        self.accepted[name] += new.count(7)
        session.commit(len(session.committed), tuple(new))

    def taken(self) -> Counter[str]:
        return Counter(name for step in self.steps for name in step)


# --- the rule --------------------------------------------------------------------------------------------------------


def test_sessions_that_take_no_time_are_all_drafted() -> None:
    assert sorted(paying_sessions([0.9, 0.01, 0.5], [0, 0, 0], FREE)) == [0, 1, 2]


def test_a_step_takes_those_that_raise_its_tokens_per_millisecond() -> None:
    assert sorted(paying_sessions([0.1, 0.9, 0.1, 0.8], [0] * 4, DEAR)) == [1, 3]


def test_a_session_whose_patience_ends_is_drafted_whatever_it_brings() -> None:
    assert sorted(paying_sessions([0.9, 0.01, 0.8], [0, patience(3) - 1, 0], DEAR)) == [0, 1, 2]
    assert sorted(paying_sessions([0.9, 0.01, 0.8], [0, patience(3) - 2, 0], DEAR)) == [0, 2]


def test_of_equal_sessions_the_one_left_out_longest_goes_first() -> None:
    assert paying_sessions([0.5, 0.5, 0.5], [0, 3, 1], CostCurve.line(1e-9, 5.0))[0] == 1


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 99)), min_size=1, max_size=40), st.floats(0, 9))
def test_a_step_always_has_sessions_and_all_that_are_due(each: list[tuple[float, int]], per_session: float) -> None:
    worths, left_out = [worth for worth, _ in each], [steps for _, steps in each]
    taken = paying_sessions(worths, left_out, CostCurve.line(1.0 + per_session, per_session))
    assert taken
    assert len(set(taken)) == len(taken)
    assert {session for session, steps in enumerate(left_out) if steps >= patience(len(each)) - 1} <= set(taken)


@given(st.lists(st.floats(0.01, 5), min_size=1, max_size=8), st.floats(0.1, 9), st.floats(0, 9))
def test_no_other_number_of_sessions_brings_more(worths: list[float], first_ms: float, per_session: float) -> None:
    cost = CostCurve.line(first_ms, per_session)

    def rate(chosen: Sequence[int]) -> float:
        return sum(worths[session] for session in chosen) / cost.at(len(chosen))

    ranked = sorted(range(len(worths)), key=lambda session: -worths[session])
    best = max(rate(ranked[:number]) for number in range(1, len(worths) + 1))
    assert rate(paying_sessions(worths, [0] * len(worths), cost)) == pytest.approx(best)


# --- what guesses are worth ------------------------------------------------------------------------------------------


def worth(acceptance: float, open_levels: int, wanted: int = 16, *, awaited: bool = False, pace: float = 1.0) -> float:
    return Standing(acceptance, pace, open_levels, wanted, awaited).worth


def test_guesses_that_hold_are_worth_more() -> None:
    assert worth(0.9, 0) > worth(0.3, 0)
    assert worth(0.9, 2, 4, awaited=True) > worth(0.3, 2, 4, awaited=True)


def test_a_session_with_nothing_open_goes_before_one_far_ahead() -> None:
    assert worth(0.2, 0) > worth(0.95, 12, pace=4.0)
    assert worth(0.95, 3, pace=4.0) > worth(0.2, 0), "needed by the next commit"


def test_a_session_whose_verifier_waits_goes_before_one_that_drafts_ahead() -> None:
    assert worth(0.3, 0, 4, awaited=True) > worth(0.9, 8)
    assert worth(0.9, 0, 4, awaited=True) > worth(0.9, 0)


def test_a_path_that_was_begun_is_finished_first() -> None:
    assert worth(0.5, 3, 4, awaited=True) > worth(0.5, 0, 4, awaited=True)


# --- steps -----------------------------------------------------------------------------------------------------------


def test_few_sessions_share_every_step() -> None:
    sessions = {name: opened(name) for name in "ab"}
    drafting = Drafting(sessions, {"a": 0.95, "b": 0.05})
    drafting.run(300)
    assert len(sessions) == FEW
    assert drafting.steps == drafting.wanting, "all that want guesses, in their order"


def gaps(drafting: Drafting, name: str) -> list[list[int]]:
    """Return the runs of steps without a session."""
    found: list[list[int]] = [[]]
    for number, step in enumerate(drafting.steps):
        if name in step:
            found.append([])
        else:
            found[-1].append(number)
    return found


def test_sessions_whose_guesses_hold_get_more_and_none_starves() -> None:
    chances = {f"high{i}": 0.9 for i in range(4)} | {f"low{i}": 0.1 for i in range(4)}
    drafting = Drafting({name: opened(name) for name in chances}, chances)
    drafting.run(2000)
    taken = drafting.taken()
    assert min(taken[f"high{i}"] for i in range(4)) > 2 * max(taken[f"low{i}"] for i in range(4))
    for i in range(4):
        assert max(map(len, gaps(drafting, f"low{i}"))) < patience(8)


def test_a_session_whose_text_becomes_easy_gets_its_share_back() -> None:
    chances = {f"high{i}": 0.9 for i in range(4)} | {"low": 0.02}
    drafting = Drafting({name: opened(name) for name in chances}, chances)
    drafting.run(1000)
    before = drafting.taken()["low"]
    chances["low"] = 0.9
    drafting.run(1000)
    drafting.steps.clear()
    drafting.run(1000)
    assert drafting.taken()["low"] > 1.5 * before


def test_until_its_cost_is_known_every_other_step_is_smaller() -> None:
    names = "abcdef"
    drafting = Drafting({name: opened(name) for name in names}, dict.fromkeys(names, 0.5))
    drafting.run(4)
    assert [len(step) for step in drafting.steps] == [3, 6, 3, 6]


def test_an_ended_session_leaves_nothing_behind() -> None:
    sessions = {name: opened(name) for name in "abcd"}
    drafting = Drafting(sessions, dict.fromkeys("abcd", 0.5))
    drafting.run(20)
    del sessions["d"]
    drafting.run(20)
    assert not any("d" in step for step in drafting.steps[20:])
    assert len(drafting.shares._records) == 3
