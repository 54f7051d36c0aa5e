"""Limit of the hidden states in a message."""

from __future__ import annotations

from outrider.protocol.checks import check_count
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.hidden_states.messages import MAX_HIDDEN_POSITIONS, MAX_HIDDEN_WIDTH
from outrider.v1 import common_pb2 as common


def check_rows(name: str, states: common.HiddenStates) -> int:
    """Return the number of rows; raise InvalidRequest unless they are whole ones within the limit."""
    if not 1 <= states.width <= MAX_HIDDEN_WIDTH:
        raise InvalidRequest.of(f"{name}.width", states.width, f"in [1, {MAX_HIDDEN_WIDTH}]")
    row = 1 + states.width if states.float8 else 2 * states.width
    rows, rest = divmod(len(states.rows), row)
    if rest:
        raise InvalidRequest.of(f"{name}.rows", f"{len(states.rows)} bytes", f"whole rows of {row} bytes")
    check_count(f"{name}.rows", rows, MAX_HIDDEN_POSITIONS, "rows")
    return rows
