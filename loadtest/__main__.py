"""`python -m loadtest`: a bounded run of locust, its reports in a folder, its figures in a table.

Ends with 1 when a request failed, a text differed or nothing completed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from loadtest.summary import Summary
from loadtest.workload import cases
from outrider.client import DEFAULT_ENDPOINT
from outrider.endpoint import allowed
from outrider.errors import InvalidRequest

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
RESULTS = Path(__file__).with_name("results")
FETCH_S = 600.0  # for the answers, before the run proper
SPARE_S = 30.0  # for locust to start and to write its reports
LOG_LINES_SHOWN = 20

console = Console()


def main(
    users: Annotated[int, typer.Option(min=1, help="Users at once; each sends one request after the other.")] = 16,
    spawn_rate: Annotated[float, typer.Option(min=0.01, help="Users added per second.")] = 8.0,
    seconds: Annotated[int, typer.Option(min=1, help="How long, once the answers are known.")] = 60,
    endpoint: Annotated[
        str, typer.Option(envvar="OUTRIDER_ENDPOINT", help="host:port of the coordinator, or several with commas.")
    ] = DEFAULT_ENDPOINT,
    report: Annotated[Path | None, typer.Option(help="Folder for the reports; default: loadtest/results/TIME.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per request.")] = 48,
    kinds: Annotated[str, typer.Option(help="Kinds of prompts, separated by commas; empty: all.")] = "",
    gamma: Annotated[int | None, typer.Option(min=0, max=64, help="Fix γ under load; absent: adaptive.")] = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Deadline of one request.")] = 120.0,
    allow_remote: Annotated[bool, typer.Option("--allow-remote", help="Permit endpoints on other machines.")] = False,
) -> None:
    """Put load on a running Outrider and check every text."""
    try:
        allowed(endpoint, allow_remote=allow_remote)
        cases(kinds, max_tokens)
    except InvalidRequest as error:
        raise typer.BadParameter(error.message) from error
    folder = report or RESULTS / datetime.now().strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--users", f"{users}", "--spawn-rate", f"{spawn_rate:g}", "--run-time", f"{seconds}s"]
    options += ["--endpoint", endpoint, "--max-tokens", f"{max_tokens}", "--timeout-s", f"{timeout_s:g}"]
    options += ["--stop-timeout", f"{timeout_s:g}", "--kinds", kinds]
    options += [] if gamma is None else ["--gamma", f"{gamma}"]
    options += ["--allow-remote"] if allow_remote else []
    console.print(f"{users} users, {seconds} s, {endpoint}; reports in {folder}")
    summary = run(options, folder, FETCH_S + seconds + timeout_s + SPARE_S)
    if summary is None:
        console.print(f"[red]locust did not finish[/red]; the end of {folder / 'locust.log'}:")
        console.print(_end_of(folder / "locust.log"), markup=False, highlight=False)
        raise typer.Exit(1)
    console.print(table(summary))
    if summary.verdict:
        console.print(f"[red]failed[/red]: {summary.verdict}; see {folder / 'locust.log'}")
        raise typer.Exit(1)


def run(options: list[str], folder: Path, limit_s: float) -> Summary | None:
    """Locust in a process of its own (it patches the standard library); None when it left no figures."""
    figures = folder / "summary.json"
    figures.unlink(missing_ok=True)
    line = [sys.executable, "-m", "locust", "--locustfile", str(LOCUSTFILE), "--headless", "--only-summary"]
    line += ["--html", str(folder / "report.html"), "--csv", str(folder / "locust"), "--summary", str(figures)]
    with (folder / "locust.log").open("w") as log, console.status("running"):
        process = subprocess.Popen(
            [*line, *options], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            console.print(f"locust has not ended after {limit_s:g} s: killed")
        finally:
            _end(process)
    return Summary.load(figures) if figures.exists() else None


def table(summary: Summary) -> Table:
    shown = Table("figure", "value", title=f"{summary.seconds:.1f} s under load")
    shown.columns[1].justify = "right"
    rows = {
        "requests": f"{summary.requests}",
        "failures": f"{summary.failures}",
        "texts that differ": f"{summary.different_texts}",
        "first token, p50 / p95": f"{summary.first_token_p50_ms:.0f} / {summary.first_token_p95_ms:.0f} ms",
        "total, p50 / p95": f"{summary.total_p50_ms:.0f} / {summary.total_p95_ms:.0f} ms",
        "tokens": f"{summary.tokens}",
        "tokens/s": f"{summary.tokens_per_second:.1f}",
    }
    for name, value in rows.items():
        shown.add_row(name, value)
    return shown


def _end(process: subprocess.Popen[bytes], grace_s: float = 5.0) -> None:
    """Also on the way out of an interrupt: nothing is left running."""
    if process.poll() is not None:
        return
    process.terminate()
    deadline = time.monotonic() + grace_s
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])


if __name__ == "__main__":
    typer.run(main)
