"""Draft logits of DeepSeek's module against transformers' own layer: every pass computes the whole text again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import DeepseekV3Config
from transformers.masking_utils import create_causal_mask
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

from drafter.published.loading import PublishedCheckpoint
from tests import published
from tests.published import VOCAB, Call, Weights, calls, weights_of
from tests.unit.drafter.published.replay import Replay

PLAIN: dict[str, Any] = {"rope_scaling": None}
ROPES: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "plain, as newer transformers write it": PLAIN | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
    "another base": PLAIN | {"rope_theta": 1e6},
    "yarn": {},
}
LAYER = "model.layers.6."


class Oracle:
    """The module's rows so far: tokens, and the hidden states before them."""

    def __init__(self, checkpoint: Path) -> None:
        self._weights: Weights = weights_of(checkpoint)
        self._config = DeepseekV3Config(**json.loads((checkpoint / "config.json").read_text()))
        self._config._attn_implementation = "eager"
        own = {name.removeprefix(LAYER): each for name, each in self._weights.items() if name.startswith(LAYER)}
        self._layer = theirs.DeepseekV3DecoderLayer(self._config, self._config.num_hidden_layers).eval()
        self._layer.load_state_dict(self._stacked({name: own[name] for name in own if name.startswith(_OF_LAYER)}))
        self._rope = theirs.DeepseekV3RotaryEmbedding(self._config)
        self._tokens = torch.empty(0, dtype=torch.long)
        self._hidden = torch.empty(0, self._config.hidden_size)
        self._output = torch.empty(0)

    @torch.no_grad()
    def run(self, call: Call) -> torch.Tensor:
        states = self._output[-1:] if call.states is None else call.states
        self._tokens = torch.cat([self._tokens[: call.cut], call.tokens])
        self._hidden = torch.cat([self._hidden[: call.cut], states])
        embedded = self._weights[f"{LAYER}embed_tokens.weight"][self._tokens].clone()
        embedded[0] = 0
        sides = [self._normed(embedded, "enorm"), self._normed(self._hidden, "hnorm")]
        mixed = (torch.cat(sides, dim=-1) @ self._weights[f"{LAYER}eh_proj.weight"].T)[None]
        places = torch.arange(len(self._tokens))[None]
        mask = create_causal_mask(self._config, mixed, None, None, position_ids=places)
        rotation = self._rope(mixed, places)
        output = self._layer(mixed, attention_mask=mask, position_ids=places, position_embeddings=rotation)
        self._output = self._normed(output[0], "shared_head.norm")
        return self._output[-len(call.tokens) :] @ self._weights[f"{LAYER}shared_head.head.weight"].T

    def _normed(self, rows: torch.Tensor, norm: str) -> torch.Tensor:
        weight = self._weights[f"{LAYER}{norm}.weight"]
        return functional.rms_norm(rows, weight.shape, weight, self._config.rms_norm_eps)

    def _stacked(self, weights: Weights) -> Weights:
        """Return the weights with the experts in two tensors, as transformers holds them."""
        experts = range(self._config.n_routed_experts)

        def each(side: str) -> list[torch.Tensor]:
            return [weights.pop(f"mlp.experts.{number}.{side}_proj.weight") for number in experts]

        both = [torch.cat(pair) for pair in zip(each("gate"), each("up"), strict=True)]
        stacked = {"mlp.experts.gate_up_proj": torch.stack(both), "mlp.experts.down_proj": torch.stack(each("down"))}
        return weights | stacked


_OF_LAYER = ("self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm.")


@pytest.mark.parametrize("low_rank", [True, False])
@pytest.mark.parametrize("rope", ROPES)
def test_draft_logits_equal_those_of_transformers(rope: str, low_rank: bool, tmp_path: Path) -> None:
    checkpoint = published.deepseek(tmp_path, low_rank=low_rank, **ROPES[rope])
    ours, oracle, positions = Replay(checkpoint), Oracle(checkpoint), 0
    for call in calls("deepseek-mtp", checkpoint):
        found, wanted = ours.run(call), oracle.run(call)
        assert found.shape[-1] == VOCAB
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
        positions += len(found)
    assert positions >= published.MIN_POSITIONS


@pytest.mark.parametrize("make", [published.deepseek, published.glm])
def test_experts_are_chosen_as_in_float32(make: published.Maker, tmp_path: Path) -> None:
    """Their correction is much larger than its differences: with both in bfloat16 others would be chosen."""
    config = json.loads((make(tmp_path) / "config.json").read_text())
    weights, gate = weights_of(tmp_path), f"{LAYER}mlp.gate."
    random = torch.Generator().manual_seed(3)
    weights[f"{gate}weight"] = weights[f"{gate}weight"].bfloat16().float()
    weights[f"{gate}e_score_correction_bias"] = 8 + 0.01 * torch.randn(config["n_routed_experts"], generator=random)
    published.write(tmp_path, config, weights, "sharded")
    rows = torch.randn(64, published.HIDDEN, generator=random).bfloat16()
    chosen = []
    for dtype in (torch.float32, torch.bfloat16):
        module: Any = PublishedCheckpoint.open(tmp_path).load(dtype=dtype)
        chosen.append(module.layer.mlp.route(rows.to(dtype))[1])
    assert torch.equal(*chosen)
