"""What a session starts from: the history of its kind of text, and that of the pair where there is none."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import cast

import pytest

from coordinator.control.estimator import (
    CREDIT,
    MAX_CREDIT,
    READING,
    REFILL,
    BestDrafter,
    Estimator,
    PairEstimate,
    PairHistory,
)
from coordinator.control.gamma import Controller
from coordinator.persistence.pair_history import PairHistoryStore
from coordinator.persistence.session_record import SessionRequest
from coordinator.persistence.store import Store
from coordinator.sessions.text_kinds import histories
from coordinator.sessions.text_kinds.histories import COPIES_GAINED, IN_VAIN, LOAN, MAX_UNSEEN, TextHistories
from coordinator.sessions.text_kinds.recognition import FIRST_READ, TextRecogniser
from outrider.protocol.cost_curve import CostCurve
from outrider.protocol.sampling_params import SamplingParams

SHORT, LONG = tuple(range(20)), tuple(range(500, 800))
_WORDS = random.Random(0)
OWN = [_WORDS.randrange(10_000, 90_000) for _ in range(64)]  # an answer that repeats nothing


class Remembering:
    """A Redis that has what was written."""

    up = True

    def __init__(self) -> None:
        self.pairs: dict[str, PairHistory] = {}

    async def pair(self, target: str, drafter: str) -> PairHistory | None:
        return self.pairs.get(drafter)

    async def put_pair(self, target: str, drafter: str, history: PairHistory) -> None:
        self.pairs[drafter] = history


class Answering:
    """One session after the other of the same pair."""

    def __init__(self) -> None:
        self.store = Remembering()
        self.pairs = PairHistoryStore(cast(Store, self.store))

    async def begin(self, prompt: tuple[int, ...], temperature: float = 0.0) -> None:
        request = SessionRequest(prompt, SamplingParams(temperature=temperature))
        self.text = TextRecogniser(request)
        self.histories = TextHistories(self.pairs, "target", "drafter", self.text)
        self.own, self.session = PairEstimate(4), PairEstimate(4)
        await self.histories.recall()
        self.histories.start(self.own, self.session, alone=True)

    def read(self, answer: list[int]) -> None:
        self.histories.read(answer, self.own, self.session, alone=True)

    def check(self, accepted: int, verdicts: int = 100) -> None:
        for _ in range(verdicts):
            for pair in (self.own, self.session):
                pair.observe_verdict(4, accepted, due=True)

    async def answer(self, prompt: tuple[int, ...], answer: list[int], accepted: int, temperature: float = 0.0) -> None:
        await self.begin(prompt, temperature)
        self.read(answer)
        self.check(accepted)
        self.histories.remember(self.own, self.session, alone=True, reading=None)

    @property
    def expected(self) -> float:
        """The acceptance of a first guess with which the session starts, or goes on."""
        return self.session.acceptance[0]


async def test_a_chat_after_edits_does_not_start_from_what_they_showed_and_the_other_way_round() -> None:
    pair = Answering()
    await pair.answer(SHORT, OWN, accepted=0)
    for _ in range(10):
        await pair.answer(LONG, list(LONG[:64]), accepted=4)
    await pair.begin(SHORT)
    assert pair.expected < 0.1
    await pair.begin(LONG)
    assert pair.expected > 0.9
    pair.read(OWN)
    assert pair.expected < 0.1, "it does not copy: it is expected to go on as a chat"
    await pair.begin(SHORT)
    pair.read(OWN[:20] * 3)
    assert pair.expected > 0.9, "it repeats itself"


async def test_a_kind_without_a_history_starts_from_the_pair() -> None:
    pair = Answering()
    await pair.begin(LONG)
    assert pair.session.history() == PairHistory(acceptance=list(pair.session.acceptance)), "nothing is known yet"
    await pair.answer(SHORT, OWN, accepted=0)
    await pair.begin(LONG)
    assert pair.expected < 0.1
    pair.read(list(LONG[:64]))
    assert pair.expected < 0.1, "nor is anything known of copies"


async def test_a_warm_text_does_not_start_from_what_cold_ones_accepted() -> None:
    pair = Answering()
    await pair.answer(LONG, list(LONG[:64]), accepted=4)
    pair.own.draft_ms.add(3.0)
    pair.histories.remember(pair.own, pair.session, alone=True, reading=READING)
    await pair.begin(LONG, temperature=1.0)
    assert pair.expected <= MAX_UNSEEN
    assert pair.own.draft_ms.value > 0.1, "drafting takes as long"
    await pair.answer(LONG, list(LONG[:64]), accepted=4, temperature=1.0)
    await pair.begin(LONG, temperature=1.0)
    assert pair.expected > 0.9, "now warm ones have shown it"


async def test_what_is_left_behind_is_a_handful_of_records_a_pair() -> None:
    pair = Answering()
    for temperature in (0.0, 0.2, 0.9, 1.5):
        for prompt in (SHORT, LONG):
            for answer in (OWN, OWN[:20] * 3, [*OWN, *OWN, *OWN]):
                await pair.answer(prompt, answer, accepted=1, temperature=temperature)
    await pair.pairs._write()
    kinds = {"", *(f" {warmth} {text}" for warmth in ("cold", "warm") for text in ("short", "long", "copy", "fresh"))}
    assert set(pair.store.pairs) == {f"drafter{kind}" for kind in kinds}


async def test_a_text_that_turns_leaves_what_each_part_showed() -> None:
    pair = Answering()
    await pair.begin(LONG)
    pair.read(OWN)
    pair.check(accepted=0)
    pair.read([*OWN, *LONG[:64]])
    pair.check(accepted=4, verdicts=400)
    pair.histories.remember(pair.own, pair.session, alone=True, reading=READING)
    await pair.begin(SHORT)
    pair.read(OWN)
    assert pair.expected < 0.1
    pair.read([*OWN, *OWN])
    assert pair.expected > 0.9


# --- on cores that others use -----------------------------------------------------------------------------------------


class Waiting:
    """A chat whose drafter waits for its verifier's other sessions, unless its guesses pay beside them."""

    def __init__(self, others: int) -> None:
        self.session = Estimator(4)
        self.session.attach_verifier(CostCurve.line(20.0, 1.0), others)
        self.controller = Controller(4, self.session)
        self.answer: list[int] = []
        self.told = self.asked = 0
        self.draft_ms = 0.5

    async def begin(self, pair: Answering, prompt: tuple[int, ...] = SHORT, temperature: float = 0.0) -> None:
        await pair.begin(prompt, temperature)
        promising = pair.histories.until_promising(self.answer, pair.own, self.session, self.promising, self.tell)
        self.task = asyncio.create_task(promising)
        await asyncio.sleep(0)

    def promising(self) -> bool:
        self.asked += 1
        return self.controller.would_guess(BestDrafter(round_trips_ms=1.0, draft_ms=self.draft_ms, shares_cores=True))

    def tell(self) -> None:
        self.told += 1


