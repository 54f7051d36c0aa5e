"""Redis connection: bounded calls, whether Redis answers, and the records that were skipped as invalid."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NoReturn, cast

import redis.asyncio as redis
import structlog
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from coordinator.persistence.stored_records import Unreadable
from outrider.base.aio import until
from outrider.protocol.errors import StartupError, Unavailable

log = structlog.get_logger(__name__)

TIMEOUT_S = 1.0
_CLOSE_S = 2.5 * TIMEOUT_S  # a call and its retry after a broken connection
MAX_CONNECTIONS = 32
_LOGGED = 1024  # messages


class StoreDown(Unavailable):
    """Error for a Redis that does not answer."""


class RedisConnection:
    """Connections to one Redis, opened when needed. Every call returns or raises StoreDown within the timeout."""

    def __init__(self, url: str, skipped: Callable[[str, str], None]) -> None:
        """Make the pool; `skipped` is called with kind and reason for each invalid record."""
        try:
            pool = redis.BlockingConnectionPool.from_url(
                url,
                max_connections=MAX_CONNECTIONS,
                timeout=TIMEOUT_S,  # to wait for a free connection
                socket_timeout=TIMEOUT_S,
                socket_connect_timeout=TIMEOUT_S,
                health_check_interval=0,
                retry=Retry(NoBackoff(), 1),
                retry_on_error=[redis.ConnectionError, redis.ReadOnlyError],  # a former primary answers so
            )
            pool.make_connection()  # type: ignore[no-untyped-call,unused-ignore]
        except (ValueError, TypeError, redis.RedisError):  # whose texts hold parts of a password
            message = "redis_url is no URL of Redis, or has unknown options; percent-encode / # ? @ in a password"
            raise StartupError(message, field="redis_url") from None
        self.client = redis.Redis.from_pool(pool)
        self.up = False
        self._skipped = skipped
        self._logged: set[str] = set()
        self._calls = 0
        self._closing = self._down_logged = False

    async def close(self) -> None:
        """Close all connections after the calls in progress: an interrupted call would connect again."""
        self._closing = True
        await until(lambda: not self._calls, _CLOSE_S)
        await self.client.aclose()

    async def answers(self) -> bool:
        """Ask Redis now, and return whether it is up."""
        with contextlib.suppress(StoreDown):  # which is logged, once
            await self.ping()
        return self.up

    async def ping(self) -> None:
        async with self.calling():
            await cast(Any, self.client.set("outrider:ping", 1, px=1000))  # a full one would answer a ping

    @contextlib.contextmanager
    def validating(self, record: str) -> Iterator[None]:
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
    async def calling(self) -> AsyncIterator[None]:
        """Record whether Redis answers the calls in the block; raise StoreDown if it does not."""
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
            log.warning("redis is down", error=f"{type(error).__name__}: {error}")  # MOVED of a cluster is told by it
        self.up, self._down_logged = False, True
        raise StoreDown(f"Redis does not answer: {type(error).__name__}: {error}", retry_after_ms=1000) from error
