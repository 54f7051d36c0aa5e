"""Choice of a worker: by load, and for verifiers by the prefix that they may have cached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from coordinator.placement.sent_prefixes import PromptPrefix, SentPrefixes
from outrider.protocol.fleet import WorkerInfo

_IMBALANCE = 1.2  # times its share of the sessions that a verifier may have for the sake of prefixes
_SLACK = 2  # sessions above that: few sessions are never far from their share
_NEAR_MS = 5.0  # round trips that differ by less count as equal


class PlacedWorker(Protocol):
    """Worker that may be chosen."""

    info: WorkerInfo
    prefixes: SentPrefixes
    round_trip_ms: float

    @property
    def sessions(self) -> int:
        """Return the number of this coordinator's sessions on it."""


WorkerT = TypeVar("WorkerT", bound=PlacedWorker)


def load_of(worker: PlacedWorker) -> int:
    """Return the number of sessions, by this coordinator's count or the worker's report, whichever is higher."""
    return max(worker.sessions, worker.info.load.sessions) + worker.info.load.waiting


def occupancy(worker: PlacedWorker) -> float:
    """Return the share of its capacity in use."""
    return load_of(worker) / max(1, worker.info.capacity)


def least_loaded(usable: Sequence[WorkerT]) -> WorkerT:
    return min(usable, key=lambda each: (occupancy(each), each.round_trip_ms))


def with_prefix(prefix: PromptPrefix, usable: Sequence[WorkerT]) -> WorkerT:
    """Return a verifier with most of the prompt, or the least loaded one if those have too many sessions."""
    able = [each for each in usable if _holds(each, prefix)] or usable  # one that is too small would refuse it
    roomy = [each for each in able if has_room(each, prefix)] or able
    found = {id(each): each.prefixes.found(prefix) for each in roomy}
    fair = [each for each in roomy if found[id(each)] and _within_share(each, roomy)]
    if fair:
        return min(fair, key=lambda each: (-found[id(each)], occupancy(each), each.round_trip_ms))

    def rank(each: WorkerT) -> tuple[float, ...]:  # new prefixes spread over idle verifiers
        return occupancy(each), each.round_trip_ms // _NEAR_MS, len(each.prefixes), each.round_trip_ms

    return min(roomy, key=rank)


def has_room(each: PlacedWorker, prefix: PromptPrefix) -> bool:
    """Return whether the session would run at once: cache for it is free, and no other session waits."""
    load = each.info.load
    return _holds(each, prefix, load.kv_tokens_used) and not load.waiting and occupancy(each) < 1.0


def _holds(each: PlacedWorker, prefix: PromptPrefix, used: int = 0) -> bool:
    """Return whether a verifier's cache has room for the session, with so many tokens in use."""
    total = each.info.load.kv_tokens_total
    return not total or used + prefix.num_tokens <= total


def _within_share(each: PlacedWorker, others: Sequence[PlacedWorker]) -> bool:
    """Return whether one more session leaves a verifier near its share, by capacity, of all sessions."""
    capacity = sum(max(1, other.info.capacity) for other in others)
    share = (1 + sum(load_of(other) for other in others)) * max(1, each.info.capacity) / capacity
    return load_of(each) + 1 <= _IMBALANCE * share + _SLACK
