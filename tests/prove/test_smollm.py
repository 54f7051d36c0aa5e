"""The real 135M model through all services: greedy text equals transformers' own, token for token.

`pytest -m prove tests/prove -s` reports acceptance as it goes; -k picks a part of it: one test per γ and drafter.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.models.hub import DEFAULT, locate_safetensors
from tests.cluster import Cluster, ask, generate_all

pytestmark = [pytest.mark.prove, pytest.mark.timeout(1800)]

MAX_TOKENS = 96
LEFT_OUT = (12, 14)  # of 30 layers: what is left agrees with the whole on most tokens
CONCURRENCY = 12
WAYS = [(0, "model"), (0, "ngram")] + [(gamma, drafter) for drafter in ("model", "ngram") for gamma in (1, 4, 8)]
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\ndef softmax(x):\n",
    "SELECT name, COUNT(*) FROM users",
    '{"name": "Ada", "born": 1815, "fields": [',
    "1, 2, 3, 4, 5, 6,",
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the",
    "A list of fruits:\n- apple\n- banana\n- ",
    "Q: What is photosynthesis?\nA:",
    "Dear Sir or Madam,\n\nI am writing to",
    "Die Hauptstadt von Deutschland ist",
    "La vie est belle parce que",
    "In 1969, humans first",
    "Water boils at",
    "To be, or not to be, that is",
    "<html>\n<head>\n<title>",
    "The three laws of robotics are:",
    "x^2 + 5x + 6 = 0, so x =",
    "My favourite recipe starts with two eggs,",
    "日本の首都は",
    "🙂 emoji are",
    " ",
    "She said hello. He said hello. They said hello. We said hello. She said hello. He said",
    "Summarise in one sentence: " + "The committee met on Tuesday and agreed on very little. " * 20,
    "Breaking news: scientists have discovered",
]


@pytest.fixture(scope="module")
def target() -> Path:
    return Path(locate_safetensors(DEFAULT, print))


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target without two of its layers: a real drafter with the same vocabulary, for nothing."""
    folder = tmp_path_factory.mktemp("draft")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    kept = [index for index in range(len(model.model.layers)) if index not in LEFT_OUT]
    model.model.layers = torch.nn.ModuleList(model.model.layers[index] for index in kept)
    model.config.num_hidden_layers = len(kept)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[index] for index in kept]
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(target).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reference(target: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager").eval()
    started = time.monotonic()
    outputs = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            pad_token_id=tokenizer.eos_token_id,
        )
        outputs.append(made[0, ids.shape[1] :].tolist())
    print(f"\nreference: {sum(map(len, outputs))} tokens in {time.monotonic() - started:.0f} s")
    return outputs


@pytest.fixture(scope="module")
def fleet(
    target: Path, draft: Path, reference: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Started when the reference is there: they would only slow each other down."""
    fleet = Cluster.standard(tmp_path_factory.mktemp("fleet"), target, draft)
    fleet.start()
    yield fleet
    fleet.stop()


@pytest.mark.parametrize(("gamma", "drafter"), WAYS, ids=lambda value: str(value))
async def test_equals_transformers(fleet: Cluster, reference: list[list[int]], gamma: int, drafter: str) -> None:
    requests = [ask(prompt, gamma=gamma, drafter=drafter, temperature=0.0, max_tokens=MAX_TOKENS) for prompt in PROMPTS]
    started = time.monotonic()
    outputs = await generate_all(fleet.address, requests, concurrency=CONCURRENCY, timeout=1500)
    stats = [output.stats for output in outputs]
    checked, accepted = sum(s.draft_tokens for s in stats), sum(s.accepted_tokens for s in stats)
    print(
        f"\nγ {gamma} {drafter}: accepted {accepted}/{checked} guesses, {sum(s.steps for s in stats)} steps, "
        f"{sum(len(output.token_ids) for output in outputs)} tokens in {time.monotonic() - started:.0f} s"
    )
    for prompt, output, wanted in zip(PROMPTS, outputs, reference, strict=True):
        assert output.token_ids == wanted, prompt
    if gamma:
        assert accepted > 0
