"""Output of a session as clients receive it: tokens with their text, and notification of new ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from coordinator.sessions.detokenizer import TextPiece, TextStream
from outrider.protocol.speculation import TokenKind, TokenLogprobs

MAX_READ = 512  # tokens that a client gets at once


@dataclass(frozen=True, slots=True)
class Token:
    """One output token as clients receive it."""

    token: int
    kind: TokenKind
    text: str
    logprobs: TokenLogprobs | None


class SessionOutput:
    """Output tokens; any number of clients may follow them. After the end, `rest` is the remaining text."""

    def __init__(self, text: TextStream) -> None:
        self.ended = False
        self.rest = TextPiece("")
        self._text = text
        self._tokens: list[Token] = []
        self._events: list[asyncio.Event] = []  # of clients that wait for output

    async def follow(self, start: int) -> AsyncIterator[tuple[int, list[Token]]]:
        """Yield output tokens from position `start` on until the session ends."""
        at = start
        with self.notified() as changed:
            while True:
                changed.clear()
                if new := self.read(at):
                    yield at, new
                    at += len(new)
                elif self.ended:
                    return
                else:
                    await changed.wait()

    def read(self, at: int) -> list[Token]:
        """Return at most MAX_READ output tokens from this position on. A slow client therefore needs no buffer."""
        return self._tokens[at : at + MAX_READ]

    @contextlib.contextmanager
    def notified(self, changed: asyncio.Event | None = None) -> Iterator[asyncio.Event]:
        """Yield an event that is set on new output and at the end of the session."""
        changed = changed or asyncio.Event()
        self._events.append(changed)
        try:
            yield changed
        finally:
            self._events.remove(changed)

    def append(self, token: int, kind: TokenKind, logprobs: TokenLogprobs | None) -> TextPiece:
        """Add a token without notifying clients; return its text and the stop string that it completed."""
        piece = self._text.add(token)
        self._tokens.append(Token(token, kind, piece.text, logprobs))
        if piece.stop:
            self.rest = TextPiece("", piece.stop)
        return piece

    def notify(self) -> None:
        for changed in self._events:
            changed.set()

    def end(self, *, finished: bool) -> None:
        """End the output; text that was held back becomes `rest` if the session has finished."""
        if self.ended:
            return
        if finished and not self.rest.stop:
            self.rest = self._text.end()
        self.ended = True
        self.notify()
