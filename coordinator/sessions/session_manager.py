"""The sessions of a coordinator: begun, found again by key or id, taken over, followed, retired.

Both edges for clients, gRPC and HTTP, stand on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace

import structlog

from coordinator.admission.quotas import Quotas
from coordinator.admission.seats import Seats, room_at
from coordinator.control.throughput_model import Mode
from coordinator.persistence.pair_history import PairHistoryStore
from coordinator.persistence.session_record import SessionRecord, SessionRequest
from coordinator.persistence.store import Store, StoreDown
from coordinator.persistence.write_behind import WriteBehind
from coordinator.sessions.drafting import DraftingContext
from coordinator.sessions.gauges import show
from coordinator.sessions.seeds import draw_nonce
from coordinator.sessions.session import Session, SessionContext
from coordinator.sessions.stop_conditions import settle
from coordinator.settings import CoordinatorSettings
from coordinator.workers.fleet_keys import FleetKeys
from coordinator.workers.target import Target
from coordinator.workers.worker_pool import WorkerPool
from outrider.base.aio import cancel_all, vital
from outrider.observability.metrics import CoordinatorMetrics
from outrider.observability.tracing import tracing_to
from outrider.protocol.checks import check_tokens
from outrider.protocol.errors import Conflict, InvalidRequest, NotFound, OutriderError, Unavailable
from outrider.protocol.fleet import WorkerInfo
from outrider.protocol.speculation import TokenKind as Kind
from outrider.security.tenants import tenant

log = structlog.get_logger(__name__)

MAX_KEY_CHARACTERS = 256
_REMEMBERED_KEYS = 16_384
_REMEMBERED_SESSIONS = 1_024
_FLUSH_S = 3.0
_RESERVE_S = 0.25
_TRACE_TRIES = 10
_TRACE_WAIT_S = 0.1


class SessionManager:
    def __init__(
        self,
        settings: CoordinatorSettings,
        redis_url: str,
        fleet: FleetKeys,
        several: Callable[[], bool] = lambda: False,
    ) -> None:
        """`several`: whether there are several tenants."""
        self.coordinator_id = f"coordinator-{secrets.token_hex(4)}"
        self._settings = settings
        self.metrics = CoordinatorMetrics(Mode)
        self._store = Store(
            redis_url, self.coordinator_id, settings.session_ttl_s, fleet.verifiers, self.metrics.record_skipped
        )
        self._journal = WriteBehind(self._store)
        self._pairs = PairHistoryStore(self._store)
        self.roster = WorkerPool(
            self._store,
            settings.heartbeat_ms,
            fleet,
            settings.verdict_timeout_s,
            # Its counters are there, at zero, before the first request: a benchmark reads them before it begins.
            target_known=lambda target: self.metrics.of(target.name),
        )
        means = DraftingContext(self.roster, self._pairs, settings.gamma_max, settings.drafters_per_session)
        self._tracing = tracing_to(settings.otlp_endpoint, "coordinator")
        self._quotas = Quotas(settings, several=several)
        self._deps = SessionContext(
            self.roster,
            self._journal,
            means,
            self.metrics,
            self._tracing,
            settings.worker_wait_s,
            Seats(lambda: room_at(self.roster), several=several),
            self._quotas,
        )
        self._sessions: dict[str, Session] = {}
        self._recent: OrderedDict[str, SessionRecord] = OrderedDict()  # for when Redis is away
        self._keys: OrderedDict[str, str] = OrderedDict()
        self._tasks: list[asyncio.Task[None]] = []
        self._draining = False
        show(self.metrics, self._sessions, self.roster, self._store, self._journal)

    # Life.

    def start(self) -> None:
        self._tasks = [
            vital(self._journal.run(), "journal"),
            vital(self._pairs.run(), "pairs"),
            vital(self.roster.run(), "roster"),
            vital(self.roster.watch(), "watch"),
        ]

    def drain(self) -> None:
        self._draining = True

    async def stop(self) -> None:
        """Sessions that have not finished are handed over through Redis: their clients resume elsewhere."""
        sessions = list(self._sessions.values())
        for session in sessions:
            session.stop(Unavailable("this coordinator is leaving; resume on another", retry_after_ms=500))
        await asyncio.gather(*(session.closed() for session in sessions))
        if not await self._journal.flush(_FLUSH_S):
            log.warning("redis did not take the last writes")
        await cancel_all(self._tasks)
        await self.roster.close()
        await self._store.close()
        await self._tracing.close()

    # What there is.

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def live(self) -> list[Session]:
        return list(self._sessions.values())

    @property
    def ready(self) -> bool:
        """Whether a request could be answered."""
        return self.roster.ready and not self._draining

    @property
    def target(self) -> Target:
        target = self.roster.target
        if target is None:
            raise Unavailable("no verifier has reported yet; is one starting?", retry_after_ms=2000)
        return target

    @property
    def workers(self) -> list[WorkerInfo]:
        return [replace(link.info, round_trip_ms=link.round_trip_ms) for link in self.roster.links()]

    async def durable(self) -> bool:
        """Whether sessions survive this coordinator."""
        try:
            await self._store.ping()
        except StoreDown as error:
            log.debug("not durable now", error=error.message)
        return self._store.up

    # Beginning, following, ending.

    @contextlib.contextmanager
    def admission(self) -> Iterator[None]:
        """Around everything that may refuse a request before there is a session to follow."""
        try:
            with self.metrics.refusals():
                yield
        except OutriderError as error:
            log.info("request refused", code=error.code, error=error.message)
            raise

    async def begin(self, request: SessionRequest, target: Target, key: str = "") -> Session:
        """A new session, or the one that this idempotency key stands for."""
        if self._draining:
            raise Unavailable("this coordinator is leaving", retry_after_ms=500)
        if len(key) > MAX_KEY_CHARACTERS:
            raise InvalidRequest.of(
                "idempotency_key", f"{len(key)} characters", f"at most {MAX_KEY_CHARACTERS} characters"
            )
        self._admit()
        self._quotas.spend(tenant(), len(request.prompt))
        record = SessionRecord(
            secrets.token_hex(12),
            replace(self._salted(request), nonce=draw_nonce()),
            model=target.info.fingerprint,
            tenant=tenant().id,
        )
        session = Session(record, target, self._deps)
        # Known before anything is awaited, so that a second request with the same key finds it.
        self._sessions[record.session_id] = session
        try:
            held = await self._reserve(key, record.session_id, request) if key else record.session_id
        except BaseException:
            del self._sessions[record.session_id]
            raise
        if held == record.session_id:
            session.start()
            return session
        del self._sessions[record.session_id]
        return await self._again(replace(record, session_id=held), target)

    def _admit(self) -> None:
        """Raises Overloaded. A session has a seat until its output has ended, whether or not it was read."""
        going = [session.record.tenant for session in self._sessions.values() if not session.ended]
        self._quotas.admit(tenant(), going.count(tenant().id), len(going))

    def _salted(self, request: SessionRequest) -> SessionRequest:
        """Keep what is cached of this tenant's texts from other tenants, in verifiers and drafters alike."""
        if self._settings.share_prefixes:
            return request
        return replace(request, cache_salt=tenant().salt(request.cache_salt))

    async def _again(self, record: SessionRecord, target: Target) -> Session:
        """The session that an idempotency key stands for; begun anew only if it left no trace."""
        for _ in range(_TRACE_TRIES):
            try:
                return await self.take_over(record.session_id, 0, ())
            except NotFound:
                await asyncio.sleep(_TRACE_WAIT_S)  # its coordinator may be about to write it
        return self._run(Session(record, target, self._deps))

    async def _reserve(self, key: str, session_id: str, request: SessionRequest) -> str:
        """The session that a key stands for: the new one, or the one that it was used for before."""
        digest = hashlib.sha256(_sameness(request).encode()).hexdigest()[:16]
        name = hashlib.sha256(tenant().idempotency_key(key).encode()).hexdigest()
        mine = f"{session_id} {digest}"
        held = self._keys.get(name)
        if held is None:
            try:
                async with asyncio.timeout(_RESERVE_S):
                    held = await self._store.reserve(name, mine)
            except (StoreDown, TimeoutError) as error:
                log.warning("idempotency holds on this coordinator only", error=str(error))
        held = self._keys.setdefault(name, held or mine)
        while len(self._keys) > _REMEMBERED_KEYS:
            self._keys.popitem(last=False)
        known_id, _, known_digest = held.partition(" ")
        if known_digest != digest:
            raise Conflict(
                "this idempotency_key was used for another request",
                field="idempotency_key",
                value=key,
                limit="a new key",
            )
        return known_id

    async def take_over(self, session_id: str, position: int, tail: tuple[int, ...]) -> Session:
        """The session to follow: the live one here, or one grown from its record."""
        live = self._live(session_id)
        if live is not None:
            _check_position(position, len(live.record.tokens), live.record)
            return live
        target = self.target
        record, noted = await self._load(session_id)
        if record.model != target.info.fingerprint:
            raise Conflict(f"session {session_id} belongs to another target", field="session_id", value=session_id)
        self._store.check(record, target.info)
        if not record.finished:
            if self._draining:
                raise Unavailable("this coordinator is leaving", retry_after_ms=500)
            _check_position(position, len(record.tokens), record)
            _append_tail(record, position, tail, target)
            await settle(record, target)
            self._check_room()
        _check_position(position, len(record.tokens), record)
        if (again := self._live(session_id)) is not None:
            return again  # somebody else was faster while the record was read
        session = Session(record, target, self._deps)
        return session if noted else self._run(session)

    def _check_room(self) -> None:
        """Sessions that another coordinator leaves behind may come on top of our own, as many again."""
        going = sum(not session.ended for session in self._sessions.values())
        if going >= 2 * self._settings.max_sessions:
            raise Unavailable(f"{going} sessions are going on here", retry_after_ms=1000)

    def _live(self, session_id: str) -> Session | None:
        """Return the session if it goes on here and is this tenant's."""
        session = self._sessions.get(session_id)
        return session if session is not None and not session.ended and _ours(session.record) else None

    def _remembered(self, session_id: str) -> SessionRecord | None:
        record = self._recent.get(session_id)
        return record if record is not None and _ours(record) else None

    async def _load(self, session_id: str) -> tuple[SessionRecord, bool]:
        """Return the record, and whether its end is noted where it is kept."""
        here = self._remembered(session_id)
        try:
            record = await self._store.claim(session_id, tenant().id)
        except StoreDown:
            if here is None:
                raise
            record = here
        if record is None:
            if here is None:
                raise _unknown(session_id)
            record = here
        noted = record.finished
        if here is not None and (len(here.tokens), here.finished) > (len(record.tokens), record.finished):
            record = replace(here, epoch=max(here.epoch, record.epoch))
        return record, noted

    def _run(self, session: Session) -> Session:
        self._sessions[session.record.session_id] = session
        session.start()
        return session

    @contextlib.contextmanager
    def followed(self, session: Session) -> Iterator[None]:
        """Somebody reads it; once nobody does, it is left off."""
        session.followers += 1
        try:
            yield
        finally:
            session.followers -= 1
            if session.followers == 0:
                if not session.ended:
                    session.stop()
                self._retire(session)

    async def cancel(self, session_id: str) -> bool:
        """False: it had ended already."""
        session = self._live(session_id)
        if session is not None:
            session.cancel()
            return True
        ended = self._remembered(session_id)
        if ended is not None and ended.finished:
            return False
        cancelled = await self._store.cancel(session_id, tenant().id)
        if cancelled is None:
            raise _unknown(session_id)
        return cancelled

    def _retire(self, session: Session) -> None:
        session_id = session.record.session_id
        if self._sessions.get(session_id) is session:
            del self._sessions[session_id]
        self._recent[session_id] = session.record
        self._recent.move_to_end(session_id)
        while len(self._recent) > _REMEMBERED_SESSIONS:
            self._recent.popitem(last=False)


