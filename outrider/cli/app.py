"""Commands of `outrider`, and its error handling."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.metadata import version
from typing import Literal

import typer
from rich.console import Console

from outrider.base.config import check_installed
from outrider.cli import doctor, talk, train, tune, up
from outrider.models.hub import fetch_default
from outrider.protocol.errors import OutriderError, PeerLost

app = typer.Typer(
    name="outrider",
    help="Disaggregated, lossless speculative decoding: a drafter guesses, a verifier checks, a coordinator streams."
    "\n\n"
    'Start with `outrider up`, then `outrider generate "Hello"` in another terminal. Most flags of services, `up`, '
    "`generate`, `chat` and `bench` have environment variables: --max-tokens is OUTRIDER_MAX_TOKENS.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
)
models_app = typer.Typer(help="Download the default target.", no_args_is_help=True)
app.add_typer(models_app, name="models")
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}

app.command()(up.up)
app.command()(up.demo)
app.command()(talk.generate)
app.command()(talk.chat)
app.command()(doctor.doctor)
app.command()(train.train)
app.command()(tune.tune)
if importlib.util.find_spec("outrider.bench") is not None:  # the service images leave it out
    app.add_typer(importlib.import_module("outrider.bench").app, name="bench")


@app.command(context_settings=_PASSED_ON)
def serve(context: typer.Context, service: Literal["verifier", "drafter", "coordinator"]) -> None:
    """Run one service in the foreground: `outrider serve verifier --target ...`. Its own --help lists its flags."""
    # Replace this process, so that signals reach the service.
    os.execv(sys.executable, [sys.executable, "-P", "-m", service, *context.args])  # noqa: S606


@app.command(context_settings=_PASSED_ON, add_help_option=False)
def drafters(context: typer.Context) -> None:
    """Examine published drafters: `outrider drafters inspect DIR --target ...` tells the format and the fit."""
    check_installed("torch", "models")
    os.execv(sys.executable, [sys.executable, "-P", "-m", "drafter.published", *context.args])  # noqa: S606


@models_app.command()
def fetch() -> None:
    """Download and prepare the default target, so that a start takes seconds. Do nothing if it exists."""
    with Console().status("looking") as status:
        path = fetch_default(status.update)
    typer.echo(f"the default target is at {path}; the default drafter comes with Outrider")


@app.command("version")
def show_version() -> None:
    """Print the version; so does `outrider --version`."""
    typer.echo(version("outrider"))


def main() -> None:
    """Run the `outrider` command."""
    if sys.stdout:  # None where a supervisor closed it
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # what it lacks, such as ASCII
    sys.argv[1:] = ["version"] if sys.argv[1:] == ["--version"] else sys.argv[1:]
    try:
        app(prog_name="outrider")
    except (OutriderError, OSError, ValueError) as error:
        # OSError: such as a file that cannot be used. ValueError: such as a number that no message can hold.
        hint = "\nIs a coordinator running there? `outrider up` starts one. TLS needs --tls-ca, and some --tls-cert."
        typer.echo(f"outrider: {error}{hint if isinstance(error, PeerLost) else ''}", err=True)
        sys.exit(1)
