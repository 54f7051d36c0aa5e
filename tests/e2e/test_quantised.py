"""A quantised target keeps the promises, against itself: the text of plain decoding, whoever drafts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster import SLOW, Cluster, ask, generate_all, until_async
from tests.conftest import Models
from tests.e2e.prompts import mixed

PROMPTS = mixed(8)
WAYS = [(0, ""), (1, "model"), (4, "model"), (4, "ngram"), (8, "ngram")]
JOIN_S = 60.0  # a cold drafter on a busy machine may miss the first answers


async def texts_of(cluster: Cluster, gamma: int, drafter: str, temperature: float) -> list[list[int]]:
    """Return the texts of all prompts; ask again until guesses of the model are accepted."""
    wishes = {"gamma": gamma, "drafter": drafter, "temperature": temperature, "max_tokens": 96}
    requests = [ask(prompt, seed=index, **wishes) for index, prompt in enumerate(PROMPTS)]

    async def speculated() -> list[list[int]]:
        outputs = await generate_all(cluster.address, requests, timeout=60)
        accepted = sum(output.stats.accepted_tokens for output in outputs)
        enough = accepted > 0 or gamma == 0 or drafter == "ngram"
        return [output.token_ids for output in outputs] if enough else []

    found: list[list[int]] = await until_async(speculated, JOIN_S, f"guesses of {drafter} accepted with γ {gamma}")
    return found


@pytest.mark.timeout(200)
@pytest.mark.parametrize("weights", [("--quantization", "int8"), ("--dtype", "bfloat16")], ids=["int8", "bfloat16"])
async def test_guesses_do_not_change_the_text(models: Models, tmp_path: Path, weights: tuple[str, ...]) -> None:
    cluster = Cluster(tmp_path)
    cluster.add_coordinator()
    cluster.add_verifier(models.target, *weights, "--engine", "native", *SLOW)
    cluster.add_drafter("model", models.draft)
    cluster.add_drafter("ngram")
    cluster.start()
    try:
        for temperature in (0.0, 0.9):
            texts = [await texts_of(cluster, gamma, drafter, temperature) for gamma, drafter in WAYS]
            assert all(each == texts[0] for each in texts)
    finally:
        cluster.stop()
