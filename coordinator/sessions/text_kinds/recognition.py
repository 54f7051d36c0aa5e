"""Recognition of the kind of text that a session writes, from what is at hand. Pure.

Guesses hold far more often in an answer that copies its prompt than in a chat, and less often at high temperatures.
A kind joins both: the temperature, and the length of the prompt until the answer shows whether it repeats.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.persistence.session_record import SessionRequest
from outrider.base.decayed_mean import DecayedMean

WARM = 0.5  # temperature from which on draws follow guesses clearly less often
LONG = 128  # tokens of a prompt that probably holds a text to work on
FIRST_READ, READ_EVERY = 8, 16  # tokens before the first look at the answer, and between two
COPYING, FRESH = 0.6, 0.4  # shares of repeated tokens at which an answer begins to copy, and stops
_SMOOTHING = 1 / 24
_MAX_PROMPT = 2048  # tokens of it that are compared, the newest ones
_MAX_KNOWN = 8192  # sequences that are remembered


class TextRecogniser:
    """Kind of one session's text, which may change while it is written."""

    def __init__(self, request: SessionRequest) -> None:
        self._prompt = request.prompt
        self.cold = request.params.temperature < WARM
        self.may_copy = len(request.prompt) >= LONG  # as far as is known before the first look at the answer
        self.start = self._named("long" if self.may_copy else "short")
        self.kind = self.start
        self.due = FIRST_READ  # number of tokens at the next look
        self._read = 0
        self._known: set[tuple[int, ...]] = set()  # all sequences of three tokens so far
        self._latest: tuple[int, ...] = ()
        self._repeated = DecayedMean(_SMOOTHING, 0.0, trials=0.0)

    @property
    def kinds(self) -> list[str]:
        """Return all kinds that this text may be of."""
        return [self.start, self._named("copy"), self._named("fresh")]

    def read(self, tokens: Sequence[int]) -> bool:
        """Read what is new of the answer's tokens; return whether the kind has changed."""
        prompt = () if self._latest else self._prompt[-_MAX_PROMPT:]
        for index, token in enumerate((*prompt, *tokens[self._read :])):
            sequence = (*self._latest, token)
            self._latest = sequence[-2:]
            repeats = sequence in self._known  # the same two tokens were followed by it before
            if len(sequence) == 3 and len(self._known) < _MAX_KNOWN:
                self._known.add(sequence)
            if index >= len(prompt):
                self._repeated.add(repeats)
        self.may_copy = False
        self._read, self.due = len(tokens), len(tokens) + READ_EVERY
        copying, fresh = self.kinds[1:]
        bound = FRESH if self.kind == copying else COPYING
        before, self.kind = self.kind, copying if self._repeated.value >= bound else fresh
        return self.kind != before

    def _named(self, text: str) -> str:
        return f"{'cold' if self.cold else 'warm'} {text}"
