"""Batching: which sessions a step computes, and which of their tokens.

A step takes every session that is ready: those with guesses to verify, those whose draft wait timeout has passed, and
chunks of prompts. Tenants with many sessions join as far as their credit allows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from outrider.engine import SessionTokens
from outrider.protocol.hidden_states.messages import StateSpec
from outrider.protocol.speculation import Guess
from outrider.settings.verifier import VerifierSettings
from outrider.speculation.goodput import compared_guesses, paying_blocks
from verifier.session import VerifySession
from verifier.shares.fair_shares import FairShares
from verifier.shares.prompt_shares import PromptShare
from verifier.step_times import StepTimes

_CREDIT_POLL_S = 0.01  # interval at which heavy tenants without credit are scheduled again
_LONGEST_WAIT_S = 6.0  # of their sessions, with or without credit: coordinators take a verifier for lost after 10 s


class ScheduledSession(NamedTuple):
    """Tokens of one session in a step."""

    session: VerifySession
    pending: tuple[int, ...]  # committed tokens that are not cached yet
    block: Guess  # to verify
    verifies: bool  # False: a prompt chunk, without logits
    states: tuple[StateSpec, ...] = ()  # hidden states that are needed of all tokens

    @classmethod
    def of(cls, session: VerifySession, pending: Sequence[int], block: Guess, *, verifies: bool) -> ScheduledSession:
        return cls(session, tuple(pending), block, verifies, session.hidden_states.specs)

    @property
    def num_tokens(self) -> int:
        return len(self.pending) + len(self.block.tokens)

    def engine_tokens(self) -> SessionTokens:
        key, last = self.session.key, len(self.pending) - 1
        hidden_from = 0 if self.states else None
        layers = [layer for spec in self.states for layer in spec.layers]
        if not self.verifies:
            return SessionTokens(key, self.pending, logits_from=last + 1, hidden_from=hidden_from, layers=layers)
        # Most blocks are chains, for which the engine needs no mask over every pair of tokens.
        guessed = [last + 1 + parent for parent in self.block.parents]
        return SessionTokens(
            key,
            self.pending + self.block.tokens,
            (*range(-1, last), *guessed) if guessed else (),
            logits_from=last,
            hidden_from=hidden_from,
            layers=layers,
        )

    def kept_rows(self, path: Sequence[int]) -> list[int]:
        """Return the rows of committed tokens and of the accepted `path`."""
        last = len(self.pending) - 1
        return [*range(last + 1), *[last + row for row in path]]


class Batching:
    """Composition of steps."""

    def __init__(self, limits: VerifierSettings, times: StepTimes, *, chain: bool = False) -> None:
        self._limits = limits
        self._times = times
        self._chain = chain  # the target verifies no branches
        self._shares = FairShares(times, limits.max_sessions, limits.tenant_stretch)
        self.waiting = 0  # prompts of heavy tenants that the last step left out

    def schedule(self, sessions: Collection[VerifySession], now: float) -> tuple[list[ScheduledSession], float | None]:
        """Return the next step's batch; if it is empty, the seconds to wait at most (None: until woken)."""
        # Without those whose peers do not read the verdicts that they have.
        sessions = [session for session in sessions if not session.check_backlog()]
        heavy = self._shares.heavy_tenants([session.tenant for session in sessions])
        batch: list[ScheduledSession] = []
        prompts: list[VerifySession] = []
        joining: list[VerifySession] = []  # ready sessions of heavy tenants
        num_decoding = 0  # sessions of other tenants, ready or not
        compared = compared_guesses(len(sessions)) if self._times.known else 0
        later: list[float] = []  # times of a next step
        for session in sessions:
            is_prefill = session.num_uncached > 1
            ready_at = now if is_prefill else session.ready_at(now)
            if ready_at > now:
                later.append(ready_at)
            elif session.tenant in heavy:
                joining.append(session)
            elif is_prefill:
                prompts.append(session)
            else:
                batch.append(self._decode(session, self._limits.guess_rows, paying=compared))
            num_decoding += not is_prefill and session.tenant not in heavy
        if compared and any(item.session.paying_guesses for item in batch):
            sessions_in, blocks = [item.session for item in batch], [item.block for item in batch]
            batch = _with_blocks(batch, paying_blocks(sessions_in, blocks, num_tokens(batch), self._times.curve()))
        if prompts:
            share = PromptShare(self._times, self._limits, num_decoding, sum([each.num_uncached for each in prompts]))
            left = share.left([item.block for item in batch], sum([len(item.pending) for item in batch]))
            batch = _with_blocks(batch, left)
            batch += self._prompt_chunks(prompts, num_tokens(batch), num_decoding)
        self.waiting = 0
        if heavy:
            joined = self._join(joining, num_tokens(batch), now)
            begun = {item.session for item in joined}
            self.waiting = sum(session.num_uncached > 1 and session not in begun for session in joining)
            batch += joined
            if joining and not batch:
                later.append(now + _CREDIT_POLL_S)
        else:
            self._shares.reset(now)
        return batch, max(0.0, min(later) - now) if later else None

    def record(self, batch: Sequence[ScheduledSession], step_ms: float) -> None:
        """Record a step's time."""
        lengths = [len(item.pending) for item in batch]
        if 1 in lengths:  # prompts alone do not tell what prompts cost beside decoding sessions
            self._times.record(num_tokens(batch), step_ms, has_prompts=max(lengths) > 1)
        if self._shares.heavy:
            self._shares.charge([(item.session.tenant, item.num_tokens) for item in batch], step_ms)

    def _decode(self, session: VerifySession, max_guesses: int, *, paying: int = 0) -> ScheduledSession:
        """Schedule the last committed token with up to `max_guesses` guesses."""
        pending = session.committed[session.cache_length :]
        block = session.block(max_guesses, chain=self._chain, paying=paying)
        return ScheduledSession.of(session, pending, block, verifies=True)

    def _join(self, sessions: Sequence[VerifySession], num_tokens: int, now: float) -> list[ScheduledSession]:
        """Schedule sessions of heavy tenants within their budget, longest waiting first."""
        budget = self._shares.budget(now, num_tokens, self._limits.max_sessions + self._limits.prefill_rows)
        late = sum(now - session.waiting_since > _LONGEST_WAIT_S for session in sessions)
        most = 1 if late > budget else budget  # a token for each that is late
        budget = max(budget, late)
        batch: list[ScheduledSession] = []
        for session in sorted(sessions, key=lambda session: session.waiting_since):
            if budget < 1:
                break
            if session.num_uncached > 1:
                batch += self._prompt_chunks([session], 0, 0, min(most, budget))
            else:
                batch.append(self._decode(session, min(self._limits.guess_rows, min(most, budget) - 1)))
            budget -= batch[-1].num_tokens
        return batch

    def _prompt_chunks(
        self, sessions: Sequence[VerifySession], num_tokens: int, num_decoding: int, budget: int | None = None
    ) -> list[ScheduledSession]:
        """Schedule prompt tokens, oldest session first, as far as the decoding sessions tolerate the longer step."""
        budget = min(self._limits.prefill_rows, budget or self._limits.prefill_rows)
        if num_decoding:
            tokens = max(num_tokens, num_decoding)
            budget = self._times.prompt_tokens(tokens, self._limits.prefill_stretch, budget)
        chunks: list[ScheduledSession] = []
        for session in sessions:
            chunk = session.committed[session.cache_length : session.cache_length + budget]
            if not chunk:
                break
            budget -= len(chunk)
            is_last = session.cache_length + len(chunk) == len(session.committed)
            no_guess = Guess(len(session.committed), 0, 0, ())
            chunks.append(ScheduledSession.of(session, chunk, no_guess, verifies=is_last))
        return chunks


def _with_blocks(batch: Sequence[ScheduledSession], blocks: Sequence[Guess]) -> list[ScheduledSession]:
    return [item._replace(block=block) for item, block in zip(batch, blocks, strict=True)]


def num_tokens(batch: Sequence[ScheduledSession]) -> int:
    return sum([len(item.pending) + len(item.block.tokens) for item in batch])
