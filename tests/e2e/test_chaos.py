"""A fault campaign as its users run it: some seconds, five minutes, and one that is interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import ROOT, environment, until


def campaign(folder: Path, *flags: str, seconds: float) -> tuple[int, dict[str, Any], str]:
    """Exit status, report, and what was said."""
    report = folder / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--json", str(report), *flags],
        cwd=ROOT,
        env=environment(TMPDIR=str(folder)),
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    print(done.stdout[-8000:], done.stderr[-4000:])
    return done.returncode, json.loads(report.read_text()) if report.exists() else {}, done.stdout


@pytest.mark.prove
@pytest.mark.timeout(400)
def test_a_short_campaign(tmp_path: Path) -> None:
    """Other tests may run beside it, so nothing is said of speed."""
    flags = (
        "--minutes",
        "0.2",
        "--seed",
        "12",
        "--clients",
        "8",
        "--warm-s",
        "2",
        "--pause-s",
        "0.7",
        "--max-gap-s",
        "60",
    )
    status, report, said = campaign(tmp_path, *flags, seconds=380)
    assert status == 0, said
    assert said.startswith("seed 12\n")
    assert report["never"] == dict.fromkeys(report["never"], 0)
    assert report["faults"] >= 4
    assert report["sessions"] >= 8
    assert not list(tmp_path.glob("outrider-chaos-*")), "nothing is left behind"


@pytest.mark.prove
@pytest.mark.timeout(1200)
def test_five_minutes(tmp_path: Path) -> None:
    status, report, said = campaign(tmp_path, "--minutes", "5", "--seed", "7", seconds=1100)
    assert status == 0, said
    assert report["faults"] >= 25
    assert report["sessions"] >= 170
    assert report["p99_gap_after_kill_s"] <= 3.0


@pytest.mark.prove
@pytest.mark.timeout(300)
def test_an_interrupted_campaign_leaves_nothing_behind(tmp_path: Path) -> None:
    running = subprocess.Popen(
        [sys.executable, "-m", "tests.chaos", "--seed", "3"],
        cwd=ROOT,
        env=environment(TMPDIR=str(tmp_path)),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    for line in running.stdout:
        if line.startswith("warming up"):
            break
    children = _children(running.pid)
    assert len(children) >= 8
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 130
    running.stdout.close()
    until(lambda: not any(Path(f"/proc/{child}").exists() for child in children), 10, "every process gone")
    assert not list(tmp_path.glob("outrider-chaos-*"))


def _children(pid: int) -> list[int]:
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(entry))
    return found
