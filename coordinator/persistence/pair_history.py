"""What pairs of target and drafter have shown, in memory and in Redis: where γ control starts a new session from."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import structlog

from coordinator.control.estimator import PairHistory
from coordinator.persistence.store import Store, StoreDown

log = structlog.get_logger(__name__)

WRITE_EVERY_S = 2.0
SHARE = 0.3  # of one session in what is remembered


class PairHistoryStore:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[tuple[str, str], PairHistory | None] = {}
        self._unwritten: set[tuple[str, str]] = set()

    async def recall(self, target: str, drafter: str) -> PairHistory | None:
        pair = (target, drafter)
        if pair not in self._known:
            try:
                self._known[pair] = await self._store.pair(target, drafter)
            except StoreDown as error:
                log.debug("pair history unknown", error=error.message)
                return None
        return self._known[pair]

    def remember(self, target: str, drafter: str, history: PairHistory) -> None:
        known = self._known.get((target, drafter))
        self._known[target, drafter] = history if known is None else _blend(known, history)
        self._unwritten.add((target, drafter))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(WRITE_EVERY_S)
            for pair in list(self._unwritten):
                history = self._known[pair]
                if history is None:
                    continue
                try:
                    await self._store.put_pair(*pair, history)
                except StoreDown:
                    break  # kept for the next round
                self._unwritten.discard(pair)


def _blend(old: PairHistory, new: PairHistory) -> PairHistory:
    def mix(before: float, now: float) -> float:
        return before + SHARE * (now - before)

    longer = max(old.acceptance, new.acceptance, key=len)
    both = [mix(a, b) for a, b in zip(old.acceptance, new.acceptance, strict=False)]
    numbers = ("offer_rate", "draft_ms", "tree_gain", "ahead_gain", "tree_rows")
    return replace(
        old,
        acceptance=both + longer[len(both) :],
        level_ms=mix(old.level_ms, new.level_ms) if old.level_ms and new.level_ms else old.level_ms or new.level_ms,
        paces={way: mix(old.paces.get(way, 1.0), pace) for way, pace in (old.paces | new.paces).items()},
        **{name: mix(getattr(old, name), getattr(new, name)) for name in numbers},
    )
