"""`outrider bench drafters` from its flags to its file and picture, with a model small enough to be quick."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import ROOT, environment
from tests.conftest import Models
from tests.contract.conftest import Refused

pytestmark = pytest.mark.timeout(240)

PROMPTS = (
    {"kind": "chat", "prompt": "one two three one two three one two"},
    {"kind": "echo", "prompt": "again and again and again"},  # its answers are long enough to have a speed
)
MODES = ("greedy", "coupled", "block")


COMMAND = (sys.executable, "-c", "from outrider.cli.app import main; main()", "bench", "drafters")
SURROUNDINGS = environment() | {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}


def bench(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=SURROUNDINGS,
        timeout=200,
        check=False,
    )


@pytest.mark.prove
def test_compares_drafters_and_transformers(models: Models, tmp_path: Path) -> None:
    written, drawn, prompts = tmp_path / "drafters.json", tmp_path / "drafters.png", tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, PROMPTS)))
    flags = ("--target", str(models.target), "--drafters", "ngram", "--prompts", str(prompts), "--quick")
    flags = (*flags, "--tokens", "192", "--gamma", "3", "--threads", "1", "--early-exit", "1", "--busy", "1")
    done = bench(*flags, "--json", str(written), "--plot", str(drawn))
    assert done.returncode == 0, done.stderr

    report = json.loads(written.read_text())
    assert set(report) == {"machine", "command", "rows", "summary"}
    assert report["machine"]["weights"] == "float32"
    assert report["machine"]["early_exit_layers"] == 1
    assert report["machine"]["busy_processes"] == 1
    rows = {(row["mode"], row["kind"], row["engine"], row["drafter"]): row for row in report["rows"]}
    transformers = {("transformers", way) for way in ("generate", "prompt lookup", "early exit")}
    outrider = {("outrider", drafter) for drafter in ("plain", "ngram")}
    assert set(rows) == {
        (mode, kind, *who)
        for mode in MODES
        for kind in ("chat", "echo")
        for who in (outrider | transformers if mode == "greedy" else outrider)
    }
    for (mode, _, engine, drafter), row in rows.items():
        assert "error" not in row, row
        assert row["answers"] == 1
        assert (row["tokens_per_s"] or 0) > 0, row
        assert row["texts_equal"] is (None if drafter == "plain" or mode == "block" else True), (engine, drafter)

    summary = report["summary"]
    assert summary["drafter"] == "ngram"
    assert summary["differences"] == []
    assert "speedup_vs_best_vllm" not in summary
    for kind in ("chat", "echo"):
        row = rows["greedy", kind, "outrider", "ngram"]
        assert row["gamma"] == 3
        assert len(row["acceptance_per_position"]) <= 3
        assert summary["speedup_vs_plain"][kind] == pytest.approx(
            row["tokens_per_s"] / rows["greedy", kind, "outrider", "plain"]["tokens_per_s"]
        )
        assert math.isfinite(summary["speedup_vs_best_transformers"][kind])
        assert summary["acceptance_first"][kind] == row["acceptance_first"]
    guessed = [row for row in report["rows"] if row.get("verdicts_with_guess")]
    assert guessed, "of six answers some repeat themselves enough for ngram to guess"
    for row in guessed:
        assert 0 <= row["acceptance_first"] <= 1 <= row["acceptance_length"] <= 4

    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert all(word in done.stdout for word in (*MODES, "ngram", "prompt lookup"))


@pytest.mark.prove
def test_ctrl_c_keeps_the_results_so_far(models: Models, tmp_path: Path) -> None:
    written, prompts = tmp_path / "drafters.json", tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps(PROMPTS[0]))
    flags = ("--target", str(models.target), "--drafters", "ngram", "--prompts", str(prompts), "--json", str(written))
    flags = (*flags, "--modes", "coupled", "--tokens", "64", "--rounds", "5000", "--threads", "1", "--early-exit", "1")
    running = subprocess.Popen(
        [*COMMAND, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=SURROUNDINGS
    )
    assert running.stderr is not None
    for line in iter(running.stderr.readline, ""):
        told_so_far = re.match(r"(\d+) of 10001 answers, now coupled chat: outrider", line)
        if told_so_far is not None and int(told_so_far[1]) > 30:
            break
    running.send_signal(signal.SIGINT)
    shown, told = running.communicate(timeout=60)
    assert running.returncode == 0, told
    assert "interrupted: the results are those of" in told
    rows = json.loads(written.read_text())["rows"]
    assert {(row["mode"], row["drafter"]) for row in rows} == {("coupled", "plain"), ("coupled", "ngram")}
    assert all(row["answers"] > 10 and row["texts_equal"] in (None, True) for row in rows)
    assert "fastest drafter over all kinds: ngram" in shown


def test_bad_prompts_get_one_clear_line(tmp_path: Path, refused: Refused) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"kind": "chat", "prompt": "hello"}\nhello\n')
    line = refused("bench", "drafters", "--prompts", str(broken))
    assert "broken.jsonl:2" in line
    assert "a JSON object" in line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--drafters", "ngram,crystal-ball"), ("--drafters", "crystal-ball", "one of", "ngram")),
        (("--modes", "greedy,typical"), ("--modes", "typical", "some of greedy, coupled, block")),
        (("--vllm-python", "no/such/python"), ("--vllm-python", "no/such/python", "a Python interpreter")),
        (("--llama-python", "no/such/python"), ("--llama-python", "no/such/python", "a Python interpreter")),
    ],
)
def test_bad_flags_get_one_clear_line(flags: tuple[str, ...], words: tuple[str, ...], refused: Refused) -> None:
    line = refused("bench", "drafters", *flags)
    assert all(word in line for word in words), line
