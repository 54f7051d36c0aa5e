"""Simulated drafter: it grows chains and trees in virtual time, without a model."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from coordinator.control.simulated_world import SimulatedWorld
from coordinator.control.throughput_model import PLAIN, SpeculationPlan
from outrider.protocol.speculation import MAX_NODES, ROOT, Guess, TreeShape

RIGHT = 1  # the right token at every position; all others are wrong
_WRONG = 1000
_NODES_AT_ONCE = 8  # guesses that a drafter ahead adds to a tree at once


@dataclass(slots=True, eq=False)
class _SimulatedNode:
    token: int
    position: int
    parent: _SimulatedNode | None
    score: float
    right: bool
    node_id: int = 0
    dropped: bool = False
    children: int = 0


_Candidate = tuple[float, int, _SimulatedNode | None, int, int]  # -score, tie-break, parent, position, rank


class SimulatedDrafter:
    """Drafter of one session; `deliver` receives its guesses at the verifier."""

    def __init__(self, world: SimulatedWorld, deliver: Callable[[Guess], None]) -> None:
        self._world = world
        self._deliver = deliver
        self._committed = 0
        self._nodes: list[_SimulatedNode] = []
        self._plan = PLAIN
        self._busy = False
        self._next_id = 1
        self._unsent: list[_SimulatedNode] = []
        self._unreported_us = 0

    def steer(self, plan: SpeculationPlan) -> None:
        self._plan = plan
        self._draft()

    def commit(self, committed: int) -> None:
        while self._committed < committed:
            kept: list[_SimulatedNode] = []
            for node in self._nodes:
                if node.position == self._committed:
                    node.dropped = node.token != RIGHT
                    continue
                node.dropped = node.parent is not None and node.parent.dropped
                if not node.dropped:
                    kept.append(node)
                    if node.position == self._committed + 1:
                        node.parent = None  # its parent is committed now
            self._nodes = kept
            self._committed += 1
        self._unsent = [node for node in self._unsent if not node.dropped and node.position >= committed]
        self._draft()

    @property
    def _depth(self) -> int:
        return max((node.position + 1 - self._committed for node in self._nodes), default=0)

    @property
    def _budget(self) -> int:
        plan = self._plan
        return min(plan.nodes or plan.gamma * plan.branches, MAX_NODES) - len(self._nodes)

    def _draft(self) -> None:
        plan = self._plan
        if self._busy or plan.gamma == 0:
            return
        if self._budget <= 0 or (self._depth >= plan.gamma and not (plan.ahead and plan.branches > 1)):
            self._flush()
            return
        self._busy = True
        start = self._committed
        parents: list[_SimulatedNode | None] = [None, *self._nodes]
        self._world.after(self._world.world.draft_ms, lambda: self._finish_step(start, parents))

    def _finish_step(self, start: int, parents: list[_SimulatedNode | None]) -> None:
        """Add the best candidates after the nodes that were open when the step began at position `start`."""
        self._busy = False
        plan, world = self._plan, self._world
        self._unreported_us += int(world.world.draft_ms * 1000)
        candidates = self._candidates(start, parents)
        levels = max(1, plan.gamma - self._depth)
        width = max(_NODES_AT_ONCE if plan.ahead else 1, self._budget // levels) if plan.branches > 1 else 1
        for _ in range(min(width, self._budget)):
            if not candidates:
                break
            value, _, parent, position, rank = heapq.heappop(candidates)
            right = (parent is None or parent.right) and world.right_rank(position) == rank
            node = _SimulatedNode(RIGHT if right else _WRONG + rank, position, parent, -value, right)
            if parent is not None:
                parent.children += 1
            self._nodes.append(node)
            self._unsent.append(node)
        if plan.ahead:
            self._flush()
        self._draft()

    def _candidates(self, start: int, parents: list[_SimulatedNode | None]) -> list[_Candidate]:
        """Return a heap of the nodes that may be added, the likeliest first."""
        chances = self._world.world.chances()[: self._plan.branches]
        candidates: list[_Candidate] = []
        for parent in parents:
            if parent is None:
                position, score, valid = start, 0.0, start >= self._committed
                done = sum(node.parent is None and node.position == position for node in self._nodes)
            else:
                position, score, valid = parent.position + 1, parent.score, not parent.dropped
                done = parent.children
            if not valid or not self._committed <= position < self._committed + self._plan.gamma:
                continue
            for rank in range(done, len(chances)):
                value = score + math.log(max(chances[rank], 1e-9))
                candidates.append((-value, len(candidates), parent, position, rank))
        heapq.heapify(candidates)
        return candidates

    def _flush(self) -> None:
        """Send all unsent nodes, one guess per connected part of the tree."""
        unsent = [node for node in self._unsent if not node.dropped and node.position >= self._committed]
        self._unsent = []
        while unsent:
            root = unsent[0].parent
            numbers: dict[int, int] = {id(root): ROOT}
            sent: list[_SimulatedNode] = []
            rest: list[_SimulatedNode] = []
            for node in unsent:
                if id(node.parent) in numbers and (node.parent is not None or node.position == unsent[0].position):
                    sent.append(node)
                    numbers[id(node)] = len(sent) - 1
                else:
                    rest.append(node)
            self._send(root, sent, TreeShape(tuple(numbers[id(node.parent)] for node in sent)))
            unsent = rest

    def _send(self, root: _SimulatedNode | None, nodes: list[_SimulatedNode], shape: TreeShape) -> None:
        for node in nodes:
            node.node_id = self._next_id
            self._next_id += 1
        guess = Guess(
            nodes[0].position,
            nodes[0].node_id,
            0 if root is None else root.node_id,
            tuple(node.token for node in nodes),
            draft_us=self._unreported_us,
            parents=shape.stated,
        )
        self._unreported_us = 0
        self._world.send_up(partial(self._deliver, guess))
