"""Readers of records in Redis, whose content is not trusted: no record may end a process.

Pure functions, one per kind of record. Each returns a record that is valid in every field or raises `Unreadable`.
"""

from __future__ import annotations

import hmac
import json
import math
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from google.protobuf.message import DecodeError

from coordinator.control.estimator import PairHistory
from coordinator.control.throughput_model import Mode
from coordinator.persistence.session_record import SessionRecord, SessionRequest, unpack, unpack_logprobs
from outrider.protocol import convert
from outrider.protocol.checks import MAX_ID_CHARACTERS, check_tokens
from outrider.protocol.errors import Conflict, InvalidRequest
from outrider.protocol.fleet import ModelInfo, WorkerInfo
from outrider.protocol.speculation import FinishReason
from outrider.security.api_keys import ApiKeys
from outrider.v1 import coordinator_pb2 as pb

MAX_PAIR_BYTES = 64 * 1024
MAX_POSITIONS = 256
_MS = (0.0, 1e7)
_SHARE = (0.0, 1.0)
_RANGES = {
    "acceptance": _SHARE,
    "offer_rate": _SHARE,
    "draft_ms": _MS,
    "tree_gain": _SHARE,
    "ahead_gain": _SHARE,
    "tree_rows": (1.0, 1e3),
    "level_ms": _MS,
    "paces": (1e-3, 1e6),
    "gained": (-1e3, 1e3),
}
MAX_ADDRESS_CHARACTERS = 300
CLOCKS_APART_S = 60.0  # by which coordinators' clocks may differ
MAX_DIGITS = 15
_MALFORMED = ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, struct.error
_PURPOSE = b"outrider worker records 1"
_RESERVED = re.compile(r"[\x21-\x7e]{1,128} [\x21-\x7e]{1,128}")
_ADDRESS = re.compile(r"[^\s/]+:[0-9]{1,5}")


class Unreadable(Conflict):
    """Error for an invalid record in Redis; `reason` is a metric label."""

    def __init__(self, what: str, reason: str = "unreadable") -> None:
        super().__init__(f"Redis has a record that cannot be used: {what}", field="redis", limit="a record of Outrider")
        self.reason = reason


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Turn every error of a reader, which this decorates, into Unreadable."""
    try:
        yield
    except Unreadable:
        raise
    except (*_MALFORMED, DecodeError, InvalidRequest) as error:
        raise Unreadable(f"{what}: {type(error).__name__}: {str(error)[:100]}") from error


# Workers.


def seal_worker(data: bytes, worker_id: str, coordinator: str, at: float, keys: ApiKeys) -> dict[str, bytes | str]:
    """Return the fields of a worker's record, authenticated if there is a fleet key."""
    when = str(int(at * 1000))
    sealed: dict[str, bytes | str] = {"data": data, "coordinator": coordinator, "at": when}
    secrets = keys.derived(_PURPOSE)
    return sealed | {"mac": _mac(secrets[0], worker_id, coordinator, when, data)} if secrets else sealed


@_reading("worker")
def read_worker(worker_id: str, given: Any, keys: ApiKeys, now: float, age_s: float) -> WorkerInfo:
    """Return the worker of a record with data, coordinator, at and mac; after `age_s` it cannot be replayed."""
    if not isinstance(given, list):
        raise Unreadable("worker: another shape or size than a coordinator writes")
    data, coordinator, at, mac = (value or b"" for value in given)
    if keys:
        made = [_mac(secret, worker_id, coordinator.decode(), at.decode(), data) for secret in keys.derived(_PURPOSE)]
        if not any(hmac.compare_digest(one.encode(), mac) for one in made):
            raise Unreadable(f"worker {worker_id}: not written with the fleet key", "unauthenticated")
        if not abs(now - int(at) / 1000) <= age_s + CLOCKS_APART_S:
            raise Unreadable(f"worker {worker_id}: of another time", "stale")
    info = convert.worker_from_proto(pb.Worker.FromString(data))
    if info.worker_id != worker_id or not 1 <= len(worker_id) <= MAX_ID_CHARACTERS:
        raise Unreadable(f"worker {worker_id}: it names {info.worker_id!r}")
    if len(info.address) > MAX_ADDRESS_CHARACTERS or not _ADDRESS.fullmatch(info.address):
        raise Unreadable(f"worker {worker_id}: its address is {info.address!r}")
    return info