@pytest.fixture
async def chats(monkeypatch: pytest.MonkeyPatch) -> Answering:
    """A pair of whose guesses a chat accepts none, and a copy all."""
    for name in ("POLL_S", "POLL_ALONE_S"):
        monkeypatch.setattr(histories, name, 0.001)
    pair = Answering()
    await pair.answer(SHORT, OWN, accepted=0)
    await pair.answer(LONG, list(LONG[:64]), accepted=4)
    return pair


async def test_beside_others_a_drafter_waits_until_they_have_left(chats: Answering) -> None:
    waiting = Waiting(others=7)
    await waiting.begin(chats)
    until = asyncio.get_running_loop().time() + 5.0
    while waiting.told < 5 and asyncio.get_running_loop().time() < until:
        await asyncio.sleep(0.001)
    assert (waiting.task.done(), waiting.asked) == (False, 1), "a choice of plan takes time: nothing has changed"
    waiting.session.attach_verifier(CostCurve.line(20.0, 1.0), 31)
    while waiting.told < 10 and asyncio.get_running_loop().time() < until:
        await asyncio.sleep(0.001)
    assert (waiting.told, waiting.asked) == (10, 1), "beside more sessions, guesses pay even less"
    waiting.session.attach_verifier(CostCurve.line(20.0, 1.0), 3)
    while waiting.asked < 2 and asyncio.get_running_loop().time() < until:
        await asyncio.sleep(0.001)
    assert (waiting.task.done(), waiting.asked) == (False, 2), "half of them have left"
    waiting.session.attach_verifier(CostCurve.line(20.0, 1.0), 0)
    await asyncio.wait_for(waiting.task, 5.0)


