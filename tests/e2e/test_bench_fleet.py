"""`outrider bench capacity --fleet` with real processes: fleets that it starts, and one that runs already."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import ROOT, Cluster, environment
from tests.conftest import Models

pytestmark = pytest.mark.timeout(200)

COMMAND = (sys.executable, "-c", "from outrider.cli.app import main; main()", "bench", "capacity", "--fleet")
SURROUNDINGS = environment() | {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}


def test_fleets_of_two_sizes_are_started_and_compared(models: Models, tmp_path: Path) -> None:
    written, drawn = tmp_path / "fleet.json", tmp_path / "fleet.png"
    flags = "--verify-pace 1:60,512:64 --verifiers 1,2 --drafters 0 --sessions 2,6 --seconds 2.5 --tokens 12"
    flags += " --system-prompts 1 --set coordinator.max-sessions=5 --set verifier-2.threads=1"
    files = ("--target", str(models.target), "--json", str(written), "--plot", str(drawn))
    command = [*COMMAND, *flags.split(), *files]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=SURROUNDINGS, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(written.read_text())
    rows = {(row["verifiers"], row["sessions"]): row for row in report["rows"]}
    assert set(rows) == {(1, 2), (1, 6), (2, 2), (2, 6)}
    for (verifiers, sessions), row in rows.items():
        assert row["tokens_per_s"] > 0
        assert row["answers"] > 0
        assert row["session_tokens_per_s"] <= 17, "a step takes 60 ms, most of it without the processors"
        assert row["between_tokens_p50_ms"] >= 59
        assert 1 <= row["imbalance"] <= verifiers
        assert row["cached_share"] > 0.3, "the system prompt was sent before"
        assert row["scaling"] == pytest.approx(row["tokens_per_s"] / rows[1, sessions]["tokens_per_s"])
        assert set(row["failures"]) == ({"overloaded"} if sessions == 6 else set()), "five sessions are allowed"
        processes = {"client", "coordinator-1", *(f"verifier-{number}" for number in range(1, verifiers + 1))}
        assert set(row["cpus"]) == processes
    assert rows[1, 6]["tokens_per_s"] > 1.5 * rows[1, 2]["tokens_per_s"], "sessions share steps"
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert "2 verifiers, 1 coordinator, 0 drafters: at most" in done.stdout
    assert "4 of 4: 2 verifiers, 1 coordinator, 0 drafters, 6 sessions:" in done.stderr


def test_a_running_fleet_is_measured_until_ctrl_c(cluster: Cluster, tmp_path: Path) -> None:
    written = tmp_path / "fleet.json"
    flags = ("--endpoint", cluster.address, "--sessions", "2,3", "--seconds", "3", "--tokens", "8", "--gamma", "0")
    command = [*COMMAND, *flags, "--json", str(written)]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=SURROUNDINGS
    )
    assert running.stderr is not None
    for told in iter(running.stderr.readline, ""):
        if re.match(r"1 verifier, 1 coordinator, \d drafters?: 3 sessions", told):
            break
    running.send_signal(signal.SIGINT)
    shown, told = running.communicate(timeout=60)
    assert running.returncode == 0, told
    assert "interrupted: the results are those of 1 of 2 measurements" in told
    (row,) = json.loads(written.read_text())["rows"]
    assert (row["verifiers"], row["sessions"]) == (1, 2)
    assert row["tokens_per_s"] > 0
    assert row["failures"] == {}
    assert row["tokens_per_step"] == pytest.approx(1), "plain decoding was asked for"
    assert set(row["cpus"]) == {"client"}
    assert f"running fleet at {cluster.address}" in shown


def test_a_running_fleet_is_measured_again_without_the_prefixes_of_the_first_time(
    cluster: Cluster, tmp_path: Path
) -> None:
    shares = []
    for name in ("first", "again"):
        written = tmp_path / f"{name}.json"
        flags = ("--endpoint", cluster.address, "--sessions", "1", "--seconds", "1", "--tokens", "96", "--gamma", "0")
        command = [*COMMAND, *flags, "--system-prompts", "0", "--json", str(written)]
        subprocess.run(command, capture_output=True, cwd=ROOT, env=SURROUNDINGS, timeout=60, check=True)
        (row,) = json.loads(written.read_text())["rows"]
        shares.append(row["cached_share"])
    assert max(shares) < 0.1, "no two requests of a measurement begin alike"


def test_a_fleet_that_does_not_run_gets_one_clear_answer() -> None:
    command = [*COMMAND, "--endpoint", "127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=SURROUNDINGS, timeout=60, check=False)
    assert done.returncode == 1
    assert "Is a coordinator running there?" in done.stderr
    assert "--tls-cert" in done.stderr, "where certificates are required, gRPC tells a closed socket alone"
    assert "Traceback" not in done.stderr
