"""What a drafting method is asked and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from drafter.calibration import Calibration
from drafter.grammar import GrammarCursor
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import MAX_GAMMA, Distribution, HiddenStates
from outrider.protocol.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Where one session stands: continue `tokens` by up to `room` tokens.

    The first `committed` of them are final, the rest are the longest chain of
    this drafter's own open guesses; `prompt_length` of them are the prompt. A
    drafter may answer with fewer tokens and will be asked again for the rest.

    One that branches looks at all open guesses, `open_tokens`, where guess i
    hangs from guess `open_parents[i]` (−1: from what is committed). It may
    give a place up to `branches` children, no more than `budget` new guesses
    in all, and none deeper than `depth` past what is committed.
    """

    session: str
    tokens: Sequence[int]
    committed: int
    prompt_length: int
    room: int
    params: SamplingParams
    vocab_size: int
    cache_salt: str = ""
    open_tokens: tuple[int, ...] = ()
    open_parents: tuple[int, ...] = ()
    branches: int = 1
    budget: int = MAX_GAMMA
    depth: int = MAX_GAMMA
    share: int = 1  # of a tree, to be added per level at least
    features: tuple[HiddenStates, ...] = ()  # the target's hidden states that came since the last ask
    calibration: Calibration = field(default_factory=Calibration, compare=False)  # of this drafter's shares
    rails: GrammarCursor | None = field(default=None, compare=False)  # through the session's grammar


@dataclass(frozen=True, slots=True)
class DraftResult:
    """More guesses: a chain that goes on where `DraftRequest.tokens` ends, or a tree.

    In a tree token i hangs from `parents[i]`: −1 for what was committed, then
    the open guesses of the ask in their order, then this draft's own tokens.
    `done`: nothing more is to be had until something is committed.
    """

    tokens: tuple[int, ...] = ()
    draft_probs: tuple[Distribution, ...] = ()
    done: bool = False
    parents: tuple[int, ...] = ()


class Drafter(Protocol):
    """One instance serves all sessions, in one thread."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The vocabulary it speaks; None if any will do."""
        ...

    @property
    def wants_features(self) -> bool:
        """Whether it builds on the target's hidden states."""
        ...

    def draft(self, asks: Sequence[DraftRequest]) -> list[DraftResult]:
        """One draft per ask, in order. In rejection and block mode every token must have been drawn from the
        distribution given with it, and none that was drawn may be left out."""
        ...

    def forget(self, session: str) -> None:
        """The session has ended."""
        ...
