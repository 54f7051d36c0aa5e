"""What `outrider train eagle3` writes, in vLLM: equal logits of its module class, equal accept length of its engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from outrider.testing.toy_models import make_model
from outrider.train.data import DataProgress, encode
from outrider.train.loop import Report
from outrider.train.published.eagle3 import Eagle3Shape
from outrider.train.run import TrainingOrder, train
from tests import published
from tests.unit.drafter.published.replay import Replay
from tests.vllm.accept_length import InTurns, Tokens, in_vllm
from tests.vllm.published_oracle import Oracle
from tests.vllm.trained import WIDTHS, written

pytestmark = pytest.mark.usefixtures("process_groups")

SHAPE = Eagle3Shape(**WIDTHS, states=(2, 3, 6), rope_theta=5e3)
GAMMA = 4


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


class Quiet:
    """A watcher of a training that shows nothing."""

    def on_status(self, text: str) -> None: ...

    def on_data(self, what: str, progress: DataProgress) -> None: ...

    def on_step(self, report: Report) -> None: ...


def accept_lengths(order: TrainingOrder, prompts: list[Tokens], length: int) -> tuple[float, float]:
    """Train a drafter; return its accept length in vLLM and in ours, after which both texts were found equal."""
    train(order, Quiet())
    theirs = in_vllm(order.target, order.out, prompts, gamma=GAMMA, length=length)
    ours = InTurns(order.target, order.out).generate(prompts, gamma=GAMMA, length=length)
    assert ours.texts == theirs.texts
    return theirs.accept_length, ours.accept_length


@pytest.mark.prove
def test_a_toy_drafter_has_the_accept_length_in_vllm_that_it_has_here(tmp_path: Path) -> None:
    """The target's attention adds nothing, so that seconds of training give a drafter with whole guesses accepted."""
    model = make_model(tmp_path / "target", seed=7, hidden=128, context=1024, sharpness=4.0, focus=0.0)
    said = [f"{word} heads are better than one" for word in ("two", "six", "no", "many") * 20]
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i} {w}"}) + "\n" for i, w in enumerate(said))
    )
    order = TrainingOrder(
        "eagle3",
        str(model),
        tmp_path / "out",
        tmp_path / "prompts.jsonl",
        max_tokens=48,
        learn_tokens=150_000,
        num_ids=257,
        learning_rate=3e-3,
    )
    order = replace(order, device="cpu", data_home=tmp_path / "data")
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [encode(tokenizer, text) for text in said[:4]] + [
        encode(tokenizer, text)[:-i] for i, text in enumerate(said[4:8], 1)
    ]
    theirs, ours = accept_lengths(order, prompts, 48)
    assert theirs > 2, "nothing to compare"
    assert ours == pytest.approx(theirs, rel=0.03)
