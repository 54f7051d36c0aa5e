"""Texts with published drafters follow the target; `tests/prove/test_published.py` draws more of all kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafter import draft_sampling
from drafter.draft_sampling import Ids, next_token
from drafter.interface import DraftRequest
from drafter.methods import eagle
from outrider.protocol.sampling_params import Verification
from outrider.protocol.speculation import Distribution
from tests.unit.drafter.methods.published_sessions import Sessions, drafter_of, p_value
from tests.unit.outrider.speculation.test_exactness import LOWEST_P

DRAWS = 90
SURELY = 1e-9


def told_other_probabilities(
    request: DraftRequest, logits: torch.Tensor, tokens: list[int], candidates: int, ids: Ids
) -> tuple[int, list[Distribution]] | None:
    """Draw a token from other logits than those that are told."""
    drawn = next_token(request, logits.roll(1, dims=-1) * 9, tokens, candidates, ids)
    told = next_token(request, logits, tokens, candidates, ids)
    return drawn and told and (drawn[0], told[1])


@pytest.mark.parametrize("name", ["dspark-rnn"])
def test_seeded_draws_follow_the_target(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = Sessions(drafter_of(name, tmp_path, monkeypatch), Verification.REJECTION)
    assert p_value(sessions.texts(DRAWS)) > LOWEST_P
    assert sessions.accepted > DRAWS // 2


@pytest.mark.parametrize("name", ["dspark-rnn"])
def test_probabilities_that_were_not_drawn_from_are_seen(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (eagle, draft_sampling):
        monkeypatch.setattr(module, "next_token", told_other_probabilities)
    assert p_value(Sessions(drafter_of(name, tmp_path, monkeypatch), Verification.REJECTION).texts(DRAWS)) < SURELY
