"""Training of an eagle: its unrolled attention, and training that continues from a trained drafter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.train.artifacts.eagle import Eagle, EagleShape
from outrider.train.artifacts.embeddings_and_head import EmbeddingsAndHead
from outrider.train.methods.interface import cross_entropy
from tests.architectures import tiny_config, tiny_model

VOCABULARY, PLACES, STEPS = 40, 9, 4


@pytest.fixture
def eagle() -> Eagle:
    torch.manual_seed(0)
    weights = torch.randn(VOCABULARY, 32)
    shape = EagleShape(hidden=32, inner=48, heads=4, kv_heads=2)
    return Eagle(shape, torch.arange(8), EmbeddingsAndHead(weights, weights, None, 0.0)).eval()


@torch.inference_mode()
def test_each_place_unrolls_as_a_drafter_drafts_there(eagle: Eagle) -> None:
    """From place i in step s: the target's states up to place i − s, then the layer's own predictions."""
    states, tokens = torch.randn(1, PLACES, 32), torch.randint(VOCABULARY, (1, PLACES))
    start = 2
    unrolled = eagle.unroll(states, tokens, torch.tensor([PLACES]), torch.tensor([start]), STEPS)
    eagle.body.set_attn_implementation("eager")
    for step in range(STEPS):
        for place in range(start + step, PLACES):
            path = states[:, start : place - step + 1]
            for _ in range(step + 1):
                inputs = eagle.inputs(path, tokens[:, start : start + path.shape[1]])
                positions = torch.arange(start, start + path.shape[1])[None]
                output = eagle.body.model(inputs_embeds=inputs, position_ids=positions).last_hidden_state
                path = torch.cat([path, output[:, -1:]], dim=1)
            torch.testing.assert_close(unrolled[step][:, place], output[:, -1], rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_heads_are_as_wide_as_the_target_s_own() -> None:
    """Their width need not be that of a state by their number, which for gpt-oss is odd: nothing could turn it."""
    target = tiny_model("gpt_oss", {"hidden_size": 60, "num_attention_heads": 4, "head_dim": 16})
    shape = EagleShape.like(target)
    assert (shape.hidden, shape.heads, shape.head_dim) == (60, 4, 16)
    eagle = Eagle(shape, torch.arange(8), EmbeddingsAndHead.of(target))
    states = eagle.unroll(torch.randn(1, 5, 60), torch.arange(5)[None], torch.tensor([5]), torch.tensor([0]), 2)
    assert all(each.shape == (1, 5, 60) for each in states)
    assert EagleShape.like(tiny_model("gpt2", {})).head_dim == 0


def test_places_outside_an_example_change_nothing(eagle: Eagle) -> None:
    states, tokens = torch.randn(1, PLACES, 32), torch.randint(VOCABULARY, (1, PLACES))
    bounds = torch.tensor([7]), torch.tensor([2])
    other = states.clone()
    other[:, :2] += 1.0
    other[:, 7:] += 1.0
    for one, two in zip(
        eagle.unroll(states, tokens, *bounds, STEPS), eagle.unroll(other, tokens, *bounds, STEPS), strict=True
    ):
        assert torch.equal(one[:, 2 + STEPS - 1 : 7], two[:, 2 + STEPS - 1 : 7])


def test_cross_entropy_is_torchs() -> None:
    torch.manual_seed(1)
    target, drafter = torch.randn(5, 30).softmax(dim=-1), torch.randn(5, 30, requires_grad=True)
    wanted = torch.nn.functional.cross_entropy(drafter, target)
    torch.testing.assert_close(cross_entropy(target, drafter), wanted)


def test_a_batch_without_chosen_places_loses_nothing() -> None:
    """Such as a long prompt of whose answer one place is left."""
    drafter = torch.randn(0, 30, requires_grad=True)
    loss = cross_entropy(torch.randn(0, 30).softmax(dim=-1), drafter)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0.0


@pytest.mark.parametrize(("family", "inner"), [("gemma3n_text", 16_384), ("gemma4_text", 96)])
def test_a_target_whose_layers_differ_lends_the_shape_of_one(family: str, inner: int) -> None:
    target: Any = SimpleNamespace(config=tiny_config(family, {}))
    shape = EagleShape.like(target)
    assert (shape.inner, shape.head_dim) == (inner, 16)
    shape.config(num_ids=16)
