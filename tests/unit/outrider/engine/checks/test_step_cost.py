"""The cost curve: on a GPU it reaches the steps that cost more than one token does, and each measured step is over."""

from __future__ import annotations

import pytest

from outrider.engine.checks import step_cost
from outrider.engine.checks.step_cost import TOKENS, measure_cost
from outrider.engine.throttled import ThrottledEngine, parse_pace
from outrider.protocol.cost_curve import UNKNOWN_COST
from tests.emulated_cuda import Counts, emulated_cuda
from tests.gpu.test_cuda import graphs_of
from tests.unit.outrider.engine.cuda.test_engine import MODELS, seeded


@pytest.mark.parametrize(("kv_tokens", "more"), [(1024, (64, 128, 256, 512)), (512, (64, 128, 256)), (256, (64, 128))])
def test_a_cpus_curve_is_that_of_one_session_and_its_prompts(kv_tokens: int, more: tuple[int, ...]) -> None:
    engine = graphs_of(seeded(MODELS["llama"]), kv_tokens)
    curve = measure_cost(engine)
    assert curve.rows == (*TOKENS, *more)
    assert list(curve.ms) == sorted(curve.ms)
    assert engine.cached_tokens == 0


def test_a_curve_reaches_the_prompts_that_cost_more_than_a_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slope of the first tokens alone says nothing of them. A slow machine does not measure for long."""
    inner, line = graphs_of(seeded(MODELS["llama"]), 1024), "1:10,64:10,128:20,512:80"
    curve = measure_cost(ThrottledEngine(inner, parse_pace(line)))
    assert curve.at(512) > 5 * curve.at(32)
    monkeypatch.setattr(step_cost, "_LONG_MS", 15.0)
    assert measure_cost(ThrottledEngine(inner, parse_pace(line))).rows[-1] == 128


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
    assert engine.cached_tokens == 0
    if most == 512:
        assert curve.at(512) > 2 * curve.at(32), "the emulator computes each token"


def test_without_room_the_cost_is_unknown() -> None:
    assert measure_cost(graphs_of(seeded(MODELS["llama"]), 32)) == UNKNOWN_COST
