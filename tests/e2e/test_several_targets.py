"""Two targets and three drafters in one fleet: each model answers as in a fleet of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from outrider.client.sync import Client
from outrider.protocol.errors import NotFound
from outrider.protocol.fleet import Role
from outrider.protocol.sampling_params import SamplingParams
from tests.cluster import Cluster, until
from tests.conftest import Models
from tests.e2e.up import up

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc"),
]

PROMPT = "Two are better than one, and two are better than none. "
LENGTH = 80
LONG = 300  # a cold drafter joins after a hundred tokens, on a busy machine after more: see `check`
JOIN_S = 60.0


def plain(folder: Path) -> str:
    """Return what transformers generates."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer.encode(PROMPT)
    with torch.inference_mode():
        for _ in range(LENGTH):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return str(tokenizer.decode(tokens[-LENGTH:], skip_special_tokens=True))


def answer(client: Client, model: str, **params: float) -> str:
    given = SamplingParams(max_tokens=LENGTH, ignore_eos=True, **params)  # type: ignore[arg-type]
    return client.complete(PROMPT, params=given, model=model).text


def accepted(client: Client, model: str, drafter: str) -> int:
    given = SamplingParams(max_tokens=LONG, ignore_eos=True, temperature=0.0)
    done = client.complete(PROMPT, params=given, model=model, drafter=drafter, gamma=3)
    return done.finished.stats.accepted_tokens


def flags(models: Models, tmp_path: Path) -> list[str]:
    both = ["--target", f"a={models.target}", "--target", f"words={models.other_vocabulary}"]
    drafters = ["--drafter", "suffix", "--drafter", f"a=model:{models.draft}"]
    return [*both, *drafters, "--set", "coordinator.alias=second=words", "--state-dir", str(tmp_path / "state")]


def check(client: Client, models: Models) -> None:
    """Check names, texts and drafters of the fleet."""
    workers = client.server().workers
    assert sorted((each.role, each.kind) for each in workers) == [
        *[(Role.VERIFIER, "target")] * 2,
        (Role.DRAFTER, "model"),
        *[(Role.DRAFTER, "suffix")] * 2,
    ]
    own = {"a": models.target, "words": models.other_vocabulary}
    texts = {name: plain(folder) for name, folder in own.items()}
    assert texts["a"] != texts["words"]
    for name, own_name in (("a", "a"), ("", "a"), ("words", "words"), ("second", "words")):
        assert answer(client, name, temperature=0.0) == texts[own_name]
    for name, drafter in (("a", "model"), ("words", "suffix")):
        until(lambda n=name, d=drafter: accepted(client, n, d), JOIN_S, f"guesses of {drafter} accepted by {name}")
    assert accepted(client, "words", "model") == 0, "it has another vocabulary"
    with pytest.raises(NotFound):
        client.complete("x", model="another")


def test_two_targets_and_three_drafters(models: Models, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.add_coordinator("--default-model", "a", "--alias", "second=words")
    cluster.add_verifier(models.target, "--served-model-name", "a")
    cluster.add_verifier(models.other_vocabulary, "--served-model-name", "words")
    for kind, model in (("suffix", None), ("suffix", None), ("model", models.draft)):
        cluster.add_drafter(kind, model)
    try:
        with Client([cluster.start().address]) as client:
            check(client, models)
    finally:
        cluster.stop()


@pytest.mark.prove
def test_outrider_up_starts_them(models: Models, tmp_path: Path) -> None:
    with up(tmp_path, *flags(models, tmp_path)) as running, Client([running.ready()]) as client:
        assert "models: a, words" in running.log.read_text()
        check(client, models)


@pytest.mark.prove
def test_each_answers_as_in_a_fleet_of_its_own(models: Models, tmp_path: Path) -> None:
    """Also drawn texts, with seeds."""
    drawn = {"temperature": 0.9, "seed": 7}
    found: list[dict[str, str]] = []
    with up(tmp_path, *flags(models, tmp_path)) as running, Client([running.ready()]) as client:
        for name in ("a", "words"):
            found.append({"greedy": answer(client, name, temperature=0.0), "drawn": answer(client, name, **drawn)})
    for target in (models.target, models.other_vocabulary):
        alone = ["--target", str(target), "--drafter", "suffix", "--state-dir", str(tmp_path / target.name)]
        with up(tmp_path, *alone) as running, Client([running.ready()]) as client:
            expected = {"greedy": answer(client, "", temperature=0.0), "drawn": answer(client, "", **drawn)}
        assert found.pop(0) == expected
