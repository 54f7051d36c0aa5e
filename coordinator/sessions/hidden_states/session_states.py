"""The hidden states of one session: which its verifier is asked for, and the newest of each. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.sessions.hidden_states.delivery import ProjectionDelivery
from coordinator.sessions.hidden_states.window import HiddenStateWindow
from outrider.protocol.errors import OutriderError
from outrider.protocol.fleet import WorkerInfo
from outrider.protocol.hidden_states.messages import FINAL_STATES, MAX_STATE_SPECS, HiddenStates, StateSpec, StateSpecs
from outrider.protocol.speculation import Verdict, VerifySteering


class SessionStates:
    """States by spec, which are numbered in this session; the final ones have number 0."""

    def __init__(self, delivery: ProjectionDelivery | None) -> None:
        """Begin without a verifier; without `delivery`, only final states can be asked for."""
        self._delivery = delivery
        self._verifier: WorkerInfo | None = None
        self.numbers: dict[StateSpec, int] = {FINAL_STATES: 0}
        self._windows: dict[int, HiddenStateWindow] = {}
        self.requested: tuple[StateSpec, ...] = ()

    def begin(self, verifier: WorkerInfo) -> None:
        """Forget what an earlier stream has sent."""
        self._verifier = verifier
        self._windows.clear()
        self.requested = ()

    def accepts(self, drafter: WorkerInfo) -> bool:
        """Return whether the verifier sends what a drafter reads."""
        if self._verifier is not None and not drafter.reads_width_of(self._verifier):
            return False
        if drafter.state_spec is None:
            return True
        return bool(self._delivery and self._verifier and self._delivery.feeds(self._verifier, drafter.state_spec))

    def request(self, wanted: Iterable[StateSpec]) -> VerifySteering | None:
        """Return what to ask a stream for; None: it sends these already."""
        specs = tuple(dict.fromkeys(wanted))
        others = [spec for spec in specs if spec != FINAL_STATES][:MAX_STATE_SPECS]
        requested = (*others, FINAL_STATES) if FINAL_STATES in specs else tuple(others)
        if set(requested) == set(self.requested):
            return None
        before, self.requested = self.requested, requested
        for spec in others:
            self.numbers.setdefault(spec, len(self.numbers))
        numbers = {self.numbers[spec] for spec in requested}
        self._windows = {number: window for number, window in self._windows.items() if number in numbers}
        final_changes = (FINAL_STATES in requested) != (FINAL_STATES in before)
        numbered = tuple(spec.numbered(self.numbers[spec]) for spec in others)
        others_change = set(others) != {spec for spec in before if spec != FINAL_STATES}
        return VerifySteering(
            hidden_states=FINAL_STATES in requested if final_changes else None,
            states=StateSpecs(numbered) if others_change else None,
        )

    def missing(self, error: OutriderError) -> str:
        """Return the digest of a projection that the verifier says that it does not have; empty: it says no such."""
        if error.field != "states.projection":
            return ""
        self.requested = tuple(spec for spec in self.requested if spec.projection != error.value)
        if self._delivery is not None and self._verifier is not None:
            self._delivery.forget(self._verifier.worker_id, error.value)
        return error.value

    def add(self, verdict: Verdict) -> None:
        for spec in self.requested:
            states = self.of(verdict, spec)
            if states is not None:
                self._windows.setdefault(self.numbers[spec], HiddenStateWindow()).add(states)

    def of(self, verdict: Verdict, spec: StateSpec) -> HiddenStates | None:
        """Return the states of a verdict that a drafter of this spec reads."""
        number = self.numbers.get(spec)
        if not number:
            return verdict.hidden_states if number == 0 else None
        return next((states for states in verdict.layer_states if states.number == number), None)

    def known(self, spec: StateSpec) -> HiddenStates | None:
        """Return the newest states, for a drafter that is attached now."""
        window = self._windows.get(self.numbers.get(spec, -1))
        return None if window is None else window.contents()
