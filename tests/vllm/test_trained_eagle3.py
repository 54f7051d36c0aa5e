"""What `outrider train eagle3` writes, against vLLM: its module class, and its accept length with method eagle3."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig
from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

from outrider.testing.toy_models import make_model
from outrider.train.artifacts.embeddings_and_head import read_embeddings_and_head
from outrider.train.published.checkpoint import MODEL, published_weights, save_config
from outrider.train.published.eagle3 import Eagle3, Eagle3Shape
from tests import published
from tests.unit.drafter.published.replay import Replay
from tests.vllm.published_oracle import Oracle

SHAPE = Eagle3Shape(hidden=128, inner=192, heads=4, kv_heads=2, head_dim=32, states=(2, 3, 6), rope_theta=5e3)


@pytest.fixture(scope="module", autouse=True)
def process_groups() -> Iterator[None]:
    """Leave none to the engines of other modules."""
    yield
    destroy_model_parallel()
    destroy_distributed_environment()


@pytest.mark.prove
def test_draft_logits_equal_those_of_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(make_model(tmp_path / "target", seed=7, hidden=128, layers=6, context=1024))
    target = read_embeddings_and_head(folder, lambda _: None)
    torch.manual_seed(3)
    module = Eagle3(SHAPE, torch.arange(2, 257, 3), target)
    checkpoint = tmp_path / "eagle3"
    save_config(checkpoint, module, folder, AutoConfig.from_pretrained(folder))
    save_file(published_weights(module, target.head), checkpoint / MODEL)
    oracle, ours = Oracle(Path(folder), checkpoint, {"method": "eagle3"}, monkeypatch), Replay(checkpoint)
    rows = 0
    for call in published.calls("eagle3", checkpoint):
        theirs, ids = oracle.drafted(oracle.run(call))
        assert torch.equal(ids, ours.ids)
        torch.testing.assert_close(ours.run(call), theirs, rtol=0, atol=1e-4)
        rows += len(theirs)
    assert rows >= published.MIN_POSITIONS
