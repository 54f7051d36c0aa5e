"""`outrider bench engine` from its flags to its file and picture, with a model small enough to be quick."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from outrider.bench.common.report import check_files
from outrider.protocol.errors import InvalidRequest
from tests.cluster import ROOT, environment
from tests.conftest import Models
from tests.contract.conftest import Refused
from tests.other_user import without_rights_of_root

pytestmark = pytest.mark.timeout(240)

PARTS = {"verification", "batch", "single_token", "ceiling", "prefill_gap", "prefix_ttft"}
RATIOS = {
    "single_token_vs_eager",
    "flatness_9",
    "flatness_17",
    "sessions8_vs_1",
    "sessions32_vs_1",
    "prefill_gap_ratio",
    "prefix_ttft_ratio",
    "fraction_of_floor",
}


def bench(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from outrider.cli.app import main; main()", "bench", "engine", *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment() | {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"},
        timeout=200,
        check=False,
    )


@pytest.mark.prove
def test_measures_everything_and_writes_it_down(models: Models, tmp_path: Path) -> None:
    written, drawn = tmp_path / "engine.json", tmp_path / "engine.png"
    flags = ("--target", str(models.target), "--quick", "--rounds", "7", "--threads", "1")
    done = bench(*flags, "--json", str(written), "--plot", str(drawn))
    assert done.returncode == 0, done.stderr

    report = json.loads(written.read_text())
    assert set(report) == {"machine", "command", "rows", "summary"}
    assert report["machine"]["threads"] == 1
    assert "--rounds 7" in report["command"]
    summary = report["summary"]
    assert set(summary) > RATIOS
    numbers = [*(value for key, value in summary.items() if key != "memory_mb"), *summary["memory_mb"].values()]
    assert all(math.isfinite(number) and number > 0 for number in numbers), summary
    assert summary["memory_mb"]["before_loading"] < summary["memory_mb"]["after_runs"]

    rows = report["rows"]
    assert {row["part"] for row in rows} == PARTS
    assert all(0 < row["min_ms"] <= row["median_ms"] for row in rows)
    assert all(row["rounds"] >= 7 for row in rows if row["part"] != "prefix_ttft")
    assert {(row["context"], row["new_tokens"]) for row in rows if row["part"] == "verification"} >= {
        (context, new_tokens) for context in (256, 1024) for new_tokens in (1, 9, 17)
    }
    steps = {row["new_tokens"]: row["min_ms"] for row in rows if row.get("context") == 256 and "new_tokens" in row}
    assert summary["flatness_9"] == pytest.approx(steps[9] / steps[1])
    gaps = {row["name"]: row for row in rows if row["part"] == "prefill_gap"}
    assert summary["prefill_gap_ratio"] == pytest.approx(gaps["during"]["p99_ms"] / gaps["without"]["median_ms"])

    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert all(key in done.stdout for key in RATIOS)


def test_a_file_that_may_not_be_written_is_told_before_the_measuring() -> None:
    with tempfile.TemporaryDirectory() as name:
        kept = Path(name, "kept.json")
        kept.touch(mode=0o444)
        os.chmod(name, 0o777)  # a new file may be written beside it
        with without_rights_of_root():
            check_files(Path(name, "new.json"), None)
            with pytest.raises(InvalidRequest, match=r"--json is .*kept\.json, must be a file that can be written"):
                check_files(kept, None)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--rounds", "3"), ("--rounds", "at least 20")),
        (("--quick", "--rounds", "3"), ("--rounds", "at least 7")),
        (("--plot", "curves.pdf"), ("--plot", "curves.pdf", ".png")),
        (("--json", "no-such-folder/x.json"), ("--json", "no-such-folder", "folder that exists")),
        (("--quantization", "int2"), ("--quantization", "int2", "none, int8")),
        (("--target", "./no-such-model"), ("no model at ./no-such-model",)),
    ],
)
def test_bad_input_gets_one_clear_line(flags: tuple[str, ...], words: tuple[str, ...], refused: Refused) -> None:
    line = refused("bench", "engine", *flags)
    assert all(word in line for word in words), line
