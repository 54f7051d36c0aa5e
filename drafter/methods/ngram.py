"""Prompt lookup: what followed the last few tokens when they came before. No model, any vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from drafter.confidence import Proposal
from drafter.grammar_filter import lawful
from drafter.interface import DraftRequest, DraftResult
from drafter.methods.registry import drafter
from drafter.settings import DrafterSettings
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.speculation import WHOLE, Distribution
from outrider.protocol.vocabulary import Vocabulary

Gram = tuple[int, ...]

_HOLDS = 0.6  # chance of a copied token, if those before it held


class _Index:
    """Where each run of tokens last ended in a session's committed text, and where before that."""

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._last: dict[Gram, int] = {}
        self._length = 0

    def extend(self, tokens: Sequence[int], committed: int) -> None:
        # The run that ends the text is not indexed yet: it would find itself.
        for end in range(self._length, committed - 1):
            for size in self._sizes:
                if size <= end + 1:
                    self._last[tuple(tokens[end + 1 - size : end + 1])] = end + 1
        self._length = max(self._length, committed - 1)

    def follow(self, tokens: Sequence[int]) -> int | None:
        """Position after the latest earlier occurrence of the longest run that ends `tokens`."""
        for size in reversed(self._sizes):
            if size <= len(tokens):
                found = self._last.get(tuple(tokens[-size:]))
                if found is not None:
                    return found
        return None


class NgramDrafter:
    wants_features = False

    def __init__(self, shortest: int, longest: int) -> None:
        self.info = ModelInfo(name="ngram", fingerprint=f"ngram-{shortest}-{longest}", architecture="none")
        self.vocabulary: Vocabulary | None = None
        self._sizes = range(min(shortest, longest), longest + 1)
        self._indexes: dict[str, _Index] = {}

    def draft(self, asks: Sequence[DraftRequest]) -> list[DraftResult]:
        return [self._draft(ask) for ask in asks]

    def propose(self, ask: DraftRequest) -> Proposal:
        """It counts nothing, so this is but a rule of thumb."""
        draft = self._draft(ask)
        return Proposal(draft, sum(_HOLDS**i for i in range(1, len(draft.tokens) + 1)))

    def forget(self, session: str) -> None:
        self._indexes.pop(session, None)

    def _draft(self, ask: DraftRequest) -> DraftResult:
        index = self._indexes.setdefault(ask.session, _Index(self._sizes))
        index.extend(ask.tokens, ask.committed)
        start = index.follow(ask.tokens)
        if start is None:
            return DraftResult(done=True)
        tokens: list[int] = []
        for i in range(ask.room):
            # Past the end of the text the copy goes on with itself: a loop is continued as a loop.
            source = start + i
            tokens.append(ask.tokens[source] if source < len(ask.tokens) else tokens[source - len(ask.tokens)])
        probs: tuple[Distribution, ...] = ()
        if ask.params.mode.needs_draft_probs:
            probs = tuple(Distribution((token,), (WHOLE,)) for token in tokens)
        return lawful(ask, DraftResult(tuple(tokens), probs))


@drafter("ngram")
def make(settings: DrafterSettings, progress: Callable[[str], None]) -> NgramDrafter:
    return NgramDrafter(settings.ngram_min, settings.ngram_max)
