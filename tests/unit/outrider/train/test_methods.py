"""Which token each guess is trained on and measured by: a drafter that foresees the target's states loses nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider.protocol.errors import StartupError
from outrider.train.artifacts.embeddings_and_head import EmbeddingsAndHead
from outrider.train.data import Example
from outrider.train.fit import best_linear, frequent_ids
from outrider.train.methods.eagle import EagleMethod
from outrider.train.methods.interface import Batch, Method, TrainingInputs, collate
from outrider.train.methods.language_model import early_exit
from outrider.train.methods.medusa import MedusaMethod
from tests.architectures import tiny_model

HIDDEN, VOCABULARY, HEADS = 64, 257, 3
CERTAIN = 8.0  # by so much the next token leads


def texts() -> list[Example]:
    """Return texts whose final states leave no doubt about the next token; the head is that of `inputs`."""
    generator = torch.Generator().manual_seed(5)
    head = heads()
    found, every = [], torch.randperm(VOCABULARY, generator=generator)
    for prompt, written in ((6, 20), (3, 9)):
        tokens, every = every[: prompt + written], every[prompt + written :]
        found.append(Example(tokens, prompt, CERTAIN * head[tokens[1:]].half(), torch.zeros(prompt + written - 1, 0)))
    return found


def heads() -> torch.Tensor:
    rows = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(6))
    return rows / rows.norm(dim=1, keepdim=True) * 3


def method_of(kind: str, examples: list[Example]) -> Any:
    model = tiny_model("llama", {"num_hidden_layers": 4, "hidden_size": HIDDEN, "tie_word_embeddings": False})
    with torch.no_grad():
        model.get_output_embeddings().weight.copy_(heads())
    matrices = EmbeddingsAndHead.of(model)
    inputs = TrainingInputs(model, matrices, torch.arange(VOCABULARY), examples)
    if kind == "medusa":
        return MedusaMethod(inputs, heads=HEADS)
    if kind == "eagle":
        return EagleMethod(inputs, layers=1, steps=HEADS)
    return early_exit(inputs, exit_layers=1, layers=1)


def foresee(method: Any, batch: Batch, late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the module predict the state that the target has, or the one `late` positions after it."""
    places = batch.tokens.shape[1]
    known = batch.hidden_states.flatten(0, 1)

    def predict(states: torch.Tensor, tokens: torch.Tensor, head: int) -> torch.Tensor:
        at = (states.reshape(-1, 1, HIDDEN) == known).all(dim=2).int().argmax(dim=1)
        later = (at % places + head + late).clamp(max=places - 1)
        return batch.wanted[at // places, later].reshape(states.shape)

    wanted = batch.wanted.roll(-late, dims=1)
    replaced: dict[str, Callable[..., Any]] = {
        "predict": predict,
        "unroll": lambda *args: [wanted] * args[-1],
        "_states": lambda _: wanted,
    }
    for name, change in replaced.items():
        for owner in (method, method.module):
            if hasattr(owner, name):
                monkeypatch.setattr(owner, name, change)


@pytest.mark.parametrize("kind", ["eagle", "medusa", "early-exit"])
@pytest.mark.parametrize("late", [0, 1])
def test_a_guess_is_held_to_the_token_that_it_is_for(kind: str, late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = texts()
    method: Method = method_of(kind, examples)
    batch = collate(examples, 384, torch.device("cpu"))
    foresee(method, batch, late, monkeypatch)
    with torch.autocast("cpu", torch.bfloat16):
        loss = float(method.loss(batch, torch.Generator().manual_seed(1), 0.9))
        lengths = method.evaluate(batch)[batch.written].clamp(max=HEADS)
    assert (loss < 0.1, torch.equal(lengths, batch.room[batch.written].clamp(max=HEADS))) == (late == 0, late == 0)


def test_the_ids_to_draft_are_those_that_the_target_wrote_most() -> None:
    """Not those of its prompts, and the lowest others where it wrote too few."""
    first = Example(torch.tensor([9, 9, 9, 5, 7, 7, 3]), 3, torch.zeros(6, 1), torch.zeros(6, 0))
    second = Example(torch.tensor([8, 7, 5, 2]), 1, torch.zeros(3, 1), torch.zeros(3, 0))
    assert frequent_ids([first, second], 2, 12).tolist() == [5, 7]
    assert frequent_ids([first, second], 3, 12).tolist() == [2, 5, 7]
    assert frequent_ids([first, second], 6, 12).tolist() == [0, 1, 2, 3, 5, 7]
    assert frequent_ids([first, second], 6, 12, [11, 7]).tolist() == [0, 2, 3, 5, 7, 11], "and before these, known ones"


def test_more_heads_than_an_answer_has_tokens_are_told() -> None:
    answer = Example(torch.tensor([1, 2, 3, 4, 5]), 3, torch.randn(4, 8), torch.zeros(4, 0))
    assert best_linear([answer], torch.randn(6, 8), 2)[0].shape == (8, 16)
    with pytest.raises(StartupError, match="heads is 3, must be at most the tokens of the target's longest answer"):
        best_linear([answer], torch.randn(6, 8), 3)
