"""Pair history in memory and in Redis: measurements from which γ control starts a new session."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import suppress
from dataclasses import replace

from coordinator.control.estimator import MAX_GAINED, PairHistory
from coordinator.persistence.redis_connection import StoreDown
from coordinator.persistence.store import Store

WRITE_EVERY_S = 2.0
SHARE = 0.3  # weight of a session in the history
MAX_PAIRS = 8 * 1024  # in memory; a pair has one for each kind of text that it has drafted
PairKey = tuple[str, str]  # fingerprints of target and drafter


class PairHistoryStore:
    """Histories by pair. Memory keeps the most recent ones, since drafters name their models themselves."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: OrderedDict[PairKey, PairHistory | None] = OrderedDict()
        self._unwritten: dict[PairKey, PairHistory] = {}

    async def recall(self, target: str, drafter: str) -> PairHistory | None:
        pair = (target, drafter)
        if pair not in self._known and self._store.up:  # else a drafter would be attached seconds later
            with suppress(StoreDown):
                found = await self._store.pair(target, drafter)
                self._keep(pair, self._known.get(pair, found))  # a session may have ended meanwhile
        if pair in self._known:
            self._known.move_to_end(pair)
        return self._known.get(pair)

    def remember(self, target: str, drafter: str, history: PairHistory) -> None:
        pair = (target, drafter)
        known = self._known.get(pair)
        blended = history if known is None else _blend(known, history)
        self._unwritten[pair] = blended
        self._keep(pair, blended)

    def settle(self, target: str, drafter: str, gained: float) -> float:
        """Add to what a known pair has gained, and return that."""
        known = self._known.get((target, drafter))
        if known is None:
            return 0.0
        if gained:
            known = replace(known, gained=max(-MAX_GAINED, min(MAX_GAINED, known.gained + gained)))
            self._unwritten[target, drafter] = self._known[target, drafter] = known
        return known.gained

    def _keep(self, pair: PairKey, history: PairHistory | None) -> None:
        self._known[pair] = history
        self._known.move_to_end(pair)
        while len(self._known) > MAX_PAIRS:
            oldest, _ = self._known.popitem(last=False)
            self._unwritten.pop(oldest, None)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(WRITE_EVERY_S)
            await self._write()

    async def _write(self) -> None:
        for pair, history in list(self._unwritten.items()):
            try:
                await self._store.put_pair(*pair, history)
            except StoreDown:
                return  # retried in the next round
            if self._unwritten.get(pair) is history:
                del self._unwritten[pair]


def _blend(old: PairHistory, new: PairHistory) -> PairHistory:
    def mix(before: float, now: float) -> float:
        return before + SHARE * (now - before)

    longer = max(old.acceptance, new.acceptance, key=len)
    both = [mix(a, b) for a, b in zip(old.acceptance, new.acceptance, strict=False)]

    def known(before: float, now: float) -> float:
        return mix(before, now) if before and now else before or now

    numbers = ("offer_rate", "tree_gain", "ahead_gain", "tree_rows")
    return replace(
        old,
        acceptance=both + longer[len(both) :],
        draft_ms=known(old.draft_ms, new.draft_ms),
        level_ms=known(old.level_ms, new.level_ms),
        paces={mode: mix(old.paces.get(mode, 1.0), ratio) for mode, ratio in (old.paces | new.paces).items()},
        **{name: mix(getattr(old, name), getattr(new, name)) for name in numbers},
    )
