"""Redis, behind one door: sessions, workers, pair histories. Every session write is fenced by epoch.

Nothing here is called on the token path. Whatever Redis does, callers get an
answer or `StoreDown` within the timeout.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any, cast

import redis.asyncio as redis
import structlog
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from coordinator.gamma import PairHistory
from coordinator.record import (
    SessionRecord,
    SessionRequest,
    logprobs_size,
    pack,
    pack_logprobs,
    unpack,
    unpack_logprobs,
)
from outrider import wire
from outrider.errors import Fenced, Unavailable
from outrider.messages import FinishReason, WorkerInfo
from outrider.v1 import coordinator_pb2 as pb

log = structlog.get_logger(__name__)

TIMEOUT_S = 1.0
_PREFIX = "outrider"
_PAIR_TTL_S = 30 * 24 * 3600

# Each script may run twice with the same effect: a retried write does no harm.
_WRITE = """
-- KEYS: session, tokens, logprobs.
-- ARGV: epoch, owner, request, model, ttl, offset, data, finish, verifier, tenant, offset and data of logprobs
local held = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '-1')
local epoch = tonumber(ARGV[1])
if held > epoch then return 'FENCED' end
if held == -1 and ARGV[3] == '' then return 'MISSING' end
if ARGV[3] ~= '' then
  redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'owner', ARGV[2], 'request', ARGV[3], 'model', ARGV[4])
  redis.call('HSET', KEYS[1], 'tenant', ARGV[10])
end
local offset = tonumber(ARGV[6])
if redis.call('STRLEN', KEYS[2]) < offset then return 'GAP' end
if #ARGV[7] > 0 then redis.call('SETRANGE', KEYS[2], offset, ARGV[7]) end
if #ARGV[12] > 0 then redis.call('SETRANGE', KEYS[3], ARGV[11], ARGV[12]) end
if ARGV[8] ~= '0' then redis.call('HSET', KEYS[1], 'finish', ARGV[8]) end
redis.call('HSET', KEYS[1], 'verifier', ARGV[9])
redis.call('EXPIRE', KEYS[1], ARGV[5])
redis.call('EXPIRE', KEYS[2], ARGV[5])
redis.call('EXPIRE', KEYS[3], ARGV[5])
return 'OK'
"""

_CLAIM = """
-- KEYS: session, tokens, logprobs. ARGV: owner, ttl, tenant.
-- Takes a session over unless it has finished; returns its fields, tokens and logprobs. Another tenant's is not there.
local tenant = redis.call('HGET', KEYS[1], 'tenant')
if redis.call('EXISTS', KEYS[1]) == 0 or (tenant and tenant ~= ARGV[3]) then return false end
if (redis.call('HGET', KEYS[1], 'finish') or '0') == '0' then
  redis.call('HINCRBY', KEYS[1], 'epoch', 1)
  redis.call('HSET', KEYS[1], 'owner', ARGV[1])
