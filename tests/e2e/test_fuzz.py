"""All edges against mutated messages and noise: no fault of ours, nobody else notices, nothing is left over."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import ROOT, environment
from tests.fuzz.generators import EDGES

INPUTS = 500  # an edge
MANY = 20_000


def fuzz(folder: Path, *options: str, seconds: float) -> dict[str, Any]:
    account = folder / "account.json"
    command = [sys.executable, "-m", "tests.fuzz", "--json", str(account), "--keep", str(folder), *options]
    run = subprocess.run(
        command, cwd=ROOT, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=seconds
    )
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-3_000:]
    found: dict[str, Any] = json.loads(account.read_text())
    return found


@pytest.mark.timeout(240)
def test_hundreds_of_inputs_an_edge(tmp_path: Path) -> None:
    found = fuzz(tmp_path, "--inputs", str(INPUTS), "--seed", "12", seconds=230)
    assert [edge["edge"] for edge in found["edges"] if edge["inputs"] >= INPUTS] == list(EDGES)
    assert found["neighbour"]["answers"] > 5
    assert found["neighbour"]["wrong"] == 0
    assert found["problems"] == []


@pytest.mark.prove
@pytest.mark.timeout(3600)
def test_twenty_thousand_inputs_an_edge_and_a_neighbours_speed(tmp_path: Path) -> None:
    found = fuzz(tmp_path, "--inputs", str(MANY), "--measure", seconds=3500)
    assert [edge["edge"] for edge in found["edges"] if edge["inputs"] >= MANY] == list(EDGES)
    assert found["problems"] == []
    print(found["neighbour"])
