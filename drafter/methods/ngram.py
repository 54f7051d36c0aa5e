"""Prompt lookup: copy what followed an earlier occurrence of the last tokens. No model, any vocabulary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, islice

from drafter.interface import DraftRequest
from drafter.methods.registry import drafter
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.speculation import Guess
from outrider.protocol.vocabulary import Vocabulary
from outrider.settings.drafter import DrafterSettings

_INDEXED_PER_REQUEST = 4096  # tokens of a session: the other sessions wait meanwhile
_ACCEPTANCE = 0.6  # assumed probability of a copied token, given that those before it are accepted


class _Index:
    """Position after the latest occurrence of each n-gram in a session's committed tokens."""

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._last: dict[tuple[int, ...], int] = {}
        self._length = 0

    def extend(self, tokens: Sequence[int], committed: int) -> bool:
        """Index the committed tokens, up to the limit per request; return whether all are indexed."""
        # The n-gram at the end of the text is not indexed yet: a lookup would find itself.
        upto = min(committed - 1, self._length + _INDEXED_PER_REQUEST)
        for end in range(self._length, upto):
            for size in self._sizes:
                if size <= end + 1:
                    self._last[tuple(tokens[end + 1 - size : end + 1])] = end + 1
        self._length = max(self._length, upto)
        return self._length >= committed - 1

    def find(self, tokens: Sequence[int]) -> int | None:
        """Return the position after the latest earlier occurrence of the longest n-gram that ends `tokens`."""
        ends = (tuple(tokens[-size:]) for size in reversed(self._sizes) if size <= len(tokens))
        return next((self._last[end] for end in ends if end in self._last), None)


class NgramDrafter:
    """Drafter that copies from the session's own tokens."""

    needs_hidden_states = False

    def __init__(self, shortest: int, longest: int) -> None:
        self.info = ModelInfo(name="ngram", fingerprint=f"ngram-{shortest}-{longest}", architecture="none")
        self.vocabulary: Vocabulary | None = None
        self._sizes = range(min(shortest, longest), longest + 1)
        self._indexes = defaultdict[str, _Index](lambda: _Index(self._sizes))

    def draft(self, requests: Sequence[DraftRequest]) -> list[Guess]:
        return [self.propose(request) for request in requests]

    def propose(self, request: DraftRequest) -> Guess:
        """Return the draft with a rough estimate of its acceptance: n-grams are not counted."""
        index = self._indexes[request.session]
        if not index.extend(request.tokens, request.committed):
            return request.chain()  # call again
        start = index.find(request.tokens)
        if start is None or not request.room:
            return request.chain(done=True)
        # Beyond the end of the text, the copy continues with its own tokens: a loop stays a loop.
        copied = islice(cycle(request.tokens[start : start + request.room]), request.room)
        guess = request.allowed(request.chain([*copied]))
        return replace(guess, expected=sum(_ACCEPTANCE**i for i in range(1, len(request.new_tokens(guess)) + 1)))

    def forget(self, session: str) -> None:
        self._indexes.pop(session, None)


@drafter("ngram")
def make(settings: DrafterSettings, progress: Callable[[str], None]) -> NgramDrafter:
    return NgramDrafter(settings.ngram_min, settings.ngram_max)
