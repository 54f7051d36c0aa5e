"""Input of the network benchmark for the simulator, measured on the shortest link."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outrider.bench.network.cases import LinkCase, modes
from outrider.bench.network.figures import NetworkResults, NetworkRun, NetworkRuns
from outrider.bench.network.prediction import prediction_cases
from outrider.protocol.statistics import GenerationStats, PlanStats

TOKENS = 60


def runs(step_ms: float, per_step: float) -> NetworkRuns:
    """Return the runs of one answer with `per_step` tokens per step."""
    steps = round(TOKENS / per_step)
    stats = GenerationStats(steps=steps, tokens_per_second=1000.0 * TOKENS / (steps * step_ms))
    return NetworkRuns([NetworkRun(tuple(range(TOKENS)), (), stats)])


def results(plain_ms: float, in_turns_ms: float) -> NetworkResults:
    plain, in_turns = modes((2,))[:2]
    near, far = LinkCase(5.0), LinkCase(80.0)
    world = {"draft_ms": 4.0, "cost": ([1, 17], [40.0, 40.0]), "rtt_ms": 5.0}
    return NetworkResults(
        measured={
            near: {plain: runs(plain_ms, 1.0), in_turns: runs(in_turns_ms, 2.0)},
            far: {plain: runs(99.0, 1.0), in_turns: runs(999.0, 2.0)},
        },
        worlds={near: world, far: world | {"rtt_ms": 80.0}},
    )


def test_what_the_services_add_goes_into_every_prediction() -> None:
    cases = prediction_cases(results(plain_ms=41.5, in_turns_ms=58.0))
    assert len(cases) == 4
    for case in cases.values():
        rows, ms = case["world"]["cost"]
        assert rows == [1, 17]
        assert ms == pytest.approx([41.5, 41.5])
        assert case["world"]["overhead_ms"] == pytest.approx(58.0 - 41.5 - 2 * 4.0 - 5.0)
    assert {case["world"]["rtt_ms"] for case in cases.values()} == {5.0, 80.0}


def test_a_clock_that_ran_fast_adds_nothing() -> None:
    case = next(iter(prediction_cases(results(plain_ms=39.0, in_turns_ms=50.0)).values()))
    assert case["world"]["cost"][1] == [40.0, 40.0]
    assert case["world"]["overhead_ms"] == 0.0


def test_narrow_links_are_not_predicted() -> None:
    narrow = results(plain_ms=40.0, in_turns_ms=60.0)
    narrow.measured[LinkCase(15.0, kib_per_s=32.0)] = narrow.measured[LinkCase(5.0)]
    assert all(not link.kib_per_s for link, _ in prediction_cases(narrow))


@pytest.mark.parametrize("tokens", [192, 96, 32, 8])
def test_the_rate_of_the_first_tokens_is_that_of_short_answers_too(tokens: int) -> None:
    runs = NetworkRuns([NetworkRun((1,) * tokens, (40.0,) * (tokens - 1), None)])  # type: ignore[arg-type]
    assert runs.first_tokens_per_s == pytest.approx(25.0)


@pytest.mark.parametrize("benchmark", ["network", "capacity"])
def test_a_benchmark_that_is_ended_removes_its_folder(benchmark: str, tmp_path: Path) -> None:
    script = "from outrider.cli.app import main; main()"
    command = [sys.executable, "-c", script, "bench", benchmark, "--quick"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as running:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("outrider-pair-*")):
            assert running.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        running.terminate()
        running.communicate(timeout=30)
    assert running.returncode != 0
    assert list(tmp_path.iterdir()) == []


def test_steps_by_plan_are_those_of_all_answers() -> None:
    def answer(**steps: int) -> NetworkRun:
        plans = tuple(PlanStats(plan, steps=number) for plan, number in steps.items())
        stats = GenerationStats(steps=sum(steps.values()), tokens_per_second=1.0, duration_ms=2.0, plans=plans)
        return NetworkRun((1, 2, 3), (1.0, 1.0), stats)

    summary = NetworkRuns([answer(turns=100, plain=1), answer(turns=7, plain=1, ahead=0)]).row()
    assert summary["plans"] == {"turns": 107, "plain": 2}
