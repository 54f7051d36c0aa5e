"""The drafting loop: keep every session γ tokens ahead of its committed position."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import structlog

from drafter.calibration import Calibration
from drafter.grammar import GrammarCursor
from drafter.interface import Drafter, DraftRequest
from drafter.session import DraftOpening, DraftSession
from drafter.shares.shares import FEW, DraftingShares
from outrider.base.decayed_mean import DecayedMean
from outrider.base.step_loop import Step, StepLoop, StepThread
from outrider.observability.metrics import DrafterMetrics
from outrider.protocol.checks import MAX_IDS
from outrider.protocol.errors import InvalidRequest, OutriderError, Overloaded, Unavailable
from outrider.protocol.fleet import WorkerLoad
from outrider.protocol.speculation import Guess, Verdict
from outrider.speculation.direct import VerifierBeside

log = structlog.get_logger(__name__)

_SMOOTHING = 0.1
_RETRY_AFTER_MS = 1_000

Requests = dict[DraftSession, DraftRequest]
Guesses = dict[DraftSession, Guess | Exception]


class DraftingLoop(StepLoop):
    """Batched drafting for all sessions, step by step: commits take effect between two steps."""

    def __init__(
        self, drafter: Drafter, max_sessions: int, metrics: DrafterMetrics, beside: VerifierBeside | None = None
    ) -> None:
        """Prepare the loop; `beside` is the verifier in this process, if any."""
        super().__init__(beside.thread if beside else StepThread("drafter"))
        self._drafter = drafter
        self._max_sessions = max_sessions
        self._metrics = metrics
        self._beside = beside
        self._sessions: dict[str, DraftSession] = {}
        self._closed: list[DraftSession] = []
        self._calibrations: dict[bool, Calibration] = {}  # key: whether the session is greedy
        self._step_ms = DecayedMean(_SMOOTHING, 0.0)
        self._shares = DraftingShares()
        self._draining = False
        metrics.bind_gauge(metrics.sessions, lambda: len(self._sessions))

    def open(self, opening: DraftOpening, grammar_cursor: GrammarCursor | None = None) -> DraftSession:
        if self._draining:
            raise Unavailable("this drafter is shutting down")
        opening.check(getattr(self._drafter, "vocab_limit", MAX_IDS))
        if (held := len(self._sessions)) >= self._max_sessions:
            message, limit = f"{held} sessions are open already", self._max_sessions
            raise Overloaded(message, field="sessions", value=held, limit=limit, retry_after_ms=_RETRY_AFTER_MS)
        calibration = self._calibrations.setdefault(opening.params.greedy, Calibration())
        session = DraftSession(opening, calibration, grammar_cursor)
        if opening.direct_source:
            self._link(session, opening)
        self._sessions[session.key] = session
        self.wake()
        return session

    def close(self, session: DraftSession, error: OutriderError | None = None) -> None:
        """End a session; idempotent."""
        if self._sessions.pop(session.key, None) is not None:
            session.close(error)
            self._closed.append(session)
            self.wake()

    def drain(self) -> None:
        """Close all sessions and refuse new ones: their coordinators continue without this drafter."""
        self._draining = True
        for session in list(self._sessions.values()):
            self.close(session)

    @property
    def busy(self) -> bool:
        return bool(self._sessions)

    def load(self) -> WorkerLoad:
        return WorkerLoad(sessions=len(self._sessions), step_ms=self._step_ms.value)

    def compose(self) -> Step | None:
        for session in self._closed:
            self._drafter.forget(session.key)
        self._closed.clear()
        sessions = self._shares.next_step(self._sessions) if len(self._sessions) > FEW else self._sessions
        requests: Requests = {}
        for session in sessions.values():
            if (wanted := session.next_request()) is not None:
                requests[session] = wanted
        if not requests:
            return None
        return partial(self._draft, requests), partial(self._take_step, requests, time.perf_counter())

    def _draft(self, requests: Requests) -> Guesses:
        """Return the guesses. If the step fails, each session drafts alone, and those that fail alone have errors."""
        try:
            return dict(zip(requests, self._drafter.draft([*requests.values()]), strict=True))
        except Exception as error:
            if type(error).__name__ == "AcceleratorError":  # of torch; it is sticky: the process ends
                raise
            if len(requests) == 1:
                return dict.fromkeys(requests, error)
        return {session: self._draft({session: request})[session] for session, request in requests.items()}

    def _take_step(self, requests: Requests, started: float, drafted: Guesses | BaseException) -> None:
        if isinstance(drafted, BaseException):
            raise drafted
        for session, found in drafted.items():
            if isinstance(found, Exception):
                log.error("drafting failed, session closed", session=session.id, error=str(found), exc_info=found)
                self.close(session, InvalidRequest(f"drafting for it failed: {type(found).__name__}"))
        guesses = {session: found for session, found in drafted.items() if isinstance(found, Guess)}
        if guesses:
            self._add({it: requests[it] for it in guesses}, [*guesses.values()], time.perf_counter() - started)

    def stop(self) -> None:
        self.drain()
        if self._beside is None:
            self.thread.stop()

    def _link(self, session: DraftSession, opening: DraftOpening) -> None:
        """Let the verifier in this process commit to the session and take its guesses."""

        def take(verdict: Verdict) -> bool:
            if session.closed:
                return False
            try:
                session.commit(verdict.position, verdict.tokens, verdict.hidden_states)
            except InvalidRequest as error:
                log.error("commit refused, session closed", session=session.id, error=error.message)
                self.close(session)
            if session.wants_more:
                self.wake()
            return True

        found = self._beside and self._beside.link(opening.session_id, opening.epoch, opening.direct_source, take)
        if not found:
            raise InvalidRequest.of("open.direct_source", opening.direct_source, "0: its verifier is not here")
        session.send = found

    def _add(self, requests: Requests, guesses: Sequence[Guess], spent_s: float) -> None:
        self._step_ms.add(spent_s * 1000)
        if len(self._sessions) > FEW:
            self._shares.measure(requests, guesses, spent_s)
        self._metrics.step_s.observe(spent_s)
        self._metrics.batch.observe(len(requests))
        self._metrics.guessed.inc(sum(map(len, map(DraftRequest.new_tokens, requests.values(), guesses))))
        for session, guess in zip(requests, guesses, strict=True):
            session.add_guess(guess, int(spent_s * 1e6))
