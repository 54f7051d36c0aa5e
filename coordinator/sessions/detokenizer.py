"""Incremental detokenizer: whole characters, unchanged spaces, nothing after a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

_CONTEXT = 6  # prompt tokens that are decoded together with the first output token
_MAX_CONTEXT = 64  # where the prompt ends in byte tokens
_MAX_CHARACTER = 4  # tokens of one byte each
_MAX_INCOMPLETE = 32  # tokens after which an incomplete character is emitted as broken
_BROKEN = "\N{REPLACEMENT CHARACTER}"

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Converter of tokens to text. A token that ends inside a character adds nothing yet."""

    def __init__(self, decode: Decode, prompt: Sequence[int]) -> None:
        self._decode = decode
        start = max(0, len(prompt) - _CONTEXT)
        while start > max(0, len(prompt) - _MAX_CONTEXT) and _BROKEN in decode(prompt[start:]):
            start -= 1  # inside a character: with byte fallback the whole run of bytes would decode as broken
        self._window = list(prompt[start:])
        self._emitted = len(self._window)  # tokens of the window whose text was returned
        self._length = len(decode(self._window))  # of their text

    def add(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        self._length = min(self._length, len(text))  # bytes of the prompt have become one character
        self.held = 0  # characters of tokens before this one that were held back
        if len(self._window) > self._emitted + 1:
            before = self._decode(self._window[:-1])
            begun = takewhile(lambda both: both[0] == both[1], zip(before, text.rstrip(_BROKEN), strict=False))
            self.held = max(0, len([*begun]) - self._length)
        if len(text) > self._length and not text.endswith(_BROKEN):
            return self._advance(len(self._window), text)
        if len(self._window) - self._emitted > _MAX_INCOMPLETE:
            # Broken for good, except for the last tokens, which may still complete a character.
            upto = len(self._window) - _MAX_CHARACTER + 1
            return self._advance(upto, self._decode(self._window[:upto]))
        return ""

    def rest(self) -> str:
        """Return the remaining text after the last token, broken or not."""
        return self._advance(len(self._window), self._decode(self._window))

    def _advance(self, upto: int, text: str) -> str:
        """Return what is new in `text`, that of the window's first `upto` tokens, and drop the tokens before."""
        new = text[self._length :]
        self._window = self._window[self._emitted :]
        self._emitted = upto - self._emitted
        self._length = len(self._decode(self._window[: self._emitted]))
        return new


class TextPiece(NamedTuple):
    """Text that one token adds to the output; `stop` is the stop string that it completed."""

    text: str
    stop: str = ""


class TextStream:
    """Detokenised text with stop strings applied. A possible start of one is held back, unless a special token follows.

    The text after n tokens depends on these alone, not on their grouping, so a stream can be resumed at any token.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._decode = decode
        self.detokenizer = Detokenizer(decode, prompt)
        self._begun = dict.fromkeys(stops, 0)  # how much of each stop string the text ends with
        self.pending = ""

    def add(self, token: int) -> TextPiece:
        text = self.detokenizer.add(token)
        if self.pending and not text and not self._decode((token,)):  # a special token, which may be a mark
            text, self.pending = self.pending, ""
            return TextPiece(text)
        return self._release(text) if self._begun else TextPiece(text)

    def end(self) -> TextPiece:
        """Return the remaining text of an output that no stop string has ended."""
        piece = self._release(self.detokenizer.rest())
        text, self.pending = piece.text + self.pending, ""
        return TextPiece(text, piece.stop)

    def _release(self, new: str) -> TextPiece:
        text, before = self.pending + new, len(self.pending)
        found = [(at, stop) for stop in self._begun if (at := text.find(stop, max(0, before + 1 - len(stop)))) >= 0]
        if found:
            at, stop = min(found)
            self.pending = ""
            return TextPiece(text[:at], stop)
        self._begun = {stop: overlap(text, stop, known + len(new)) for stop, known in self._begun.items()}
        keep = max(self._begun.values(), default=0)
        self.pending = text[len(text) - keep :]
        return TextPiece(text[: len(text) - keep])


def overlap(text: str, stop: str, most: int) -> int:
    """Return the length of the longest end of `text` that starts `stop`, up to `most`."""
    return next((n for n in range(min(len(text), len(stop) - 1, most), 0, -1) if text.endswith(stop[:n])), 0)
