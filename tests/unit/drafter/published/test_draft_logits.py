"""Draft logits of synthetic checkpoints against those of vLLM's module classes, recorded in fixtures.

`tests/vllm/published_oracle.py` writes the fixtures, and `tests/vllm/test_published.py` compares with vLLM itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafter.published.rows import DraftKvCache
from tests import published
from tests.cluster import ROOT
from tests.published import CASES
from tests.unit.drafter.published.replay import Replay


@pytest.mark.parametrize("length", [-1, 1])
def test_rows_that_are_not_there_cannot_be_kept(length: int) -> None:
    with pytest.raises(ValueError, match="must be 0 to 0"):
        DraftKvCache(1).truncate(length)


@pytest.mark.parametrize("name", CASES)
def test_draft_logits_equal_the_recorded_ones(name: str, tmp_path: Path) -> None:
    recorded = load_file(ROOT / "tests" / "fixtures" / "published" / f"{name}.safetensors")
    checkpoint = CASES[name](tmp_path)
    ours = Replay(checkpoint)
    found = torch.cat([ours.run(call) for call in published.calls(name, checkpoint)])
    assert torch.equal(ours.ids, recorded["ids"])
    assert len(found) >= published.MIN_POSITIONS
    torch.testing.assert_close(found, recorded["logits"], rtol=0, atol=1e-4)
