"""Hidden states of committed positions, and what a drafter declares to read of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from outrider.protocol.checks import check_number
from outrider.protocol.errors import InvalidRequest

MAX_HIDDEN_WIDTH = 131_072  # numbers per position
MAX_HIDDEN_POSITIONS = 512  # positions per message
MAX_LAYERS = 1024
MAX_STATE_LAYERS = 16  # of a StateSpec
MAX_STATE_SPECS = 4  # of a session
DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Hidden states of committed positions, as float16 or float8 rows; see HiddenStates in common.proto."""

    position: int
    width: int
    rows: bytes
    number: int = 0  # of their StateSpec
    float8: bool = False

    @property
    def row_bytes(self) -> int:
        return 1 + self.width if self.float8 else 2 * self.width

    @property
    def count(self) -> int:
        """Return the number of positions."""
        return len(self.rows) // self.row_bytes


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Hidden states that a drafter reads; see StateSpec in common.proto."""

    layers: tuple[int, ...] = ()
    projection: str = ""
    width: int = 0
    float8: bool = False
    number: int = 0

    def check(self, name: str) -> None:
        if len(self.layers) > MAX_STATE_LAYERS or not all(1 <= layer <= MAX_LAYERS for layer in self.layers):
            raise InvalidRequest.of(f"{name}.layers", list(self.layers), f"≤ {MAX_STATE_LAYERS} of 1 to {MAX_LAYERS}")
        check_number(f"{name}.width", self.width, 0, MAX_HIDDEN_WIDTH)
        if self.projection and not DIGEST.fullmatch(self.projection):
            raise InvalidRequest.of(f"{name}.projection", self.projection, "a SHA-256 digest in hex, or empty")

    def numbered(self, number: int) -> StateSpec:
        return replace(self, number=number)


FINAL_STATES = StateSpec()  # after the final norm, float16: those of the field `hidden_states`


@dataclass(frozen=True, slots=True)
class StateSpecs:
    """Hidden states that a session asks its verifier for."""

    specs: tuple[StateSpec, ...] = ()

    def check(self) -> None:
        numbers = [spec.number for spec in self.specs]
        if len(numbers) > MAX_STATE_SPECS or len(set(numbers)) < len(numbers) or not all(numbers):
            raise InvalidRequest.of("states.number", numbers[:10], f"at most {MAX_STATE_SPECS}, each once, from 1 on")
        for spec in self.specs:
            spec.check("states")
