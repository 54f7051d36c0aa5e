"""Progress of an answer: new tokens, ends, and silences before the first ones."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.api.http.answer import progress
from coordinator.sessions.detokenizer import TextStream
from coordinator.sessions.output import SessionOutput
from outrider.protocol.errors import PeerLost
from outrider.protocol.speculation import FinishReason, TokenKind


def session(error: PeerLost | None = None) -> Any:
    output = SessionOutput(TextStream(lambda ids: "".join(map(chr, ids)), (), ()))
    record = SimpleNamespace(session_id="s", finish_reason=FinishReason.STOP)
    return SimpleNamespace(output=output, record=record, error=error)


async def test_a_silence_is_of_no_session_and_an_end_has_the_error_of_its_own() -> None:
    """A silence read the state of the last session, whose end was still to come."""
    one, lost = session(), session(PeerLost("gone"))
    async with contextlib.aclosing(progress([one, lost], 0.01)) as updates:
        assert await anext(updates) == (-1, [])
        one.output.append([65], [TokenKind.PLAIN])
        one.output.end(finished=True)
        number, [token] = await anext(updates)
        assert (number, token.text) == (0, "A")
        assert await anext(updates) == (0, [])
        assert await anext(updates) == (-1, [])
        lost.output.end(finished=False)
        with pytest.raises(PeerLost, match="gone"):
            await anext(updates)
