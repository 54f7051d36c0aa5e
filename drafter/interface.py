"""Interface between the drafting loop and the drafting methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from drafter.calibration import Calibration
from drafter.grammar import GrammarCursor
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.hidden_states.messages import HiddenStates
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import MAX_GAMMA, NO_GUESS, ROOT, WHOLE, Distribution, Guess
from outrider.protocol.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Request to continue one session's `tokens` by up to `max_new_tokens` tokens, or levels of a tree.

    The first `committed` tokens are final, and the first `prompt_length` of them are the prompt. The rest is the
    longest chain of `open_guess`, this drafter's own open guesses. A drafter may return fewer tokens; it is called
    again for the rest.

    A drafter that builds trees uses all open guesses. A node may get up to `branches` children. At most `budget`
    guesses may be added, none deeper than `depth` beyond the committed position.
    """

    session: str
    tokens: Sequence[int]
    committed: int
    prompt_length: int
    max_new_tokens: int
    params: SamplingParams
    vocab_size: int
    cache_salt: str = ""
    open_guess: Guess = NO_GUESS
    branches: int = 1
    budget: int = MAX_GAMMA
    depth: int = MAX_GAMMA
    min_per_level: int = 1  # guesses to add to a tree per level
    hidden_states: tuple[HiddenStates, ...] = ()  # received since the last request
    calibration: Calibration = field(default_factory=Calibration, compare=False)  # of this drafter's probabilities
    grammar_cursor: GrammarCursor | None = field(default=None, compare=False)

    @property
    def room(self) -> int:
        """Return how many tokens a chain may add: an open tree may be as deep as the limit."""
        return max(0, min(self.max_new_tokens, self.depth - (len(self.tokens) - self.committed)))

    def chain(
        self, tokens: Sequence[int] = (), draft_probs: Sequence[Distribution] | None = None, *, done: bool = False
    ) -> Guess:
        """Return the open guesses and a chain of new tokens after the longest; without `draft_probs` it is certain."""
        if draft_probs is None:
            needed = self.params.mode.needs_draft_probs
            draft_probs = [Distribution((token,), (WHOLE,)) for token in tokens] if needed else ()
        known = self.open_guess
        first = len(known.tokens)
        new_parents = (known.tip, *range(first, first + len(tokens) - 1))[: len(tokens)]
        probs, parents = (*known.draft_probs, *draft_probs), (*known.shape.parents, *new_parents)
        return Guess(self.committed, 0, 0, (*known.tokens, *tokens), probs, parents=parents, done=done)

    def new_tokens(self, guess: Guess) -> tuple[int, ...]:
        """Return the tokens of a guess that were not open."""
        return guess.tokens[len(self.open_guess.tokens) :]

    def new_levels(self, guess: Guess) -> int:
        """Return how many levels of guesses were not open."""
        depths = guess.shape.depths[len(self.open_guess.tokens) :]
        return max(depths) - min(depths) + 1 if depths else 0

    def allowed(self, guess: Guess) -> Guess:
        """Return a guess without the new tokens that the session's grammar forbids.

        Only for deterministic drafters: to withhold a sampled token would bias the text in rejection and block mode.
        """
        if self.grammar_cursor is None:
            return guess
        first = len(self.open_guess.tokens)
        paths = guess.shape.paths
        allowed: dict[int, bool] = dict.fromkeys(range(first), True)
        for node in reversed(range(first, len(guess.tokens))):  # one look-up for each path to a leaf
            if node not in allowed:
                path = [guess.tokens[each] for each in paths[node]]
                length = self.grammar_cursor.allowed_length(self.tokens, self.committed, path)
                allowed |= {each: i < length for i, each in enumerate(paths[node]) if each >= first}
        kept = [node for node in range(len(guess.tokens)) if allowed[node]]
        if len(kept) == len(guess.tokens):
            return guess
        return replace(guess.part(ROOT, kept), done=True, expected=guess.expected)


class Drafter(Protocol):
    """Drafting method. One instance serves all sessions, in one thread.

    Attributes that it may have: `vocab_limit`, the number of ids that it has embeddings of. `reads_context`: it needs
    the hidden states of the whole prompt. `target_width`: their width. `projection`, a PackedProjection: it reads one
    vector per token, which the verifier projects from the states after several layers.
    """

    @property
    def info(self) -> ModelInfo: ...

    @property
    def vocabulary(self) -> Vocabulary | None:
        """Return the vocabulary of its tokens; None if it works with any."""

    @property
    def needs_hidden_states(self) -> bool:
        """Return whether it needs the target's hidden states."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[Guess]:
        """Return for each request its open guesses and what the drafter adds to them.

        `done` of a guess means that there is nothing to add before the next commit.

        In rejection and block mode, each token must be drawn from the distribution returned with it, none withheld.
        """

    def forget(self, session: str) -> None:
        """Free the state of a session that has ended."""


@runtime_checkable
class Proposer(Protocol):
    """Drafter whose drafts cost next to nothing, so that `blend` may discard them."""

    def propose(self, request: DraftRequest) -> Guess:
        """Return what `draft` would return, with `expected`. It depends only on the request and on the past."""
