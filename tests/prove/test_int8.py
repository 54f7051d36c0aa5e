"""The real model with weights of one byte: hardly less likely text, and the promises hold against itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.engine import Engine, SessionTokens
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
from outrider.models.hub import fetch_default
from tests.cluster import Cluster, ask, generate_all
from tests.prove.test_smollm import PROMPTS

pytestmark = [pytest.mark.prove, pytest.mark.timeout(1800)]

TEXT = Path(__file__).with_name("lighthouse.txt")
WAYS = [(0, "ngram"), (4, "ngram"), (4, "model"), (8, "model")]


def mean_nll(engine: Engine, tokens: list[int]) -> float:
    logits = engine.extend([SessionTokens("text", tokens)]).logits[0]
    engine.free("text")
    return float(torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(tokens[1:])))


def test_the_text_is_as_likely_within_a_hundredth() -> None:
    path = str(fetch_default(print))
    full = load_model(path, EngineOptions(device="cpu"))
    tokens = full.tokenizer.encode(TEXT.read_text())
    exact = mean_nll(full.engine, tokens)
    small = mean_nll(load_model(path, EngineOptions(device="cpu", quantization="int8")).engine, tokens)
    print(f"\nmean negative log-likelihood of {len(tokens)} tokens: float32 {exact:.4f}, int8 {small:.4f}")
    assert small <= 1.01 * exact


async def test_guesses_do_not_change_the_text(tmp_path: Path) -> None:
    """Greedy and coupled, against the plain decoding of the same quantised target; the drafter is the whole model."""
    path = fetch_default(print)
    fleet = Cluster(tmp_path)
    fleet.add_coordinator()
    fleet.add_verifier(path, "--quantization", "int8", "--engine", "native")
    fleet.add_drafter("model", path)
    fleet.add_drafter("ngram")
    fleet.start()
    try:
        for temperature in (0.0, 0.8):
            made = []
            for gamma, drafter in WAYS:
                requests = [
                    ask(prompt, gamma=gamma, drafter=drafter, temperature=temperature, max_tokens=48, seed=5)
                    for prompt in PROMPTS[:16]
                ]
                outputs = await generate_all(fleet.address, requests, concurrency=8, timeout=900)
                made.append([output.token_ids for output in outputs])
                accepted = sum(output.stats.accepted_tokens for output in outputs)
                print(f"\ntemperature {temperature}, γ {gamma}, {drafter}: {accepted} guesses accepted")
                assert gamma == 0 or drafter == "ngram" or accepted > 200
            assert all(each == made[0] for each in made)
    finally:
        fleet.stop()
