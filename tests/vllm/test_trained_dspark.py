"""What `outrider train dspark` writes gives the same logits in vLLM's module class and in ours."""

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
from outrider.train.published.dspark import Dspark, DsparkShape
from tests import published
from tests.unit.drafter.published.replay import Replay
from tests.vllm.published_oracle import Oracle

# The calls have blocks of six, and their mask is token 5.
SHAPE = DsparkShape(
    hidden=128,
    inner=192,
    heads=4,
    kv_heads=2,
    head_dim=32,
    states=(2, 3, 6),
    layers=2,
    rope_theta=5e3,
    block=6,
    rank=16,
    mask=5,
)


@pytest.fixture(scope="module", autouse=True)
def process_groups() -> Iterator[None]:
    """Leave none to the engines of other modules."""
    yield
    destroy_model_parallel()
    destroy_distributed_environment()


def written(folder: Path, ids: torch.Tensor) -> tuple[Path, Path]:
    """Return a toy target, and a checkpoint of random weights for it that drafts these ids."""
    target = make_model(folder / "target", seed=7, hidden=128, layers=6, context=1024)
    torch.manual_seed(3)
    matrices = read_embeddings_and_head(str(target), lambda _: None)
    module, checkpoint = Dspark(SHAPE, ids, matrices), folder / "dspark"
    save_config(checkpoint, module, str(target), AutoConfig.from_pretrained(target))
    save_file(published_weights(module, matrices.head), checkpoint / MODEL)
    return target, checkpoint


def compare(folder: Path, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch, rounds: int) -> int:
    """Compare logits with the Markov head's, and confidence; return the number of places."""
    target, checkpoint = written(folder, ids)
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
