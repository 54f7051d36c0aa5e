"""Figures of `outrider bench capacity`, from measurements that are given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.bench.capacity import concurrent_sessions
from outrider.bench.capacity.command import _full_summary, sessions_at
from outrider.bench.capacity.concurrent_sessions import ConcurrentFigures, run_sessions
from outrider.bench.common.timed_output import TimedOutput
from outrider.protocol.statistics import GenerationStats


def point(sessions: int, token_ms: float = 1.0, tokens_per_s: float = 1.0, guesses: float = 0.0) -> ConcurrentFigures:
    return ConcurrentFigures(sessions, token_ms, tokens_per_s, guesses)


@pytest.mark.parametrize(("token_ms", "sessions"), [(20.0, 2.0), (30.0, 3.0), (60.0, 5.0), (120.0, 8.0), (1.0, 0.1)])
def test_sessions_between_measurements_are_interpolated(token_ms: float, sessions: float) -> None:
    points = [point(2, 20.0), point(4, 40.0), point(6, 80.0)]
    assert sessions_at(points, token_ms) == pytest.approx(sessions)


def test_a_full_verifier_is_compared_with_plain_decoding_and_with_the_best_fixed_mode() -> None:
    speeds = {"plain": (10.0, 40.0), "γ 2": (20.0, 30.0), "γ 6": (25.0, 20.0), "adaptive": (30.0, 36.0)}
    filled = {
        mode: [
            point(sessions, tokens_per_s=speed, guesses=4.0 / sessions) for sessions, speed in ((1, alone), (8, full))
        ]
        for mode, (alone, full) in speeds.items()
    }
    summary = _full_summary(filled)
    assert summary["full_adaptive_vs_plain"] == pytest.approx({"1": 3.0, "8": 0.9})
    assert summary["full_adaptive_vs_best_fixed"] == pytest.approx({"1": 1.2, "8": 0.9})
    assert summary["full_guesses_per_step"] == {"1": 4.0, "8": 0.5}


def test_concurrent_sessions_are_measured_while_all_of_them_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = GenerationStats(steps=4, offered_per_position=(3, 1))
    arrivals = {
        0: ((0.0, 1), (1.0, 1), (2.0, 2), (3.0, 2), (4.0, 2)),
        1: ((2.0, 1), (3.0, 4), (4.0, 4), (5.0, 1), (9.0, 1)),
    }

    class GivenClient:
        def __init__(self, endpoints: Any) -> None:
            pass

        def __enter__(self) -> GivenClient:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def generate(self, *, params: Any, **_: Any) -> int:
            return int(params.seed)

    def given(session: int) -> TimedOutput:
        return TimedOutput((), arrivals[session], SimpleNamespace(stats=stats))  # type: ignore[arg-type]

    monkeypatch.setattr(concurrent_sessions, "Client", GivenClient)
    monkeypatch.setattr(concurrent_sessions, "timed", given)
    figures = run_sessions(SimpleNamespace(endpoints=()), 2, 8, {})  # type: ignore[arg-type]
    assert figures.token_ms == pytest.approx((2000 / 4 + 2000 / 8) / 2), "from the last start to the first end"
    assert figures.tokens_per_s == pytest.approx(4 / 2 + 8 / 2)
    assert figures.guesses_per_step == pytest.approx(1.0)
