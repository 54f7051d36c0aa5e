"""Sampling of guesses from part of the vocabulary: the same guesses as over all ids."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from drafter.draft_sampling import adjust_logits, next_token, token_choices
from drafter.interface import DraftRequest
from outrider.protocol.sampling_params import SamplingParams, Verification

VOCAB, CANDIDATES = 500, 8
TOKENS = [3, 9, 27]


def asked(branches: int = 1, **params: object) -> DraftRequest:
    given = SamplingParams(**({"seed": 5} | params))  # type: ignore[arg-type]
    return DraftRequest("s", TOKENS, len(TOKENS), 2, 4, given, VOCAB, branches=branches)


@pytest.fixture
def drafted() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of some ids."""
    torch.manual_seed(2)
    ids = torch.randperm(VOCAB)[:200].sort().values
    return 3 * torch.randn(1, len(ids)), ids


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.3},
        {"temperature": 0.8, "top_p": 0.7},
        {"verification": Verification.BLOCK},
        {"verification": Verification.REJECTION, "top_p": 0.6},
        {"verification": Verification.REJECTION, "top_k": 3, "min_p": 0.05},
    ],
)
def test_a_part_of_the_vocabulary_gives_the_same_guesses(
    drafted: tuple[torch.Tensor, torch.Tensor], params: dict[str, object]
) -> None:
    request = asked(branches=3, **params)
    part, ids = drafted
    assert adjust_logits(request, part, ids, TOKENS, [()])[1] is ids
    whole = torch.full((1, VOCAB), float("-inf")).index_copy(1, ids, part)
    assert next_token(request, part, TOKENS, CANDIDATES, ids) == next_token(request, whole, TOKENS, CANDIDATES)
    if not request.params.mode.needs_draft_probs:
        ((of_part,), (of_all,)) = token_choices(request, part, [()], ids), token_choices(request, whole, [()])
        assert [token for token, _ in of_part] == [token for token, _ in of_all]
        assert [share for _, share in of_part] == pytest.approx([share for _, share in of_all])


@pytest.mark.parametrize("params", [{"logit_bias": {3: 1.0}}, {"repetition_penalty": 1.2}])
def test_penalties_and_biases_are_applied_over_all_ids(
    drafted: tuple[torch.Tensor, torch.Tensor], params: dict[str, object]
) -> None:
    logits, ids = adjust_logits(asked(**params), *drafted, TOKENS, [()])
    assert ids is None
    assert logits.shape == (1, VOCAB)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("top_p", [1.0, 0.6])
@pytest.mark.parametrize("mode", [Verification.COUPLED, Verification.REJECTION, Verification.BLOCK])
def test_nothing_is_drawn_from_logits_that_are_not_finite(mode: Verification, top_p: float, value: float) -> None:
    """As after a token whose embedding is NaN: the draft ends there, and its session goes on."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = value
    request = asked(verification=mode, top_p=top_p)
    assert next_token(request, logits, TOKENS, CANDIDATES) is None
    assert token_choices(request, logits, [()]) == [[]]


def test_drafted_ids_that_the_session_lacks_are_left_out(drafted: tuple[torch.Tensor, torch.Tensor]) -> None:
    """On a GPU a row without a place for them would end the process."""
    logits, ids = drafted
    request = replace(asked(logit_bias={3: 1.0}), vocab_size=100)
    adjusted, _ = adjust_logits(request, logits, ids, TOKENS, [()])
    whole = torch.full((1, VOCAB), float("-inf")).index_copy(1, ids, logits)[:, :100]
    whole[0, 3] += 1.0
    assert torch.equal(adjusted, whole)
