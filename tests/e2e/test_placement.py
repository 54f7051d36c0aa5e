"""Sessions with shared prompts on three verifiers: placed where the prompt lies, and evenly.

`pytest -m prove -s tests/e2e/test_placement.py` prints the figures.
"""

from __future__ import annotations

import random
from pathlib import Path

import httpx2 as httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.placement.sent_prefixes import BLOCK_TOKENS
from tests.cluster import Cluster, ask, free_port, generate_all
from tests.conftest import Models

pytestmark = [pytest.mark.prove, pytest.mark.timeout(600)]

SYSTEMS, SESSIONS, VERIFIERS = 20, 200, 3
SYSTEM_TOKENS, OWN_TOKENS = 16 * BLOCK_TOKENS, 40


def prompts() -> list[list[int]]:
    """Return the prompts of all sessions: a shared system prompt, then tokens of their own."""
    rng = random.Random(5)
    systems = [[rng.randrange(256) for _ in range(SYSTEM_TOKENS)] for _ in range(SYSTEMS)]
    made = [systems[i % SYSTEMS] + [rng.randrange(256) for _ in range(OWN_TOKENS)] for i in range(SESSIONS)]
    rng.shuffle(made)
    return made


def counter(port: int, name: str) -> float:
    page = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name == f"outrider_{name}_total")


@pytest.mark.parametrize("at_once", [6, 24])
async def test_most_shared_prompts_are_found_and_load_is_even(models: Models, tmp_path: Path, at_once: int) -> None:
    cluster = Cluster(tmp_path)
    cluster.add_coordinator()
    ports = [free_port() for _ in range(VERIFIERS)]
    for port in ports:
        cluster.add_verifier(models.target, "--metrics-port", str(port))
    try:
        cluster.start()
        given = prompts()
        requests = [ask(tokens, max_tokens=8, temperature=0.0, ignore_eos=True, gamma=0) for tokens in given]
        outputs = await generate_all(cluster.address, requests, concurrency=at_once)
        looked_up = [counter(port, "prefix_cache_queries") for port in ports]
    finally:
        cluster.stop()
    found = sum(output.stats.cached_tokens for output in outputs)
    possible = (SESSIONS - SYSTEMS) * SYSTEM_TOKENS
    imbalance = max(looked_up) * VERIFIERS / sum(looked_up)
    print(f"{at_once} at once: {found / possible:.3f} of an infinite cache's hits, imbalance {imbalance:.2f}")
    assert found >= 0.9 * possible
    assert imbalance <= 1.3
