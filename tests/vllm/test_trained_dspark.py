"""What `outrider train dspark` writes gives the same logits in vLLM's module class and in ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.train.published.dspark import DsparkShape
from tests import published
from tests.unit.drafter.published.replay import Replay
from tests.vllm.published_oracle import Oracle
from tests.vllm.trained import WIDTHS, written

pytestmark = pytest.mark.usefixtures("process_groups")

# The calls have blocks of six, and their mask is token 5.
SHAPE = DsparkShape(**WIDTHS, states=(2, 3, 6), layers=2, rope_theta=5e3, block=6, rank=16, mask=5)


def compare(folder: Path, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch, rounds: int) -> int:
    """Compare logits with the Markov head's, and confidence; return the number of places."""
    target, checkpoint = written(folder, SHAPE, ids)
    oracle, ours = Oracle(target, checkpoint, "dspark", monkeypatch), Replay(checkpoint)
    assert torch.equal(ours.ids, ids)
    places = 0
    for call in published.calls("dspark", checkpoint, rounds):
        theirs, drafted = oracle.drafted(oracle.run(call))
        assert torch.equal(drafted, ids)
        torch.testing.assert_close(ours.run(call), theirs, rtol=0, atol=1e-4)
        places += len(theirs)
    return places


def test_a_drafter_of_all_ids_guesses_in_vllm_as_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare(tmp_path, torch.arange(257), monkeypatch, rounds=1) == SHAPE.block


@pytest.mark.prove
def test_draft_logits_equal_those_of_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare(tmp_path, torch.arange(2, 257, 3), monkeypatch, rounds=14) >= published.MIN_POSITIONS
