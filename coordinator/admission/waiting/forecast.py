"""Forecast of when a request could be answered at the earliest, from the figures of recent requests to its target.

It is optimistic throughout: a request is refused only if it would be late under better conditions than are likely.
Figures count for a minute, so a target that refuses everything soon tries again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.persistence.session_record import SessionRequest
from outrider.protocol.errors import Expired
from outrider.protocol.statistics import GenerationStats

KEPT_S = 60.0
FEWEST = 5  # requests that a figure is taken from
_REMEMBERED = 64
_TENTH = 10  # the best tenth of the requests is expected
_FASTER = 2  # by how much an answer may be faster than those, if more of its guesses hold


@dataclass(frozen=True, slots=True)
class Served:
    """Figures of one request that had a seat from its beginning to its end."""

    load: int  # seats in use when it began or ended, whichever were more
    prompt: int  # tokens
    output: int
    first_s: float  # from its seat to its first token
    after_s: float  # from there to its end
    tokens_per_s: float  # after the first token
    at: float

    @classmethod
    def of(cls, prompt: int, output: int, stats: GenerationStats, *, waited_s: float, load: int) -> Served:
        first_s, whole_s = stats.time_to_first_token_ms / 1000, stats.duration_ms / 1000
        spent_s = max(0.0, first_s - waited_s)
        return cls(load, prompt, output, spent_s, whole_s - first_s, stats.tokens_per_second, time.monotonic())


@dataclass(frozen=True, slots=True)
class Line:
    """Place of a new request: the target's seats, those in use, and the sessions that must end before it begins."""

    seats: int
    in_use: int
    ahead: int


class Forecast:
    """Recent figures of one target."""

    def __init__(self) -> None:
        self._served: deque[Served] = deque(maxlen=_REMEMBERED)

    def add(self, served: Served) -> None:
        self._served.append(served)

    def check(self, request: SessionRequest, line: Line, remaining_s: float) -> None:
        """Raise Expired for a request that cannot be answered in this time."""
        if remaining_s <= 0:
            raise Expired("the deadline has passed", field="timeout", retry_after_ms=1000)
        queued_s, answer_s = self.seconds(request, line)
        if (late_s := queued_s + answer_s - remaining_s) <= 0:
            return
        retry_s = late_s if late_s < queued_s else KEPT_S  # a shorter queue helps, or only other figures do
        raise Expired(
            f"the request allows {remaining_s:.3g} s and would take {queued_s + answer_s:.3g} s at least, "
            f"{queued_s:.3g} s of them in the queue",
            field="timeout",
            value=f"{remaining_s:.3g} s",
            limit=f"at least {queued_s + answer_s:.3g} s",
            retry_after_ms=max(1000, int(1000 * retry_s)),
        )

    def seconds(self, request: SessionRequest, line: Line) -> tuple[float, float]:
        """Return the time in the queue and the time of the answer, each 0 where too little is known."""
        recent = [served for served in self._served if served.at >= time.monotonic() - KEPT_S]
        queued_s = line.ahead * _low(served.after_s for served in recent) / max(1, line.seats)
        # A request that shared the verifiers with more others than now was slower than this one will be.
        alike = [served for served in recent if served.load <= line.in_use + 1]
        params, prompt, output = request.params, len(request.prompt), request.params.max_tokens
        if not params.ignore_eos or params.stop or params.stop_token_ids or params.grammar is not None:
            output = min(output, int(_low(served.output for served in alike)))
        # Shorter prompts say nothing of a long one: their time is mostly that of a step.
        prefill_s = _low(served.first_s * prompt / served.prompt for served in alike if served.prompt >= prompt)
        step_s = _low(1 / served.tokens_per_s for served in alike if served.tokens_per_s)
        return queued_s, (prefill_s + max(0, output - 1) * step_s) / _FASTER


def _low(values: Iterable[float]) -> float:
    """Return the value that a tenth of them are below; 0 if there are too few."""
    ordered = sorted(values)
    return ordered[len(ordered) // _TENTH] if len(ordered) >= FEWEST else 0.0
