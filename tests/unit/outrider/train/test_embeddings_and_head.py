"""A target's head, as drafters and training use it, gives the target's logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.train.artifacts.embeddings_and_head import EmbeddingsAndHead, read_embeddings_and_head
from tests.architectures import save, tiny_model

SCALED: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"final_logit_softcapping": 5.0},
    "cohere": {"logit_scale": 0.0625},
    "granite": {"logits_scaling": 8.0},
    "minicpm3": {"dim_model_base": 8},
    "hyperclovax": {"logits_scaling": 0.25},
    "falcon_h1": {"lm_head_multiplier": 0.3},
    "phi": {},  # its head has a bias
    "gemma3": {},  # these three have other names in their files
    "mistral3": {},
    "qwen2_5_vl": {},
}


@pytest.mark.parametrize("family", SCALED)
@torch.inference_mode()
def test_logits_are_the_target_s_own(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, SCALED[family])
    save(model, tmp_path)
    tokens = torch.arange(2, 12)[None]
    body: Any = model.base_model
    states, wanted = body(tokens).last_hidden_state[0], model(tokens).logits[0]
    for matrices in (EmbeddingsAndHead.of(model), read_embeddings_and_head(str(tmp_path), lambda _: None)):
        torch.testing.assert_close(matrices.logits(states, slice(None)), wanted, rtol=1e-4, atol=1e-4)
        few = matrices.cut(torch.tensor([3, 5]))
        torch.testing.assert_close(
            few.logits(states.bfloat16(), slice(None)).float(), wanted[:, [3, 5]], rtol=0.1, atol=0.1
        )


def test_nothing_of_a_target_is_trained() -> None:
    """A step of training would go through its head's bias a second time."""
    matrices = EmbeddingsAndHead.of(tiny_model("phi", {}))
    assert matrices.head_bias is not None
    assert not matrices.probs(torch.ones(1, matrices.hidden)).requires_grad
