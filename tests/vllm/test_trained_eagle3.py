"""What `outrider train eagle3` writes, in vLLM: equal logits of its module class, equal accept length of its engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from outrider.models.hub import DEFAULT, locate_safetensors
from outrider.train.data import encode, shipped
from outrider.train.published.eagle3 import Eagle3Shape
from outrider.train.run import TrainingOrder
from tests import published
from tests.unit.drafter.published.replay import Replay
from tests.vllm.published_oracle import Oracle
from tests.vllm.trained import WIDTHS, drafted, toy, written

pytestmark = pytest.mark.usefixtures("process_groups")

SHAPE = Eagle3Shape(**WIDTHS, states=(2, 3, 6), rope_theta=5e3)


def test_vllm_reads_every_tensor_of_a_drafter_of_all_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, checkpoint = written(tmp_path, SHAPE, torch.arange(257))
    oracle = Oracle(target, checkpoint, "eagle3", monkeypatch)
    theirs, _ = oracle.drafted(oracle.run(next(published.calls("eagle3", checkpoint))))
    assert theirs.shape[1] == 257


@pytest.mark.prove
def test_draft_logits_equal_those_of_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, checkpoint = written(tmp_path, SHAPE, torch.arange(2, 257, 3))
    oracle, ours = Oracle(target, checkpoint, "eagle3", monkeypatch), Replay(checkpoint)
    rows = 0
    for call in published.calls("eagle3", checkpoint):
        theirs, ids = oracle.drafted(oracle.run(call))
        assert torch.equal(ids, ours.ids)
        torch.testing.assert_close(ours.run(call), theirs, rtol=0, atol=1e-4)
        rows += len(theirs)
    assert rows >= published.MIN_POSITIONS


@pytest.mark.prove
def test_a_toy_drafter_has_the_accept_length_in_vllm_that_it_has_here(tmp_path: Path) -> None:
    theirs, ours = toy("eagle3", tmp_path)
    assert ours.texts == theirs.texts
    assert theirs.accept_length > 2, "nothing to compare"
    assert ours.accept_length == pytest.approx(theirs.accept_length, rel=0.03)


@pytest.mark.prove
@pytest.mark.timeout(3600)
def test_a_drafter_of_the_default_model_has_the_accept_length_in_vllm_that_it_has_here(tmp_path: Path) -> None:
    """Train for minutes, on few texts: a guess in five holds. A near tie of two logits may change a text."""
    order = TrainingOrder(
        "eagle3", DEFAULT, tmp_path / "out", num_examples=400, max_tokens=96, learn_tokens=200_000, num_ids=4096
    )
    tokenizer = AutoTokenizer.from_pretrained(locate_safetensors(DEFAULT, print))
    asked = [encode(tokenizer, prompt.text) for prompt in shipped("heldout")[::3]]
    theirs, ours = drafted(replace(order, device="cpu", data_home=tmp_path / "data"), asked)
    equal = sum(a == b for a, b in zip(theirs.texts, ours.texts, strict=True))
    print(f"accept length {theirs.accept_length:.3f} in vLLM, {ours.accept_length:.3f} here; {equal} equal texts")
    assert equal > 0.9 * len(asked)
    assert theirs.accept_length > 1.15, "nothing to compare"
    assert ours.accept_length == pytest.approx(theirs.accept_length, rel=0.03)