async def test_one_that_was_alone_with_a_debt_is_judged_when_others_come() -> None:
    pair = Answering()
    await pair.begin(SHORT)
    pair.check(accepted=4)
    pair.session.gain(-4.0)
    pair.histories.remember(pair.own, pair.session, alone=True, reading=READING)
    waiting = Waiting(others=0)
    await waiting.begin(pair)
    await asyncio.sleep(0.05)
    assert (waiting.task.done(), waiting.asked) == (False, 0), "its kind has a debt"
    waiting.session.attach_verifier(CostCurve.line(20.0, 1.0), 3)
    async with asyncio.timeout(5.0):
        while not waiting.asked:
            await asyncio.sleep(0.01)
    waiting.task.cancel()


async def test_beside_others_a_drafter_begins_when_the_answer_copies(chats: Answering) -> None:
    waiting = Waiting(others=7)
    await waiting.begin(chats)
    waiting.answer += list(range(16)) * 4
    await asyncio.wait_for(waiting.task, 5.0)
    assert waiting.session.pair.acceptance[0] > 0.9


@pytest.mark.parametrize(("others", "prompt"), [(0, SHORT), (7, LONG)])
async def test_a_drafter_does_not_wait_without_others_or_where_guesses_hold(
    chats: Answering, others: int, prompt: tuple[int, ...]
) -> None:
    waiting = Waiting(others)
    await waiting.begin(chats, prompt)
    assert (waiting.task.done(), waiting.told) == (True, 0)


async def test_a_text_that_stands_still_is_read_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Answering()
    await pair.begin(SHORT)
    pair.check(accepted=0)
    pair.session.gain(-4.0)
    pair.histories.remember(pair.own, pair.session, alone=True, reading=READING)
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 9:
            waiting.answer.append(1)
        if len(pauses) == 11:
            raise asyncio.CancelledError

    waiting = Waiting(others=0)
    await pair.begin(SHORT)
    monkeypatch.setattr(histories, "asyncio", SimpleNamespace(sleep=pause, gather=asyncio.gather))
    promising = pair.histories.until_promising(
        waiting.answer, pair.own, waiting.session, waiting.promising, waiting.tell
    )
    with pytest.raises(asyncio.CancelledError):
        await promising
    assert pauses[0] == 0.0, "it is judged at once"
    assert pauses[1:8] == pytest.approx([0.04, 0.08, 0.16, *[histories.POLL_S] * 4])
    assert pauses[9:] == pytest.approx([histories.POLL_ALONE_S, 2 * histories.POLL_ALONE_S])


async def test_guesses_that_hold_are_not_drafted_where_every_token_of_a_step_is_dear(chats: Answering) -> None:
    waiting = Waiting(others=7)
    waiting.session.attach_verifier(CostCurve.line(20.0, 19.0), 7)
    await waiting.begin(chats, LONG)
    assert (waiting.task.done(), waiting.told) == (False, 1)
    waiting.task.cancel()


async def test_a_pair_that_is_not_known_is_tried_beside_others_where_it_could_pay() -> None:
    pair, waiting = Answering(), Waiting(others=7)
    await waiting.begin(pair)
    assert not waiting.task.done()
    waiting.task.cancel()
    cheap = Waiting(others=7)
    cheap.session.attach_verifier(CostCurve.line(20.0, 0.1), 7)
    cheap.draft_ms = 0.05
    await cheap.begin(pair)
    assert cheap.task.done()


async def test_each_kind_of_text_has_its_own_credit() -> None:
    """Chats that lost leave later chats a debt; edits that gained may lose before later ones do not begin."""
    pair = Answering()
    await pair.begin(SHORT)
    assert pair.session.credit == CREDIT
    pair.session.credit -= 0.5
    pair.check(accepted=0)
    pair.histories.remember(pair.own, pair.session, alone=True, reading=READING)
    await pair.begin(LONG)
    assert pair.session.credit == CREDIT, "of a kind that was not seen"
    pair.read(list(LONG[:64]))
    pair.session.credit += 4.4
    pair.check(accepted=4)
    pair.histories.remember(pair.own, pair.session, alone=True, reading=READING)
    await pair.begin(SHORT)
    assert pair.session.credit == pytest.approx(CREDIT - 0.5 - READING - IN_VAIN)
    for gained in (4.4, 2.0, -0.4):
        await pair.begin(LONG)
        pair.read([*OWN[:20] * 3])
        expected = min(MAX_CREDIT, LOAN * (COPIES_GAINED + gained))
        assert pair.session.credit == pytest.approx(expected), "it copies: none may lose all that others have gained"
        pair.session.credit -= 2.4
        pair.read([*OWN[:20] * 3, *OWN, *range(1000, 1100)])
        assert pair.text.kind == "cold fresh"
        pair.histories.remember(pair.own, pair.session, alone=True, reading=READING)