def written_at(given: Sequence[bytes | None]) -> int:
    """Return the time of writing in milliseconds, or 0 for records of older releases."""
    at = given[2] or b""
    return int(at) if at.isdigit() and len(at) <= MAX_DIGITS else 0


def _mac(secret: bytes, *parts: str | bytes) -> str:
    """Return the MAC of all parts with their lengths, so that no byte can move between parts."""
    raw = [part.encode() if isinstance(part, str) else part for part in parts]
    return hmac.new(secret, b"".join(len(part).to_bytes(8, "big") + part for part in raw), "sha256").hexdigest()


# Sessions.


@_reading("session")
def read_session(
    session_id: str, given: Sequence[bytes | None], tokens: bytes, logprobs: bytes, asking: str
) -> SessionRecord:
    """Return the session of a record; one without a tenant belongs to the tenant that asks."""
    request, epoch, finish, model, verifier, tenant = given
    asked = SessionRequest.from_json(request or b"")
    asked.check()
    ids, kinds, ended = *unpack(tokens), int(finish or b"0")
    top = asked.params.logprobs
    known = [] if top is None else unpack_logprobs(logprobs, top)[: len(ids)]
    if not all(math.isfinite(value) for one in known if one for value in (one.logprob, *one.top_logprobs)):
        raise Unreadable("session: logprobs that are no numbers")
    missing = 0 if top is None else len(ids) - len(known)  # evicted
    return SessionRecord(
        session_id=session_id,
        request=asked,
        epoch=int(epoch or b""),
        tokens=ids,
        kinds=kinds,
        logprobs=[*known, *[None] * missing],
        finish_reason=FinishReason(ended) if ended in set(FinishReason) else FinishReason.STOP,  # of a newer version
        model=(model or b"").decode(),
        verifier=(verifier or b"").decode(),
        tenant=asking if tenant is None else tenant.decode(),
    )


@_reading("session")
def check_session(record: SessionRecord, target: ModelInfo) -> None:
    """Raise Unreadable for a session that this target cannot continue."""
    record.request.check(target.vocab_size)
    check_tokens("tokens", record.tokens, target.vocab_size)
    if len(record.tokens) > record.request.params.max_tokens:
        raise Unreadable(f"session: {len(record.tokens)} tokens, of at most {record.request.params.max_tokens}")


@_reading("idempotency key")
def read_reserved(text: bytes) -> str:
    """Return the value of an idempotency key: `session_id digest`."""
    reserved = text.decode("ascii")
    if not _RESERVED.fullmatch(reserved):
        raise Unreadable("idempotency key: not a session and a digest")
    return reserved


# Pair histories.


@_reading("pair history")
def read_pair(text: bytes) -> PairHistory:
    """Return a pair history; missing fields take their defaults, fields of newer versions are ignored."""
    if len(text) > MAX_PAIR_BYTES:
        raise Unreadable(f"pair history: over {MAX_PAIR_BYTES} bytes")
    known = {name: value for name, value in json.loads(text).items() if name in _RANGES}
    return PairHistory(**{name: _pair_field(name, value) for name, value in known.items()})


def _pair_field(name: str, value: Any) -> Any:
    if name == "acceptance":
        return [_number(name, one) for one in value[:MAX_POSITIONS]]
    if name == "paces":
        return {mode: _number(name, ratio) for mode, ratio in value.items() if mode in set(Mode)}
    return _number(name, value)


def _number(name: str, value: Any) -> float:
    low, high = _RANGES[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise Unreadable(f"pair history: {name} has no number from {low:g} to {high:g}")
    return float(value)
