"""`outrider generate` and `outrider chat`."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from outrider.base.config import option
from outrider.cli import options
from outrider.cli.show import LEGEND, as_json, explanation, show_text, show_tokens, summary
from outrider.client.sync import DEFAULT_ENDPOINT, Client, Finished, Tokens
from outrider.protocol.errors import InvalidRequest, OutriderError
from outrider.protocol.printable import printable

_INTERRUPTED = 130


def generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    endpoint: options.Endpoint = DEFAULT_ENDPOINT,
    api_key: options.ApiKey = "",
    tls_ca: options.TlsCa = "",
    tls_cert: options.TlsCert = "",
    tls_key: options.TlsKey = "",
    tls_name: options.TlsName = "",
    model: options.Model = "",
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 1.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    gamma: options.Gamma = None,
    branches: options.Branches = None,
    ahead: options.Ahead = None,
    drafter: options.Drafter = "",
    verification: options.Mode = None,
    stop: options.Stop = None,
    json_schema: options.JsonSchema = "",
    json_object: options.JsonObject = False,
    regex: options.Regex = "",
    chat: Annotated[bool, option("--chat/--raw", "Send through the chat template, or unchanged.")] = False,
    system: Annotated[str, option("--system", "System message before the prompt, with --chat.")] = "",
    timeout_s: Annotated[float | None, option("--timeout-s", "Time limit in seconds.", min=0.001)] = None,
    as_json_: Annotated[bool, option("--json", "Print one JSON object at the end.")] = False,
    show_guesses: options.ShowGuesses = False,
    explain: options.Explain = False,
    plain: options.Plain = False,
) -> None:
    """Generate from a prompt and stream the text.

    The text is the target's own with every drafter. In greedy and coupled mode --gamma and --plain never change it.
    """
    params = options.sampling(context.params)
    text = (sys.stdin.read() if sys.stdin else "") if prompt == "-" else prompt  # None: closed
    if system and not chat and getattr(context.get_parameter_source("system"), "name", "") == "COMMANDLINE":
        raise InvalidRequest("--system needs --chat", field="--system", value=system)
    messages = [*([("system", system)] if system else []), ("user", text)]
    request: dict[str, Any] = {"chat": messages} if chat else {"prompt": text}
    request |= {"params": params, "gamma": 0 if plain else gamma, "drafter": drafter}
    request |= {"branches": branches, "ahead": ahead, "model": model}
    with options.connect(context.params) as client:
        if as_json_:
            escaped = sys.stdout.encoding != "utf-8"
            typer.echo(json.dumps(as_json(client.complete(**request)), ensure_ascii=escaped, indent=2))
            return
        _stream(client, request, colour=show_guesses, explain=explain, once=True)


def chat(
    context: typer.Context,
    endpoint: options.Endpoint = DEFAULT_ENDPOINT,
    api_key: options.ApiKey = "",
    tls_ca: options.TlsCa = "",
    tls_cert: options.TlsCert = "",
    tls_key: options.TlsKey = "",
    tls_name: options.TlsName = "",
    model: options.Model = "",
    system: Annotated[str, option("--system", "System message.")] = "",
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = 0.7,
    top_k: options.TopK = 0,
    top_p: options.TopP = 0.95,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    gamma: options.Gamma = None,
    drafter: options.Drafter = "",
    show_guesses: options.ShowGuesses = False,
    plain: options.Plain = False,
) -> None:
    """Chat with the target. /reset clears the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."""
    params = options.sampling(context.params)
    opening = [("system", system)] if system else []
    history = list(opening)
    request = {"params": params, "gamma": 0 if plain else gamma, "drafter": drafter, "model": model}
    with contextlib.suppress(ImportError):  # edits lines; without it a terminal cuts them off after 4095 bytes
        importlib.import_module("readline")
    with options.connect(context.params) as client:
        Console().print(Text.assemble((printable(client.model(model).name), "bold"), "  /reset  /exit"))
        while (line := _read_line()) is not None:
            if line == "/reset":
                history = list(opening)
            elif line:
                history.append(("user", line))
                try:
                    history.append(("assistant", _stream(client, request | {"chat": history}, colour=show_guesses)))
                except OutriderError as error:  # the conversation goes on without this line
                    history.pop()
                    typer.echo(f"outrider: {error.message}", err=True)


def _read_line() -> str | None:
    """Return a line from the user; None: exit."""
    try:
        line = input("you> ").strip()
    except (EOFError, KeyboardInterrupt, RuntimeError) as end:  # Ctrl-C drops a line, or came too late for an answer
        typer.echo()
        return "" if isinstance(end, KeyboardInterrupt) else None  # RuntimeError: standard input is closed
    return None if line in ("/exit", "/quit") else line


def _stream(client: Client, request: dict[str, Any], *, colour: bool, explain: bool = False, once: bool = False) -> str:
    """Print an output as it arrives; return its text."""
    out, notes = Console(highlight=False), Console(stderr=True, highlight=False, markup=False)
    if colour:
        notes.print(LEGEND)
    parts: list[str] = []
    try:
        for reply in client.generate(**request):
            if isinstance(reply, Tokens):
                parts.append(reply.text)
                show_tokens(out, reply, colour=colour)
            elif isinstance(reply, Finished):
                parts.append(reply.text)
                show_text(out, f"{reply.text}\n")
                notes.print(summary(reply.stats, reply), style="dim")
                if explain:
                    notes.print(explanation(reply.stats))
    except KeyboardInterrupt:
        out.print()
        notes.print("stopped", style="dim")
        if once or not sys.stdin.isatty():
            sys.exit(_INTERRUPTED)
    return "".join(parts)
