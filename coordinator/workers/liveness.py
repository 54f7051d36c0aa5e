"""Workers that fall silent, and verifiers that owe a verdict: their streams are ended, and sessions go on elsewhere.

Time is counted in ticks of our own loop: while this process does not run,
nobody else is late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

import structlog

from outrider.protocol.errors import OutriderError, PeerLost
from outrider.protocol.fleet import Role, WorkerLoad

if TYPE_CHECKING:
    from coordinator.workers.worker_pool import WorkerConnection

log = structlog.get_logger(__name__)

TICK_S = 0.25
SILENT_S = 2.0  # without a word, an answer to a probe included: four probes
_STEPS = 20.0  # of the verifier's usual length, that a verdict may take
_PROMPT_STEPS = 20.0  # times as long as its tokens take alone, that a prompt may: others go through with it
_ROW_MS = 10.0  # for a token of a prompt, at a verifier that publishes no cost
_MOST_S = 600.0


class Stream(Protocol):
    """To a worker, as far as it is watched."""

    def hang_up(self, why: OutriderError) -> None: ...

    def overdue_s(self, tick_s: float, load: WorkerLoad, timeout_s: float) -> float:
        """After another tick: for how long it has owed an answer, if that is too long, else 0."""
        ...


class Silence:
    """How long nothing was heard of a worker."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def heard(self) -> None:
        self.seconds = 0.0

    def __bool__(self) -> bool:
        return self.seconds >= SILENT_S


class Debt:
    """A verifier's stream: it decodes by itself, so that there is always a verdict to come."""

    def __init__(self, num_tokens: int) -> None:
        self.patience_s = 0.0  # that the verifier was told to have
        self._prompt = num_tokens  # to go through the model before the first verdict
        self._waited_s = 0.0
        self._queued_s = 0.0

    def paid(self) -> None:
        self._prompt = 0
        self._waited_s = 0.0

    def overdue_s(self, tick_s: float, load: WorkerLoad, timeout_s: float) -> float:
        if self._prompt and load.waiting and self._queued_s < _MOST_S:
            self._queued_s += tick_s  # it says that sessions wait for room: ours may be one of them
            return 0.0
        self._waited_s += tick_s
        return self._waited_s if self._waited_s > self._limit_s(load, timeout_s) else 0.0

    def _limit_s(self, load: WorkerLoad, timeout_s: float) -> float:
        limit_s = timeout_s + self.patience_s + _STEPS * load.step_ms / 1000
        if self._prompt:
            row_ms = load.cost.at(load.cost.rows[-1]) / load.cost.rows[-1] if load.cost.rows else _ROW_MS
            limit_s += timeout_s + _PROMPT_STEPS * self._prompt * row_ms / 1000
        return min(_MOST_S, limit_s)


async def watch(
    links: Callable[[], Iterable[WorkerConnection]], spare: Callable[[WorkerConnection], bool], timeout_s: float
) -> None:
    """`spare`: whether another worker could take what this one has; without one, a silent verifier is given longer."""
    while True:
        await asyncio.sleep(TICK_S)
        for link in list(links()):
            _look(link, spare, timeout_s)


def _look(link: WorkerConnection, spare: Callable[[WorkerConnection], bool], timeout_s: float) -> None:
    link.silence.seconds += TICK_S
    address, silent_s = link.info.address, link.silence.seconds
    drafter = link.info.role is Role.DRAFTER
    lost = bool(link.silence) and (drafter or silent_s >= timeout_s or spare(link))
    if lost and link.streams:
        log.info("worker silent", worker=link.info.worker_id, seconds=silent_s, sessions=link.sessions)
        link.failed()
    for stream in list(link.streams):
        if lost:
            stream.hang_up(PeerLost(f"{address} has said nothing for {silent_s:g} s"))
        elif owed_s := stream.overdue_s(TICK_S, link.info.load, timeout_s):
            stream.hang_up(PeerLost(f"{address} has owed a verdict for {owed_s:g} s"))
