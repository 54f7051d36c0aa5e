"""`vllm bench serve` as the load on a fleet: no request fails, and its figures of speculation are the coordinator's."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.testing.toy_models import make_model
from tests.cluster import ROOT, Cluster, environment, speculation_counters

pytestmark = [pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]

REQUESTS = 50
LENGTHS = ("--random-input-len", "24", "--random-output-len", "48")
# The command `vllm` asks for a package of that name; the build for CPUs has another.
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "target", seed=7, sharpness=4.0, focus=0.1)


@pytest.fixture(scope="module")
def fleet(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    draft = make_model(tmp_path_factory.mktemp("draft") / "draft", seed=99, like=target, blur=0.05)
    fleet = Cluster.standard(tmp_path_factory.mktemp("fleet"), target, draft)
    fleet.start()
    yield fleet
    fleet.stop()


async def bench_serve(fleet: Cluster, target: Path, folder: Path, backend: str, endpoint: str) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        BENCH_SERVE,
        *("--backend", backend, "--endpoint", endpoint, "--base-url", fleet.coordinators[0].web),
        *("--model", "target", "--tokenizer", str(target), "--dataset-name", "random", *LENGTHS),
        *("--num-prompts", str(REQUESTS), "--max-concurrency", "2", "--seed", "5", "--ignore-eos"),
        *("--extra-body", json.dumps({"speculation": {"gamma": 3, "drafter": "model"}})),
        *("--save-result", "--result-dir", str(folder), "--result-filename", "result.json"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=ROOT,
        env=environment(HF_HUB_OFFLINE="1"),
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()[-4000:]
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


@pytest.mark.prove
@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions")]
)
async def test_its_figures_are_the_coordinators(
    fleet: Cluster, target: Path, tmp_path: Path, backend: str, endpoint: str
) -> None:
    before = speculation_counters(fleet.coordinators[0])
    result = await bench_serve(fleet, target, tmp_path, backend, endpoint)
    after = speculation_counters(fleet.coordinators[0])
    assert (result["completed"], result["failed"]) == (REQUESTS, 0)
    assert result["total_output_tokens"] == REQUESTS * 48
    measured = {name: after[name] - before[name] for name in after}
    reported = {
        "drafts": result["spec_decode_num_drafts"],
        "draft_tokens": result["spec_decode_draft_tokens"],
        "accepted_tokens": result["spec_decode_accepted_tokens"],
    }
    # One request of its own, a warm-up that its figures leave out, comes before it reads the counters.
    print(f"{backend}: {reported}, mean length {result['spec_decode_acceptance_length']:.3f}")
    assert measured["accepted_tokens"] > 0
    assert all(0 <= measured[name] - reported[name] <= 48 for name in reported), (measured, reported)
    length = 1 + reported["accepted_tokens"] / reported["drafts"]
    assert result["spec_decode_acceptance_length"] == pytest.approx(length)
