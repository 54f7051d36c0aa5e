"""Checkpoints as `outrider train` writes them, with random weights, for a toy target."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from outrider.testing.toy_models import make_model
from outrider.train.artifacts.embeddings_and_head import read_embeddings_and_head
from outrider.train.published.checkpoint import MODEL, published_weights, save_config
from outrider.train.published.dspark import Dspark, DsparkShape
from outrider.train.published.eagle3 import Eagle3, Eagle3Shape

WIDTHS = {"hidden": 128, "inner": 192, "heads": 4, "kv_heads": 2, "head_dim": 32}


def written(folder: Path, shape: Eagle3Shape, ids: torch.Tensor) -> tuple[Path, Path]:
    """Return a target, and a checkpoint for it that drafts these ids."""
    target = make_model(folder / "target", seed=7, hidden=128, layers=6, context=1024)
    torch.manual_seed(3)
    matrices = read_embeddings_and_head(str(target), lambda _: None)
    module = Dspark(shape, ids, matrices) if isinstance(shape, DsparkShape) else Eagle3(shape, ids, matrices)
    checkpoint = folder / "drafter"
    save_config(checkpoint, module, str(target), AutoConfig.from_pretrained(target))
    save_file(published_weights(module, matrices.head), checkpoint / MODEL)
    return target, checkpoint
