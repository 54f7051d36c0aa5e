"""The verification loop: schedule, run, commit.

The loop runs on the event loop, the target in one thread. Guess trees change on the event loop only, also during a
step, since guesses arrive at any time. The target's thread does not read the trees. It reads the step's immutable
`ScheduledSession` objects and the parts of a session that change only between steps: committed tokens, cache length and
sampling history. It advances a session's grammar itself; the event loop does not use the grammar during a step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

import structlog

from outrider.base.decayed_mean import DecayedMean
from outrider.base.step_loop import Step, StepLoop, StepThread
from outrider.observability.metrics import VerifierMetrics
from outrider.protocol.cost_curve import UNKNOWN_COST, CostCurve
from outrider.protocol.errors import InvalidRequest, OutriderError, PeerLost, Unavailable
from outrider.protocol.fleet import WorkerLoad
from outrider.protocol.hidden_states.messages import FINAL_STATES
from outrider.protocol.speculation import FinishReason, Guess, TokenKind, Verdict, VerifyTimings
from outrider.settings.verifier import VerifierSettings
from outrider.speculation.direct import TakeGuess, TakeVerdict
from outrider.speculation.grammar import GrammarMatcher
from outrider.speculation.tree import tallies
from verifier.admission import Admission
from verifier.batching import Batching, ScheduledSession, num_tokens
from verifier.hidden_states.kept import KeptStates
from verifier.session import Rejection, VerifyOpening, VerifySession
from verifier.step_times import StepTimes
from verifier.target import SessionResult, TargetFailed, VerifyStep, VerifyTarget

log = structlog.get_logger(__name__)


class VerificationLoop(StepLoop):
    """Verification of all sessions in shared steps."""

    def __init__(
        self, target: VerifyTarget, limits: VerifierSettings, metrics: VerifierMetrics, cost: CostCurve = UNKNOWN_COST
    ) -> None:
        super().__init__(StepThread("target"))
        self._target = target
        self._limits = limits
        self._metrics = metrics
        self._times = StepTimes(cost)
        self._kept_states = KeptStates()
        self._admission = Admission(target, limits, metrics)
        self._batching = Batching(limits, self._times, chain=not target.verifies_trees)
        self._step_ms = DecayedMean(0.1, 0.0)
        self._draining = False
        metrics.bind_gauge(metrics.cache_idle, lambda: target.evictable_tokens / limits.kv_tokens)

    # Called by the streams.

    def open(self, opening: VerifyOpening, guide: GrammarMatcher | None = None) -> VerifySession:
        """Admit a session or queue it, with the state of its grammar; raise if it is invalid or there is no room."""
        if self._draining:
            raise Unavailable("this verifier is shutting down")
        opening.check(self._target.info)
        try:
            return self._admission.open(opening, guide)
        finally:
            self.wake()  # an older epoch of the session may have been closed even if this one is refused

    def close(self, session: VerifySession, error: OutriderError | None = None) -> None:
        """End a session; idempotent."""
        self._admission.close(session, error)
        self.wake()

    def link(self, session_id: str, epoch: int, source: int, take: TakeVerdict) -> TakeGuess | None:
        """Join a drafter in this process to a session, as VerifierBeside says."""
        session = self._admission.find(session_id)
        if session is None or session.epoch != epoch:
            return None
        session.direct = take
        take(Verdict(0, tuple(session.committed), 0, TokenKind.NONE, hidden_states=session.hidden_states.newest()))

        def take_guess(guess: Guess) -> None:
            if session.closed or session.direct is not take:  # refused before, or another drafter's turn
                return
            session.draft_us += guess.draft_us
            try:
                session.add_guess(replace(guess, source=source))
            except InvalidRequest as error:
                session.direct = None  # its coordinator ends it, too
                self.reject(session, error, source, bounded=False)  # one at most, however many are unread
            self.wake()

        return take_guess

    def reject(self, session: VerifySession, error: OutriderError, source: int, *, bounded: bool = True) -> None:
        """Tell a session's peer that a guess or steering message is invalid."""
        log.info("guess rejected", error=error.message)
        self._metrics.guesses_refused.inc()
        session.reject(error, source, bounded=bounded)

    def drain(self) -> None:
        self._draining = True

    @property
    def busy(self) -> bool:
        return bool(self._admission.sessions())

    def load(self) -> WorkerLoad:
        return WorkerLoad(
            sessions=len(self._admission.running),
            waiting=len(self._admission.waiting) + self._batching.waiting,
            kv_tokens_used=self._admission.reserved_tokens,
            kv_tokens_total=self._limits.kv_tokens,
            step_ms=self._step_ms.value,
            cost=self._times.curve(),
            kv_tokens_idle=self._target.evictable_tokens,
        )

    # The loop.

    def compose(self) -> Step | None:
        self._admission.free_closed()
        self._admission.admit_waiting()
        for session in self._admission.running.values():
            if not session.begun:
                session.begun = True
                self._target.match_prefix(session, session.hidden_states.follow(self._kept_states))
                session.hidden_states.begin(session.num_cached_tokens)
        now = time.monotonic()
        batch, wait_s = self._batching.schedule(self._admission.running.values(), now)
        if batch:
            return partial(self._target.step, batch), partial(self._take_step, batch, now)
        if wait_s is not None:
            self.wake_in(wait_s)
        return None

    def _take_step(self, batch: Sequence[ScheduledSession], started: float, result: VerifyStep | BaseException) -> None:
        if not isinstance(result, BaseException):
            self._commit(batch, result, started)
            return
        if isinstance(result, TargetFailed):
            self._fail(result)
        if isinstance(result, TargetFailed) or not isinstance(result, Exception):
            raise result
        # A failing step must not end sessions that are not in it.
        log.error("verification step failed", session_ids=[item.session.id for item in batch], exc_info=result)
        for item in batch:
            self.close(item.session, PeerLost(f"the target's forward pass failed: {result}"))

    def stop(self) -> None:
        for session in self._admission.sessions():
            self.close(session, Unavailable("this verifier is shutting down"))
        self.thread.stop()
        with closing(self._target):
            self._admission.free_closed()

    def _fail(self, error: TargetFailed) -> None:
        """Close all sessions, so that they continue on another verifier."""
        log.critical("target failed, the process ends", error=str(error))
        self.drain()  # a session that is opened now would never be computed
        for session in self._admission.sessions():
            self.close(session, PeerLost(f"the target failed: {error}"))

    def _commit(self, batch: Sequence[ScheduledSession], step: VerifyStep, started: float) -> None:
        """Record a step, commit its tokens and send its verdicts."""
        batch_tokens = num_tokens(batch)
        self._step_ms.add(step.step_us / 1000)
        self._metrics.step_s.observe(step.step_us / 1e6)
        self._metrics.forward_s.observe(step.forward_us / 1e6)
        self._metrics.batch.observe(len(batch))
        self._metrics.tokens.observe(batch_tokens)
        self._batching.record(batch, step.step_us / 1000)
        num_committed = sum([len(each.verified.tokens) for each in step.results if each.verified is not None])
        for item, result in zip(batch, step.results, strict=True):
            session = item.session
            if session.closed:
                continue
            if result.error is not None:
                self.close(session, result.error)
                continue
            if result.cache_length > session.cache_length and len(result.hidden_states) < len(item.states):
                for error in session.hidden_states.refuse_missing(item.states, result.hidden_states):
                    session.outbox.put_nowait(Rejection(error, 0))
            session.cache_length = result.cache_length
            if result.num_cached_tokens is not None:
                session.num_cached_tokens = 0 if session.has_committed else result.num_cached_tokens
                session.hidden_states.begin(result.num_cached_tokens)
            if result.verified is None:
                session.waiting_since = time.monotonic()
                session.hidden_states.add(session.cache_length, result.hidden_states)
                continue
            if not session.has_committed:
                self._metrics.prefix_queries.inc(len(session.committed))
                self._metrics.prefix_hits.inc(session.num_cached_tokens)
            timings = VerifyTimings(
                wait_us=max(0, int((started - session.waiting_since) * 1e6)),
                step_us=step.step_us,
                sessions=len(batch),
                batch_tokens=batch_tokens,
                session_tokens=item.num_tokens,
                cached_tokens=session.num_cached_tokens,
                step_tokens=num_committed,
                draft_us=session.draft_us,
            )
            session.num_cached_tokens = session.draft_us = 0  # the first verdict carries them
            verdict = _verdict(item, result, timings)
            session.commit(verdict)
            session.waiting_since = started + step.step_us / 1e6
            if verdict.finish_reason is not FinishReason.NONE:
                self.close(session)