async def copying(pair: Answering) -> None:
    await pair.begin(LONG)
    pair.read(list(LONG[:64]))
    assert pair.text.kind == "cold copy"


async def test_what_a_text_gains_beyond_the_greatest_credit_counts_for_its_kind(chats: Answering) -> None:
    await copying(chats)
    for gained in (*[2.0] * 10, *[-1.0] * 5):
        chats.session.gain(gained)
    assert chats.session.credit == MAX_CREDIT - 5.0, "the text itself may not lose all of it"
    chats.histories.remember(chats.own, chats.session, alone=True, reading=READING)
    balances = []
    for lost in (-2.0, -3.0):
        await copying(chats)
        assert chats.session.credit == MAX_CREDIT
        balances.append(chats.pairs.settle("target", "drafter cold copy", 0.0))
        for _ in range(4):
            chats.session.gain(lost)
        chats.histories.remember(chats.own, chats.session, alone=True, reading=READING)
    assert balances == [15.0, 7.0]


async def test_copies_may_lose_before_any_has_gained(chats: Answering) -> None:
    """The first guesses may fail by chance, and guesses that hold in a copy gain most."""
    for lost in (0.0, 5.0, 10.0, 15.0, 20.0):
        await copying(chats)
        balance = COPIES_GAINED - lost
        assert chats.session.credit == pytest.approx(max(CREDIT, LOAN * balance) + min(0.0, balance))
        chats.session.gain(-5.0)
        chats.histories.remember(chats.own, chats.session, alone=True, reading=READING)


async def fresh(pair: Answering) -> None:
    await pair.begin(SHORT)
    pair.read(OWN)
    assert pair.text.kind == "cold fresh"


async def test_a_text_without_credit_borrows_from_what_its_kind_has_gained(chats: Answering) -> None:
    await fresh(chats)
    chats.session.gain(4.0)
    chats.histories.remember(chats.own, chats.session, alone=True, reading=READING)
    await fresh(chats)
    answer = list(OWN)
    for balance in (4.0, 2.5, 1.5, 0.7, -0.2):
        assert chats.session.credit == pytest.approx(max(CREDIT, balance * LOAN) + min(0.0, balance))
        chats.session.gain({4.0: -1.5, 2.5: -1.0, 1.5: -0.8, 0.7: -0.9}.get(balance, 0.0))
        answer += range(2000 + len(answer), 2016 + len(answer))
        chats.read(answer)
    assert chats.text.kind == "cold fresh"


async def test_a_text_borrows_nothing_that_it_has_lost_itself(chats: Answering) -> None:
    """The kind in which its drafter was attached gets the sum at the end, but it counts before."""
    await chats.begin(SHORT)
    chats.read(OWN)
    chats.histories.start(chats.own, chats.session, alone=True)
    chats.session.gain(-0.7)
    chats.read([*OWN, *range(2000, 2032)])
    assert chats.text.kind == "cold fresh"
    assert chats.session.credit == pytest.approx(CREDIT - 0.7)


async def test_the_first_text_of_a_kind_borrows_nothing_either_that_it_has_lost() -> None:
    """Losses of a kind without a record are kept nowhere else. Such a text tried again every 16 tokens."""
    pair = Answering()
    await pair.begin(SHORT)
    answer = list(OWN)
    for lost in (0.7, 0.8):
        pair.session.gain(-lost)
        answer += range(2000 + len(answer), 2032 + len(answer))
        pair.read(answer)
        assert pair.text.kind == "cold fresh"
        assert pair.session.credit < 0.0
    assert pair.session.credit == pytest.approx(CREDIT - 1.5)


