"""Interface between the drafting loop and the drafting methods."""

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
    """Request to continue one session's `tokens` by up to `max_new_tokens` tokens, or levels of a tree.

    The first `committed` tokens are final, and the first `prompt_length` of
    them are the prompt. The rest is the longest chain of this drafter's own
    open guesses. A drafter may return fewer tokens; it is called again for
    the rest.

    A drafter that builds trees uses all open guesses, `open_tokens`. The
    parent of guess i is guess `open_parents[i]`; −1 is the committed position.
    A node may get up to `branches` children. At most `budget` guesses may be
    added, none deeper than `depth` beyond the committed position.
    """

    session: str
    tokens: Sequence[int]
    committed: int
    prompt_length: int
    max_new_tokens: int
    params: SamplingParams
    vocab_size: int
    cache_salt: str = ""
    open_tokens: tuple[int, ...] = ()
    open_parents: tuple[int, ...] = ()
    branches: int = 1
    budget: int = MAX_GAMMA
    depth: int = MAX_GAMMA
    min_per_level: int = 1  # guesses to add to a tree per level
    hidden_states: tuple[HiddenStates, ...] = ()  # received since the last request
    calibration: Calibration = field(default_factory=Calibration, compare=False)  # of this drafter's probabilities
    grammar_cursor: GrammarCursor | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class DraftResult:
    """New guesses: a chain after `DraftRequest.tokens`, or a tree.

    In a tree, `parents[i]` is the parent of token i: −1 for the committed
    position, then the request's open guesses in order, then this result's own
    tokens. `done` means that the drafter has nothing to add before the next
    commit.
    """

    tokens: tuple[int, ...] = ()
    draft_probs: tuple[Distribution, ...] = ()
    done: bool = False
    parents: tuple[int, ...] = ()


class Drafter(Protocol):
    """Drafting method. One instance serves all sessions, in one thread."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def vocabulary(self) -> Vocabulary | None:
        """Return the vocabulary of its tokens; None if it works with any."""
        ...

    @property
    def needs_hidden_states(self) -> bool:
        """Return whether it needs the target's hidden states."""
        ...

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftResult]:
        """Return one result per request, in order.

        In rejection and block mode, every token must be drawn from the
        distribution returned with it, and no drawn token may be withheld.
        """
        ...

    def forget(self, session: str) -> None:
        """Free the state of a session that has ended."""
        ...
