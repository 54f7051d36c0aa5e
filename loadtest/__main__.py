"""`python -m loadtest`: a run of locust with a time limit, a report in a directory and a table of the results.

The exit code is 1 if a request failed, a text differed, no request completed
or the throughput did not recover after a peak.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from loadtest.credentials import ClientCredentials
from loadtest.options import COMMON, OWN, signature
from loadtest.report.summary import Percentiles, Summary
from loadtest.settings import Load, LoadTarget, check_writable
from loadtest.shapes import max_duration_s, parts
from outrider.base.config import check_installed
from outrider.base.processes import end_on_signals, ending_with_parent
from outrider.protocol.errors import InvalidRequest, StartupError

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
RESULTS = Path(__file__).with_name("results")
REFERENCE_S = 600.0  # for the reference outputs, before the load
SPARE_S = 30.0  # for locust's start and its reports
LOG_LINES_SHOWN = 20

console = Console()


def main(**flags: Any) -> None:
    """Generate load on a running Outrider over gRPC and HTTP, and compare every text with its reference."""
    given = {option.name: option.default for option in (*OWN, *COMMON)} | flags
    load = Load(**{field.name: given[field.name] for field in fields(Load)})
    try:
        load.check()
        where = LoadTarget.of(SimpleNamespace(**given))
        names = ("api_key", "tls_ca", "tls_cert", "tls_key", "tls_name")
        ClientCredentials.load(**{name: given[name] for name in names})
        made = parts(load.shape, load.users, load.seconds, load.times, where.capacity, where.max_users)
        longest = max_duration_s(made, load.spawn_rate, where.timeout_s)
        for package in ("locust", "matplotlib"):
            check_installed(package, "loadtest")
        folder = given["report"] or RESULTS / datetime.now().strftime("%Y%m%d-%H%M%S")
        figures, page = given["json"] or folder / "summary.json", given["html"] or folder / "report.html"
        check_writable(folder / "locust.log", figures, page)
    except (InvalidRequest, StartupError) as error:
        raise typer.BadParameter(error.message) from error
    endpoints = ", ".join((*where.grpc, *where.http))
    console.print(f"{load.shape}: {load.users} users, {load.seconds} s, {endpoints}; reports in {folder}")
    summary = run(_locust_options(given), folder, figures, given["api_key"], REFERENCE_S + longest + SPARE_S)
    if summary is None:
        console.print(f"[red]locust did not finish[/red]; the end of {folder / 'locust.log'}:")
        console.print(_tail(folder / "locust.log"), markup=False, highlight=False)
        raise typer.Exit(1)
    draw(summary, page)
    console.print(table(summary))
    if summary.verdict:
        console.print(f"[red]failed[/red]: {summary.verdict}; see {folder / 'locust.log'}")
        raise typer.Exit(1)


main.__signature__ = signature()  # type: ignore[attr-defined]


def _locust_options(given: Mapping[str, Any]) -> list[str]:
    """Return locust's options, without the API key: every user of a machine can read command lines."""
    line = ["--users", str(given["users"]), "--spawn-rate", f"{given['spawn_rate']:g}"]
    line += ["--run-time", f"{given['seconds']}s", "--stop-timeout", str(math.ceil(given["timeout_s"]))]
    for option in COMMON:
        value = given[option.name]
        if option.kind is bool:
            line += [option.locust_flag] if value else []
        elif option.name != "api_key":
            line += [option.locust_flag, "" if value is None else str(value)]
    return line


def run(options: list[str], folder: Path, figures: Path, api_key: str, limit_s: float) -> Summary | None:
    """Run locust in a subprocess, since it patches the standard library; return None if it wrote no summary."""
    figures.unlink(missing_ok=True)
    line = [sys.executable, "-m", "locust", "--locustfile", str(LOCUSTFILE), "--headless", "--only-summary"]
    line += ["--html", str(folder / "locust.html"), "--csv", str(folder / "locust"), "--summary", str(figures)]
    environment = os.environ | {"OUTRIDER_API_KEY": api_key}
    with (folder / "locust.log").open("w") as log, console.status("running"):
        process = subprocess.Popen(
            [*line, *options],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=ending_with_parent(),
        )
        try:
            process.wait(limit_s)
        except KeyboardInterrupt:
            console.print("interrupted: the results are those so far")
        except subprocess.TimeoutExpired:
            console.print(f"locust did not end within {limit_s:g} s: killed")
        finally:
            _end(process)
    return Summary.load_from(figures) if figures.exists() else None


def draw(summary: Summary, file: Path) -> None:
    # Imported here: it takes a second, which an invalid command need not wait for.
    from loadtest.report.page import write

    write(summary, file)
    console.print(f"report: {file}")


def table(summary: Summary) -> Table:
    counts = summary.all
    shown = Table("figure", "value", title=f"{summary.seconds:.1f} s under load")
    shown.columns[1].justify = "right"
    rows = {
        "requests": f"{counts.requests}",
        "failures": f"{counts.failures}",
        "shed": f"{counts.shed}",
        "texts compared / that differ": f"{counts.compared} / {summary.different_texts}",
        "first token, p50 / p95": _pair(counts.first_token_ms),
        "inter-token, p50 / p95": _pair(counts.inter_token_ms),
        "whole answer, p50 / p95": _pair(counts.total_ms),
        "tokens": f"{counts.tokens}",
        "tokens/s": f"{summary.tokens_per_s:.1f}",
    }
    if counts.acceptance_length is not None:
        rows["guesses accepted"] = f"{counts.accepted} of {counts.guesses}"
        rows["tokens per step with guesses"] = f"{counts.acceptance_length:.2f}"
    if len(summary.parts) > 1:
        rows |= {f"tokens/s, {part.name} ({part.users} users)": f"{part.tokens_per_s:.1f}" for part in summary.parts}
    if summary.recovery is not None:
        rows["recovery: last part / first part"] = f"{summary.recovery:.0%}"
    for name, value in rows.items():
        shown.add_row(name, value)
    return shown


def _pair(times: Percentiles) -> str:
    return f"{times.p50:.0f} / {times.p95:.0f} ms" if times.p50 is not None and times.p95 is not None else "–"


def _end(process: subprocess.Popen[bytes], grace_s: float = 30.0) -> None:
    """Terminate the subprocess, also after an interrupt."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)  # a shape's run ends without its summary on SIGTERM
    deadline = time.monotonic() + grace_s
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    ends = [number for number, line in enumerate(lines) if "locust.main: Shutting down" in line]  # empty tables follow
    return "\n".join(lines[: ends[-1] if ends else None][-LOG_LINES_SHOWN:])


app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)  # a local variable may be a key
app.command()(main)

if __name__ == "__main__":
    end_on_signals()
    app()
