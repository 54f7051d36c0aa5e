"""One request under way: what arrives and when, and what becomes of it.

Every text is compared with the one that the fleet gave without load. A
refusal for want of room, before anything came, is *shed*: the fleet defends
itself, and the client tries again when it was told to. Everything else that
is not the right text is a failure.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from loadtest.asking import Asker, ReplyPiece, named
from loadtest.workload import Case, Output, difference
from outrider.protocol.errors import OutriderError, Overloaded, PeerLost, Unavailable

TEXT_DIFFERS = "text differs"
PAUSE_S = 1.0  # after trouble, where nobody says how long: a system in trouble is not hammered
_SPREAD = 0.5  # of a pause: those who were refused together do not come back together

_RETRIES = 2
_RETRY_S = 0.2


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tokens that came at once, milliseconds after the request was sent."""

    at_ms: float
    tokens: int


@dataclass(slots=True)
class Attempt:
    protocol: str
    case: Case
    begun_at: float = field(default_factory=time.time)
    total_ms: float = 0.0
    error: str = ""  # what the failure is called
    detail: str = ""  # and what it says, for people
    shed: bool = False
    pause_s: float = 0.0  # before this user's next request
    _began: float = field(default_factory=time.perf_counter)
    _pieces: list[tuple[float, ReplyPiece]] = field(default_factory=list)
    _output_tokens: int = 0

    def follow(self, pieces: Iterable[ReplyPiece]) -> Output:
        """To its end; raises what ends it."""
        try:
            for piece in pieces:
                self._pieces.append((self._now_ms(), piece))
        finally:
            self.total_ms = self._now_ms()
        told = [piece.token_ids for _, piece in self._pieces]
        known = [token for ids in told for token in ids or ()]
        self._output_tokens = next((p.output_tokens for _, p in self._pieces if p.output_tokens is not None), 0)
        text = "".join(piece.text for _, piece in self._pieces)
        return Output(text, None if None in told else tuple(known), self._output_tokens)

    def judge(self, pieces: Iterable[ReplyPiece], expected: Output) -> None:
        """Follow it, and say what it is."""
        try:
            found = difference(expected, self.follow(pieces))
        except OutriderError as error:
            self._ended_by(error)
            return
        if found:
            self.error, self.detail = TEXT_DIFFERS, found

    @property
    def compared(self) -> bool:
        """Whether it came to its end, so that there was a text to compare."""
        return not self.shed and self.error in ("", TEXT_DIFFERS)

    @property
    def tokens(self) -> int:
        return self._output_tokens

    @property
    def arrivals(self) -> list[Arrival]:
        """Where the protocol does not tell how many tokens came at once, the answer's are shared out by characters."""
        arrived = [(at, piece) for at, piece in self._pieces if piece.arrived]
        if all(piece.token_ids is not None for _, piece in arrived):
            return [Arrival(at, len(piece.token_ids or ())) for at, piece in arrived]
        characters = sum(len(piece.text) for _, piece in arrived)
        seen, shares = 0, [0]
        for _, piece in arrived:
            seen += len(piece.text)
            shares.append(round(self._output_tokens * seen / characters))
        return [Arrival(at, until - since) for (at, _), (since, until) in zip(arrived, pairwise(shares), strict=True)]

    @property
    def first_token_ms(self) -> float | None:
        return next((at for at, piece in self._pieces if piece.arrived), None)

    @property
    def gaps(self) -> list[tuple[Arrival, float]]:
        """Every arrival after the first, with the time since the one before, per token that came."""
        found = []
        since = self.first_token_ms or 0.0
        for arrival in self.arrivals[1:]:
            if arrival.tokens:
                found.append((arrival, (arrival.at_ms - since) / arrival.tokens))
                since = arrival.at_ms
        return found

    @property
    def inter_token_ms(self) -> float | None:
        """The mean over the tokens after those that came first."""
        gaps = self.gaps
        tokens = sum(arrival.tokens for arrival, _ in gaps)
        return sum(arrival.tokens * ms for arrival, ms in gaps) / tokens if tokens else None

    def _ended_by(self, error: OutriderError) -> None:
        self.detail = error.message
        self.shed = isinstance(error, Overloaded | Unavailable) and self.first_token_ms is None
        self.error = "" if self.shed else named(error)
        told = (error.retry_after_ms or 0) / 1000
        self.pause_s = max(PAUSE_S if not self.shed else 0.0, told or PAUSE_S) * random.uniform(1, 1 + _SPREAD)

    def _now_ms(self) -> float:
        return 1000 * (time.perf_counter() - self._began)


def fetch(asker: Asker, case: Case) -> Output:
    """The answer without load and without guessing. A connection that breaks is no answer yet."""
    for _ in range(_RETRIES):
        with contextlib.suppress(PeerLost, Unavailable):
            return Attempt(asker.protocol, case).follow(asker.ask(case, gamma=0))
        time.sleep(_RETRY_S)
    return Attempt(asker.protocol, case).follow(asker.ask(case, gamma=0))
