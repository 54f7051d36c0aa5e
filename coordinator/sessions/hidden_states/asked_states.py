"""The hidden states that a verifier's stream was asked for, and the check of those that come."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.protocol.errors import InvalidRequest, ProtocolViolation
from outrider.protocol.hidden_states.limits import check_rows
from outrider.protocol.speculation import Verdict, VerifySteering
from outrider.v1 import verifier_pb2 as verify


@dataclass(slots=True)
class AskedStates:
    """States asked for at some time: those under way when they are switched off still come."""

    final: bool = False
    numbers: set[int] = field(default_factory=set)  # of the others

    def note(self, steering: VerifySteering) -> int:
        """Record what steering asks for; return how many refusals may come of it."""
        self.final = self.final or bool(steering.hidden_states)
        if steering.states is None:
            return 0
        self.numbers.update(spec.number for spec in steering.states.specs)
        return len(steering.states.specs)

    def check(self, proto: verify.Verdict) -> int:
        """Return the bytes of all states. Raise ProtocolViolation for any of a wrong size or that was not asked for."""
        if proto.HasField("hidden_states") and not self.final:
            raise ProtocolViolation("verdict.hidden_states is given, must be absent: none were asked for")
        numbers = [states.number for states in proto.layer_states]
        if len(set(numbers)) < len(numbers) or not self.numbers.issuperset(numbers):
            raise ProtocolViolation("verdict.layer_states has states that were not asked for, or twice the same")
        carried = [*([proto.hidden_states] if proto.HasField("hidden_states") else []), *proto.layer_states]
        try:
            for states in carried:
                check_rows("verdict.hidden_states", states)
        except InvalidRequest as error:
            raise ProtocolViolation(error.message) from error
        return sum(len(states.rows) for states in carried)


def check_ends(verdict: Verdict) -> None:
    """Raise ProtocolViolation unless hidden states reach exactly to the token before the last one."""
    wanted = verdict.position + len(verdict.tokens) - 1
    for states in filter(None, (verdict.hidden_states, *verdict.layer_states)):
        if (end := states.position + states.count) != wanted:
            raise ProtocolViolation(f"verdict.hidden_states is up to {end}, must be up to {wanted}")
