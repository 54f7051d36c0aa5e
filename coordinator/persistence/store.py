"""Store: sessions, workers, pair history and idempotency keys in Redis. Session writes are fenced by epoch.

It is not called on the token path. Every call returns or raises StoreDown
within the timeout. The content of Redis is not trusted: invalid records are
skipped and counted, or raise `Unreadable` (see `stored_records`).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from typing import Any, NoReturn, cast

import redis.asyncio as redis
import structlog
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from coordinator.control.estimator import PairHistory
from coordinator.persistence import lua_scripts, stored_records
from coordinator.persistence.session_record import SessionRecord, logprobs_size, pack, pack_logprobs
from coordinator.persistence.stored_records import Unreadable
from outrider.base.aio import until
from outrider.protocol import convert
from outrider.protocol.errors import Fenced, Unavailable
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo
from outrider.protocol.speculation import FinishReason
from outrider.security.api_keys import ApiKeys

log = structlog.get_logger(__name__)

TIMEOUT_S = 1.0
_CLOSE_S = 2.5 * TIMEOUT_S  # a call and its retry after a broken connection
_PREFIX = "outrider"
_PAIR_TTL_S = 30 * 24 * 3600
MAX_CONNECTIONS = 32
MAX_WORKERS = 4096
_LOGGED = 1024  # messages


class StoreDown(Unavailable):
    """Error for a Redis that does not answer."""


class Store:
    """Typed access to Redis."""

    def __init__(
        self,
        url: str,
        owner: str,
        session_ttl_s: int,
        fleet_keys: ApiKeys | None = None,
        skipped: Callable[[str, str], None] = lambda _record, _reason: None,
    ) -> None:
        """Connect lazily; `fleet_keys` authenticate worker records, `skipped` is called for each invalid record."""
        pool = redis.BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=TIMEOUT_S,  # to wait for a free connection
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            health_check_interval=0,
            retry=Retry(NoBackoff(), 1),
            retry_on_error=[redis.ConnectionError],
        )
        self._redis = redis.Redis.from_pool(pool)
        self._owner = owner
        self._ttl_s = session_ttl_s
        self._fleet_keys = fleet_keys or ApiKeys()
        self._skipped = skipped
        self._logged: set[str] = set()
        self._write = self._redis.register_script(lua_scripts.WRITE)
        self._claim = self._redis.register_script(lua_scripts.CLAIM)
        self._cancel = self._redis.register_script(lua_scripts.CANCEL)
        self._read_worker = self._redis.register_script(lua_scripts.READ_WORKER)
        self._remove_worker = self._redis.register_script(lua_scripts.REMOVE_WORKER)
        self._calls = 0
        self._closing = False
        self.up = False
        self._down_logged = False

    async def close(self) -> None:
        """Close all connections after the calls in progress: an interrupted call would connect again."""
        self._closing = True
        await until(lambda: not self._calls, _CLOSE_S)
        await self._redis.aclose()

    async def ping(self) -> None:
        async with self._calling():
            await cast(Any, self._redis.ping())

    # Sessions.

    async def write(self, record: SessionRecord, start: int, end: int, *, whole: bool) -> str:
        """Write output tokens [start, end) and the finish reason; return OK, FENCED, MISSING or GAP.

        `whole` writes the request too.
        """
        top = record.request.params.logprobs
        known = [] if top is None else record.logprobs[start:end]
        async with self._calling():
            reply = await self._write(
                keys=self._keys(record.session_id),
                args=[
                    record.epoch,
                    self._owner,
                    record.request.to_json() if whole else "",
                    record.model,
                    self._ttl_s,
                    4 * start,
                    pack(record.tokens[start:end], record.kinds[start:end]),
                    int(record.finish_reason) if end == len(record.tokens) else 0,
                    record.verifier,
                    record.tenant,
                    logprobs_size(top or 0) * start,
                    pack_logprobs(known, top or 0),
                ],
            )
        return bytes(reply).decode()

    async def claim(self, session_id: str, tenant: str = "") -> SessionRecord | None:
        """Take over a session, or only read a finished one; return None if the tenant has no such session.

        Raise Unreadable for an invalid record.
        """
        async with self._calling():
            reply = await self._claim(keys=self._keys(session_id), args=[self._owner, self._ttl_s, tenant])
        if not reply:
            return None
        with self._validating("session"):
            if not isinstance(reply, list):
                raise Unreadable("session: another shape or size than a coordinator writes")
            given, tokens, logprobs = reply
            return stored_records.read_session(session_id, given, tokens, logprobs, tenant)

    def check(self, record: SessionRecord, target: ModelInfo) -> None:
        """Raise Unreadable for a session that does not fit this target."""
        with self._validating("session"):
            stored_records.check_session(record, target)

    async def cancel(self, session_id: str, tenant: str = "") -> bool | None:
        """Cancel a session; return whether it was running, or None if the tenant has no such session."""
        async with self._calling():
            reply = int(await self._cancel(keys=self._keys(session_id)[:1], args=[int(FinishReason.CANCELLED), tenant]))
        if reply < -1:
            with self._validating("session"):
                raise Unreadable("session: another shape than a coordinator writes")
        return None if reply < 0 else bool(reply)

    async def reserve(self, key: str, value: str) -> str | None:
        """Store an idempotency key's value if it has none; return the value it had, or raise Unreadable."""
        name = f"{_PREFIX}:idempotency:{key}"
        with self._validating("idempotency"):
            async with self._calling():
                reserved = cast(bytes | None, await self._redis.set(name, value, nx=True, ex=self._ttl_s, get=True))
            return stored_records.read_reserved(reserved) if reserved is not None else None

    # Workers.

    async def put_worker(self, worker: WorkerInfo, ttl_ms: int) -> None:
        key = f"{_PREFIX}:worker:{worker.worker_id}"
        async with self._calling(), self._redis.pipeline(transaction=True) as pipe:
            data = convert.worker_to_proto(worker).SerializeToString()
            sealed = stored_records.seal_worker(data, worker.worker_id, self._owner, time.time(), self._fleet_keys)
            pipe.delete(key)  # it may have another type
            pipe.hset(key, mapping=cast(Any, sealed))
            pipe.pexpire(key, ttl_ms)
            await pipe.execute()

    async def remove_worker(self, worker_id: str) -> None:
        async with self._calling():
            await self._remove_worker(keys=[f"{_PREFIX}:worker:{worker_id}"], args=[self._owner])

    async def workers(self, age_s: float) -> list[WorkerInfo]:
        """Return the workers that coordinators with our fleet key have recorded within `age_s`.

        Of two workers at one address, as before and after a restart, only the newest is returned.
        """
        found: dict[tuple[str, Role], tuple[int, WorkerInfo]] = {}
        async with self._calling():
            async for key in self._redis.scan_iter(match=f"{_PREFIX}:worker:*", count=256):
                fields = await self._read_worker(keys=[key])
                with contextlib.suppress(Unreadable), self._validating("worker"):
                    if fields:
                        info, written = self._worker(key, fields, age_s), stored_records.written_at(fields)
                        if written >= found.get((info.address, info.role), (0, info))[0]:
                            found[info.address, info.role] = written, info
                if len(found) >= MAX_WORKERS:
                    break
        return [info for _, info in found.values()]

    def _worker(self, key: bytes, fields: Any, age_s: float) -> WorkerInfo:
        if not isinstance(fields, list):
            raise Unreadable("worker: another shape or size than a coordinator writes")
        worker_id = key.decode(errors="replace").removeprefix(f"{_PREFIX}:worker:")
        return stored_records.read_worker(worker_id, fields, self._fleet_keys, time.time(), age_s)

    # Pair history.

    async def pair(self, target: str, drafter: str) -> PairHistory | None:
        with contextlib.suppress(Unreadable), self._validating("pair"):
            async with self._calling():
                data = await self._redis.getrange(_pair_key(target, drafter), 0, stored_records.MAX_PAIR_BYTES)
            return stored_records.read_pair(cast(bytes, data)) if data else None
        return None

    async def put_pair(self, target: str, drafter: str, history: PairHistory) -> None:
        async with self._calling():
            await self._redis.set(_pair_key(target, drafter), json.dumps(asdict(history)), ex=_PAIR_TTL_S)

    @staticmethod
    def _keys(session_id: str) -> list[str]:
        # The braces keep all keys in one slot of a Redis cluster.
        return [f"{_PREFIX}:{kind}:{{{session_id}}}" for kind in ("session", "tokens", "logprobs")]

    @contextlib.contextmanager
    def _validating(self, record: str) -> Iterator[None]:
        """Count invalid records and log each once."""
        try:
            yield
        except Unreadable as error:
            self._skipped(record, error.reason)
            if error.message not in self._logged:
                if len(self._logged) >= _LOGGED:
                    self._logged.clear()
                self._logged.add(error.message)
                log.warning("redis record skipped", record=record, reason=error.reason, error=error.message)
            raise

    @contextlib.asynccontextmanager
    async def _calling(self) -> AsyncIterator[None]:
        if self._closing:
            raise StoreDown("this coordinator is shutting down")
        self._calls += 1
        try:
            yield
        except ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                self._down(error)
            raise Unreadable("a value of another type than a coordinator writes") from error
        except (RedisError, OSError, TimeoutError) as error:
            self._down(error)
        finally:
            self._calls -= 1
        if not self.up:
            log.info("redis is up")
        self.up = True

    def _down(self, error: Exception) -> NoReturn:
        if self.up or not self._down_logged:
            log.warning("redis is down", error=str(error))
        self.up, self._down_logged = False, True
        raise StoreDown(f"Redis does not answer: {error}", retry_after_ms=1000) from error


def fenced(session_id: str) -> Fenced:
    return Fenced(f"session {session_id} is owned by another coordinator now", field="session_id", value=session_id)


def _pair_key(target: str, drafter: str) -> str:
    return f"{_PREFIX}:pair:{target}:{drafter}"
