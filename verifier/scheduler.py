"""Which sessions step together: schedule, run, commit.

One loop on the event loop, one thread for the engine. Each step takes what
is ready: sessions with guesses that fit, sessions out of patience, and a
share of the prompts still to be cached.

Trees change on the event loop only, also while a step runs: guesses come at
any time. The engine's thread does not read the trees. It has the step's
`Work` and reads of a session what changes between steps only: committed
tokens, how many of them are cached, the sampler's history, and the draft
probabilities of the block's nodes. A session's grammar it advances itself;
the event loop leaves it alone during a step.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import structlog
import torch

from outrider.engine import Engine, SessionTokens, StepResult
from outrider.engine.block_manager import BLOCK_TOKENS, blocks_for
from outrider.observability.metrics import VerifierMetrics
from outrider.protocol.cost_curve import UNKNOWN_COST, CostCurve
from outrider.protocol.errors import Fenced, InvalidRequest, OutriderError, Overloaded, PeerLost, Unavailable
from outrider.protocol.fleet import WorkerLoad
from outrider.protocol.speculation import FinishReason, Verdict, VerifyTimings
from outrider.speculation.grammar import GrammarMatcher, Masks
from outrider.speculation.tree import Block
from verifier.fair_shares import FairShares
from verifier.hidden_states import as_sent
from verifier.session import VerifyOpening, VerifySession, last_kind
from verifier.step_budget import Pace
from verifier.verify import VerifyResult, judge, likeliest_of_all

log = structlog.get_logger(__name__)

_REMEMBERED_EPOCHS = 16_384
EPOCH_KEPT_S = 600.0  # after its stream was opened; a coordinator that lost the session has noticed by then
_RETRY_AFTER_MS = 1_000
_SMOOTHING = 0.1
_LOOK_AGAIN_S = 0.01  # whether those who wait for their share of the time have it
_MASK_THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_sessions: int
    max_waiting: int
    kv_tokens: int
    prefill_rows: int  # prompt tokens cached per step, all sessions together
    prefill_stretch: float  # how many times as long they may make a step while others decode
    guess_rows: int  # guesses checked per session and step
    tenant_stretch: float = 1.05  # how many times as long tenants with many sessions may make steps of those with few


@dataclass(frozen=True, slots=True)
class Work:
    """One session's part of a step."""

    session: VerifySession
    pending: tuple[int, ...]  # committed tokens not cached yet
    block: Block
    judged: bool  # False: a piece of the prompt, nothing to decide
    hidden_from: int | None  # first row whose hidden state is wanted; None: of none

    @classmethod
    def of(cls, session: VerifySession, pending: Sequence[int], block: Block, *, judged: bool) -> Work:
        hidden_from = session.hidden.wanted_from(session.cached, len(pending), len(session.committed))
        return cls(session, tuple(pending), block, judged, hidden_from)

    @property
    def num_rows(self) -> int:
        return len(self.pending) + len(self.block.tokens)

    def rows(self) -> SessionTokens:
        offset = len(self.pending) - 1
        if not self.judged:
            return SessionTokens(
                self.session.key,
                self.pending,
                logits_from=len(self.pending),
                hidden_from=self.hidden_from,
            )
        parents = (*range(-1, offset), *(offset + 1 + parent for parent in self.block.parents))
        return SessionTokens(
            self.session.key,
            self.pending + self.block.tokens,
            # Most blocks are chains, which the engine masks without looking at every pair of rows.
            parents if parents != tuple(range(-1, len(parents) - 1)) else (),
            logits_from=offset,
            hidden_from=self.hidden_from,
        )

    def hidden(self, rows: torch.Tensor, path: Sequence[int]) -> torch.Tensor | None:
        """Of the wanted rows those of committed tokens and of the accepted `path`."""
        if self.hidden_from is None:
            return None
        committed = len(self.pending) - self.hidden_from
        return as_sent(rows, [*range(committed), *(committed - 1 + row for row in path)])


@dataclass(frozen=True, slots=True)
class ForwardResult:
    judgement: VerifyResult | None
    hidden: torch.Tensor | None  # of consecutive positions, as sent  # [rows, width]
    complete: int | None = None  # after how many of the judgement's tokens the grammar's end is reached
    error: OutriderError | None = None  # the session cannot go on


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    results: list[ForwardResult]
    forward_us: int
    step_us: int


