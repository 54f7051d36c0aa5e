"""Idempotency keys: a key stands for one session of its tenant."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Container
from dataclasses import replace

import structlog

from coordinator.persistence.redis_connection import StoreDown
from coordinator.persistence.session_record import SessionRequest
from coordinator.persistence.store import Store
from outrider.protocol.errors import Conflict
from outrider.security.tenants import tenant

log = structlog.get_logger(__name__)

MAX_KEY_CHARACTERS = 256
_REMEMBERED_KEYS = 16_384
_RESERVE_S = 0.25


class IdempotencyKeys:
    """Sessions by idempotency key, in Redis and, for a time without it, in memory."""

    def __init__(self, store: Store, ttl_s: float, running: Container[str]) -> None:
        self._store, self._ttl_s = store, ttl_s
        self._running = running  # ids of sessions, whose keys hold longer
        self._keys: OrderedDict[str, tuple[str, float]] = OrderedDict()  # what they stand for, and until when

    def __contains__(self, key: str) -> bool:
        value, until = self._keys.get(_name(key), ("", 0.0))
        return until > time.monotonic() or value.partition(" ")[0] in self._running

    async def reserve(self, key: str, session_id: str, request: SessionRequest) -> str:
        """Return the id of the session that a key stands for: `session_id`, or the one it was used for before.

        A request is the same if it was sent equally, or if all that a coordinator made of it is equal.
        """
        seed = None if request.drawn_seed else request.params.seed
        same = replace(request, params=replace(request.params, seed=seed))  # without one that a coordinator drew
        digests = [digest_of(same.to_json().encode()), *filter(None, [request.sent])]
        name, value, left_s = _name(key), " ".join([session_id, *digests]), self._ttl_s
        if key not in self:
            self._keys.pop(name, None)
            try:
                async with asyncio.timeout(_RESERVE_S):
                    value, left_s = await self._store.reserve(name, value) or (value, left_s)
            except (StoreDown, TimeoutError) as error:
                log.warning("idempotency key not stored in redis", error=str(error) or f"no answer in {_RESERVE_S:g} s")
        reserved, _ = self._keys.setdefault(name, (value, time.monotonic() + left_s))
        while len(self._keys) > _REMEMBERED_KEYS:
            self._keys.popitem(last=False)
        known_id, *known_digests = reserved.split(" ")
        if not {*digests} & {*known_digests}:
            message = "this idempotency_key was used for another request"
            raise Conflict(message, field="idempotency_key", value=key, limit="a new key")
        return known_id


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _name(key: str) -> str:
    return hashlib.sha256(tenant().idempotency_key(key).encode()).hexdigest()
