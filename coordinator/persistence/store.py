"""Store: sessions, workers, pair history and idempotency keys in Redis. Session writes are fenced by epoch.

It is not called on the token path. The content of Redis is not trusted: invalid records are
skipped and counted, or raise `Unreadable` (see `stored_records`).
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, cast

from coordinator.control.estimator import PairHistory
from coordinator.persistence import lua_scripts, stored_records
from coordinator.persistence.redis_connection import RedisConnection
from coordinator.persistence.session_record import SessionRecord, logprobs_size, pack, pack_logprobs
from coordinator.persistence.stored_records import Unreadable
from outrider.protocol import convert
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo
from outrider.protocol.speculation import FinishReason
from outrider.security.api_keys import ApiKeys

_PREFIX = "outrider"
_PAIR_TTL_S = 30 * 24 * 3600
MAX_WORKERS = 4096
_SCANNED = 4096  # keys at once; 256 took 15 times the CPU time here


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
        self.connection = RedisConnection(url, skipped)
        self._redis = self.connection.client
        self._owner = owner
        self._ttl_s = session_ttl_s
        self._fleet_keys = fleet_keys or ApiKeys()
        self._write = self._redis.register_script(lua_scripts.WRITE)
        self._claim = self._redis.register_script(lua_scripts.CLAIM)
        self._cancel = self._redis.register_script(lua_scripts.CANCEL)
        self._read_worker = self._redis.register_script(lua_scripts.READ_WORKER)
        self._remove_worker = self._redis.register_script(lua_scripts.REMOVE_WORKER)

    @property
    def up(self) -> bool:
        return self.connection.up

    # Sessions.

    async def write(self, record: SessionRecord, start: int, end: int, *, whole: bool) -> str:
        """Write tokens [start, end), finish reason and, if `whole`, request; return OK or why not, see WRITE."""
        top = record.request.params.logprobs
        known = [] if top is None else record.logprobs[start:end]
        async with self.connection.calling():
            reply = await self._write(
                keys=_session_keys(record.session_id),
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
                    0 if top is None else logprobs_size(top) * start,
                    pack_logprobs(known, top or 0),
                    int(top is not None and not record.request.params.mode.needs_draft_probs),
                ],
            )
        return bytes(reply).decode()

    async def claim(self, session_id: str, tenant: str = "") -> SessionRecord | None:
        """Take over a session, or read a finished one; None: the tenant has none. Raise Unreadable if it is invalid."""
        async with self.connection.calling():
            args = self._owner, self._ttl_s, tenant, secrets.token_hex(8)
            reply = await self._claim(keys=_session_keys(session_id), args=args)
        if not reply:
            return None
        with self.connection.validating("session"):
            if not isinstance(reply, list):
                raise Unreadable("session: another shape or size than a coordinator writes")
            given, tokens, logprobs = reply
            return stored_records.read_session(session_id, given, tokens, logprobs, tenant)

    def check(self, record: SessionRecord, target: ModelInfo) -> None:
        """Raise Unreadable for a session that does not fit this target."""
        with self.connection.validating("session"):
            stored_records.check_session(record, target)

    async def cancel(self, session_id: str, tenant: str = "") -> bool | None:
        """Cancel a session; return whether it was running, or None if the tenant has no such session."""
        async with self.connection.calling():
            args = int(FinishReason.CANCELLED), tenant, secrets.token_hex(8)
            reply = int(await self._cancel(keys=_session_keys(session_id)[:1], args=args))
        if reply < -1:
            with self.connection.validating("session"):
                raise Unreadable("session: another shape than a coordinator writes")
        return None if reply < 0 else bool(reply)

    async def reserve(self, key: str, value: str) -> tuple[str, float] | None:
        """Store an idempotency key's value if it has none; return what it had, for so many s, or raise Unreadable."""
        # The second digest, of what was sent, is kept apart: older versions compare all after the id.
        name = f"{_PREFIX}:idempotency:{key}"
        session_id, digest, *sent = value.split(" ")
        with self.connection.validating("idempotency"):
            async with self.connection.calling():
                left_ms = await self._redis.pttl(name)
                own = f"{session_id} {digest}"
                reserved = cast(bytes | None, await self._redis.set(name, own, nx=True, ex=self._ttl_s, get=True))
                if reserved is None:
                    await self._redis.set(f"{name}:sent", " ".join([session_id, *sent]), ex=self._ttl_s)
                    return None
                first = cast(bytes, await self._redis.getrange(f"{name}:sent", 0, lua_scripts.MAX_FIELD_BYTES))
            known = stored_records.read_reserved(reserved)
            known_id, *others = first.decode(errors="replace").split(" ")
            same = known.startswith(f"{known_id} ")  # else an older version has begun again with the key
            return " ".join([known, *others * same]), left_ms / 1000

    # Workers.

    async def put_worker(self, worker: WorkerInfo, ttl_ms: int) -> None:
        key = f"{_PREFIX}:worker:{worker.worker_id}"
        async with self.connection.calling(), self._redis.pipeline(transaction=True) as pipe:
            data = convert.worker_to_proto(worker).SerializeToString()
            sealed = stored_records.seal_worker(data, worker.worker_id, self._owner, time.time(), self._fleet_keys)
            pipe.delete(key)  # it may have another type
            pipe.hset(key, mapping=cast(Any, sealed))
            pipe.pexpire(key, ttl_ms)
            await pipe.execute()

    async def remove_worker(self, worker_id: str) -> None:
        async with self.connection.calling():
            await self._remove_worker(keys=[f"{_PREFIX}:worker:{worker_id}"], args=[self._owner])

    async def workers(self, age_s: float) -> list[WorkerInfo]:
        """Return the workers recorded with our fleet key within `age_s`; of two at one address only the newest."""
        found: dict[tuple[str, Role], tuple[int, WorkerInfo]] = {}
        async with self.connection.calling():
            # A Redis that refuses writes, as a full one, has no records of workers that live: it counts as down.
            await self._redis.set(f"{_PREFIX}:coordinator:{self._owner}", 1, px=int(1000 * age_s))
            async for key in self._redis.scan_iter(match=f"{_PREFIX}:worker:*", count=_SCANNED):
                fields = await self._read_worker(keys=[key])
                with contextlib.suppress(Unreadable), self.connection.validating("worker"):
                    if fields:
                        worker_id = key.decode(errors="replace").removeprefix(f"{_PREFIX}:worker:")
                        info = stored_records.read_worker(worker_id, fields, self._fleet_keys, time.time(), age_s)
                        written = stored_records.written_at(fields)
                        if written >= found.get((info.address, info.role), (0, info))[0]:
                            found[info.address, info.role] = written, info
                if len(found) >= MAX_WORKERS:
                    break
        return [info for _, info in found.values()]

    # Pair history.

    async def pair(self, target: str, drafter: str) -> PairHistory | None:
        with contextlib.suppress(Unreadable), self.connection.validating("pair"):
            async with self.connection.calling():
                data = await self._redis.getrange(_pair_key(target, drafter), 0, stored_records.MAX_PAIR_BYTES)
            return stored_records.read_pair(cast(bytes, data)) if data else None
        return None

    async def put_pair(self, target: str, drafter: str, history: PairHistory) -> None:
        async with self.connection.calling():
            await self._redis.set(_pair_key(target, drafter), json.dumps(asdict(history)), ex=_PAIR_TTL_S)


def _pair_key(target: str, drafter: str) -> str:
    return f"{_PREFIX}:pair:{target}:{drafter}"


def _session_keys(session_id: str) -> list[str]:
    # The braces keep all keys in one slot of a Redis cluster.
    return [f"{_PREFIX}:{kind}:{{{session_id}}}" for kind in ("session", "tokens", "logprobs")]
