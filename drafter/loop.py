"""The drafting loop: keep every session γ tokens ahead of what is committed."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import structlog

from drafter.calibration import Calibration
from drafter.grammar import GrammarCursor
from drafter.interface import Drafter, DraftRequest, DraftResult
from drafter.session import DraftOpening, DraftSession
from outrider.observability.metrics import DrafterMetrics
from outrider.protocol.errors import Overloaded, Unavailable
from outrider.protocol.fleet import WorkerLoad

log = structlog.get_logger(__name__)

_SMOOTHING = 0.1
_RETRY_AFTER_MS = 1_000


class DraftingLoop:
    """All sessions that want guesses are drafted together, step by step, so that a commit takes effect between two."""

    def __init__(self, drafter: Drafter, max_sessions: int, metrics: DrafterMetrics) -> None:
        self._drafter = drafter
        self._max_sessions = max_sessions
        self._metrics = metrics
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drafter")
        self._sessions: dict[str, DraftSession] = {}
        self._gone: list[DraftSession] = []
        self._calibrations: dict[bool, Calibration] = {}  # by whether draws are greedy
        self._wake = asyncio.Event()
        self._step_ms = 0.0
        self._draining = False
        metrics.shows(metrics.sessions, lambda: len(self._sessions))

    def open(self, opening: DraftOpening, rails: GrammarCursor | None = None) -> DraftSession:
        if self._draining:
            raise Unavailable("this drafter is leaving")
        opening.check()
        if len(self._sessions) >= self._max_sessions:
            raise Overloaded(
                f"{len(self._sessions)} sessions are drafted already",
                field="sessions",
                value=len(self._sessions),
                limit=self._max_sessions,
                retry_after_ms=_RETRY_AFTER_MS,
            )
        session = DraftSession(opening, self._calibrations.setdefault(opening.params.greedy, Calibration()), rails)
        self._sessions[session.key] = session
        self._wake.set()
        return session

    def wake(self) -> None:
        """A commit or a steer came in."""
        self._wake.set()

    def close(self, session: DraftSession) -> None:
        """End a session; idempotent."""
        if self._sessions.pop(session.key, None) is None:
            return
        session.outbox.put_nowait(None)
        self._gone.append(session)
        self._wake.set()

    def drain(self) -> None:
        """Drafts are worth nothing to a drafter that leaves: streams end at once, sessions go on without."""
        self._draining = True
        for session in list(self._sessions.values()):
            self.close(session)

    @property
    def busy(self) -> bool:
        return bool(self._sessions)

    def load(self) -> WorkerLoad:
        return WorkerLoad(sessions=len(self._sessions), step_ms=self._step_ms)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            for session in self._gone:
                self._drafter.forget(session.key)
            self._gone.clear()
            asked = [(session, ask) for session in self._sessions.values() if (ask := session.ask()) is not None]
            if not asked:
                await self._wake.wait()
                continue
            started = time.perf_counter()
            try:
                drafts = await loop.run_in_executor(self._thread, self._drafter.draft, [ask for _, ask in asked])
            except Exception as error:  # whatever the model threw must not end the other sessions
                log.exception("drafting failed", session_ids=[session.id for session, _ in asked], error=str(error))
                for session, _ in asked:
                    self.close(session)
                continue
            self._take(asked, drafts, time.perf_counter() - started)

    def stop(self) -> None:
        self.drain()
        self._thread.shutdown(wait=True)

    def _take(self, asked: list[tuple[DraftSession, DraftRequest]], drafts: list[DraftResult], spent_s: float) -> None:
        self._step_ms += _SMOOTHING * (spent_s * 1000 - self._step_ms)
        tokens = sum(len(draft.tokens) for draft in drafts)
        self._metrics.stepped(sessions=len(asked), tokens=tokens, seconds=spent_s)
        for (session, _), draft in zip(asked, drafts, strict=True):
            session.take(draft, int(spent_s * 1e6))
