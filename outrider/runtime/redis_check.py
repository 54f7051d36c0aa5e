"""Check of a Redis: whether coordinators can use it."""

from __future__ import annotations

from outrider.protocol.errors import StartupError


def check_redis(url: str) -> str:
    """Return a URL without its password; raise StartupError if coordinators cannot use the Redis there."""
    import redis  # here: most commands need none

    scheme, separator, rest = url.partition("://")
    where = f"{scheme}{separator}{rest.rpartition('@')[2].partition('?')[0]}"
    try:
        with redis.Redis.from_url(url, socket_timeout=2, socket_connect_timeout=2) as client:
            client.set("outrider:check", 1, px=1000, nx=True, get=True)  # replicas, and Redis 6, would answer a ping
            client.exists("outrider:check", "outrider:other")  # of two slots: no node of a cluster answers
    except (redis.RedisError, OSError, ValueError, TypeError) as error:
        # Texts of the last two may hold a password; that of a cluster says nothing without its name, MovedError.
        found = "not a valid URL" if isinstance(error, ValueError | TypeError) else f"{type(error).__name__}: {error}"
        raise StartupError(f"Redis cannot be used at {where}: {found}", field="redis_url") from None
    return where
