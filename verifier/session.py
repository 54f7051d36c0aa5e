"""One session at the verifier: what is committed, what was guessed, how it is to be drawn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from outrider.protocol.checks import MAX_EPOCH, check_salt, check_tokens
from outrider.protocol.errors import InvalidRequest, OutriderError
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import (
    MAX_GAMMA,
    MAX_NODES,
    NO_STEERING,
    FinishReason,
    Guess,
    Steering,
    TokenKind,
    Verdict,
    check_opening,
)
from outrider.speculation.acceptance import RandomSource, SeededNoise
from outrider.speculation.grammar import GrammarMatcher
from outrider.speculation.sampling import History
from outrider.speculation.tree import Block, GuessTree
from verifier.hidden_states import HiddenStateBuffer

MAX_BACKLOG = 64
MAX_UNREAD = 1024  # replies of all kinds
_MASKS_S = 0.02  # what the masks of a step may take: the others wait for them


@dataclass(frozen=True, slots=True)
class VerifyOpening:
    """What a stream's first message says."""

    session_id: str
    epoch: int
    tokens: tuple[int, ...]
    prompt_length: int
    params: SamplingParams
    steering: Steering = NO_STEERING
    features: bool = False
    cache_salt: str = ""
    tenant: str = ""

    def check(self, model: ModelInfo) -> None:
        """Nothing that comes from outside is believed."""
        check_opening(
            self.session_id,
            self.tokens,
            self.prompt_length,
            self.params,
            self.steering,
            model.vocab_size,
            self.cache_salt,
        )
        check_salt("open.tenant", self.tenant)
        if self.epoch > MAX_EPOCH:
            raise InvalidRequest.of("open.epoch", self.epoch, f"at most {MAX_EPOCH}")
        if self.prompt_length + self.params.max_tokens > model.context_length:
            raise InvalidRequest.of(
                "params.max_tokens",
                self.params.max_tokens,
                f"at most {model.context_length - self.prompt_length}: the context is {model.context_length} tokens "
                f"and the prompt has {self.prompt_length}",
            )
        if len(self.tokens) - self.prompt_length >= self.params.max_tokens:
            raise InvalidRequest.of(
                "open.tokens",
                f"{len(self.tokens) - self.prompt_length} output tokens",
                f"fewer than params.max_tokens {self.params.max_tokens}",
            )


@dataclass(frozen=True, slots=True)
class Refused:
    """A guess or steer was not taken; the session goes on."""

    error: OutriderError
    source: int = 0  # of the guess


@dataclass(frozen=True, slots=True)
class Ended:
    """The last thing in an outbox."""

    error: OutriderError | None


