"""Simulated verifier: one step checks the guesses of all sessions that are ready, in a time on its cost curve."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.control.estimator import PairHistory
from coordinator.control.gamma import FixedChoices
from coordinator.control.simulation.session import SimulatedSession, SimulatedStep, SimulationResult, accepted_path
from coordinator.control.simulation.world import EventQueue, SimulatedWorld, World
from outrider.protocol.speculation import Guess
from outrider.speculation.goodput import compared_guesses, paying_blocks

_Checked = tuple[SimulatedSession, Guess, float]  # the session, its guesses in the step, and how long it had waited


class SimulatedVerifier:
    """Steps of the sessions of one verifier."""

    def __init__(self) -> None:
        self.events = EventQueue()
        self.sessions: list[SimulatedSession] = []
        self._stepping = False

    def wake(self) -> None:
        """Begin a step with the sessions that are ready, unless one runs."""
        if self._stepping:
            return
        ready = [session for session in self.sessions if session.ready()]
        if not ready:
            return
        self._stepping = True
        checked = [(session, block, session.start_step()) for session, block in zip(ready, _blocks(ready), strict=True)]
        world = checked[0][0].world
        tokens = sum(1 + len(block.tokens) for _, block, _ in checked)
        step_ms = world.cost.at(tokens) * (world.burden if tokens > len(checked) else 1.0)
        step_ms += checked[0][0].delay_ms(step_ms)
        self.events.after(step_ms, lambda: self._finish(checked, step_ms, tokens))

    def _finish(self, checked: Sequence[_Checked], step_ms: float, tokens: int) -> None:
        paths = [accepted_path(block) for _, block, _ in checked]
        step = SimulatedStep(step_ms, len(checked), tokens, sum(len(path) + 1 for path in paths))
        for (session, block, waited_ms), path in zip(checked, paths, strict=True):
            session.finish_step(block, path, waited_ms, step)
        self._stepping = False
        self.wake()


def _blocks(ready: Sequence[SimulatedSession]) -> list[Guess]:
    """Return the guesses of each session that a step checks."""
    blocks = [session.block(compared_guesses(len(ready))) for session in ready]
    if not any(session.paying_guesses for session in ready):
        return blocks
    return paying_blocks(ready, blocks, len(ready) + sum(len(block.tokens) for block in blocks), ready[0].world.cost)


class Simulation(SimulatedSession):
    """One session with a verifier of its own. `world` may be replaced between two runs."""

    def __init__(
        self,
        world: World,
        gamma_max: int = 16,
        fixed: FixedChoices | None = None,
        history: PairHistory | None = None,
        seed: int = 0,
    ) -> None:
        self._verifier = SimulatedVerifier()
        own = SimulatedWorld(world, seed, self._verifier.events)
        super().__init__(own, self._verifier.wake, gamma_max, fixed, history)
        self._verifier.sessions.append(self)
        self._verifier.wake()

    def run(self, tokens: int) -> SimulationResult:
        """Commit at least this many further tokens and return their counters."""
        self.result = SimulationResult()
        started, before = self.now, len(self.committed)
        while len(self.committed) < before + tokens:
            self._verifier.events.run_next()
        self.result.ms = self.now - started
        self.result.tokens = len(self.committed) - before
        return self.result
