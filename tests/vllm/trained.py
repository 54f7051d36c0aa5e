"""Checkpoints as `outrider train` writes them for a toy target: of random weights, and trained for seconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer

from outrider.models.hub import locate_safetensors
from outrider.testing.toy_models import make_model
from outrider.train.artifacts.embeddings_and_head import read_embeddings_and_head
from outrider.train.data import DataProgress, encode
from outrider.train.loop import Report
from outrider.train.published.checkpoint import MODEL, published_weights, save_config
from outrider.train.published.dspark import Dspark, DsparkShape
from outrider.train.published.eagle3 import Eagle3, Eagle3Shape
from outrider.train.run import TrainingOrder, train
from tests.vllm.accept_length import Drafted, InTurns, in_vllm

WIDTHS = {"hidden": 128, "inner": 192, "heads": 4, "kv_heads": 2, "head_dim": 32}
GAMMA, LENGTH = 4, 48


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


class Quiet:
    """A watcher of a training that shows nothing."""

    def on_status(self, text: str) -> None: ...

    def on_data(self, what: str, progress: DataProgress) -> None: ...

    def on_step(self, report: Report) -> None: ...


def toy(method: str, folder: Path) -> tuple[Drafted, Drafted]:
    """Train a drafter of a toy model; return what vLLM and we draft with it.

    The target's attention adds nothing, so that seconds of training give a drafter with whole guesses accepted.
    """
    model = make_model(folder / "target", seed=7, hidden=128, context=1024, sharpness=4.0, focus=0.0)
    said = [f"{word} heads are better than one" for word in ("two", "six", "no", "many") * 20]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i} {w}"}) + "\n" for i, w in enumerate(said)))
    order = TrainingOrder(
        method,
        str(model),
        folder / "out",
        prompts,
        max_tokens=LENGTH,
        learn_tokens=150_000,
        num_ids=257,
        learning_rate=3e-3,
        heads=GAMMA,
        device="cpu",
        data_home=folder / "data",
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = [encode(tokenizer, text) for text in said[:4]]
    asked += [encode(tokenizer, text)[:-i] for i, text in enumerate(said[4:8], 1)]
    return drafted(order, asked)


def drafted(order: TrainingOrder, asked: Sequence[Sequence[int]]) -> tuple[Drafted, Drafted]:
    """Train a drafter; return what vLLM and we draft with it."""
    train(order, Quiet())
    target, prompts = str(locate_safetensors(order.target, print)), [list(prompt) for prompt in asked]
    theirs = in_vllm(target, order.out, prompts, gamma=GAMMA, length=LENGTH, method=order.method)
    return theirs, InTurns(target, order.out).generate(prompts, gamma=GAMMA, length=LENGTH)
