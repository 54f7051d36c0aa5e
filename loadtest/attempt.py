"""One request: its arrivals over time, and its outcome.

Every text is compared with the reference that the fleet generated without
load. A request that is refused for lack of capacity, before any output, is
*shed*: the client retries it after the time that the server states. Any other
outcome than the reference text is a failure.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from loadtest.load_clients import LoadClient, ReplyPiece, Speculation, error_name
from loadtest.workload import TEXT_DIFFERS, Case, Output, difference
from outrider.protocol.errors import OutriderError, Overloaded, PeerLost, Unavailable

RETRY_PAUSE_S = 1.0  # after a failure without Retry-After, to limit the load on a failing system
_JITTER = 0.5  # random part of a pause: requests refused together must not be retried together

_RETRIES = 2
_RETRY_S = 0.2


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tokens that arrived at once, and when: milliseconds after the request was sent."""

    at_ms: float
    tokens: int


@dataclass(slots=True)
class Attempt:
    """One request with its measurements."""

    protocol: str
    case: Case
    begun_at: float = field(default_factory=time.time)
    total_ms: float = 0.0
    tokens: int = 0  # of the whole output
    error: str = ""  # name of the failure
    detail: str = ""  # its message, for people
    shed: bool = False
    pause_s: float = 0.0  # before this user's next request
    _began: float = field(default_factory=time.perf_counter)
    _pieces: list[tuple[float, ReplyPiece]] = field(default_factory=list)

    def read(self, pieces: Iterable[ReplyPiece]) -> Output:
        """Read the output to its end; raise the error that ends it."""
        try:
            for piece in pieces:
                self._pieces.append((self._now_ms(), piece))
        finally:
            self.total_ms = self._now_ms()
        ids_of_pieces = [piece.token_ids for _, piece in self._pieces]
        token_ids = [token for ids in ids_of_pieces for token in ids or ()]
        self.tokens = next((p.output_tokens for _, p in self._pieces if p.output_tokens is not None), 0)
        text = "".join(piece.text for _, piece in self._pieces)
        return Output(text, None if None in ids_of_pieces else tuple(token_ids), self.tokens)

    def run(self, pieces: Iterable[ReplyPiece], expected: Output) -> None:
        """Read the output, compare it with the reference, and record the outcome."""
        try:
            found = difference(expected, self.read(pieces))
        except OutriderError as error:
            self._fail(error)
            return
        if found:
            self.error, self.detail = TEXT_DIFFERS, found

    @property
    def compared(self) -> bool:
        """Return whether the request completed, so that its text was compared."""
        return not self.shed and self.error in ("", TEXT_DIFFERS)

    @property
    def speculation(self) -> Speculation:
        """Return the guesses of a complete output."""
        return next((p.speculation for _, p in self._pieces if p.output_tokens is not None), Speculation())

    @property
    def arrivals(self) -> list[Arrival]:
        """Return the arrivals; without token ids, the output's tokens are distributed by characters."""
        arrived = [(at, piece) for at, piece in self._pieces if piece.arrived]
        if all(piece.token_ids is not None for _, piece in arrived):
            return [Arrival(at, len(piece.token_ids or ())) for at, piece in arrived]
        characters = sum(len(piece.text) for _, piece in arrived)
        seen, shares = 0, [0]
        for _, piece in arrived:
            seen += len(piece.text)
            shares.append(round(self.tokens * seen / characters))
        return [Arrival(at, until - since) for (at, _), (since, until) in zip(arrived, pairwise(shares), strict=True)]

    @property
    def first_token_ms(self) -> float | None:
        return next((at for at, piece in self._pieces if piece.arrived), None)

    @property
    def gaps(self) -> list[tuple[Arrival, float]]:
        """Return every arrival after the first, with the time since the previous one per token."""
        found = []
        since = self.first_token_ms or 0.0
        for arrival in self.arrivals[1:]:
            if arrival.tokens:
                found.append((arrival, (arrival.at_ms - since) / arrival.tokens))
                since = arrival.at_ms
        return found

    @property
    def inter_token_ms(self) -> float | None:
        """Return the mean time per token after the first arrival."""
        gaps = self.gaps
        tokens = sum(arrival.tokens for arrival, _ in gaps)
        return sum(arrival.tokens * ms for arrival, ms in gaps) / tokens if tokens else None

    def _fail(self, error: OutriderError) -> None:
        self.detail = error.message
        self.shed = isinstance(error, Overloaded | Unavailable) and self.first_token_ms is None
        self.error = "" if self.shed else error_name(error)
        retry_after_s = (error.retry_after_ms or 0) / 1000
        pause_s = max(RETRY_PAUSE_S if not self.shed else 0.0, retry_after_s or RETRY_PAUSE_S)
        self.pause_s = pause_s * random.uniform(1, 1 + _JITTER)

    def _now_ms(self) -> float:
        return 1000 * (time.perf_counter() - self._began)


def fetch_reference(client: LoadClient, case: Case) -> Output:
    """Return the output without load and without guesses; retry lost connections."""
    for _ in range(_RETRIES):
        with contextlib.suppress(PeerLost, Unavailable):
            return Attempt(client.protocol, case).read(client.generate(case, gamma=0))
        time.sleep(_RETRY_S)
    return Attempt(client.protocol, case).read(client.generate(case, gamma=0))
