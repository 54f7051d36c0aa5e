"""`python -m loadtest`: a run of locust with a time limit, a report in a directory and a table of the results.

The exit code is 1 if a request failed, a text differed, no request completed
or the throughput did not recover after a peak.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from loadtest.credentials import ClientCredentials
from loadtest.report.summary import Percentiles, Summary
from loadtest.settings import (
    DEFAULT_HTTP_ENDPOINT,
    DEFAULT_MAX_TOKENS,
    DEFAULT_MAX_USERS,
    DEFAULT_SECONDS,
    DEFAULT_SPAWN_RATE,
    DEFAULT_TIMEOUT_S,
    DEFAULT_TIMES,
    DEFAULT_USERS,
    Load,
    LoadTarget,
)
from loadtest.shapes import SHAPES, max_duration_s
from loadtest.shapes import parts as parts_of
from outrider.client.sync import DEFAULT_ENDPOINT
from outrider.protocol.errors import InvalidRequest, StartupError

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
RESULTS = Path(__file__).with_name("results")
REFERENCE_S = 600.0  # for the reference outputs, before the load
SPARE_S = 30.0  # for locust's start and its reports
LOG_LINES_SHOWN = 20

console = Console()


def _option(flag: str, text: str, **more: Any) -> Any:
    """Return an option with the environment name that locust's command line uses as well."""
    return typer.Option(flag, envvar="OUTRIDER_" + flag[2:].upper().replace("-", "_"), help=text, **more)


def main(
    users: Annotated[int, typer.Option(min=1, help="Concurrent users; each sends its requests in sequence.")] = (
        DEFAULT_USERS
    ),
    spawn_rate: Annotated[float, typer.Option(min=0.01, help="Users added per second.")] = DEFAULT_SPAWN_RATE,
    seconds: Annotated[
        int, typer.Option(min=1, help="Duration of the load, after the reference outputs are ready.")
    ] = DEFAULT_SECONDS,
    shape: Annotated[str, _option("--shape", f"Number of users over time: {', '.join(SHAPES)}.")] = SHAPES[0],
    times: Annotated[
        float, _option("--times", "Peak as a multiple of the users (spike) or of the fleet's capacity (overload).")
    ] = DEFAULT_TIMES,
    endpoint: Annotated[
        str, _option("--endpoint", "host:port of the coordinator for gRPC, or several, separated by commas.")
    ] = DEFAULT_ENDPOINT,
    http_endpoint: Annotated[
        str, _option("--http-endpoint", "host:port of the coordinator for HTTP, or several, separated by commas.")
    ] = DEFAULT_HTTP_ENDPOINT,
    grpc_share: Annotated[float, _option("--grpc-share", "Relative number of users over gRPC.", min=0)] = 1.0,
    http_share: Annotated[float, _option("--http-share", "Relative number of users over HTTP.", min=0)] = 1.0,
    api_key: Annotated[str, _option("--api-key", "API key, or @FILE.")] = "",
    tls_ca: Annotated[
        str,
        _option("--tls-ca", "PEM file: authority that signed the coordinator's certificate; system: the public ones."),
    ] = "",
    tls_cert: Annotated[
        str, _option("--tls-cert", "PEM file: client certificate, if the coordinator requires one.")
    ] = "",
    tls_key: Annotated[str, _option("--tls-key", "PEM file: private key of --tls-cert.")] = "",
    max_tokens: Annotated[int, _option("--max-tokens", "Maximum tokens per request.", min=1)] = DEFAULT_MAX_TOKENS,
    kinds: Annotated[
        str, _option("--kinds", "Kinds of prompts with weights, e.g. chat:3,code; empty: all kinds equally.")
    ] = "",
    gamma: Annotated[int | None, _option("--gamma", "Fixed γ under load; absent: adaptive.", min=0, max=64)] = None,
    timeout_s: Annotated[float, _option("--timeout-s", "Deadline of a request, seconds.", min=0.1)] = (
        DEFAULT_TIMEOUT_S
    ),
    max_users: Annotated[int, _option("--max-users", "Limit on the users of any shape.", min=1)] = (DEFAULT_MAX_USERS),
    capacity: Annotated[
        int,
        _option("--capacity", "Sessions that the fleet runs at once, for overload; 0: as the fleet reports.", min=0),
    ] = 0,
    allow_remote: Annotated[bool, _option("--allow-remote", "Allow endpoints on other machines.")] = False,
    report: Annotated[
        Path | None, typer.Option(help="Directory for the reports; default: loadtest/results/TIME.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Path of the HTML report; default: in the report directory.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Path of the JSON summary; default: in the report directory.")
    ] = None,
) -> None:
    """Generate load on a running Outrider over gRPC and HTTP, and compare every text with its reference."""
    load = Load(shape, users, spawn_rate, seconds, times, grpc_share, http_share, kinds, max_tokens, gamma)
    try:
        load.check()
        where = LoadTarget.at(endpoint, http_endpoint, timeout_s, max_users, capacity, allow_remote=allow_remote)
        ClientCredentials.load(api_key=api_key, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)
        longest = max_duration_s(parts_of(shape, users, seconds, times, capacity, max_users), spawn_rate, timeout_s)
        check_installed()
    except (InvalidRequest, StartupError) as error:
        raise typer.BadParameter(error.message) from error
    folder = report or RESULTS / datetime.now().strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    figures = json or folder / "summary.json"
    console.print(f"{shape}: {users} users, {seconds} s, {', '.join((*where.grpc, *where.http))}; reports in {folder}")
    line = [
        *_options(load, where, allow_remote),
        "--tls-ca",
        tls_ca,
        "--client-cert",
        tls_cert,
        "--client-key",
        tls_key,
    ]
    summary = run(line, folder, figures, api_key, REFERENCE_S + longest + SPARE_S)
    if summary is None:
        console.print(f"[red]locust did not finish[/red]; the end of {folder / 'locust.log'}:")
        console.print(_tail(folder / "locust.log"), markup=False, highlight=False)
        raise typer.Exit(1)
    draw(summary, html or folder / "report.html")
    console.print(table(summary))
    if summary.verdict:
        console.print(f"[red]failed[/red]: {summary.verdict}; see {folder / 'locust.log'}")
        raise typer.Exit(1)


