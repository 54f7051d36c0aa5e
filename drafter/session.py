"""One session at the drafter: requests to the drafting method, commits, and guesses to send."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from drafter.calibration import Calibration
from drafter.grammar import GrammarCursor
from drafter.hidden_states.earlier_states import StateQueue
from drafter.interface import DraftRequest
from outrider.base.decayed_mean import DecayedMean
from outrider.protocol.checks import MAX_IDS, check_number, check_tokens
from outrider.protocol.errors import InvalidRequest, OutriderError
from outrider.protocol.hidden_states.earlier_states import MAX_EARLIER_POSITIONS
from outrider.protocol.hidden_states.messages import HiddenStates
from outrider.protocol.speculation import MAX_GAMMA, DraftSteering, Guess, SessionOpening, path_to
from outrider.speculation.direct import TakeGuess
from outrider.speculation.open_guesses import OpenGuesses

MAX_TREE = 128  # open guesses of a session
MESSAGE_S = 0.0006  # least time between two messages: a coordinator reads 2,000 a second, and a backlog is late
EAGER_REQUEST_US = 4_000  # target duration of one request of an eager session: commits take effect between two
EAGER_MIN_PER_LEVEL = 8  # guesses that an eager session adds to a tree at once: the likeliest ones of any level
_SMOOTHING = 0.2


@dataclass(frozen=True, slots=True)
class DraftOpening(SessionOpening):
    """Content of a stream's first message."""

    vocab_size: int
    steer: DraftSteering = field(default_factory=DraftSteering)
    cache_salt: str = ""
    vocabulary_digest: str = ""
    eos_token_ids: tuple[int, ...] = ()
    earlier_states: int = 0  # positions whose states may come later
    direct_source: int = 0  # unless 0: of guesses that go to the verifier in this process

    def check(self, most_ids: int = MAX_IDS) -> None:
        check_number("open.vocab_size", self.vocab_size, 1, most_ids)
        self.check_for(self.vocab_size, self.steer, self.cache_salt)
        check_tokens("open.eos_token_ids", self.eos_token_ids, self.vocab_size)
        check_number("open.earlier_states", self.earlier_states, 0, MAX_EARLIER_POSITIONS)


