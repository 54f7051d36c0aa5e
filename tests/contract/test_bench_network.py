"""`outrider bench network` and `outrider bench capacity`, small: real services, real sockets, a link in between."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.cli.bench import far
from outrider.cli.bench.capacity import Point, sessions_at

pytestmark = pytest.mark.timeout(240)

SUMMARY = (
    "adaptive_vs_colocated_rtt15",
    "adaptive_vs_plain_rtt15",
    "adaptive_vs_plain_rtt80",
    "worst_vs_plain",
    "worst_regret",
    "worst_regret_drift",
    "predicted_within_10pct",
    "bytes_per_guess",
)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["bench", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_network_measures_every_mode_and_draws_it(tmp_path: Path) -> None:
    report, picture = tmp_path / "network.json", tmp_path / "network.png"
    output = run(
        *("network", "--quick", "--tokens", "40", "--verify-pace", "1:20,17:20,33:40", "--draft-ms", "1"),
        *("--json", str(report), "--plot", str(picture)),
    )
    assert "paced engines" in output, "nobody takes these for the speed of a model"
    found = json.loads(report.read_text())
    summary = found["summary"]
    assert all(isinstance(summary[key], float) for key in SUMMARY)
    assert summary["texts_equal"] is True
    assert 0 < summary["bytes_per_guess"] <= 4
    rows = {(row["rtt_ms"], row["mode"]): row for row in found["rows"]}
    assert {rtt for rtt, _ in rows} == {0.0, 15.0, 80.0}
    assert rows[80.0, "in turns, γ 6"]["tokens_per_s"] < rows[0.0, "in turns, γ 6"]["tokens_per_s"], "the link is felt"
    assert rows[15.0, "chain ahead"]["acceptance_first"] > 0.5
    assert picture.stat().st_size > 20_000


def test_capacity_compares_sessions(tmp_path: Path) -> None:
    report = tmp_path / "capacity.json"
    output = run("capacity", "--quick", "--json", str(report))
    assert "the bound is 1.20" in output
    summary = json.loads(report.read_text())["summary"]
    assert summary["bound"] == {"light": pytest.approx(1.2), "heavy": pytest.approx(1.8)}
    assert summary["sessions_ratio"]["heavy"] > 1.2, "who drafts elsewhere serves more"


@pytest.mark.parametrize(("token_ms", "sessions"), [(10.0, 1.0), (15.0, 1.5), (20.0, 2.0), (30.0, 3.0), (60.0, 6.0)])
def test_sessions_at_a_time_per_token(token_ms: float, sessions: float) -> None:
    line = [Point(1, 10.0), Point(2, 20.0), Point(4, 40.0)]
    assert sessions_at(line, token_ms) == pytest.approx(sessions)


def test_a_pair_accepts_about_what_was_asked_for(tmp_path: Path) -> None:
    pair = far.make_pair(tmp_path, 0.8)
    assert pair.acceptance == pytest.approx(0.8, abs=0.05)
    assert 0.3 < pair.gain < 0.95


@pytest.mark.parametrize("pace", ["", "4", "x:1", "4:1,2:3", "1:-4"])
def test_a_pace_that_cannot_be_read_is_told(pace: str) -> None:
    result = CliRunner().invoke(app, ["bench", "network", "--verify-pace", pace or ","])
    assert result.exit_code != 0
