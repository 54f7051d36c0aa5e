"""Draft logits of published checkpoints against vLLM's own module classes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import published
from tests.published import CASES
from tests.unit.drafter.published.replay import Replay
from tests.vllm.published_oracle import FIXTURES, reference

pytestmark = [pytest.mark.prove, pytest.mark.usefixtures("process_groups")]


@pytest.mark.parametrize("name", CASES)
def test_draft_logits_equal_those_of_vllm(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, results = reference(name, tmp_path, monkeypatch)
    ours = Replay(checkpoint)
    written = load_file(FIXTURES / f"{name}.safetensors")
    rows = 0
    for call, theirs, ids in results:
        assert torch.equal(ids, ours.ids)
        torch.testing.assert_close(ours.run(call), theirs, rtol=0, atol=1e-4)
        torch.testing.assert_close(written["logits"][rows : rows + len(theirs)], theirs, rtol=0, atol=1e-4)
        rows += len(theirs)
    assert rows >= published.MIN_POSITIONS
