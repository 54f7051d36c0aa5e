"""Throughput of `vllm serve` with and without the attached mode, by `vllm bench serve`, both servers by turns."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import pytest

from outrider.models.hub import DEFAULT, locate_safetensors
from outrider.train.data import TrainingPrompt, shipped
from tests.cluster import Process, free_port
from tests.vllm.conftest import RUNNER
from tests.vllm.test_attach import Served, healthy, plugin, vllm_serve

pytestmark = [
    pytest.mark.prove,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(RUNNER == "v2", reason="the interpreter's times mean nothing"),
]

REQUESTS = {1: 3, 4: 8, 16: 24}  # of a run, by how many are open at once
ROUNDS = 3
LENGTH = 64
CACHE = ("--kv-cache-memory-bytes", str(1 << 30))
NOISE = 0.95  # of a ratio of medians of interleaved runs on a shared machine


def prompts() -> list[str]:
    """Return prompts of all kinds by turns. None comes twice: a drafter remembers the texts of earlier runs."""
    known = [*shipped("heldout"), *shipped("train")]
    by_kind = [list(group) for _, group in groupby(sorted(known, key=_kind), key=_kind)]
    return [prompt.text for turn in zip(*by_kind, strict=False) for prompt in turn]


def _kind(prompt: TrainingPrompt) -> str:
    return prompt.kind


def bench(served: Served, model: Path, concurrent: int, given: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return the report of one run; all requests are greedy."""
    file = folder / "prompts.json"  # as ShareGPT conversations, which vLLM reads without pandas
    file.write_text(json.dumps([{"conversations": [{"value": prompt}, {"value": ""}]} for prompt in given]))
    from vllm.benchmarks.serve import add_cli_args, main  # the command `vllm bench serve`
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    add_cli_args(parser := FlexibleArgumentParser())
    flags = [
        *("--base-url", f"http://{served.address}", "--model", "m", "--tokenizer", str(model)),
        *("--dataset-name", "sharegpt", "--dataset-path", str(file), "--disable-shuffle"),
        *("--sharegpt-output-len", str(LENGTH), "--ignore-eos", "--num-prompts", str(len(given))),
        *("--max-concurrency", str(concurrent), "--temperature", "0", "--disable-tqdm"),
        *("--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", "run.json"),
    ]
    main(parser.parse_args(flags))
    report: dict[str, Any] = json.loads((folder / "run.json").read_text())
    assert report["completed"] == len(given), report["errors"][0]
    return report


async def test_throughput_is_not_below_that_without_outrider(tmp_path: Path) -> None:
    model = Path(locate_safetensors(DEFAULT, print))
    port = free_port()
    python = [sys.executable, "-u", "-m"]
    coordinator = Process(
        "coordinator", [*python, "coordinator", "--port", str(port), "--http-port", "-1"], port, tmp_path
    )
    drafting = ["drafter", "--kind", "suffix", "--coordinators", coordinator.address]
    drafter = Process("drafter", [*python, *drafting], free_port(), tmp_path)
    coordinator.start().wait_ready(60)
    drafter.start()
    unused = iter(prompts())
    try:
        with (
            vllm_serve(model, tmp_path / "plain.log", *CACHE) as bare,
            vllm_serve(model, tmp_path / "attached.log", *CACHE, *plugin(coordinator, tmp_path)) as served,
        ):
            await healthy(bare)
            await healthy(served)
            drafter.wait_ready(60)
            ratios = {}
            for concurrent, number in REQUESTS.items():
                runs = [list(islice(unused, number)) for _ in range(1 + ROUNDS)]
                compared = [await _compare(bare, served, model, concurrent, given, tmp_path) for given in runs]
                ratios[concurrent] = _report(concurrent, compared[1:])
    finally:
        drafter.stop()
        coordinator.stop()
    assert min(ratios.values()) >= NOISE, ratios


async def _compare(
    bare: Served, served: Served, model: Path, concurrent: int, given: Sequence[str], folder: Path
) -> list[dict[str, Any]]:
    """Return the reports of both servers for the same prompts; their texts must be equal."""
    reports = [await asyncio.to_thread(bench, each, model, concurrent, given, folder) for each in (bare, served)]
    assert reports[0]["generated_texts"] == reports[1]["generated_texts"]
    return reports


def _report(concurrent: int, rounds: list[list[dict[str, Any]]]) -> float:
    """Print the figures, and return the ratio of the median throughputs."""
    plain, attached = ([reports[index]["output_throughput"] for reports in rounds] for index in (0, 1))
    rates, lengths = (  # not reported of a round without guesses
        statistics.median(reports[1].get(f"spec_decode_acceptance_{name}", 0.0) for reports in rounds)
        for name in ("rate", "length")
    )
    ratio = statistics.median(attached) / statistics.median(plain)
    print(
        f"{concurrent} at once: {ratio:.2f} x; tokens/s without {plain}, with {attached}; "
        f"{rates:.0f} % of guesses accepted, {lengths:.2f} tokens per step with guesses"
    )
    return ratio
