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
from tests.published import CASES, LLAMA
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


def test_a_configuration_may_say_qkv_bias_as_the_original_reader_of_eagle_does(tmp_path: Path) -> None:
    """Its checkpoints for targets like Qwen2 need not be named after them; the output has no bias either way."""
    weights = published.weights_of(published.eagle(tmp_path))
    for side in ("q", "k", "v"):
        name = f"layers.0.self_attn.{side}_proj"
        weights[f"{name}.bias"] = torch.linspace(-1, 1, len(weights[f"{name}.weight"]))
    found = []
    for folder, named in (("original", {"qkv_bias": True}), ("qwen2", {"model_type": "qwen2"})):
        checkpoint = published.write(tmp_path / folder, LLAMA | named, weights)
        ours = Replay(checkpoint)
        found.append(torch.cat([ours.run(call) for call in published.calls("eagle", checkpoint, rounds=2)]))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