async def test_an_attached_drafter_costs_its_kind_more_if_it_gains_nothing() -> None:
    pair = Answering()
    await pair.begin(SHORT)
    pair.check(accepted=3)
    pair.session.credit += 3.0
    pair.histories.remember(pair.own, pair.session, alone=True, reading=READING)
    await pair.begin(SHORT)
    expected = pair.expected
    pair.session.credit += 0.25
    pair.histories.remember(pair.own, pair.session, alone=True, reading=READING)
    await pair.begin(SHORT)
    assert pair.session.credit == pytest.approx(CREDIT + 3.25 - 2 * READING)
    assert pair.expected == expected, "nothing else was shown"
    pair.histories.remember(pair.own, pair.session, alone=True, reading=READING)
    await pair.begin(SHORT)
    assert pair.session.credit == pytest.approx(CREDIT + 3.25 - 3 * READING - IN_VAIN)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_a_long_prompt_is_held_against_later_ones_unless_its_answer_gained(temperature: float) -> None:
    pair, balance = Answering(), 0.0
    for gained, cost in ((4.0, READING), (0.0, READING + IN_VAIN)):
        await pair.begin(LONG, temperature)
        pair.check(accepted=3)
        pair.read(list(LONG[:64]))
        assert pair.text.kind.endswith("copy")
        pair.session.credit += gained
        pair.histories.remember(pair.own, pair.session, alone=True, reading=READING)
        balance += gained - cost
        await pair.begin(LONG, temperature)
        assert pair.session.credit == pytest.approx(max(CREDIT, LOAN * balance) + min(0.0, balance))


async def test_a_drafter_with_cores_of_its_own_leaves_no_debt() -> None:
    pair = Answering()
    for _ in range(3):
        await pair.answer(SHORT, OWN, accepted=0)
    await pair.begin(SHORT)
    assert pair.session.credit == CREDIT


async def indebted(pair: Answering) -> None:
    """A chat that loses in its first tokens, and after them."""
    await pair.begin(SHORT)
    pair.session.credit += READING - 1.2 + 0.6
    pair.check(accepted=0)
    pair.read(OWN)
    pair.session.credit -= 0.6
    pair.histories.remember(pair.own, pair.session, alone=True, reading=READING)


async def test_alone_a_drafter_waits_until_plain_steps_have_paid_what_earlier_texts_lost(chats: Answering) -> None:
    await indebted(chats)
    waiting = Waiting(others=0)
    await waiting.begin(chats)
    for tokens, done in ((15, False), (16, False), (65, False), (67, True)):
        waiting.answer[:] = [*OWN, 90_000, 90_001, 90_002][:tokens]
        await asyncio.sleep(0.02)
        assert waiting.task.done() is done, "50 plain steps after its kind was told"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_alone_a_drafter_waits_until_the_answer_to_a_long_prompt_shows_its_kind(
    chats: Answering, temperature: float
) -> None:
    waiting = Waiting(others=0)
    await waiting.begin(chats, LONG, temperature)
    waiting.answer += LONG[: FIRST_READ - 1]
    await asyncio.sleep(0.02)
    assert (waiting.task.done(), waiting.told) == (False, 0), "it may need the states of the prompt"
    waiting.answer.append(LONG[FIRST_READ - 1])
    await asyncio.wait_for(waiting.task, 5.0)


async def test_alone_a_drafter_begins_when_the_answer_copies(chats: Answering) -> None:
    await indebted(chats)
    waiting = Waiting(others=0)
    await waiting.begin(chats)
    await asyncio.sleep(0.01)
    assert not waiting.task.done()
    waiting.answer += list(range(16)) * 4
    await asyncio.wait_for(waiting.task, 5.0)


async def test_an_answer_whose_drafter_waited_to_its_end_leaves_what_it_refilled(chats: Answering) -> None:
    await indebted(chats)
    waiting = Waiting(others=0)
    await waiting.begin(chats)
    for tokens in (16, 48):
        waiting.answer[:] = OWN[:tokens]
        await asyncio.sleep(0.02)
    waiting.task.cancel()
    await asyncio.gather(waiting.task, return_exceptions=True)
    await chats.begin(SHORT)
    assert chats.session.credit == pytest.approx(CREDIT - 1.2 + 16 * REFILL)
    chats.read(OWN)
    assert chats.session.credit == pytest.approx(CREDIT - 0.6 + 32 * REFILL)


async def test_a_session_keeps_what_it_has_gained_itself_when_its_text_turns(chats: Answering) -> None:
    await chats.begin(LONG)
    chats.session.credit = 4.0
    chats.read(OWN)
    assert chats.text.kind == "cold fresh"
    assert chats.session.credit == 4.0