class DraftSession:
    """Session state, owned by the loop. The stream sends what `messages` yields."""

    def __init__(
        self, opening: DraftOpening, calibration: Calibration | None = None, grammar_cursor: GrammarCursor | None = None
    ) -> None:
        self.id = opening.session_id
        self.key = f"{opening.session_id}@{opening.epoch}@{id(self)}"
        self.params = opening.params
        self.closed = False
        self.error: OutriderError | None = None  # that closed it
        self.send: TakeGuess | None = None  # to the verifier in this process, or at once over the stream
        self.ready: Callable[[], bool] | None = None  # whether the stream's peer reads; None: it is the verifier here
        self._due_at = 0.0  # of the next message over the stream
        self.record: TakeGuess = lambda _: None  # of each guess that is sent, either way
        self._changed = asyncio.Event()  # there may be guesses to send
        self._cache_salt = f"{opening.vocabulary_digest} {opening.cache_salt}"  # texts of other targets stay apart
        self._vocab_size = opening.vocab_size
        self._prompt_length = opening.prompt_length
        self._calibration = calibration or Calibration()
        self._grammar_cursor = grammar_cursor
        self.committed = list(opening.tokens)
        self.open_guesses = OpenGuesses(len(opening.tokens))
        self._request: DraftRequest | None = None  # the last one
        self.hidden_states = StateQueue(opening.earlier_states)
        self._gamma = 0
        self._branches = 1
        self._nodes = 0
        self.eager = False
        self._exhausted = False  # the drafter has nothing to add before the next commit
        self._passed_at = -1  # committed position at which the last empty guess was sent
        self._draft_us = 0
        self._step_us = DecayedMean(_SMOOTHING, 0.0)  # per token of a chain, or per level of a tree
        self.steer(opening.steer)

    def next_request(self) -> DraftRequest | None:
        """Return the request for the drafting method; None if the session needs no guesses now."""
        if not self.wants_more:
            return None
        guess = self.open_guesses.guess
        path = [guess.tokens[node] for node in path_to(guess.tip, guess.shape.parents)]
        max_steps = max(1, int(EAGER_REQUEST_US / max(self._step_us.value, 1.0))) if self.eager else MAX_GAMMA
        self._request = DraftRequest(
            session=self.key,
            tokens=self.committed + path,
            committed=len(self.committed),
            prompt_length=self._prompt_length,
            max_new_tokens=max(1, min(self.depth - len(path), self._budget, max_steps)),
            params=self.params,
            vocab_size=self._vocab_size,
            cache_salt=self._cache_salt,
            open_guess=guess,
            branches=self._branches,
            budget=self._budget,
            depth=self.depth,
            min_per_level=EAGER_MIN_PER_LEVEL if self.eager else 1,
            hidden_states=self.hidden_states.take() if self.hidden_states.pending else (),
            calibration=self._calibration,
            grammar_cursor=self._grammar_cursor,
        )
        return self._request

    def add_guess(self, guess: Guess, spent_us: int) -> None:
        """Add the drafting method's answer to the last request."""
        assert self._request is not None
        self.open_guesses.extend(guess, self.committed[guess.position :])
        if guess.position == len(self.committed):
            self._exhausted = guess.done
        self._draft_us += spent_us
        if levels := self._request.new_levels(guess):
            self._step_us.add(spent_us / levels)
        self._offer()

    def _offer(self) -> None:
        """Send what is due: after a commit or steering, an empty guess may be, without a further request."""
        waits = self.ready is not None and (time.monotonic() < self._due_at or not self.ready())
        if self.send is None or self.closed or waits:
            self._changed.set()
            return
        while (message := self.next_message()) is not None:
            self.send(message)
            self._due_at = max(self._due_at, time.monotonic()) + MESSAGE_S

    def close(self, error: OutriderError | None = None) -> None:
        self.closed, self.error = True, error
        self._changed.set()

    async def messages(self) -> AsyncIterator[Guess]:
        """Yield guesses until the session is closed. What waits is joined to fewer messages, or pruned by a commit."""
        while not self.closed:
            self._changed.clear()
            linked = self.send is not None and self.ready is None
            if (wait_s := self._due_at - time.monotonic()) > 0 and not linked:
                await asyncio.sleep(wait_s)
            elif not linked and (guess := self.next_message()) is not None:
                self._due_at = time.monotonic() + MESSAGE_S
                yield guess
            else:
                await self._changed.wait()

    def next_message(self) -> Guess | None:
        """Return the next guess to send; an empty one: the verifier need not wait for more at this position."""
        wants_more = self.wants_more
        if wants_more and not self.eager:
            return None  # the whole tree at once
        guess = self.open_guesses.take_unsent(self._draft_us)
        short = not wants_more and self.open_guesses.guess.shape.depth < self.depth
        if guess is None and short and self._passed_at < len(self.committed):
            self._passed_at = len(self.committed)
            guess = Guess(self._passed_at, 0, 0, (), draft_us=self._draft_us)
        if guess is not None:
            self._draft_us = 0
            self.record(guess)
        return guess

    def commit(self, position: int, tokens: tuple[int, ...], hidden_states: HiddenStates | None = None) -> None:
        """Append the target's tokens; keep the part of the tree that agrees with them."""
        known = len(self.committed)
        if position > known:
            raise InvalidRequest.of("committed.position", position, f"at most {known}, the tokens known here")
        new = tokens[known - position :]
        check_tokens("committed.tokens", new, self._vocab_size)
        if hidden_states is not None:
            self.hidden_states.add(hidden_states)
        for siblings, accepted in self.open_guesses.commit(new):
            self._calibration.record_outcome(siblings, accepted)
        self.committed += new
        self._exhausted = self._exhausted and not new
        self._offer()

    def steer(self, steering: DraftSteering) -> None:
        steering.check()
        self._gamma = self._gamma if steering.gamma is None else steering.gamma
        if steering.branches is not None:
            # Sampled guesses have no siblings: a choice among them by value would bias the text.
            self._branches = 1 if self.params.mode.needs_draft_probs else max(1, steering.branches)
        self._nodes = self._nodes if steering.nodes is None else steering.nodes
        self.eager = self.eager if steering.eager is None else steering.eager
        if steering.gamma is not None or steering.branches is not None or steering.nodes is not None:
            self._exhausted = False
        self._offer()

    @property
    def depth(self) -> int:
        """Return how far beyond the committed position a guess can still be accepted."""
        return min(self._gamma, self._prompt_length + self.params.max_tokens - 1 - len(self.committed))

    @property
    def _budget(self) -> int:
        """Return how many more guesses may be open."""
        return min(self._nodes or self._gamma * self._branches, MAX_TREE) - len(self.open_guesses.guess.tokens)

    @property
    def wants_more(self) -> bool:
        if self._exhausted or (depth := self.depth) <= 0 or self._budget <= 0:
            return False
        return self.open_guesses.guess.shape.depth < depth or (self.eager and self._branches > 1)
