"""Events of a stream, as clients split them."""

from __future__ import annotations

import json

from coordinator.api.http.streams import _event


def test_an_event_is_one_line_for_all_that_split_lines() -> None:
    """Such as `str.splitlines`, and so httpx: it knows more ends of lines than the standard of events."""
    data = {"text": "a\u2028b\u2029c\x85d\u000be\x1cf\n\r 世界 \u00e9"}
    (line, nothing) = _event(data).decode().splitlines()
    assert nothing == ""
    assert json.loads(line.removeprefix("data: ")) == data
    assert "世界 é".encode() in _event(data), "the rest as it is"
