"""Direct links: the verifier and the drafter of a session that run in one process need no coordinator between them.

The coordinator opens both streams and steers both ends as always. Only commits and guesses take the short way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from outrider.base.step_loop import StepThread
from outrider.protocol.speculation import Guess, Verdict

TakeVerdict = Callable[[Verdict], bool]  # of the drafter's end; False: its session has ended
TakeGuess = Callable[[Guess], None]  # of the verifier's end


class VerifierBeside(Protocol):
    """The verifier in a drafter's process."""

    thread: StepThread  # in which both compute: two threads would have OpenMP threads each

    def link(self, session_id: str, epoch: int, source: int, take: TakeVerdict) -> TakeGuess | None:
        """Join a drafter's end to a session, and hand it what is committed; None: there is no such session."""
