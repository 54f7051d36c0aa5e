"""Input of the network benchmark for the simulator, measured on the shortest link."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from outrider.bench.common.timed_output import timed
from outrider.bench.network import measurement
from outrider.bench.network.cases import LinkCase, NetworkMode, modes
from outrider.bench.network.figures import NetworkResults, NetworkRun, NetworkRuns, summarise
from outrider.bench.network.measurement import _DRIFT, PROMPT, NetworkMeasurement
from outrider.bench.network.plot import _speed
from outrider.bench.network.prediction import prediction_cases
from outrider.bench.network.toy_pair import _CONTEXT
from outrider.cli.app import app
from outrider.client.events import Finished, Tokens
from outrider.protocol.speculation import FinishReason
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
    world = {"draft_ms": 4.0, "cost": ([1, 17], [40.0, 44.0]), "rtt_ms": 5.0}
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
        assert ms == pytest.approx([41.5, 45.5])
        assert case["world"]["overhead_ms"] == pytest.approx(58.0 - 41.5 - 2 * 4.0 - 5.0)
    assert {case["world"]["rtt_ms"] for case in cases.values()} == {5.0, 80.0}


def test_a_clock_that_ran_fast_adds_nothing() -> None:
    case = next(iter(prediction_cases(results(plain_ms=39.0, in_turns_ms=50.0)).values()))
    assert case["world"]["cost"][1] == [40.0, 44.0]
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


def test_figures_of_a_mode_are_of_all_its_answers() -> None:
    one = GenerationStats(
        steps=2,
        tokens_per_second=50.0,
        duration_ms=200.0,
        offered_per_position=(2, 1),
        accepted_per_position=(1, 1),
        bytes_per_accepted_token=30.0,
        bytes_per_guessed_token=10.0,
        missed=4,
        missed_at_hand=1,
        draft_ms=40.0,
        mean_wait_ms=10.0,
        mean_step_ms=30.0,
    )
    other = GenerationStats(
        steps=3,
        tokens_per_second=100.0,
        duration_ms=200.0,
        bytes_per_accepted_token=10.0,
        bytes_per_guessed_token=20.0,
        draft_ms=60.0,
        mean_wait_ms=30.0,
        mean_step_ms=30.0,
    )
    gaps = tuple(float(ms) for ms in range(1, 100))
    runs = NetworkRuns([NetworkRun((1, 2, 3, 4), gaps, one), NetworkRun((1,) * 6, (1000.0,), other)])
    row = runs.row()
    assert row["tokens_per_s"] == pytest.approx(75.0)
    assert row["tokens_per_step"] == pytest.approx(10 / 5)
    assert runs.step_ms == pytest.approx(1000 * 2 / 75)
    assert row["first_tokens_per_s"] == pytest.approx((1000 * 64 / sum(range(1, 65)) + 1.0) / 2)
    assert (row["itl_p50_ms"], row["itl_p99_ms"]) == (50.5, 99.0), "of 100 gaps"
    assert row["acceptance_first"] == pytest.approx(1 / 2)
    assert row["bytes_per_accepted_token"] == pytest.approx(20.0)
    assert row["bytes_per_guess"] == pytest.approx(15.0)
    assert row["missed_at_hand"] == pytest.approx(1 / 4)
    assert row["drafter_idle"] == pytest.approx(1 - 100 / 400)
    assert row["verifier_idle"] == pytest.approx(40 / 100)


def test_the_summary_compares_each_link_with_plain_decoding_and_with_the_best_fixed_mode() -> None:
    plain, in_turns, *_, adaptive = modes((2,))
    near, far, slow = LinkCase(5.0), LinkCase(80.0), LinkCase(80.0, kib_per_s=32.0)

    def answer(speed: float, first_gap_ms: float, drafts: int = 0) -> NetworkRuns:
        stats = GenerationStats(tokens_per_second=speed, drafts=drafts, bytes_per_guessed_token=7.0 + drafts)
        return NetworkRuns([NetworkRun((1, 2), (first_gap_ms,), stats)])

    measured = {
        near: {plain: answer(20.0, 50.0), in_turns: answer(40.0, 25.0), adaptive: answer(50.0, 20.0, drafts=1)},
        far: {plain: answer(20.0, 50.0), in_turns: answer(10.0, 90.0), adaptive: answer(18.0, 100.0, drafts=2)},
        slow: {plain: answer(20.0, 50.0), in_turns: answer(10.0, 90.0), adaptive: answer(22.0, 50.0)},
    }
    predicted = {(near, plain): 21.9, (near, in_turns): 33.0, (far, in_turns): 10.0, (far, plain): 22.3}
    summary = summarise(measured, predicted, {"regret": 0.25}, texts_equal=True)
    assert summary["adaptive_vs_colocated_rtt5"] == pytest.approx(50 / 40)
    assert summary["adaptive_vs_colocated_rtt80"] == pytest.approx(18 / 40), "of the link that is only long"
    assert summary["adaptive_vs_plain_rtt80"] == pytest.approx(18 / 20)
    assert summary["colocated_vs_plain"] == pytest.approx(2.0)
    assert summary["worst_vs_plain"] == pytest.approx(0.9)
    assert summary["worst_vs_plain_first64"] == pytest.approx(0.5)
    assert summary["worst_regret"] == pytest.approx(1 - 18 / 20)
    assert summary["worst_regret_drift"] == 0.25
    assert summary["predicted_within_10pct"] == pytest.approx(2 / 4)
    assert summary["bytes_per_guess"] == 9.0


def test_links_that_all_have_jitter_are_drawn_without_a_curve() -> None:
    plain, in_turns = modes((2,))[:2]
    axes = Figure().subplots()
    _speed(axes, {LinkCase(15.0, jitter_ms=4.0): {plain: runs(40.0, 1.0), in_turns: runs(50.0, 2.0)}})
    assert [len(line.get_xydata()) for line in axes.lines] == [0, 0]


def test_one_text_that_differs_is_not_forgotten() -> None:
    results = NetworkResults()
    for seed, tokens in ((0, (1, 2)), (1, (3,)), (0, (1, 9)), (1, (3,))):
        results.add_text(seed, tokens)
    assert not results.texts_equal


def test_tokens_that_arrive_together_have_no_time_between_them() -> None:
    """The sum of the gaps is the answer's time, however many tokens a message has."""
    stats = GenerationStats()
    pieces = [Tokens(0, "", ids, (), ()) for ids in ((1,), (2, 3, 4))]
    replies = [*pieces, Finished("", FinishReason.LENGTH, "", 1, 4, stats)]
    setup = SimpleNamespace(client=Mock(generate=Mock(return_value=replies)))
    measurement = NetworkMeasurement(setup, modes((2,)), 4, 1, NetworkResults())  # type: ignore[arg-type]
    run = measurement._generate(modes((2,))[0], seed=1, tokens=4)
    assert run.tokens == (1, 2, 3, 4)
    assert len(run.gaps_ms) == 3
    assert run.gaps_ms[1:] == (0.0, 0.0)
    counts: list[int] = []
    timed(pieces + replies[-1:], counts.append)
    assert counts == [1, 4], "parts of an answer end by its tokens so far"


