"""One session at the verifier: committed tokens, guess tree, sampling state and replies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from outrider.multiplex.direct_call import DirectCall
from outrider.protocol.checks import MAX_EPOCH, MAX_SALT_CHARACTERS, check_count, check_tokens
from outrider.protocol.errors import InvalidRequest, OutriderError
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.hidden_states.earlier_states import EarlierStates
from outrider.protocol.hidden_states.messages import StateSpec
from outrider.protocol.speculation import FinishReason, Guess, SessionOpening, Verdict, VerifySteering, joined
from outrider.speculation.acceptance import RandomSource, SeededNoise
from outrider.speculation.direct import TakeVerdict
from outrider.speculation.goodput import new_pace
from outrider.speculation.grammar import GrammarMatcher
from outrider.speculation.sampling import History
from outrider.speculation.tree import GuessTree
from verifier.hidden_states.buffer import HiddenStateBuffer
from verifier.hidden_states.earlier_states import queue_request

MAX_UNREAD_VERDICTS = 64  # a session with more unread replies is stalled
MAX_UNREAD_REPLIES = 1024  # beyond that, a further rejection ends the session
_MAX_STATES = 256  # of different hidden states that a session asks for over time
_MAX_MASK_S = 0.02  # time for the grammar masks of a step: the other sessions wait for them


@dataclass(frozen=True, slots=True)
class VerifyOpening(SessionOpening):
    """Content of a stream's first message."""

    steer: VerifySteering = field(default_factory=VerifySteering)
    hidden_states: bool = False
    cache_salt: str = ""
    tenant: str = ""

    def check(self, model: ModelInfo) -> None:
        """Raise InvalidRequest for the first invalid field."""
        self.check_for(model.vocab_size, self.steer, self.cache_salt)
        check_count("open.tenant", len(self.tenant), MAX_SALT_CHARACTERS, "characters")
        if self.epoch > MAX_EPOCH:
            raise InvalidRequest.of("open.epoch", self.epoch, f"at most {MAX_EPOCH}")
        if self.prompt_length + self.params.max_tokens > model.context_length:
            context, prompt = model.context_length, self.prompt_length
            limit = f"at most {context - prompt}: the context is {context} tokens and the prompt has {prompt}"
            raise InvalidRequest.of("params.max_tokens", self.params.max_tokens, limit)
        if (committed := len(self.tokens) - self.prompt_length) >= self.params.max_tokens:
            limit = f"fewer than params.max_tokens {self.params.max_tokens}"
            raise InvalidRequest.of("open.tokens", f"{committed} output tokens", limit)


@dataclass(frozen=True, slots=True)
class Rejection:
    """Reply to an invalid guess or steering message; the session continues."""

    error: OutriderError
    source: int = 0  # of the guess


@dataclass(frozen=True, slots=True)
class Ended:
    """Last item of an outbox."""

    error: OutriderError | None


