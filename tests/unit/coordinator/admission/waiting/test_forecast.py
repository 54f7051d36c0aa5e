"""Forecast: what is refused, and what is too little to refuse for."""

from __future__ import annotations

import time

import pytest

from coordinator.admission.waiting import forecast as module
from coordinator.admission.waiting.forecast import FEWEST, KEPT_S, Forecast, Line, Served
from coordinator.admission.waiting.seats import Capacity, Seats
from coordinator.admission.waiting.urgency import Urgency
from coordinator.persistence.session_record import SessionRecord, SessionRequest
from outrider.protocol.errors import Expired
from outrider.protocol.sampling_params import Grammar, SamplingParams
from outrider.protocol.speculation import FinishReason
from outrider.protocol.statistics import GenerationStats

IDLE = Line(seats=4, in_use=3, ahead=0)


def request(prompt: int = 10, max_tokens: int = 101, *, ignore_eos: bool = True, **params: object) -> SessionRequest:
    given = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos, **params)  # type: ignore[arg-type]
    return SessionRequest((1,) * prompt, given)


def served(**changed: float) -> Served:
    """Twenty tokens a second for five seconds, after a tenth of one for a prompt of 100."""
    given: dict[str, float] = {"load": 1, "prompt": 100, "output": 100, "first_s": 0.1, "after_s": 5.0}
    given |= {"tokens_per_s": 20.0, "at": time.monotonic()} | changed
    return Served(**given)  # type: ignore[arg-type]


def known(*figures: Served) -> Forecast:
    forecast = Forecast()
    for one in figures or [served()] * FEWEST:
        forecast.add(one)
    return forecast


def test_the_time_of_an_answer_is_that_of_its_prompt_and_its_tokens() -> None:
    assert known().seconds(request(), IDLE) == (0.0, pytest.approx((0.01 + 100 / 20) / 2))


def test_the_queue_goes_on_as_fast_as_seats_are_left() -> None:
    queued_s, _ = known().seconds(request(), Line(seats=4, in_use=4, ahead=12))
    assert queued_s == pytest.approx(12 * 5.0 / 4)


@pytest.mark.parametrize("figures", [(), [served()] * (FEWEST - 1), [served(at=-1e9)] * FEWEST])
def test_too_little_and_too_old_figures_say_nothing(figures: list[Served]) -> None:
    forecast = Forecast()
    for one in figures:
        forecast.add(one)
    assert forecast.seconds(request(), Line(4, 4, 40)) == (0.0, 0.0)


def test_the_best_tenth_is_what_is_expected() -> None:
    fast = [served(tokens_per_s=100.0, after_s=1.0)] * 2
    queued_s, answer_s = known(*[served()] * 15, *fast).seconds(request(), Line(4, 4, 4))
    assert (queued_s, answer_s) == (pytest.approx(1.0), pytest.approx((0.01 + 100 / 100) / 2))


def test_an_output_that_may_end_earlier_counts_as_a_short_one() -> None:
    """Unless its length is certain: a short one of those that came."""
    forecast = known(*[served(output=21)] * FEWEST)
    early = [request(ignore_eos=False), request(stop=("x",)), request(stop_token_ids=(3,))]
    early.append(request(grammar=Grammar(regex="x*")))
    for one in early:
        assert forecast.seconds(one, IDLE)[1] == pytest.approx((0.01 + 20 / 20) / 2), one.params
    assert forecast.seconds(request(max_tokens=11, ignore_eos=False), IDLE)[1] == pytest.approx((0.01 + 10 / 20) / 2)


def test_short_prompts_say_nothing_of_a_long_one() -> None:
    assert known().seconds(request(prompt=101, max_tokens=1), IDLE) == (0.0, 0.0)
    assert known().seconds(request(prompt=100, max_tokens=1), IDLE) == (0.0, pytest.approx(0.1 / 2))


def test_what_was_slow_in_a_crowd_says_nothing_of_an_idle_fleet() -> None:
    crowded = known(*[served(load=4)] * FEWEST)
    assert crowded.seconds(request(), Line(seats=4, in_use=2, ahead=0)) == (0.0, 0.0)
    assert crowded.seconds(request(), Line(seats=4, in_use=3, ahead=0))[1] > 2.5


def test_a_request_is_refused_only_if_it_must_be_late() -> None:
    forecast, line = known(), Line(seats=4, in_use=4, ahead=8)
    forecast.check(request(), line, 12.6)
    with pytest.raises(Expired) as refused:
        forecast.check(request(), line, 10.0)
    assert (refused.value.field, refused.value.value, refused.value.limit) == ("timeout", "10 s", "at least 12.5 s")
    assert refused.value.retry_after_ms == pytest.approx(2505, abs=2), "then the queue is shorter by this much"
    with pytest.raises(Expired) as hopeless:
        forecast.check(request(), IDLE, 1.0)
    assert hopeless.value.retry_after_ms == 1000 * KEPT_S, "no queue is to blame"


def test_a_target_that_refuses_everything_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    forecast, now = known(), time.monotonic()
    with pytest.raises(Expired):
        forecast.check(request(), IDLE, 1.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: now + KEPT_S + 1)
    forecast.check(request(), IDLE, 1.0)


async def test_seats_measure_what_they_forecast() -> None:
    """Of three sessions at one seat, two wait at a verifier: what they waited is no prefill."""
    seats = Seats(lambda: Capacity(1, 0), several=lambda: False)
    stats = GenerationStats(time_to_first_token_ms=100, duration_ms=5100, tokens_per_second=20.0)
    done = SessionRecord("s", request(prompt=100), tokens=[1] * 100, finish_reason=FinishReason.LENGTH)
    hurried = Urgency(deadline=time.monotonic() + 2.0)
    seats.check_in_time("", hurried, request())
    for _ in range(FEWEST):
        async with seats.taken("", 10) as seat:
            seats.measure(seat, done, lambda: stats)
    with pytest.raises(Expired):
        seats.check_in_time("", hurried, request())
    seats.check_in_time("", Urgency(), request())
    seats.check_in_time("", hurried, request(max_tokens=2))
    async with seats.taken("", 10), seats.taken("", 10) as second:
        with pytest.raises(Expired, match="10 s of them in the queue"):
            seats.check_in_time("", hurried, request(max_tokens=2))
        for _ in range(64):
            seats.measure(second, done, lambda: stats)
    seats.check_in_time("", hurried, request(prompt=100, max_tokens=1))
    assert seats._forecast.seconds(request(prompt=100, max_tokens=1), IDLE) == (0.0, 0.0)
