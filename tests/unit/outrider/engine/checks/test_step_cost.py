"""The cost curve: on a GPU it reaches the steps that cost more than one token does, and each measured step is over."""

from __future__ import annotations

import pytest

from outrider.engine.checks.step_cost import TOKENS, measure_cost
from outrider.protocol.cost_curve import UNKNOWN_COST
from tests.emulated_cuda import Counts, emulated_cuda
from tests.gpu.test_cuda import graphs_of
from tests.unit.outrider.engine.cuda.test_engine import MODELS, seeded


def test_a_cpus_curve_is_that_of_one_session() -> None:
    engine = graphs_of(seeded(MODELS["llama"]), 1024)
    curve = measure_cost(engine)
    assert curve.rows == TOKENS
    assert list(curve.ms) == sorted(curve.ms)
    assert engine.cached_tokens == 0


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