def _unknown(session_id: str) -> NotFound:
    return NotFound(
        f"there is no session {session_id!r}", field="session_id", value=session_id, limit="a session id from Started"
    )


def _ours(record: SessionRecord) -> bool:
    return record.tenant == tenant().id


def _sameness(request: SessionRequest) -> str:
    """What must be equal for two requests to be the same; a seed that was drawn is not part of it."""
    seed = None if request.drawn_seed else request.params.seed
    return replace(request, params=replace(request.params, seed=seed)).to_json()


def _append_tail(record: SessionRecord, position: int, tail: tuple[int, ...], target: Target) -> None:
    """Take over tokens that the client has and the record has not, where they cannot be made again.

    That is in rejection and block mode. In the other modes they are made
    again, and what the client says of them is not asked for.
    """
    mode = record.request.params.mode
    if not mode.needs_draft_probs:
        return
    if len(tail) > position:
        raise InvalidRequest.of("tail", f"{len(tail)} tokens", f"at most {position}, those before from_position")
    check_tokens("tail", tail, target.info.vocab_size)
    known = len(record.tokens)
    start = position - len(tail)
    both = slice(start, min(known, position))
    if list(tail[: max(0, known - start)]) != record.tokens[both]:
        raise Conflict(
            f"tail differs from the output of session {record.session_id}", field="tail", limit="what was streamed"
        )
    if start > known:
        raise Conflict(
            f"{position - known} tokens before from_position were lost with a coordinator and cannot be drawn again in "
            f"{mode.name.lower()} mode; send them as tail",
            field="tail",
            value=len(tail),
            limit=f"at least {position - known} tokens",
        )
    for token in tail[known - start :]:
        record.append(token, Kind.PLAIN, None)


def _check_position(position: int, known: int, record: SessionRecord) -> None:
    limit = known if record.finished else record.request.params.max_tokens
    if position > limit:
        raise InvalidRequest.of("from_position", position, f"at most {limit}")
