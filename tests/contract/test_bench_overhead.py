"""`outrider bench overhead`: what the services add to a round, with one session and with several at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import ROOT, environment
from tests.contract.conftest import Refused

COMMAND = (sys.executable, "-c", "from outrider.cli.app import main; main()", "bench", "overhead")
SURROUNDINGS = environment() | {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}


def overhead(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *flags], capture_output=True, text=True, timeout=100, cwd=ROOT, env=SURROUNDINGS, check=False
    )


@pytest.mark.parametrize(("flags", "drafters"), [((), {"drafter-1"}), (("--together",), set[str]())])
def test_rounds_of_sessions_at_once(flags: tuple[str, ...], drafters: set[str], tmp_path: Path) -> None:
    written = tmp_path / "overhead.json"
    done = overhead("--rounds", "100", "--sessions", "1,6", "--seconds", "1", "--json", str(written), *flags)
    assert done.returncode == 0, done.stderr
    summary = json.loads(written.read_text())["summary"]
    assert summary["parts"]["drafter_ms"] > 0
    one, six = summary["sessions"]
    assert (one["sessions"], six["sessions"]) == (1, 6)
    for row in (one, six):
        assert row["rounds_per_s"] > 0
        assert row["tokens_per_round"] > 1, "guesses were accepted"
        assert row["cpu_us_per_token"].keys() == {"client", "coordinator-1", "verifier-1"} | drafters
    assert "per CPU second" in done.stdout


@pytest.mark.parametrize("sessions", ["none", "1,0", "1,,2", "5000"])
def test_bad_numbers_get_one_clear_line(sessions: str, refused: Refused) -> None:
    line = refused("bench", "overhead", "--sessions", sessions)
    assert "--sessions" in line
    assert "numbers from 1 to 1024" in line
