"""A trained early exit computes what its drafter serves, also where layers differ or logits are scaled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from drafter.methods import early_exit as served
from outrider.engine import SessionTokens
from outrider.protocol.errors import StartupError
from outrider.settings.drafter import DrafterSettings
from outrider.train.artifacts import card as cards
from outrider.train.artifacts.card import Card
from outrider.train.artifacts.embeddings_and_head import EmbeddingsAndHead
from outrider.train.data import Example
from outrider.train.methods.interface import TrainingInputs, collate
from outrider.train.methods.language_model import LanguageMethod, early_exit
from tests.architectures import LLAMA3, save, tiny_model

EXIT, TRAINED = 2, 1  # of four layers: the last one's copy is the third
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "gemma2": {"final_logit_softcapping": 5.0},
    "gemma3_text": {"layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]},
    "cohere2": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 8.0},
}


def method_for(folder: Path) -> LanguageMethod:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = TrainingInputs(model, EmbeddingsAndHead.of(model), torch.arange(257), [])
    return early_exit(inputs, exit_layers=EXIT, layers=TRAINED)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_trained_is_served(family: str, tmp_path: Path) -> None:
    target = tiny_model(family, FAMILIES[family])
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(8.0)  # else every token attends to all alike, whatever the rotation
    save(target, tmp_path / "target")
    method = method_for(tmp_path / "target")
    cards.save(tmp_path / "out", Card("early-exit", "target", "", "", "", dict(method.shape)), method.weights())
    tokens = torch.randint(2, 250, (40,), generator=torch.Generator().manual_seed(3))
    width = method._target_weights.hidden
    text = Example(tokens, 2, torch.zeros(39, width), torch.zeros(39, 0))
    with torch.no_grad():
        states = method._states(collate([text], 384, torch.device("cpu")))
        trained = torch.log_softmax(method._logits(states)[0].float(), dim=-1)
    settings = DrafterSettings(
        kind="early-exit", model=str(tmp_path / "out"), target=str(tmp_path / "target"), device="cpu", kv_tokens=512
    )
    engine = served.make(settings, lambda _: None)._engine
    logits = engine.extend([SessionTokens("s", tokens.tolist(), logits_from=0)]).logits[0]
    torch.testing.assert_close(trained, torch.log_softmax(logits[1:-1].float(), dim=-1), rtol=0, atol=0.1)


def test_layers_that_cannot_stand_earlier_are_told(tmp_path: Path) -> None:
    """In a mixture of experts whose first layers are dense, the last layer's weights do not fit them."""
    save(tiny_model("deepseek_v3", {"first_k_dense_replace": 3}), tmp_path)
    with pytest.raises(StartupError, match="its last layers have other weights than"):
        method_for(tmp_path)
