"""Output of one request with the times at which its tokens arrived."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from outrider.client.sync import Finished, Reply, Tokens


@dataclass(frozen=True, slots=True)
class TimedOutput:
    tokens: tuple[int, ...]
    arrivals: tuple[tuple[float, int], ...]  # seconds of `time.perf_counter`, tokens that arrived together
    finished: Finished

    @property
    def gaps_ms(self) -> list[float]:
        """Return the times from one arrival to the next."""
        return [1000 * (after - before) for (before, _), (after, _) in pairwise(self.arrivals)]


def timed(replies: Iterable[Reply], on_tokens: Callable[[int], None] = lambda _: None) -> TimedOutput:
    """Read a stream to its end; `on_tokens` is called with the number of tokens so far."""
    tokens: list[int] = []
    arrivals: list[tuple[float, int]] = []
    for reply in replies:
        if isinstance(reply, Tokens):
            arrivals.append((time.perf_counter(), len(reply.token_ids)))
            tokens += reply.token_ids
            on_tokens(len(tokens))
        elif isinstance(reply, Finished):
            return TimedOutput(tuple(tokens), tuple(arrivals), reply)
    raise AssertionError("a stream ends with Finished or raises")
