"""`outrider bench network` and `outrider bench capacity`, small: real services, real sockets, a link in between."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.bench.capacity.command import sessions_at
from outrider.bench.capacity.concurrent_sessions import ConcurrentFigures
from outrider.bench.common import remote_pair
from outrider.bench.network import plot
from outrider.bench.network.cases import LinkCase, modes
from outrider.bench.network.figures import NetworkRun, NetworkRuns
from outrider.cli.app import app
from outrider.protocol.errors import InvalidRequest, StartupError
from outrider.protocol.statistics import GenerationStats

pytestmark = pytest.mark.timeout(240)

SUMMARY = (
    "adaptive_vs_colocated_rtt80",
    "adaptive_vs_plain_rtt80",
    "worst_vs_plain",
    "worst_vs_plain_first64",
    "worst_regret",
    "worst_regret_drift",
    "predicted_within_10pct",
    "bytes_per_guess",
)


def run(*arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("outrider")), "bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.prove
def test_network_measures_every_mode(tmp_path: Path) -> None:
    report = tmp_path / "network.json"
    output = run(
        *("network", "--quick", "--tokens", "16", "--verify-pace", "1:12,17:12,33:24", "--drafters", "0.8:1,0.4:1"),
        *("--rtts", "0,80", "--json", str(report)),
    )
    assert "throttled engines" in output, "the figures must not look like those of a model"
    found = json.loads(report.read_text())
    summary = found["summary"]
    assert all(isinstance(summary[key], float) for key in SUMMARY)
    assert summary["texts_equal"] is True
    assert 0 < summary["bytes_per_guess"] <= 4
    drift = summary["drift"]
    assert len(drift["parts"]) == 4
    assert all(len(seconds) == 4 for seconds in drift["seconds"].values())
    assert {(row["rtt_ms"], row["drafter"]) for row in found["rows"]} == {(0.0, ""), (80.0, ""), (80.0, "0.4, 1 ms")}
    rows = {(row["rtt_ms"], row["mode"]): row for row in found["rows"] if not row["drafter"]}
    assert rows[80.0, "in turns, γ 6"]["tokens_per_s"] < rows[0.0, "in turns, γ 6"]["tokens_per_s"], "the link is felt"
    assert rows[0.0, "in turns, γ 6"]["acceptance_first"] > 0.5


def test_what_was_found_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, fewer in (("_RTTS", (0.0, 40.0)), ("_ACCEPTANCES", (0.4, 0.8)), ("_DRAFTS", (0.1, 1.0))):
        monkeypatch.setattr(plot, name, fewer)
    runs = NetworkRuns([NetworkRun((1, 2), (10.0,), GenerationStats(tokens_per_second=30.0))])
    measured = {LinkCase(rtt): dict.fromkeys(modes((2, 4)), runs) for rtt in (0.0, 15.0)}
    drawn = tmp_path / "network.png"
    pair = remote_pair.ToyPair(tmp_path, tmp_path, 0.8, 0.6)
    plot.draw(measured, pair, remote_pair.ThrottledTimes("1:40,17:40,33:80", 4.0), drawn)
    assert drawn.stat().st_size > 20_000


@pytest.mark.prove
def test_capacity_compares_sessions(tmp_path: Path) -> None:
    report = tmp_path / "capacity.json"
    output = run("capacity", "--quick", "--json", str(report))
    assert "the bound is 1.20" in output
    summary = json.loads(report.read_text())["summary"]
    assert summary["bound"] == {"light": pytest.approx(1.2), "heavy": pytest.approx(1.8)}
    assert summary["sessions_ratio"]["heavy"] > 1.2, "a remote drafter leaves room for more sessions"
    guesses = summary["full_guesses_per_step"]
    assert guesses["8"] < 0.5 * guesses["1"], "a full verifier checks few guesses"


@pytest.mark.parametrize(("token_ms", "sessions"), [(10.0, 1.0), (15.0, 1.5), (20.0, 2.0), (30.0, 3.0), (60.0, 6.0)])
def test_sessions_at_a_time_per_token(token_ms: float, sessions: float) -> None:
    line = [ConcurrentFigures(count, 10.0 * count, 0.0, 0.0) for count in (1, 2, 4)]
    assert sessions_at(line, token_ms) == pytest.approx(sessions)


def test_a_pair_accepts_about_what_was_asked_for(tmp_path: Path) -> None:
    pair = remote_pair.make_pair(tmp_path, 0.8, remote_pair.ReferenceAnswers((5, 6, 7, 8), count=3, tokens=100))
    assert pair.acceptance == pytest.approx(0.8, abs=0.05)
    assert 0.3 < pair.gain < 0.95


@pytest.mark.parametrize("pace", ["", "4", "x:1", "4:1,2:3", "1:-4"])
def test_a_pace_that_cannot_be_read_is_told(pace: str) -> None:
    result = CliRunner().invoke(app, ["bench", "network", "--verify-pace", pace or ","])
    assert isinstance(result.exception, StartupError)


@pytest.mark.parametrize("rtts", ["x", "1,,2", "-1", "nan"])
def test_round_trips_that_cannot_be_are_told(rtts: str) -> None:
    result = CliRunner().invoke(app, ["bench", "network", f"--rtts={rtts}"])
    assert isinstance(result.exception, InvalidRequest)


@pytest.mark.parametrize("drafters", ["x", "0.8", "0.8:4,", "1.5:4", "0.5:-1", "nan:4"])
def test_drafters_that_cannot_be_are_told(drafters: str) -> None:
    result = CliRunner().invoke(app, ["bench", "network", f"--drafters={drafters}"])
    assert isinstance(result.exception, InvalidRequest)
