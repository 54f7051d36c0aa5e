"""Output of a session as clients receive it: tokens with their text, and notification of new ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from itertools import repeat
from typing import NamedTuple

from coordinator.admission.waiting.urgency import urgency
from coordinator.sessions.detokenizer import TextPiece, TextStream
from outrider.protocol.speculation import TokenKind, TokenLogprobs

MAX_READ = 64  # tokens that a client gets at once: they are written in 7 ms, each with 20 log probabilities


class Token(NamedTuple):
    """One output token as clients receive it."""

    token: int
    kind: TokenKind
    text: str
    logprobs: TokenLogprobs | None
    held: int = 0  # characters of tokens before it that were held back, so that they come with it


class SessionOutput:
    """Output tokens; any number of clients may follow them. After the end, `rest` is the remaining text."""

    def __init__(self, text: TextStream) -> None:
        self.ended = False
        self.rest = TextPiece("")
        self.thought = 0  # tokens of reasoning, as far as an answer was read for it
        self.tokens: list[Token] = []
        self.changed: list[asyncio.Event] = []  # of clients: each is set on new tokens and at the end
        self._text = text

    def append(
        self, tokens: Sequence[int], kinds: Sequence[TokenKind], logprobs: Sequence[TokenLogprobs | None] = ()
    ) -> int:
        """Add tokens up to the first stop string without notifying clients; return their number."""
        before = len(self.tokens)
        for token, kind, entry in zip(tokens, kinds, logprobs or repeat(None), strict=False):
            held, piece = len(self._text.pending), self._text.add(token)
            self.tokens.append(Token(token, kind, piece.text, entry, held + self._text.detokenizer.held))
            if piece.stop:
                self.rest = TextPiece("", piece.stop)
                break
        return len(self.tokens) - before

    def notify(self) -> None:
        for changed in self.changed:
            changed.set()

    def end(self, *, finished: bool) -> None:
        """End the output; text that was held back becomes `rest` if the session has finished."""
        if self.ended:
            return
        if finished and not self.rest.stop:
            self.rest = self._text.end()
        self.ended = True
        self.notify()


async def follow(
    outputs: Sequence[SessionOutput], start: int = 0, silence_s: float | None = None
) -> AsyncGenerator[tuple[int, int, list[Token]], None]:
    """Yield (index of an output, position, new tokens) from `start` on.

    There are no tokens at its end. The index is -1 while first ones are waited for, after each silence.
    """
    at = dict.fromkeys(range(len(outputs)), start)  # of outputs that have not ended
    changed = asyncio.Event()
    with contextlib.ExitStack() as followed:
        for output in outputs:
            output.changed.append(changed)
            followed.callback(output.changed.remove, changed)
        while at:
            changed.clear()
            for index, position in list(at.items()):
                output = outputs[index]
                if tokens := output.tokens[position : position + MAX_READ]:
                    at[index] += len(tokens)
                    if output.ended or len(tokens) == MAX_READ:
                        changed.set()  # the end remains, or more
                    yield index, position, tokens
                    if len(tokens) == MAX_READ:
                        await asyncio.sleep(0)  # others write, too
                elif output.ended:
                    del at[index]
                    yield index, position, []
            if at and all(outputs[index].tokens for index in at):
                await changed.wait()
            elif at and not await _first(changed, silence_s):
                yield -1, start, []


async def _first(changed: asyncio.Event, silence_s: float | None) -> bool:
    """Wait for first tokens until the caller's deadline. Return False after a silence."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(silence_s):
            await urgency().wait(changed)
    return changed.is_set()
