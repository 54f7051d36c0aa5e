"""Published drafters change no distribution: chi-square over seeded sessions, for each kind and each rule."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from outrider.protocol.sampling_params import Verification
from tests.unit.drafter.methods.published_sessions import KINDS, Sessions, drafter_of, p_value
from tests.unit.outrider.speculation.test_exactness import LOWEST_P
from tests.unit.outrider.speculation.test_exactness import Path as Text

pytestmark = pytest.mark.prove

DRAWS = 1500


@cache
def plain_texts() -> list[Text]:
    """Return the texts of sessions without a drafter."""
    return Sessions(None, Verification.COUPLED).texts(DRAWS)


@pytest.mark.parametrize("mode", [Verification.REJECTION, Verification.BLOCK])
@pytest.mark.parametrize("name", KINDS)
def test_drawn_guesses(name: str, mode: Verification, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = Sessions(drafter_of(name, tmp_path, monkeypatch), mode)
    assert p_value(sessions.texts(DRAWS)) > LOWEST_P
    assert sessions.accepted > DRAWS // 2


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("name", KINDS)
def test_coupled_guesses(name: str, branches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = Sessions(drafter_of(name, tmp_path, monkeypatch), Verification.COUPLED, branches)
    texts = sessions.texts(DRAWS)
    assert p_value(texts) > LOWEST_P
    assert sessions.accepted > DRAWS // 2
    assert texts == plain_texts(), "whatever is guessed"
