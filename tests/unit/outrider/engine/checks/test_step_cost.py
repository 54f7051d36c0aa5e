"""The cost curve: on a GPU it reaches the steps that cost more than one token does, and each measured step is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from outrider.engine.checks import step_cost
from outrider.engine.checks.step_cost import TOKENS, measure_cost
from outrider.engine.interface import EngineWrapper, SessionTokens, StepResult
from outrider.engine.throttled import parse_pace
from outrider.protocol.cost_curve import UNKNOWN_COST
from tests.emulated_cuda import Counts, emulated_cuda
from tests.gpu.test_cuda import graphs_of
from tests.unit.outrider.engine.cuda.test_engine import MODELS, seeded

FLAT_TO_64 = "1:10,64:10,128:20,512:80"


class Paced(EngineWrapper):
    """Engine whose steps take what `pace` says, and more with every token's logits, in time of its own."""

    def __init__(self, kv_tokens: int, pace: str, logits_ms: float = 0.0) -> None:
        super().__init__(graphs_of(seeded(MODELS["llama"]), kv_tokens))
        self._pace, self._logits_ms = parse_pace(pace), logits_ms
        self._now = 0.0
        self.steps: list[int] = []  # their tokens
        self.stalls = -1  # the number of a step that takes two seconds more

    def perf_counter(self) -> float:
        return self._now

    def extend(self, batch: Sequence[SessionTokens]) -> StepResult:
        self.steps.append(sum(len(new.tokens) for new in batch))
        logits = sum(len(new.tokens) - (new.logits_from or 0) for new in batch)
        self._now += (self._pace.at(self.steps[-1]) + logits * self._logits_ms) / 1000
        self._now += 2 * (len(self.steps) - 1 == self.stalls)
        return self.inner.extend(batch)


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Paced]:
    def make(*arguments: Any, **options: Any) -> Paced:
        engine = Paced(*arguments, **options)
        monkeypatch.setattr(step_cost, "time", engine)
        return engine

    return make


@pytest.mark.parametrize(("kv_tokens", "more"), [(1024, (64, 128, 256, 512)), (512, (64, 128, 256)), (256, (64, 128))])
def test_a_cpus_curve_is_that_of_one_session(
    paced: Callable[..., Paced], kv_tokens: int, more: tuple[int, ...]
) -> None:
    engine = paced(kv_tokens, "1:1,512:1.5")
    curve = measure_cost(engine)
    assert curve.rows == (*TOKENS, *more)
    assert list(curve.ms) == sorted(curve.ms)
    assert engine.blocks.pool.num_used == 0


def test_a_curve_reaches_the_prompts_that_cost_more_than_a_few_tokens(
    paced: Callable[..., Paced], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slope of the first tokens alone says nothing of them. A slow machine does not measure for long."""
    curve = measure_cost(paced(1024, FLAT_TO_64))
    assert curve.at(512) > 5 * curve.at(32)
    monkeypatch.setattr(step_cost, "_LONG_MS", 9.0)
    assert measure_cost(paced(1024, FLAT_TO_64)).rows[-1] == 32


def test_more_tokens_are_not_computed_once_the_slope_is_known(paced: Callable[..., Paced]) -> None:
    """Where twice the tokens take twice the time, all others are known. So a worker starts soon."""
    engine = paced(1024, FLAT_TO_64)
    curve = measure_cost(engine)
    assert max(engine.steps) == curve.rows[-1] == 128
    assert curve.at(512) == pytest.approx(80.0)


SLOW = "1:350,2:440,4:700,8:1280,32:5000"


def test_a_large_model_on_a_slow_machine_starts_soon(paced: Callable[..., Paced]) -> None:
    """Its context has fewer tokens, and its curve ends where a step takes a second and the slope is known."""
    engine = paced(256, SLOW)
    curve = measure_cost(engine)
    assert curve.rows == (1, 2, 4, 8)
    assert engine.steps == [16, 1, 2, 4, 8, 8], "the context, and one round, with its last step again"
    assert curve.at(32) == pytest.approx(4760), "with the last slope"


def test_a_slow_step_says_nothing_of_more_tokens_while_they_cost_nothing(paced: Callable[..., Paced]) -> None:
    curve = measure_cost(paced(256, "1:1200,16:1200,32:2400"))
    assert curve.rows == TOKENS
    assert curve.at(64) == pytest.approx(4800)


def test_other_models_have_the_whole_context(paced: Callable[..., Paced]) -> None:
    engine = paced(256, "1:10,16:250,32:500")
    assert measure_cost(engine).rows == TOKENS
    assert engine.steps[:2] == [16, 112 - 16], "what fits beside 32 tokens"


def test_a_stall_ends_no_curve(paced: Callable[..., Paced]) -> None:
    engine = paced(256, "1:10,32:20")
    engine.stalls = 5  # the first step of eight tokens, after two of the context and three shorter ones
    curve = measure_cost(engine)
    assert curve.rows == (*TOKENS, 64, 128)
    assert curve.ms[3] < 13


@pytest.mark.parametrize(("pace", "rounds"), [("1:10,32:100", 2), ("1:500,32:2000", 1)])
def test_rounds_end_once_they_have_taken_long(paced: Callable[..., Paced], pace: str, rounds: int) -> None:
    engine = paced(256, pace)
    measure_cost(engine)
    assert engine.steps.count(8) == rounds


@pytest.mark.parametrize(("pace", "most", "least"), [("1:2,32:20", 99, 10), ("1:10,32:100", 2, 2)])
def test_short_steps_are_measured_at_many_moments(
    paced: Callable[..., Paced], pace: str, most: int, least: int
) -> None:
    """The coordinator starts at the same time: two guesses were taken to make a step half as long again."""
    engine = paced(256, pace)
    measure_cost(engine)
    assert all(least <= engine.steps.count(tokens) <= most for tokens in (1, 2, 4, 8))
    assert engine.steps.count(12) == 2


def test_a_cpus_curve_has_the_logits_of_all_tokens(paced: Callable[..., Paced]) -> None:
    """Guesses need them. Prompts do not: what that saves, the times of their steps show."""
    curve = measure_cost(paced(512, FLAT_TO_64, logits_ms=0.2))
    assert (curve.at(64), curve.at(128)) == pytest.approx((10.0 + 64 * 0.2, 20.0 + 128 * 0.2))


@pytest.mark.parametrize(("kv_tokens", "most"), [(8192, 512), (1024, 64), (256, 32)])
def test_a_gpus_curve_reaches_as_many_sessions_as_fit(kv_tokens: int, most: int) -> None:
    with emulated_cuda() as device:
        engine = graphs_of(seeded(MODELS["llama"]).cuda(), kv_tokens)
        device.counts = Counts()
        curve = measure_cost(engine)
        waits = device.counts.syncs["tolist"]
    assert curve.rows[-1] == most
    assert waits in (2 * len(curve.rows), 3 * len(curve.rows)), "a launched step is not a finished one"
    assert list(curve.ms) == sorted(curve.ms)
    assert engine.blocks.pool.num_used == 0
    if most == 512:
        assert curve.at(512) > 2 * curve.at(32), "the emulator computes each token"


def test_without_room_the_cost_is_unknown() -> None:
    assert measure_cost(graphs_of(seeded(MODELS["llama"]), 32)) == UNKNOWN_COST
