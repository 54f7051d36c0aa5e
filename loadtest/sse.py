"""Server-sent events, read as they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def events(lines: Iterable[bytes]) -> Iterator[str]:
    """The data of each event. Comments and other fields are skipped; an event that was cut off is none."""
    data: list[str] = []
    for line in lines:
        text = line.decode().rstrip("\r\n")
        if not text:
            if data:
                yield "\n".join(data)
            data = []
        elif text.startswith("data:"):
            data.append(text.removeprefix("data:").removeprefix(" "))
