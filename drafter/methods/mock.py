"""Drafter for the mock engine whose guesses are always accepted: for `outrider bench overhead` only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from drafter.interface import DraftRequest
from drafter.methods.registry import drafter
from outrider.engine.mock import next_token
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.speculation import Guess
from outrider.protocol.vocabulary import Vocabulary
from outrider.settings.drafter import DrafterSettings


class MockDrafter:
    needs_hidden_states = False

    def __init__(self) -> None:
        self.info = ModelInfo(name="mock", fingerprint="mock", architecture="none")
        self.vocabulary: Vocabulary | None = None

    def draft(self, requests: Sequence[DraftRequest]) -> list[Guess]:
        drafts: list[Guess] = []
        for request in requests:
            tokens = [request.tokens[-1]]
            for _ in range(request.max_new_tokens):
                tokens.append(next_token(tokens[-1]))
            drafts.append(request.chain(tokens[1:]))
        return drafts

    def forget(self, session: str) -> None:
        """Do nothing: there is no state."""


@drafter("mock")
def make(settings: DrafterSettings, progress: Callable[[str], None]) -> MockDrafter:
    return MockDrafter()