class Scheduler:
    def __init__(
        self, engine: Engine, limits: SchedulerLimits, metrics: VerifierMetrics, cost: CostCurve = UNKNOWN_COST
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._metrics = metrics
        self._pace = Pace(cost)
        self._shares = FairShares(self._pace, limits.max_sessions, limits.tenant_stretch)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._masking = ThreadPoolExecutor(max_workers=_MASK_THREADS, thread_name_prefix="masks")
        self._sessions: dict[str, VerifySession] = {}
        self._waiting: deque[VerifySession] = deque()
        self._gone: list[VerifySession] = []
        self._epochs: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._reserved = 0
        self._wake = asyncio.Event()
        self._step_ms = 0.0
        self._draining = False
        metrics.shows(metrics.sessions, lambda: len(self._sessions))
        metrics.shows(metrics.waiting, lambda: len(self._waiting))
        metrics.shows(metrics.cache_usage, lambda: self._reserved / limits.kv_tokens)
        metrics.shows(metrics.cache_idle, lambda: engine.evictable_tokens / limits.kv_tokens)

    # Called by the streams.

    def open(self, opening: VerifyOpening, guide: GrammarMatcher | None = None) -> VerifySession:
        """Admit a session or queue it; `guide` is for its grammar. Raises what is wrong with it, or Overloaded."""
        if self._draining:
            raise Unavailable("this verifier is leaving")
        opening.check(self._engine.info)
        known = self._epoch_of(opening.session_id)
        if opening.epoch < known:
            raise Fenced(
                f"session {opening.session_id} is at epoch {known}",
                field="open.epoch",
                value=opening.epoch,
                limit=f"at least {known}",
            )
        session = VerifySession(opening, self._engine.info, self._engine.device, guide)
        if self._needs(session) > self._limits.kv_tokens:
            raise InvalidRequest.of(
                "params.max_tokens",
                opening.params.max_tokens,
                f"at most {max(0, self._limits.kv_tokens - session.prompt_length - self._limits.guess_rows)}: "
                f"this verifier's cache holds {self._limits.kv_tokens} tokens",
            )
        self._remember_epoch(opening.session_id, opening.epoch)
        older = self._live(opening.session_id)
        if older is not None:
            self.close(older, Fenced(f"session {older.id} was taken over by epoch {opening.epoch}"))
        if len(self._waiting) >= self._limits.max_waiting and not self._fits(session):
            raise Overloaded(
                f"{len(self._sessions)} sessions run and {len(self._waiting)} wait",
                field="sessions",
                value=len(self._sessions) + len(self._waiting),
                limit=self._limits.max_sessions + self._limits.max_waiting,
                retry_after_ms=_RETRY_AFTER_MS,
            )
        self._waiting.append(session)
        self._admit()
        self._wake.set()
        return session

    def wake(self) -> None:
        """A guess or a steer came in, or a stalled stream was read."""
        self._wake.set()

    def close(self, session: VerifySession, error: OutriderError | None = None) -> None:
        """End a session, whoever asks for it; idempotent."""
        if session.closed:
            return
        session.end(error)
        if self._sessions.get(session.id) is session:
            del self._sessions[session.id]
            self._reserved -= self._needs(session)
            self._gone.append(session)
        else:
            self._waiting.remove(session)
        self._wake.set()

    def drain(self) -> None:
        self._draining = True

    @property
    def busy(self) -> bool:
        return bool(self._sessions or self._waiting)

    def load(self) -> WorkerLoad:
        return WorkerLoad(
            sessions=len(self._sessions),
            waiting=len(self._waiting),
            kv_tokens_used=self._reserved,
            kv_tokens_total=self._limits.kv_tokens,
            step_ms=self._step_ms,
            cost=self._pace.curve(),
            kv_tokens_idle=self._engine.evictable_tokens,
        )

    # The loop.

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            self._free_gone()
            self._admit()
            self._begin()
            work, wait_s = self._schedule()
            if not work:
                await self._sleep(wait_s)
                continue
            started = time.monotonic()
            try:
                step = await loop.run_in_executor(self._thread, self._execute, work)
            except Exception as error:  # whatever the model threw must not end the other sessions
                log.exception("step failed", session_ids=[item.session.id for item in work])
                for item in work:
                    self.close(item.session, PeerLost(f"the target's forward pass failed: {error}"))
                continue
            self._commit(work, step, started)

    def stop(self) -> None:
        for session in [*self._sessions.values(), *self._waiting]:
            self.close(session, Unavailable("this verifier is leaving"))
        self._thread.shutdown(wait=True)
        self._masking.shutdown(wait=True)
        self._free_gone()

    def _begin(self) -> None:
        """New sessions start from what is in the cache of their prompt already."""
        for session in self._sessions.values():
            if not session.begun:
                session.begun = True
                session.cached = session.found = self._engine.match_prefix(
                    session.key, session.committed, session.cache_salt
                )
                self._metrics.began(tokens=len(session.committed), found=session.found)

    def _schedule(self) -> tuple[list[Work], float | None]:
        """What the next step does; when nothing, how long at most to wait (None: until woken)."""
        now = time.monotonic()
        many = self._shares.many(session.tenant for session in self._sessions.values())
        work: list[Work] = []
        prompts: list[VerifySession] = []
        others: list[VerifySession] = []  # who may join, of tenants with many sessions
        decoding = 0
        soonest: float | None = None
        for session in self._sessions.values():
            if session.stalls():
                continue  # nobody reads: nothing is gained by going on
            begins = session.uncached > 1
            due = now if begins else session.due(now)
            if due > now:
                soonest = due if soonest is None else min(due, soonest)
            elif session.tenant in many:
                others.append(session)
            elif begins:
                prompts.append(session)
            else:
                work.append(self._whole(session, self._limits.guess_rows))
            decoding += not begins and session.tenant not in many
        work += self._pieces(prompts, sum(item.num_rows for item in work), decoding)
        if many:
            work += self._joining(others, sum(item.num_rows for item in work), now)
            if others and not work:
                soonest = now + _LOOK_AGAIN_S if soonest is None else min(soonest, now + _LOOK_AGAIN_S)
        else:
            self._shares.unlimited(now)
        return work, None if soonest is None else max(0.0, soonest - now)

    def _whole(self, session: VerifySession, most: int) -> Work:
        """What a session that decodes would have checked, up to so many guesses."""
        return Work.of(session, session.committed[session.cached :], session.block(most), judged=True)

    def _joining(self, sessions: Sequence[VerifySession], rows: int, now: float) -> list[Work]:
        """Of tenants with many sessions what fits beside the others, who has waited longest first."""
        room = self._shares.room(now, rows, self._limits.max_sessions + self._limits.prefill_rows)
        work: list[Work] = []
        for session in sorted(sessions, key=lambda session: session.idle_since):
            if room < 1:
                break
            if session.uncached > 1:
                work += self._pieces([session], 0, 0, room)
            else:
                work.append(self._whole(session, min(self._limits.guess_rows, room - 1)))
            room -= work[-1].num_rows
        return work

    def _pieces(self, prompts: list[VerifySession], rows: int, decoding: int, most: int | None = None) -> list[Work]:
        """As much of the prompts as the others can bear, the oldest first."""
        room = min(self._limits.prefill_rows, most or self._limits.prefill_rows)
        if decoding:
            room = self._pace.prompt_rows(max(rows, decoding), self._limits.prefill_stretch, room)
        pieces: list[Work] = []
        for session in prompts:
            taken = session.committed[session.cached : session.cached + room]
            if not taken:
                break
            room -= len(taken)
            whole = session.cached + len(taken) == len(session.committed)
            pieces.append(Work.of(session, taken, Block(), judged=whole))
        return pieces

    def _execute(self, work: list[Work]) -> ScheduledStep:
        """In the engine's thread: one forward pass, then each session's judgement."""
        started = time.perf_counter()
        masks = [self._mask(item) for item in work]
        done = self._engine.extend([item.rows() for item in work])
        forward = time.perf_counter()
        likeliest = likeliest_of_all(done, [item.session.params for item in work if item.judged])
        results: list[ForwardResult] = []
        for index, item in enumerate(work):
            try:
                results.append(self._result(item, done, index, likeliest[index], masks[index]))
            except InvalidRequest as error:  # of its grammar: the others go on
                log.info("grammar failed", session=item.session.id, error=error.message)
                results.append(ForwardResult(None, None, error=error))
        finished = time.perf_counter()
        return ScheduledStep(results, int((forward - started) * 1e6), int((finished - started) * 1e6))

    def _mask(self, item: Work) -> Future[Masks] | None:
        """What a grammar allows after each row is found out while these go through the model."""
        guide = item.session.guide
        if guide is None or not item.judged:
            return None
        return self._masking.submit(guide.allowed, item.block.paths, self._engine.info.vocab_size)

    def _result(
        self, item: Work, done: StepResult, index: int, likeliest: Sequence[int], mask: Future[Masks] | None
    ) -> ForwardResult:
        session = item.session
        if not item.judged:
            return ForwardResult(None, item.hidden(done.hidden_states[index], ()))
        judgement = judge(
            done.logits[index],
            item.block,
            len(session.committed),
            session.params,
            session.history,
            session.chance,
            likeliest,
            None if mask is None else mask.result(),
        )
        complete = None if session.guide is None else session.guide.advance(judgement.tokens)
        offset = len(item.pending) - 1
        kept = (*range(offset + 1), *(offset + row for row in judgement.outcome.path))
        self._engine.compact(session.key, session.cached, kept)
        return ForwardResult(judgement, item.hidden(done.hidden_states[index], judgement.outcome.path), complete)

    def _commit(self, work: list[Work], step: ScheduledStep, started: float) -> None:
        rows = sum(item.num_rows for item in work)
        tokens = sum(len(result.judgement.tokens) for result in step.results if result.judgement is not None)
        self._step_ms += _SMOOTHING * (step.step_us / 1000 - self._step_ms)
        self._metrics.stepped(sessions=len(work), rows=rows, forward_us=step.forward_us, step_us=step.step_us)
        self._pace.took(rows, step.step_us / 1000, prompts=any(len(item.pending) > 1 for item in work))
        self._shares.took([(item.session.tenant, item.num_rows) for item in work], step.step_us / 1000)
        for item, result in zip(work, step.results, strict=True):
            session = item.session
            if session.closed:
                continue
            if result.error is not None:
                self.close(session, result.error)
                continue
            session.cached += len(item.pending)
            if result.judgement is None:
                session.idle_since = time.monotonic()
                if result.hidden is not None:
                    session.hidden.keep(result.hidden)
                continue
            session.cached += len(result.judgement.outcome.path)
            timings = VerifyTimings(
                wait_us=max(0, int((started - session.idle_since) * 1e6)),
                forward_us=step.forward_us,
                step_us=step.step_us,
                sessions=len(work),
                batch_tokens=rows,
                session_tokens=item.num_rows,
                cached_tokens=session.found,
                step_tokens=tokens,
            )
            session.found = 0
            verdict = _verdict(item, result, timings)
            session.commit(verdict)
            if verdict.finish_reason is not FinishReason.NONE:
                self.close(session)

    async def _sleep(self, seconds: float | None) -> None:
        alarm = None if seconds is None else asyncio.get_running_loop().call_later(seconds, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            if alarm is not None:
                alarm.cancel()

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0]):
            session = self._waiting.popleft()
            self._metrics.queued.observe(time.monotonic() - session.opened_at)
            self._sessions[session.id] = session
            self._reserved += self._needs(session)

    def _fits(self, session: VerifySession) -> bool:
        return (
            len(self._sessions) < self._limits.max_sessions
            and self._reserved + self._needs(session) <= self._limits.kv_tokens
        )

    def _needs(self, session: VerifySession) -> int:
        """Room in the cache, in whole pages, that a session may come to need: a step never finds the cache full."""
        tokens = session.prompt_length + session.params.max_tokens + self._limits.guess_rows
        return blocks_for(tokens) * BLOCK_TOKENS

    def _free_gone(self) -> None:
        for session in self._gone:
            self._engine.free(session.key)
        self._gone.clear()

    def _live(self, session_id: str) -> VerifySession | None:
        everyone: Iterator[VerifySession] = iter([*self._sessions.values(), *self._waiting])
        return next((session for session in everyone if session.id == session_id), None)

    def _epoch_of(self, session_id: str) -> int:
        """The highest that was seen; -1: none lately. Whoever names a huge one does not lock an id for ever."""
        epoch, seen = self._epochs.get(session_id, (-1, 0.0))
        lately = time.monotonic() - seen < EPOCH_KEPT_S
        return epoch if lately or self._live(session_id) is not None else -1

    def _remember_epoch(self, session_id: str, epoch: int) -> None:
        self._epochs[session_id] = epoch, time.monotonic()
        self._epochs.move_to_end(session_id)
        while len(self._epochs) > _REMEMBERED_EPOCHS:
            self._epochs.popitem(last=False)


def _verdict(item: Work, result: ForwardResult, timings: VerifyTimings) -> Verdict:
    assert result.judgement is not None
    session, outcome = item.session, result.judgement.outcome
    position = len(session.committed)
    tokens, reason = session.cut(result.judgement.tokens, result.complete)
    accepted = min(len(outcome.path), len(tokens))
    features = None
    if result.hidden is not None:
        cut = len(result.judgement.tokens) - len(tokens)
        features = session.hidden.take(position - 1 + len(tokens), result.hidden[: len(result.hidden) - cut])
    return Verdict(
        position=position,
        tokens=tuple(tokens),
        accepted=accepted,
        last=last_kind(outcome.kind, accepted, len(tokens)),
        proposed=item.block.depth,
        skipped=sum(item.block.nodes[row - 1].skipped for row in outcome.path[:accepted]),
        finish_reason=reason,
        timings=timings,
        logprobs=result.judgement.logprobs[: len(tokens)],
        hidden_states=features,
        sources=item.block.tallies(outcome.path[:accepted]),
        nodes=len(item.block.tokens),
        accepted_from_branch=sum(item.block.ranks[row - 1] > 0 for row in outcome.path[:accepted]),
    )