class VerifySession:
    """Owned by the scheduler; the stream sends what is in `outbox`."""

    def __init__(
        self, opening: VerifyOpening, model: ModelInfo, device: torch.device, guide: GrammarMatcher | None = None
    ) -> None:
        self.id = opening.session_id
        self.epoch = opening.epoch
        self.params = opening.params
        self.prompt_length = opening.prompt_length
        self.hidden = HiddenStateBuffer(opening.features)
        self.committed = list(opening.tokens)
        self.outbox: asyncio.Queue[Verdict | Refused | Ended] = asyncio.Queue()
        self.tree = GuessTree(
            self.committed,
            single=self.params.mode.needs_draft_probs,
            max_nodes=MAX_NODES,
            max_ahead=MAX_GAMMA,
        )
        assert self.params.seed is not None
        self.chance: RandomSource = SeededNoise(self.params.seed)
        self.history = (
            History(self.committed, self.prompt_length, model.vocab_size, device) if self.params.penalised else None
        )
        self.guide = guide  # through the grammar, where there is one; the engine's thread has it during a step
        self.cache_salt = opening.cache_salt
        self.tenant = opening.tenant
        self.cached = 0
        self.found = 0  # tokens that were in the cache before
        self.begun = False
        self.opened_at = time.monotonic()
        self.gamma = 0  # a guessed path of this length is worth waiting for
        self.nodes = 0  # guesses to check per step; 0: no limit of the session's own
        self.patience_s = 0.0
        self.idle_since = self.opened_at
        self.closed = False
        self.stalled = False  # the peer does not read: no steps until it does
        self._vocab_size = model.vocab_size
        self._stops = set(self.params.stop_token_ids)
        if guide is not None or not self.params.ignore_eos:
            self._stops.update(model.eos_token_ids)
        self._started = False
        self.steer(opening.steering)

    @property
    def key(self) -> str:
        """Name of the cache in the engine: streams of different epochs never share one."""
        return f"{self.id}@{self.epoch}@{id(self)}"

    @property
    def uncached(self) -> int:
        """Committed tokens that are not in the cache: one while it decodes."""
        return len(self.committed) - self.cached

    @property
    def remaining(self) -> int:
        return self.prompt_length + self.params.max_tokens - len(self.committed)

    def steer(self, steering: Steering) -> None:
        steering.check()
        if steering.gamma is not None:
            self.gamma = steering.gamma
        if steering.draft_wait_us is not None:
            self.patience_s = steering.draft_wait_us / 1e6
        if steering.nodes is not None:
            self.nodes = steering.nodes
        if steering.hidden_states is not None:
            self.hidden.steer(steering.hidden_states)

    def guess(self, guess: Guess) -> None:
        """Check and plant a guess. Raises InvalidRequest; the session goes on regardless."""
        if len(guess.tokens) > MAX_GAMMA:
            raise InvalidRequest.of("guess.tokens", f"{len(guess.tokens)} tokens", f"at most {MAX_GAMMA} tokens")
        check_tokens("guess.tokens", guess.tokens, self._vocab_size)
        wanted = len(guess.tokens) if self.params.mode.needs_draft_probs else 0
        if len(guess.draft_probs) != wanted:
            raise InvalidRequest.of(
                "guess.draft_probs",
                f"{len(guess.draft_probs)} distributions",
                f"{wanted} in {self.params.mode.name.lower()} mode",
            )
        for index, (token, distribution) in enumerate(zip(guess.tokens, guess.draft_probs, strict=False)):
            name = f"guess.draft_probs[{index}]"
            distribution.check(name, self._vocab_size)
            if token not in distribution.ids:
                raise InvalidRequest.of(f"guess.tokens[{index}]", token, f"among the ids of {name}")
        self.tree.add(guess)

    def due(self, now: float) -> float:
        """When the next step may run: now if there is something to check or nothing to wait for."""
        wanted = min(self.gamma, self.remaining - 1)
        nothing_to_wait_for = not self._started or self.tree.passed_at >= len(self.committed)
        if nothing_to_wait_for or self.patience_s == 0.0 or self.tree.has_depth(wanted):
            return now
        return self.idle_since + self.patience_s

    def block(self, max_rows: int) -> Block:
        if self.guide is not None:
            max_rows = min(max_rows, self.guide.affordable_masks(_MASKS_S))
        return self.tree.block(min(max_rows, self.nodes or max_rows), self.remaining - 1)

    def cut(self, tokens: Sequence[int], complete: int | None = None) -> tuple[list[int], FinishReason]:
        """What of these may be committed: nothing after a stop, nothing past max_tokens, nothing after as many as are
        `complete` by the grammar."""
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
        self.idle_since = time.monotonic()
        self._started = True
        self.outbox.put_nowait(replace(verdict, remaining_depth=self.tree.depth))

    def stalls(self) -> bool:
        """Whether too much is unread to go on. The stream says when that is over: see `relieved`."""
        self.stalled = self.stalled or self.outbox.qsize() > MAX_BACKLOG
        return self.stalled

    def relieved(self) -> bool:
        """After the stream took something: whether a stalled session may go on from now."""
        if not self.stalled or self.outbox.qsize() > MAX_BACKLOG // 2:
            return False
        self.stalled = False
        return True

    def refuse(self, error: OutriderError, source: int) -> None:
        """Raises InvalidRequest where refusals pile up unread: that would grow without end."""
        if self.outbox.qsize() > MAX_UNREAD:
            raise InvalidRequest.of("refusals", f"{self.outbox.qsize()} unread", f"at most {MAX_UNREAD}")
        self.outbox.put_nowait(Refused(error, source))

    def end(self, error: OutriderError | None = None) -> None:
        self.closed = True
        self.outbox.put_nowait(Ended(error))


def last_kind(kind: TokenKind, accepted: int, committed: int) -> TokenKind:
    """Kind of the token after the accepted ones, when a stop has not cut it off."""
    return kind if committed > accepted else TokenKind.NONE
