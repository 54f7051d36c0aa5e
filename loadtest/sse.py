"""Incremental reader of server-sent events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def events(lines: Iterable[bytes]) -> Iterator[str]:
    """Yield the data of each event; skip comments, other fields, and an incomplete last event."""
    data: list[str] = []
    for line in lines:
        text = line.decode().rstrip("\r\n")
        if not text:
            if data:
                yield "\n".join(data)
            data = []
        elif text.startswith("data:"):
            data.append(text.removeprefix("data:").removeprefix(" "))