class VerifySession:
    """Session state, owned by the loop. The stream sends the items of `outbox`."""

    def __init__(
        self, opening: VerifyOpening, model: ModelInfo, device: torch.device, guide: GrammarMatcher | None = None
    ) -> None:
        self.id = opening.session_id
        self.epoch = opening.epoch
        self.key = f"{self.id}@{self.epoch}@{id(self)}"  # in the engine: streams of different epochs share no cache
        self.params = opening.params
        self.prompt_length = opening.prompt_length
        self.committed = list(opening.tokens)
        self.hidden_states = HiddenStateBuffer(opening.hidden_states, opening.cache_salt, self.committed)
        self.outbox: asyncio.Queue[Verdict | Rejection | EarlierStates | Ended] = asyncio.Queue()
        self.peer: DirectCall | None = None  # that takes what is sent at once
        self.send: Callable[[Verdict], None]
        self.tree = GuessTree(self.committed, single=self.params.mode.needs_draft_probs)
        assert self.params.seed is not None
        self.chance: RandomSource = SeededNoise(self.params.seed)
        own = (self.committed, self.prompt_length, model.vocab_size, device)
        self.history = History(*own) if self.params.penalised else None
        self.direct: TakeVerdict | None = None  # of a drafter in this process
        self.draft_us = 0  # that it took since the last verdict
        self.guide = guide  # grammar state, if any; the engine's thread uses it during a step
        self.cache_salt = opening.cache_salt
        self.tenant = opening.tenant
        self.cache_length = 0  # committed tokens in the KV cache
        self.num_cached_tokens = 0  # tokens found in the prefix index, until a verdict reports them
        self.begun = False  # its target knows it
        self.opened_at = time.monotonic()
        self.gamma = 0  # a step waits for a guessed path of this length
        self.max_guesses = 0  # guesses to verify per step; 0: no limit for this session
        self.plain_steps = 1  # that may share a verdict while the peer does not read
        self._next_reply: Verdict | Rejection | EarlierStates | Ended | None = None
        self.paying_guesses = 0  # unless 0, in its place in a shared step: as many as pay for their time
        self.pace = new_pace()
        self.draft_wait_s = 0.0
        self.waiting_since = self.opened_at
        self.closed = False
        self.stalled = False  # no steps until the peer reads its replies
        self._vocab_size = model.vocab_size
        self._states: dict[int, StateSpec] = {}  # by number
        self._stops = self.params.ending_tokens(model.eos_token_ids)
        self.has_committed = False
        self.steer(opening.steer)

    @property
    def num_uncached(self) -> int:
        """Return the committed tokens that are not cached: one while the session decodes."""
        return len(self.committed) - self.cache_length

    @property
    def remaining(self) -> int:
        return self.prompt_length + self.params.max_tokens - len(self.committed)

    def steer(self, steering: VerifySteering) -> None:
        steering.check()
        specs = steering.states.specs if steering.states is not None else ()
        known = {spec.number: spec for spec in specs} | self._states
        if wrong := [spec.number for spec in specs if known[spec.number] != spec or len(known) > _MAX_STATES]:
            raise InvalidRequest.of("states.number", wrong[0], f"one of at most {_MAX_STATES}, each with one meaning")
        self._states = known
        self.gamma = self.gamma if steering.gamma is None else steering.gamma
        self.max_guesses = self.max_guesses if steering.nodes is None else steering.nodes
        self.paying_guesses = self.paying_guesses if steering.paying_nodes is None else steering.paying_nodes
        self.plain_steps = self.plain_steps if steering.plain_steps is None else steering.plain_steps
        self.draft_wait_s = self.draft_wait_s if steering.draft_wait_us is None else steering.draft_wait_us / 1e6
        self.hidden_states.steer(steering.hidden_states, steering.states)
        if steering.earlier_states is not None:
            queue_request(self.outbox, steering.earlier_states)

    def add_guess(self, guess: Guess) -> None:
        """Check a guess and add it to the tree; raise InvalidRequest if it is invalid."""
        check_tokens("guess.tokens", guess.tokens, self._vocab_size)
        wanted = len(guess.tokens) if self.params.mode.needs_draft_probs else 0
        if len(guess.draft_probs) != wanted:
            limit = f"{wanted} in {self.params.mode.name.lower()} mode"
            raise InvalidRequest.of("guess.draft_probs", f"{len(guess.draft_probs)} distributions", limit)
        for index, (token, distribution) in enumerate(zip(guess.tokens, guess.draft_probs, strict=False)):
            name = f"guess.draft_probs[{index}]"
            distribution.check(name, self._vocab_size)
            if token not in distribution.ids:
                raise InvalidRequest.of(f"guess.tokens[{index}]", token, f"among the ids of {name}")
        self.tree.add(guess)

    def ready_at(self, now: float) -> float:
        """Return when the next step may run: now, or when the draft wait timeout ends."""
        nothing_to_wait_for = not self.has_committed or self.tree.passed_at >= len(self.committed)
        if nothing_to_wait_for or self.draft_wait_s == 0.0 or self.tree.depth >= min(self.gamma, self.remaining - 1):
            return now
        return self.waiting_since + self.draft_wait_s

    def block(self, max_guesses: int, *, chain: bool = False, paying: int = 0) -> Guess:
        """Return the guesses to verify, the likeliest first: `paying`, where a shared step chooses among them."""
        if self.guide is not None:
            max_guesses = min(max_guesses, self.guide.affordable_masks(_MAX_MASK_S))
        wanted = min(self.paying_guesses, paying) or self.max_guesses or max_guesses
        return self.tree.block(min(max_guesses, wanted), self.remaining - 1, chain=chain)

    def truncate_output(self, tokens: Sequence[int], complete: int | None = None) -> tuple[list[int], FinishReason]:
        """Return the tokens to commit, with the reason if they end the output.

        It ends with a stop token, at max_tokens, or after the first `complete` tokens, which complete the grammar.
        """
        for index, token in enumerate(tokens):
            if token in self._stops or index + 1 == complete:
                return list(tokens[: index + 1]), FinishReason.STOP
        if len(tokens) >= self.remaining:
            return list(tokens[: self.remaining]), FinishReason.LENGTH
        return list(tokens), FinishReason.NONE

    def commit(self, verdict: Verdict) -> None:
        self.committed.extend(verdict.tokens)
        self.tree.commit(verdict.tokens)
        if self.history is not None:
            self.history.append(verdict.tokens)
        self.has_committed = True
        self.pace.add(len(verdict.tokens))
        verdict.remaining_depth = self.tree.depth
        if self.direct is not None and self.direct(verdict):
            verdict = replace(verdict, hidden_states=None)
        ends = verdict.finish_reason is not FinishReason.NONE  # by the task: it waits until the peer has room for it
        if not ends and self._next_reply is None and self.outbox.empty() and self.peer and self.peer.ready():
            self.send(verdict)
        else:
            self.outbox.put_nowait(verdict)

    async def next_reply(self) -> Verdict | Rejection | EarlierStates | Ended:
        """Return the next reply; plain steps that the peer has not read share a verdict, if it takes such."""
        reply = self._next_reply = self._next_reply or await self.outbox.get()
        if self.peer and self.plain_steps > 1 and isinstance(reply, Verdict):
            await self.peer.readable()  # steps that end meanwhile share the verdict
        self._next_reply = None
        unread: list[Verdict] = []
        while isinstance(reply, Verdict) and reply.is_plain and len(unread) < self.plain_steps:
            unread.append(reply)
            if self.outbox.empty():
                return joined(unread)
            reply = self.outbox.get_nowait()
        if unread:
            self._next_reply, reply = reply, joined(unread)
        return reply

    def check_backlog(self) -> bool:
        """Return whether the session is stalled by unread replies; `resume_after_read` ends that."""
        self.stalled = self.stalled or self.outbox.qsize() > MAX_UNREAD_VERDICTS
        return self.stalled

    def resume_after_read(self) -> bool:
        """Return whether a stalled session can continue, after its stream has read a reply."""
        if not self.stalled or self.outbox.qsize() > MAX_UNREAD_VERDICTS // 2:
            return False
        self.stalled = False
        return True

    def reject(self, error: OutriderError, source: int, *, bounded: bool = True) -> None:
        """Send a rejection; raise InvalidRequest if too many replies are unread, since memory must stay bounded."""
        if bounded and self.outbox.qsize() > MAX_UNREAD_REPLIES:
            raise InvalidRequest.of("refusals", f"{self.outbox.qsize()} unread", f"at most {MAX_UNREAD_REPLIES}")
        self.outbox.put_nowait(Rejection(error, source))

    def end(self, error: OutriderError | None = None) -> None:
        self.closed = True
        self.outbox.put_nowait(Ended(error))