def check_installed() -> None:
    for package in ("locust", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise StartupError(f"{package} is not installed: pip install 'outrider[loadtest]'")


def _options(load: Load, where: LoadTarget, allow_remote: bool) -> list[str]:
    """Return locust's options, without the API key: every user of a machine can read command lines."""
    given = {
        "--users": load.users,
        "--spawn-rate": f"{load.spawn_rate:g}",
        "--run-time": f"{load.seconds}s",
        "--stop-timeout": f"{where.timeout_s:g}",
        "--shape": load.shape,
        "--times": load.times,
        "--grpc-share": load.grpc_share,
        "--http-share": load.http_share,
        "--kinds": load.kinds,
        "--max-tokens": load.max_tokens,
        "--gamma": "" if load.gamma is None else load.gamma,
        "--endpoint": ",".join(where.grpc),
        "--http-endpoint": ",".join(where.http),
        "--timeout-s": f"{where.timeout_s:g}",
        "--max-users": where.max_users,
        "--capacity": where.capacity,
    }
    line = [str(word) for flag, value in given.items() for word in (flag, value)]
    return [*line, "--allow-remote"] if allow_remote else line


def run(options: list[str], folder: Path, figures: Path, api_key: str, limit_s: float) -> Summary | None:
    """Run locust in a subprocess, since it patches the standard library; return None if it wrote no summary."""
    figures.parent.mkdir(parents=True, exist_ok=True)
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
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            console.print(f"locust did not end within {limit_s:g} s: killed")
        finally:
            _end(process)
    return Summary.load_from(figures) if figures.exists() else None


def draw(summary: Summary, file: Path) -> None:
    from loadtest.report.page import (
        write,  # imported here: it takes a second, which an invalid command need not wait for
    )

    file.parent.mkdir(parents=True, exist_ok=True)
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
    if len(summary.parts) > 1:
        rows |= {f"tokens/s, {part.name} ({part.users} users)": f"{part.tokens_per_s:.1f}" for part in summary.parts}
    if summary.recovery is not None:
        rows["recovery: last part / first part"] = f"{summary.recovery:.0%}"
    for name, value in rows.items():
        shown.add_row(name, value)
    return shown


def _pair(times: Percentiles) -> str:
    return f"{times.p50:.0f} / {times.p95:.0f} ms" if times.p50 is not None and times.p95 is not None else "–"


def _end(process: subprocess.Popen[bytes], grace_s: float = 5.0) -> None:
    """Terminate the subprocess, also after an interrupt."""
    if process.poll() is not None:
        return
    process.terminate()
    deadline = time.monotonic() + grace_s
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])


app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)  # a local variable may be a key
app.command()(main)

if __name__ == "__main__":
    app()
