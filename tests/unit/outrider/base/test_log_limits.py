"""A flood of the same lines stays short, and no line tells a terminal what to do."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from outrider.base.log_limits import MOST_WARNINGS, WINDOW_S, RepeatLimiter
from outrider.protocol.printable import printable

FLOOD = """
import logging, structlog
from outrider.base.logs import set_up_logs
set_up_logs("info", as_json=False, service="coordinator")
log = structlog.get_logger("here")
for number in range(5000):
    log.warning("full", number=number)
    logging.getLogger("asyncio").error("socket.accept() out of system resource\\nsocket: %d", number)
log.info("peer said", value="\\x1b]0;owned\\x07\\x9b31m\\u202eevil", long="x" * 100_000)
"""


def test_a_flood_is_counted_and_not_written() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FLOOD)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.count("full") == MOST_WARNINGS
    assert done.stderr.count("out of system resource") == MOST_WARNINGS
    assert len(done.stderr) < 20_000
    for control in ("\x1b", "\x07", "\x9b", "\u202e"):
        assert control not in done.stderr
    assert "\\x1b]0;owned\\x07" in done.stderr


def test_the_next_window_tells_what_is_missing() -> None:
    now = 0.0
    repeats = RepeatLimiter(lambda: now)
    told = [repeats.missing("error", "x") for _ in range(MOST_WARNINGS + 7)]
    assert told == [0] * MOST_WARNINGS + [None] * 7
    assert repeats.missing("error", "y") == 0
    now = WINDOW_S
    assert repeats.missing("error", "x") == 7
    assert repeats.missing("error", "x") == 0


@pytest.mark.parametrize("text", ["plain", "Grüße, 世界 🙂", "a\tb\nc", "e\u0301"])
def test_what_people_write_is_shown_as_it_is(text: str) -> None:
    assert printable(text) == text


def test_lone_surrogates_can_be_written() -> None:
    assert printable("\ud800").encode() == b"\\ud800"
