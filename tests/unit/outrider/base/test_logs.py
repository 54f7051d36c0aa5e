"""One form for everything that a service logs, whoever logs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from datetime import datetime
from pathlib import Path

SCRIPT = """
import logging, warnings
noisy = logging.getLogger("noisy")
noisy.addHandler(logging.StreamHandler())  # as libraries do that bring a form of their own
noisy.propagate = False
import structlog
from outrider.base.logs import set_up_logs
set_up_logs("info", as_json={as_json}, service="verifier")
log = structlog.get_logger("here")
structlog.contextvars.bind_contextvars(session_id="s-1", request_id="r-1")
log.debug("too fine")
log.info("worker joined", worker="w\\nx", odd=object)
noisy.warning("%d things", 3)
noisy.info("too fine")
warnings.warn("old ways")
try:
    raise ValueError("broken")
except ValueError:
    log.exception("step failed")
    noisy.exception("library failed")
"""


def logged(as_json: bool) -> list[str]:
    script = textwrap.dedent(SCRIPT.format(as_json=as_json))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_json_is_one_object_a_line() -> None:
    lines = [json.loads(line) for line in logged(as_json=True)]
    assert [line["event"].split("\n")[0] for line in lines[:2]] == ["worker joined", "3 things"]
    assert "old ways" in lines[2]["event"]
    assert [line["event"] for line in lines[3:]] == ["step failed", "library failed"]
    assert [line["level"] for line in lines] == ["info", "warning", "warning", "error", "error"]
    for line in lines:
        assert line["service"] == "verifier"
        assert (line["session_id"], line["request_id"]) == ("s-1", "r-1")
        assert datetime.fromisoformat(line["timestamp"]).tzinfo is not None
    assert lines[0]["worker"] == "w\nx"
    assert all("ValueError: broken" in line["exception"] for line in lines[3:])
    assert lines[1]["logger"] == "noisy"


def test_text_says_the_same_to_people() -> None:
    text = "\n".join(logged(as_json=False))
    for part in ("worker joined", "session_id=s-1", "3 things", "old ways", "step failed", "ValueError: broken"):
        assert part in text
    assert "too fine" not in text
    assert "format_exc_info" not in text


_ON_A_FULL_DISK = """
import logging, resource, structlog
from outrider.base.logs import report_progress, set_up_logs
set_up_logs("info", as_json=False, service="test")
log = structlog.get_logger("test")
log.info("before")
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
for _ in range(3):
    log.info("no room")
logging.getLogger("library").warning("no room")
report_progress("no room")
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
log.info("after")
"""


def test_a_stage_that_a_locale_cannot_write_costs_nothing() -> None:
    program = "from outrider.base.logs import report_progress as r; r('loading /models/grün'); r('ready')"
    variables = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("progress: ready\n", 0), done.stderr


def test_a_full_disk_costs_log_lines_and_nothing_else(tmp_path: Path) -> None:
    told = tmp_path / "log"
    with told.open("wb") as file:
        done = subprocess.run([sys.executable, "-c", _ON_A_FULL_DISK], stdout=file, stderr=file, check=False)
    lines = told.read_text()
    assert done.returncode == 0, lines
    assert "before" in lines
    assert "after" in lines
    assert "log lines lost" in lines
