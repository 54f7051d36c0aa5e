"""From tokens to text, piece by piece: whole characters, unchanged spaces, nothing past a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_CONTEXT = 6  # prompt tokens that the first output token is read in the light of
_LONGEST_CONTEXT = 64  # where the prompt's end is made of bytes
_LONGEST_CHARACTER = 4  # tokens: a byte each
_PATIENCE = 32  # tokens; most of what is no character by then never will be
_BROKEN = "\N{REPLACEMENT CHARACTER}"

Decode = Callable[[Sequence[int]], str]


class Detokeniser:
    """What each token adds to the text. A token that ends inside a character adds nothing yet."""

    def __init__(self, decode: Decode, prompt: Sequence[int]) -> None:
        self._decode = decode
        start = max(0, len(prompt) - _CONTEXT)
        while start > max(0, len(prompt) - _LONGEST_CONTEXT) and _BROKEN in decode(prompt[start:]):
            start -= 1  # not inside a character: with byte fallback the whole run of bytes would look broken
        self._window = list(prompt[start:])
        self._shown = len(self._window)  # tokens of the window whose text is out
        self._text = decode(self._window)

    def add(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        if len(text) > len(self._text) and not text.endswith(_BROKEN):
            return self._advance(len(self._window))
        if len(self._window) - self._shown > _PATIENCE:
            # Broken for good, but for the last ones, which may yet become a character.
            return self._advance(len(self._window) - _LONGEST_CHARACTER + 1)
        return ""

    def rest(self) -> str:
        """What is left when no more tokens come, broken or not."""
        return self._advance(len(self._window))

    def _advance(self, upto: int) -> str:
        """Show the text of the window's first `upto` tokens; what was shown before leaves the window."""
        new = self._decode(self._window[:upto])[len(self._text) :]
        self._window = self._window[self._shown :]
        self._shown = upto - self._shown
        self._text = self._decode(self._window[: self._shown])
        return new


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What one token adds to the output; `stop` is the stop string that it completed."""

    text: str
    stop: str = ""


class TextStream:
    """Detokenised text with stop strings applied. What might be the start of a stop string is held back.

    What is out after n tokens depends on these tokens alone, not on how they
    came in: so a stream can be resumed at any token.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._detokeniser = Detokeniser(decode, prompt)
        self._stops = stops
        self._held = ""

    def add(self, token: int) -> TextPiece:
        return self._release(self._detokeniser.add(token))

    def end(self) -> TextPiece:
        """The last of the text, when no stop string has ended it."""
        piece = self._release(self._detokeniser.rest())
        if piece.stop:
            return piece
        text, self._held = piece.text + self._held, ""
        return TextPiece(text)

    def _release(self, new: str) -> TextPiece:
        text = self._held + new
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found)
            self._held = ""
            return TextPiece(text[:at], stop)
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return TextPiece(text[: len(text) - keep])


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that starts `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