def test_answers_that_do_not_fit_while_the_link_changes_are_refused_at_once() -> None:
    """They are four times as long there, which comes last: all results were lost."""
    most = 1000
    assert len(PROMPT) + len(_DRIFT) * most <= _CONTEXT
    for tokens, status in ((most, 1), (most + 1, 2)):
        ended = CliRunner().invoke(app, ["bench", "network", "--rtts", "none", "--tokens", str(tokens)])
        assert ended.exit_code == status, ended.output


@pytest.mark.parametrize(("tokens", "refused"), [(1, "--tokens"), (15, "--tokens"), (16, "--rtts")])
def test_answers_without_times_between_tokens_are_refused_at_once(tokens: int, refused: str) -> None:
    """Their figures were the last thing to fail, after all measurements."""
    ended = CliRunner().invoke(app, ["bench", "network", "--rtts", "none", "--tokens", str(tokens)])
    assert str(ended.exception).startswith(f"{refused} is")


def test_parts_of_an_answer_end_by_its_tokens_and_change_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message may end several of them; the time of the first token is not the link's."""
    sizes, clock = (1, 4, 8, 3), iter((5.0, 6.0, 8.0, 12.0))
    pieces = [Tokens(0, "", (1,) * size, (), ()) for size in sizes]
    replies = [*pieces, Finished("", FinishReason.LENGTH, "", 1, 16, GenerationStats())]
    link, waited = SimpleNamespace(shape=None), Mock()
    setup = SimpleNamespace(
        client=Mock(generate=Mock(return_value=replies)),
        network=SimpleNamespace(link=link),
        wait_for_round_trip=waited,
    )
    results = NetworkResults()
    measured = NetworkMeasurement(setup, modes((2,)), 4, 1, results)  # type: ignore[arg-type]
    monkeypatch.setattr(measurement, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert measured._generate_with_drift(modes((2,))[0], seed=1) == [1.0, 2.0, 0.0, 4.0]
    assert link.shape == LinkCase(_DRIFT[-1][0]).shape, "that of the last part"
    waited.assert_called_once_with(_DRIFT[0][0])
    assert results.texts == {1: (1,) * 16}


def test_a_changing_link_is_compared_with_the_best_fixed_mode_and_with_that_of_each_part() -> None:
    seconds = {"plain": [2.0, 2.0, 2.0, 2.0], "chain ahead": [1.0, 3.0, 1.0, 2.0], "adaptive": [2.0, 2.0, 2.0, 4.0]}
    given = [mode for mode in modes(()) if mode.name in seconds]
    measured = NetworkMeasurement(Mock(), given, 4, 3, NetworkResults())
    noise = iter((0.0, 1.0, -1.0))  # of the three rounds, whose median counts
    shift = {"now": 0.0}

    def generate(mode: NetworkMode) -> list[float]:
        if mode is given[0]:
            shift["now"] = next(noise)
        return [each + shift["now"] for each in seconds[mode.name]]

    answers = [[0.0] * 4, *(generate(mode) for _ in range(3) for mode in given)]  # the first one warms up
    measured._generate_with_drift = Mock(side_effect=answers)  # type: ignore[method-assign]
    found = measured.measure_drift(lambda _: None)
    assert found["seconds"] == seconds
    assert found["best_fixed"] == "chain ahead"
    assert found["regret"] == pytest.approx(1 - 7 / 10)
    assert found["regret_of_parts"] == pytest.approx(1 - 6 / 10)
    assert found["vs_plain"] == pytest.approx(8 / 10)
