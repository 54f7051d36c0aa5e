"""Sessions of a coordinator, for gRPC and HTTP: starting, finding by key or id, taking over, following, retiring."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import version
from weakref import WeakValueDictionary

import structlog

from coordinator.admission.model_limits import limits_of, read_limits
from coordinator.admission.quotas import Quotas
from coordinator.admission.waiting.seats import Seats, capacity_of
from coordinator.admission.waiting.urgency import urgency
from coordinator.control.throughput_model import Mode
from coordinator.persistence.ended_sessions import EndedSessions
from coordinator.persistence.idempotency import IdempotencyKeys
from coordinator.persistence.pair_history import PairHistoryStore
from coordinator.persistence.session_record import SessionRecord, SessionRequest
from coordinator.persistence.store import Store
from coordinator.persistence.write_behind import WriteBehind
from coordinator.sessions.drafting import DraftingContext
from coordinator.sessions.hidden_states.delivery import ProjectionDelivery
from coordinator.sessions.resumption import TOKEN_BYTES, append_tail, check_position, finish_ended
from coordinator.sessions.session import Session, SessionContext
from coordinator.workers.fleet_keys import FleetKeys
from coordinator.workers.liveness import watch
from coordinator.workers.registrations import Registrations
from coordinator.workers.target import Target
from coordinator.workers.worker_pool import WorkerPool
from outrider.base.aio import beside, cancel_all, critical_task
from outrider.observability.metrics import CoordinatorMetrics
from outrider.observability.tracing import make_tracing
from outrider.protocol.errors import Conflict, Expired, NotFound, Unavailable
from outrider.protocol.statistics import ServerInfo
from outrider.security.tenants import tenant
from outrider.settings.coordinator import CoordinatorSettings

log = structlog.get_logger(__name__)

_FLUSH_S = 3.0
_FIND_WAIT_S = 0.1
_CHECK_S = 2.0


class SessionManager:
    """Sessions of this coordinator, with the components that they share."""

    def __init__(
        self, settings: CoordinatorSettings, redis_url: str, fleet: FleetKeys, several: Callable[[], bool]
    ) -> None:
        """Connect the components; `several` returns whether there is more than one tenant."""
        self.coordinator_id = f"coordinator-{secrets.token_hex(4)}"
        self._settings = settings
        read_limits(settings.model_limits)  # a wrong one is found at the start
        self.metrics = CoordinatorMetrics(Mode)
        skips, ttl_s = self.metrics.records_skipped.add, settings.session_ttl_s
        self.store = Store(redis_url, self.coordinator_id, ttl_s, fleet.verifiers, skips)
        self.write_behind = WriteBehind(self.store, lambda it: it in self._sessions or it in self.ended.recent)
        self._pairs = PairHistoryStore(self.store)
        # A new target's counters exist before its first request: benchmarks read them before they start.
        self.worker_pool = WorkerPool(fleet, settings, on_target=self.metrics.of)
        self.targets = self.worker_pool.targets
        self.registrations = Registrations(self.worker_pool, self.store, settings.heartbeat_ms)
        self.delivery = ProjectionDelivery(self.worker_pool.workers)
        self.drafting = DraftingContext(
            self.worker_pool, self._pairs, settings.gamma_max, settings.drafters_per_session, delivery=self.delivery
        )
        self._tracing = make_tracing(settings.otlp_endpoint, "coordinator")
        self._quotas = Quotas(settings, several=several)
        self._context = SessionContext(
            self.write_behind,
            self.drafting,
            self.metrics,
            self._tracing,
            settings.worker_wait_s,
            cache(lambda target: Seats(partial(capacity_of, self.worker_pool, target), several=several)),
            self._quotas,
        )
        self._sessions: dict[str, Session] = {}
        self._claiming: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by session
        self.attached: list[str] = []  # tenants of sessions that engines attached
        self.ended = EndedSessions(self.store)
        self._keys = IdempotencyKeys(self.store, ttl_s, self._sessions)
        self._tasks: list[asyncio.Task[None]] = []
        self._draining = False

    # Lifecycle.

    def start(self) -> None:
        pool = self.worker_pool
        self._tasks = [
            critical_task(self.write_behind.run(), "write-behind"),
            critical_task(self._pairs.run(), "pair history"),
            critical_task(self.registrations.run(), "registrations"),
            critical_task(watch(pool.workers.in_use, pool.has_spare, self._settings.verdict_timeout_s), "liveness"),
            critical_task(self.delivery.run(), "projections"),
            critical_task(self._check_waiting(), "waiting sessions"),
        ]

    def drain(self) -> None:
        self._draining = True

    async def stop(self) -> None:
        """Stop all sessions; clients resume unfinished ones on another coordinator, from Redis."""
        for session in (sessions := self.live):
            session.stats.moves = True
            session.stop(Unavailable("this coordinator is shutting down; resume on another", retry_after_ms=500))
        await asyncio.gather(*(session.closed() for session in sessions))
        if not await self.write_behind.flush(_FLUSH_S):
            log.warning("last writes to redis failed")
        await cancel_all(self._tasks)
        await self.worker_pool.workers.close()
        await self.store.connection.close()
        await self._tracing.close()

    async def _check_waiting(self) -> None:
        """Write sessions without tokens again and again: another coordinator may have cancelled one, or resumed it."""
        while True:
            await asyncio.sleep(_CHECK_S)
            for session in (each for each in self.live if each.stats.waiting and not each.ended):
                session.store(in_doubt=True)

    # State.

    @property
    def live(self) -> list[Session]:
        return list(self._sessions.values())

    @property
    def ready(self) -> bool:
        """Return whether a request could be answered."""
        return self.worker_pool.ready and not self._draining

    async def info(self) -> ServerInfo:
        durable, workers = await self.store.connection.answers(), tuple(self.worker_pool.infos())
        return ServerInfo(version("outrider"), self.coordinator_id, len(self._sessions), durable, workers)

    # Requests.

    async def begin(self, request: SessionRequest, target: Target, key: str = "") -> Session:
        """Return a new session, or the one that this idempotency key stands for."""
        if new := key not in self._keys:  # a repeated request starts nothing
            self._admit_request(request, target)
        # Prefix caches of this tenant are kept apart from those of other tenants.
        salt = request.cache_salt if self._settings.share_prefixes else tenant().salt(request.cache_salt)
        salted = replace(request, cache_salt=salt, priority=urgency().priority)
        record = SessionRecord(secrets.token_hex(12), salted, model=target.identity, tenant=tenant().id)
        session = Session(record, target, self._context)
        # Stored before the first await, so that a second request with the same key finds it.
        self._sessions[record.session_id] = session
        known_id = ""
        try:
            known_id = await self._keys.reserve(key, record.session_id, request) if key else record.session_id
        finally:
            if known_id != record.session_id:
                self._sessions.pop(record.session_id, None)
                session.stop(Unavailable("the first request with this idempotency_key failed", retry_after_ms=500))
        if not session.ended:
            return self._run(session)
        return await self._find_by_key(replace(record, session_id=known_id), target, admitted=new)

    def _admit_request(self, request: SessionRequest, target: Target) -> None:
        self._context.seats(target.identity).check_in_time(tenant().id, urgency(), request)
        running = (s for s in self.live if s.target.identity == target.identity and not s.ended)
        waits = ((session.record.tenant, session.stats.waiting) for session in running)
        limits_of(self._settings, target).admit(target.info.name, waits, tenant().id)
        self.admit(len(request.prompt))

    def admit(self, num_tokens: int) -> None:
        """Count a new session of the calling tenant, with its prompt; raise Overloaded beyond a limit."""
        if self._draining:
            raise Unavailable("this coordinator is shutting down", retry_after_ms=500)
        self._quotas.admit(tenant(), *self._held())
        self._quotas.spend(tenant(), num_tokens)

    def _held(self) -> tuple[int, int]:
        """Return the sessions of this tenant and of all. One counts until its output has ended, read or not."""
        running = [session.record.tenant for session in self._sessions.values() if not session.ended] + self.attached
        return running.count(tenant().id), len(running)

    async def _find_by_key(self, record: SessionRecord, target: Target, *, admitted: bool) -> Session:
        """Return the session that an idempotency key stands for; start it again only if it is stored nowhere."""
        for _ in range(10):
            try:
                known = await self.take_over(record.session_id, 0, ())
            except NotFound:
                await asyncio.sleep(_FIND_WAIT_S)  # its coordinator may not have written it yet
                continue
            if known.target.identity != target.identity:
                with self.followed(known):  # else it would run on, unread
                    raise Conflict("this idempotency_key was used for another model", field="idempotency_key")
            return known
        if (live := self._live(record.session_id)) is None and not admitted:
            self._admit_request(record.request, target)
        return live or self._run(Session(record, target, self._context))

    async def take_over(self, session_id: str, position: int, tail: Sequence[int]) -> Session:
        """Return the session to follow: the running one, or one continued from its record."""
        if (live := self._live(session_id)) is not None:
            await live.opened()
        async with self._claiming.setdefault(session_id, asyncio.Lock()):  # a second claim would fence the first
            if (live := self._live(session_id)) is not None:
                check_position(position, live.record)
                append_tail(live.record, position, tail, live.target, closed=True)
                return live
            self.targets.check_any()
            if self._draining:  # before it claims the session
                raise Unavailable("this coordinator is shutting down", retry_after_ms=500)
            record, stored_as_finished = await self.ended.load(session_id)
            if (target := self.targets.of(record.model)) is None:
                message = f"no verifier of the target of session {session_id} has reported; is one starting?"
                raise Unavailable(message, field="session_id", value=session_id, retry_after_ms=500)
            self.store.check(record, target.info)
            check_position(position, record)
            append_tail(record, position, tail, target, closed=record.finished)
            await finish_ended(record, target)
            check_position(position, record)
            session = await beside(TOKEN_BYTES * len(record.tokens), Session, record, target, self._context)
            if not record.finished:
                self._quotas.admit_takeover(tenant(), *self._held())
            if record.finished and not stored_as_finished:
                self.ended.keep(record)  # else Redis may get it no more
                session.store()
            return session if record.finished else self._live(session_id) or self._run(session)

    def _live(self, session_id: str) -> Session | None:
        """Return the session if it runs here or has finished and is still read, and belongs to this tenant."""
        session = self._sessions.get(session_id)
        if session is None or (session.ended and not session.record.finished):
            return None
        return session if session.record.tenant == tenant().id else None

    def _run(self, session: Session) -> Session:
        self._sessions[session.record.session_id] = session
        session.start()
        return session

    @contextlib.contextmanager
    def followed(self, session: Session) -> Iterator[None]:
        """Count a reader of the session; stop the session when the last one leaves."""
        session.followers += 1
        try:
            yield
        except Expired as late:
            if session.followers == 1 and session.stats.waiting:
                session.stop(late)
            raise
        finally:
            session.followers -= 1
            if session.followers == 0:
                if not session.ended:
                    session.stop()
                if self._sessions.get(session.record.session_id) is session:
                    del self._sessions[session.record.session_id]
                self.ended.keep(session.record)

    async def cancel(self, session_id: str) -> bool:
        """Cancel the session; return False if it had ended already."""
        if (session := self._live(session_id)) is None:
            return await self.ended.cancel(session_id)
        running = not session.record.finished  # else Redis may not have its end yet
        session.cancel()
        return running