def _verdict(item: ScheduledSession, result: SessionResult, timings: VerifyTimings) -> Verdict:
    assert result.verified is not None
    session, block, outcome = item.session, item.block, result.verified.outcome
    position = len(session.committed)
    tokens, reason = session.truncate_output(result.verified.tokens, result.complete_after)
    accepted = min(len(outcome.path), len(tokens))
    path = outcome.path[:accepted]
    nodes = session.tree.nodes(block) if block.tokens else []
    end, cut = position - 1 + len(tokens), len(result.verified.tokens) - len(tokens)
    states = session.hidden_states.take(end, result.hidden_states, tokens, cut) if result.hidden_states else {}
    return Verdict(
        position=position,
        tokens=tuple(tokens),
        accepted=accepted,
        last=outcome.kind if len(tokens) > accepted else TokenKind.NONE,  # the output may end before it
        proposed=block.shape.depth if nodes else 0,
        finish_reason=reason,
        timings=timings,
        logprobs=result.verified.logprobs[: len(tokens)],
        hidden_states=states.pop(FINAL_STATES.number, None),
        layer_states=tuple(states.values()),
        sources=tallies(nodes, block.shape.depths, path) if nodes else (),
        nodes=len(nodes),
        accepted_from_branch=sum([nodes[row - 1].rank > 0 for row in path]),
    )