end
redis.call('EXPIRE', KEYS[1], ARGV[2])
redis.call('EXPIRE', KEYS[2], ARGV[2])
redis.call('EXPIRE', KEYS[3], ARGV[2])
return {redis.call('HGETALL', KEYS[1]), redis.call('GET', KEYS[2]) or '', redis.call('GET', KEYS[3]) or ''}
"""

_CANCEL = """
-- KEYS: session. ARGV: finish, tenant. The owner learns of it by being fenced. Another tenant's session is not there.
local tenant = redis.call('HGET', KEYS[1], 'tenant')
if redis.call('EXISTS', KEYS[1]) == 0 or (tenant and tenant ~= ARGV[2]) then return -1 end
if (redis.call('HGET', KEYS[1], 'finish') or '0') ~= '0' then return 0 end
redis.call('HINCRBY', KEYS[1], 'epoch', 1)
redis.call('HSET', KEYS[1], 'finish', ARGV[1])
return 1
"""

_REMOVE_WORKER = """
-- KEYS: worker. ARGV: coordinator. Only the coordinator that wrote it last may remove it.
if redis.call('HGET', KEYS[1], 'coordinator') == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
"""


class StoreDown(Unavailable):
    """Redis does not answer."""


class Store:
    def __init__(self, url: str, owner: str, session_ttl_s: int) -> None:
        self._redis = redis.Redis.from_url(
            url,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            health_check_interval=0,
            retry=Retry(NoBackoff(), 1),
            retry_on_error=[redis.ConnectionError],
        )
        self._owner = owner
        self._ttl_s = session_ttl_s
        self._write = self._redis.register_script(_WRITE)
        self._claim = self._redis.register_script(_CLAIM)
        self._cancel = self._redis.register_script(_CANCEL)
        self._remove_worker = self._redis.register_script(_REMOVE_WORKER)
        self.up = False

    async def close(self) -> None:
        await self._redis.aclose()

    async def ping(self) -> None:
        async with self._answering():
            await cast(Any, self._redis.ping())

    # Sessions.

    async def write(self, record: SessionRecord, start: int, end: int, *, whole: bool) -> str:
        """Put output tokens [start, end) and the finish; `whole` writes the request too. OK, FENCED, MISSING or GAP."""
        top = record.request.params.logprobs
        known = [] if top is None else record.logprobs[start:end]
        async with self._answering():
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
        """Become the session's owner; a finished one is only read. None: this tenant has no such session."""
        async with self._answering():
            reply = await self._claim(keys=self._keys(session_id), args=[self._owner, self._ttl_s, tenant])
        if not reply:
            return None
        fields = dict(zip(reply[0][::2], reply[0][1::2], strict=True))
        tokens, kinds = unpack(reply[1])
        request = SessionRequest.from_json(fields[b"request"])
        top = request.params.logprobs
        return SessionRecord(
            session_id=session_id,
            request=request,
            epoch=int(fields[b"epoch"]),
            tokens=tokens,
            kinds=kinds,
            logprobs=[] if top is None else unpack_logprobs(reply[2], top)[: len(tokens)],
            finish_reason=FinishReason(int(fields.get(b"finish", 0))),
            model=fields.get(b"model", b"").decode(),
            verifier=fields.get(b"verifier", b"").decode(),
            tenant=fields.get(b"tenant", tenant.encode()).decode(),
        )

    async def cancel(self, session_id: str, tenant: str = "") -> bool | None:
        """Whether it was still going; None: this tenant has no such session."""
        async with self._answering():
            reply = int(await self._cancel(keys=self._keys(session_id)[:1], args=[int(FinishReason.CANCELLED), tenant]))
        return None if reply < 0 else bool(reply)

    async def reserve(self, key: str, value: str) -> str | None:
        """Tie an idempotency key to a value; the value it is tied to already, if it is."""
        name = f"{_PREFIX}:idempotency:{key}"
        async with self._answering():
            held = cast(bytes | None, await self._redis.set(name, value, nx=True, ex=self._ttl_s, get=True))
        return held.decode() if held is not None else None

    # Workers.

    async def put_worker(self, worker: WorkerInfo, ttl_ms: int) -> None:
        key = f"{_PREFIX}:worker:{worker.worker_id}"
        async with self._answering(), self._redis.pipeline(transaction=True) as pipe:
            data = wire.worker_to_proto(worker).SerializeToString()
            pipe.hset(key, mapping={"data": data, "coordinator": self._owner})
            pipe.pexpire(key, ttl_ms)
            await pipe.execute()

    async def remove_worker(self, worker_id: str) -> None:
        async with self._answering():
            await self._remove_worker(keys=[f"{_PREFIX}:worker:{worker_id}"], args=[self._owner])

    async def workers(self) -> list[WorkerInfo]:
        """Every worker that some coordinator has heard of lately."""
        async with self._answering():
            keys = [key async for key in self._redis.scan_iter(match=f"{_PREFIX}:worker:*", count=256)]
            found = [await cast(Any, self._redis.hget(key, "data")) for key in keys]
        return [wire.worker_from_proto(pb.Worker.FromString(data)) for data in found if data]

    # What pairs of target and drafter have shown.

    async def pair(self, target: str, drafter: str) -> PairHistory | None:
        async with self._answering():
            data = await self._redis.get(_pair_key(target, drafter))
        return PairHistory(**json.loads(data)) if data else None

    async def put_pair(self, target: str, drafter: str, history: PairHistory) -> None:
        async with self._answering():
            await self._redis.set(_pair_key(target, drafter), json.dumps(asdict(history)), ex=_PAIR_TTL_S)

    @staticmethod
    def _keys(session_id: str) -> list[str]:
        # The braces keep all in one slot of a Redis cluster.
        return [f"{_PREFIX}:{kind}:{{{session_id}}}" for kind in ("session", "tokens", "logprobs")]

    @contextlib.asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        try:
            yield
        except (RedisError, OSError, TimeoutError) as error:
            if self.up:
                log.warning("redis is down", error=str(error))
            self.up = False
            raise StoreDown(f"Redis does not answer: {error}", retry_after_ms=1000) from error
        if not self.up:
            log.info("redis is up")
        self.up = True


def fenced(session_id: str) -> Fenced:
    return Fenced(f"session {session_id} is owned by another coordinator now", field="session_id", value=session_id)


def _pair_key(target: str, drafter: str) -> str:
    return f"{_PREFIX}:pair:{target}:{drafter}"
