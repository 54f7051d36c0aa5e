"""Throughput of `vllm serve` with and without the attached mode, by `vllm bench serve`, both servers by turns."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from outrider.models.hub import fetch_default
from outrider.train.data import shipped
from tests.cluster import Process, environment, free_port
from tests.vllm.conftest import RUNNER
from tests.vllm.test_attach import Served, healthy, plugin, vllm_serve

pytestmark = [
    pytest.mark.prove,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(RUNNER == "v2", reason="the interpreter's times mean nothing"),
]

CONCURRENT = (1, 4, 16)
REQUESTS = {1: 6, 4: 16, 16: 32}
ROUNDS = 3
LENGTH = 96
CACHE = ("--kv-cache-memory-bytes", str(1 << 30))
NOISE = 0.95  # of a ratio of medians of interleaved runs on a shared machine


def dataset(folder: Path, number: int) -> Path:
    """Write prompts of all kinds by turns, as ShareGPT conversations: `vllm bench serve` reads them without pandas."""
    by_kind = [list(group) for _, group in groupby(sorted(shipped("heldout"), key=_kind), key=_kind)]
    mixed = [prompt for turn in zip(*by_kind, strict=False) for prompt in turn]
    chosen = [mixed[index % len(mixed)].text for index in range(number)]
    file = folder / f"prompts-{number}.json"
    file.write_text(json.dumps([{"conversations": [{"value": prompt}, {"value": ""}]} for prompt in chosen]))
    return file


def _kind(prompt: Any) -> str:
    return str(prompt.kind)


def bench(served: Served, model: Path, concurrent: int, folder: Path) -> dict[str, Any]:
    """Return the report of one run; all requests are greedy."""
    number = REQUESTS[concurrent]
    command = [
        *(
            sys.executable,
            "-m",
            "vllm.entrypoints.cli.main",
            "bench",
            "serve",
            "--base-url",
            f"http://{served.address}",
        ),
        *("--model", "m", "--tokenizer", str(model), "--dataset-name", "sharegpt", "--disable-shuffle"),
        *("--dataset-path", str(dataset(folder, number)), "--sharegpt-output-len", str(LENGTH), "--ignore-eos"),
        *("--num-prompts", str(number), "--max-concurrency", str(concurrent), "--temperature", "0"),
        *("--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", "run.json"),
    ]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report: dict[str, Any] = json.loads((folder / "run.json").read_text())
    assert report["completed"] == number, report
    return report


async def test_throughput_is_not_below_that_without_outrider(tmp_path: Path) -> None:
    model = fetch_default(print)
    port = free_port()
    python = [sys.executable, "-u", "-m"]
    coordinator = Process(
        "coordinator", [*python, "coordinator", "--port", str(port), "--http-port", "-1"], port, tmp_path
    )
    drafting = ["drafter", "--kind", "suffix", "--coordinators", coordinator.address]
    drafter = Process("drafter", [*python, *drafting], free_port(), tmp_path)
    coordinator.start().wait_ready(60)
    drafter.start()
    try:
        with (
            vllm_serve(model, tmp_path / "plain.log", *CACHE) as bare,
            vllm_serve(model, tmp_path / "attached.log", *CACHE, *plugin(coordinator, tmp_path)) as served,
        ):
            await healthy(bare)
            await healthy(served)
            drafter.wait_ready(60)
            ratios = {
                concurrent: await _compare(bare, served, model, concurrent, tmp_path) for concurrent in CONCURRENT
            }
    finally:
        drafter.stop()
        coordinator.stop()
    assert min(ratios.values()) >= NOISE, ratios


async def _compare(bare: Served, served: Served, model: Path, concurrent: int, folder: Path) -> float:
    """Return the ratio of the median throughputs, after a round that is not counted; the texts must be equal."""
    reports: dict[str, list[dict[str, Any]]] = {"plain": [], "attached": []}
    for _ in range(1 + ROUNDS):
        for name, server in (("plain", bare), ("attached", served)):
            reports[name].append(await asyncio.to_thread(bench, server, model, concurrent, folder))
    texts = [report["generated_texts"] for runs in reports.values() for report in runs]
    assert all(each == texts[0] for each in texts)
    counted = reports["attached"][1:]
    assert all(report["spec_decode_accepted_tokens"] > 0 for report in counted)
    speeds = {name: [report["output_throughput"] for report in runs[1:]] for name, runs in reports.items()}
    ratio = statistics.median(speeds["attached"]) / statistics.median(speeds["plain"])
    rates = [report["spec_decode_acceptance_rate"] for report in counted]
    lengths = [report["spec_decode_acceptance_length"] for report in counted]
    print(
        f"{concurrent} at once: {ratio:.2f} x, tokens/s {speeds}, acceptance {statistics.median(rates):.0f} %, "
        f"{statistics.median(lengths):.2f} tokens per verified step"
    )
    return ratio
