"""Simulated world: virtual time, and the link and text of a session."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.protocol.cost_curve import CostCurve

_LONGEST_HICCUP = 16.0  # times the least one
_BRANCH_SHARES = (0.65, 0.25, 0.10)  # of `gain`, by rank after the first guess


@dataclass(frozen=True, slots=True)
class World:
    """Parameters of drafter, verifier and link. Times are in milliseconds; the link is that of the drafter."""

    acceptance: float = 0.8  # of a first guess on a correct path
    gain: float = 0.6  # share of the misses for which a later candidate is right
    draft_ms: float = 4.0  # per token of a chain or level of a tree
    cost: CostCurve = field(default_factory=lambda: CostCurve((1, 17, 33), (40.0, 40.0, 80.0)))
    rtt_ms: float = 0.0
    jitter_ms: float = 0.0
    overhead_ms: float = 1.2  # of a round through three services
    shared: bool = False  # drafter and verifier run on the same cores
    burden: float = 1.0  # factor of the time of steps with guesses, which the published cost curve does not show
    hiccups: float = 0.0  # by other load on the machine, per plain step's time of steps and drafts
    hiccup_ms: float = 12.0  # at most, or with `tail` the least
    tail: float = 0.0  # exponent of their Pareto distribution; 0: they are uniform
    late: float = 0.0  # share of messages that wait for a core

    def chances(self) -> list[float]:
        """Return the chance of each of the drafter's candidates to be right, by rank."""
        return [self.acceptance, *(share * self.gain * (1 - self.acceptance) for share in _BRANCH_SHARES)]


class EventQueue:
    """Actions in virtual time; milliseconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def run_next(self) -> None:
        self.now, _, action = heapq.heappop(self._events)
        action()

    def after(self, ms: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + ms, self._count, action))


class SimulatedWorld:
    """The world of one session: messages over its link, and the right tokens of its text."""

    def __init__(self, world: World, seed: int, events: EventQueue) -> None:
        self.world = world
        self.after = events.after
        self._events = events
        self._seed = seed
        self._jitter = random.Random(seed)
        self._load = random.Random(seed + 1)
        self._ranks: dict[int, int] = {}
        self._arrives_up = self._arrives_down = 0.0

    @property
    def now(self) -> float:
        return self._events.now

    def send_up(self, action: Callable[[], None]) -> None:
        """Schedule an arrival at the verifier. Messages never overtake each other."""
        self._arrives_up = max(self._arrives_up, self.now + self._one_way_ms())
        self.after(self._arrives_up - self.now, action)

    def send_down(self, action: Callable[[], None]) -> None:
        """Schedule an arrival at the drafter."""
        self._arrives_down = max(self._arrives_down, self.now + self._one_way_ms())
        self.after(self._arrives_down - self.now, action)

    def _one_way_ms(self) -> float:
        world = self.world
        own_ms = (world.rtt_ms + world.overhead_ms) / 2 + self._jitter.uniform(0, world.jitter_ms)
        return own_ms + self._hiccup_ms(world.late)

    def delay_ms(self, work_ms: float) -> float:
        """Return how long other load on the machine delays a step or draft that takes so long without."""
        return self._hiccup_ms(self.world.hiccups * work_ms / self.world.cost.at(1))

    def _hiccup_ms(self, chance: float) -> float:
        if self._load.random() >= chance:
            return 0.0
        most = self._load.paretovariate(self.world.tail) if self.world.tail else self._load.random()
        return self.world.hiccup_ms * min(most, _LONGEST_HICCUP)

    def right_rank(self, position: int) -> int:
        """Return the rank of the drafter's candidate that is right after a correct path; −1: none is."""
        if position not in self._ranks:
            # A generator per position, so that every plan meets the same text.
            drawn = random.Random(self._seed * 1_000_003 + position).random()
            right = -1
            for rank, chance in enumerate(self.world.chances()):
                drawn -= chance
                if drawn < 0:
                    right = rank
                    break
            self._ranks[position] = right
        return self._ranks[position]
