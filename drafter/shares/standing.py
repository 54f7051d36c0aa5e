"""Worth of a session's next guesses, from what its commits have shown so far. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.base.decayed_mean import DecayedMean
from outrider.protocol.speculation import NO_GUESS, Guess

_SMOOTHING = 0.05  # of a level of guesses, or of a commit
_UNKNOWN, _UNKNOWN_TRIALS = 0.5, 2.0  # acceptance of a session without commits
_LATER = 0.5  # worth of a guess that is needed one commit later: it can still be drafted then


@dataclass(frozen=True, slots=True)
class Standing:
    """State of a session that wants guesses: its acceptance, and how far it has drafted."""

    acceptance: float  # of a level of guesses, if the level before it was accepted
    pace: float  # tokens per commit
    open_levels: int
    wanted_levels: int
    awaited: bool  # the verifier's step waits for all of the wanted levels

    @property
    def worth(self) -> float:
        """Return the expected tokens of the next level; where a round waits, all of its tokens wait for each level."""
        if self.awaited:
            accepted = sum(self.acceptance**level for level in range(1, self.wanted_levels + 1))
            return (1.0 + accepted) / max(1, self.wanted_levels - self.open_levels)
        commits_ahead = int(self.open_levels / max(1.0, self.pace))
        return float(self.acceptance ** (self.open_levels + 1) * _LATER**commits_ahead)


class GuessRecord:
    """Outcomes of one session's guesses, and how long the drafter has left it out."""

    def __init__(self) -> None:
        self.left_out = 0  # steps in succession that went to other sessions
        self.drafted = False  # its prompt was read in an earlier step
        self._guess = NO_GUESS  # open when the session was last looked at
        self._acceptance = DecayedMean(_SMOOTHING, _UNKNOWN, _UNKNOWN_TRIALS)
        self._pace = DecayedMean(_SMOOTHING, 1.0, 1.0)

    def drafts(self, guess: Guess) -> None:
        """Record a step's answer: the open guesses and the new ones."""
        self._guess = guess
        self.drafted = self.drafted or guess.done or bool(guess.tokens)

    def follow(self, committed: Sequence[int], open_guess: Guess) -> None:
        """Record how far the last known guesses agree with the tokens that were committed since."""
        tokens = committed[self._guess.position :] if self._guess is not NO_GUESS else ()
        if tokens:
            node, accepted = self._guess.walk(tokens)
            for _ in range(accepted):
                self._acceptance.add(1.0)
            if accepted < len(tokens) and node in self._guess.children:
                self._acceptance.add(0.0)
            self._pace.add(accepted + 1)
        self._guess = open_guess

    def standing(self, open_levels: int, wanted_levels: int, *, awaited: bool) -> Standing:
        return Standing(self._acceptance.value, self._pace.value, open_levels, wanted_levels, awaited)
