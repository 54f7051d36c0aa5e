"""`outrider up` and `outrider demo`: all services on one machine."""

from __future__ import annotations

import inspect
import shlex
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.rule import Rule
from rich.spinner import Spinner
from rich.table import Table

from outrider.base.config import option, redis_url
from outrider.base.endpoint import ANY_HOST, bracketed
from outrider.base.logs import set_up_logs
from outrider.base.processes import end_on_signals
from outrider.cli import options
from outrider.cli.show import LEGEND, show_text, show_tokens, summary
from outrider.client.events import collect
from outrider.client.sync import Client, Generation, Reply, Tokens
from outrider.launch import options as launch_options
from outrider.launch.services import KINDS, ignored_variable_hints, merged, read_assignments, read_file, suggestion
from outrider.launch.stack import LaunchPlan, Stack, on_one_cpu, stack, watch
from outrider.launch.targets import REPEATED, Drafters, Targets, planned
from outrider.models.drafter_choice import AUTO, choose_drafter
from outrider.models.hub import DEFAULT, DEFAULT_NAME
from outrider.protocol.errors import OutriderError, StartupError
from outrider.protocol.fieldwise import from_plain
from outrider.protocol.sampling_params import SamplingParams
from outrider.security.tls import SYSTEM


def _defaults_from(context: typer.Context, config: str) -> str:
    """Use a file's values as defaults of the flags."""
    if config:
        given, _ = read_file(Path(config))
        known = {one.name: one.opts[0][2:] for one in context.command.params if one.name not in ("config", "settings")}
        for name in given:
            if name not in known:
                near = suggestion(name, [*known.values(), *(f"[{kind}]" for kind in KINDS)])
                message = f"{config}: {name.replace('_', '-')} is not a flag of `up`{near}"
                raise StartupError(message, field="config", value=name)
        wrapped = {name: [given[name]] for name in REPEATED & given.keys() if isinstance(given[name], str)}
        context.default_map = given | wrapped
    return config


def up(
    context: typer.Context,
    target: Targets = None,
    drafter: Drafters = None,
    verifiers: Annotated[int, option("--verifiers", "Number of verifiers of each target.", min=1, max=1024)] = 1,
    drafters: Annotated[int, option("--drafters", "Number of drafters of each kind and target.", min=0, max=1024)] = 1,
    coordinators: Annotated[int, option("--coordinators", "Number of coordinators.", min=1, max=1024)] = 1,
    host: Annotated[str, option("--host", "Address to listen on; 0.0.0.0 for all of IPv4, :: for all.")] = "127.0.0.1",
    insecure: Annotated[bool, option("--insecure", "Allow a --host other than loopback without API keys.")] = False,
    port: Annotated[int, option("--port", "Port of the first coordinator; others take the next.", max=65535)] = 50050,
    http_port: Annotated[
        int, option("--http-port", "Port of the first coordinator's HTTP API and playground; -1: none.", min=-1)
    ] = 8000,
    device: launch_options.Device = "auto",
    drafter_device: launch_options.DrafterDevice = "auto",
    drafter_apart: Annotated[
        bool,
        option(
            "--drafter-apart",
            "Run all drafters in processes of their own. On a CPU, a target's first one is else in its verifier's.",
        ),
    ] = False,
    dtype: launch_options.Dtype = "auto",
    quantization: launch_options.Quantization = "none",
    engine: launch_options.Engine = "auto",
    threads: launch_options.Threads = 0,
    kv_tokens: Annotated[int, option("--kv-tokens", "KV cache of each verifier, tokens; 0: what fits a GPU.")] = 65_536,
    log_level: launch_options.LogLevel = "info",
    api_keys: Annotated[str, option("--api-keys", "API keys of clients: with commas, or @FILE, one per line.")] = "",
    open_metrics: Annotated[bool, option("--open-metrics", "Serve HTTP /metrics without an API key.")] = False,
    fleet_key: Annotated[str, option("--fleet-key", "Secret of workers elsewhere, or @FILE. Default: new.")] = "",
    drafter_key: Annotated[
        str, option("--drafter-key", "Secret for remote drafters, or @FILE. Default: generated; none with --fleet-key.")
    ] = "",
    otlp_endpoint: Annotated[str, option("--otlp-endpoint", "OTLP/HTTP collector of traces, http://host:4318.")] = "",
    state_dir: Annotated[
        str, option("--state-dir", "Folder of sessions and keys between runs. Default: one per port in OUTRIDER_HOME.")
    ] = "",
    tls: Annotated[bool, option("--tls", "Use TLS, with a private authority made in the state folder.")] = False,
    tls_cert: Annotated[str, option("--tls-cert", "PEM file: certificate of all services, which then use TLS.")] = "",
    tls_key: Annotated[str, option("--tls-key", "PEM file: private key of --tls-cert, unencrypted.")] = "",
    tls_ca: Annotated[str, option("--tls-ca", "PEM file: authority of --tls-cert. Default: public authorities.")] = "",
    settings: Annotated[
        list[str] | None,
        option(
            "--set",
            "Any setting of a service: coordinator.max-sessions=64, or verifier-2.device=cuda:1 for one of several. "
            "Repeatable. `outrider serve SERVICE --help` lists them.",
            metavar="SERVICE.SETTING=VALUE",
        ),
    ] = None,
    config: Annotated[
        str,
        option(
            "--config",
            "TOML file: flags of this command by name, and the services' settings in tables [coordinator], "
            "[verifier], [drafter], or [verifier-2] for one of several. Flags and variables override it.",
            callback=_defaults_from,
            is_eager=True,
        ),
    ] = "",
) -> None:
    """Run all services on this machine: Redis (unless REDIS_URL is set), verifiers, drafters, coordinators.

    Ctrl-C stops them cleanly. A process that dies is restarted. The next run on this port continues the sessions.

    Settings of the services: `outrider up --set coordinator.max-sessions=64 --set verifier.drain-s=30`.
    """
    given = from_plain(LaunchPlan, context.params | planned(target, drafter, drafters, engine))
    overrides = merged(read_file(Path(config))[1] if config else {}, read_assignments(settings or []))
    apart = drafter_apart or any(name.startswith("drafter") for name in overrides)  # for a process of its own
    together = not apart and on_one_cpu(device, drafter_device, engine)
    plan = replace(given, overrides=overrides, together=together, keep=True)
    console = Console()
    say = partial(console.print, soft_wrap=True)  # a path or a command in one piece
    for hint in ignored_variable_hints({parameter.envvar for parameter in context.command.params}):
        say(f"[yellow]note[/yellow]  {hint}")
    end_on_signals()
    set_up_logs(log_level, as_json=False, service="up")  # a full disk then costs lines, not the watch over Redis
    try:
        with Starting(console) as view, stack(plan, view.tick) as running:
            view.done()
            endpoints, logs = ",".join(running.endpoints), escape(str(running.folder))
            say(f"[bold green]ready[/bold green]  gRPC at [bold]{escape(endpoints)}[/bold]  logs in {logs}")
            if http_port >= 0:
                web = escape(_from_here(running.web, host))
                say(f"playground at [bold]{web}[/bold], OpenAI API at {web}/v1")
            if plan.others:
                say(f"models: {escape(', '.join(each.name for each in plan.targets))}")
            at = f" --endpoint {shlex.quote(_from_here(endpoints, host))}{_tls_flags(running.plan)}"
            own = shlex.quote(str(Path(sys.executable).with_name("outrider")))  # of an environment that is not active
            name = "outrider" if shutil.which("outrider") else own
            say(escape(f'try: {name} generate{at} "The capital of France is"\nCtrl-C stops'))
            if running.state is not None:
                there = (("sessions", not redis_url()), ("keys for further workers", not fleet_key))
                kept = [what for what, is_kept in there if is_kept]
                until = "" if running.state.kept else " until this ends"
                say(f"{' and '.join(kept) or 'files'} are in {escape(str(running.state.folder))}{until}")
            if api_keys:
                say("clients need one of the API keys: --api-key or OUTRIDER_API_KEY")
            watch(running, say)
    except KeyboardInterrupt:
        console.print("stopped")


def demo(
    target: launch_options.Target = DEFAULT,
    drafter: launch_options.DrafterChoice = AUTO,
    max_tokens: options.MaxTokens = 160,
    port: Annotated[int, option("--port", "Port of the coordinator; 0 takes a free one.")] = 0,
    device: launch_options.Device = "auto",
    dtype: launch_options.Dtype = "auto",
) -> None:
    """Start all services, answer two prompts with plain and speculative decoding, and compare speed and text."""
    SamplingParams(max_tokens=max_tokens).check()  # before anything starts
    console = Console(highlight=False)
    chosen, together = choose_drafter(drafter, target), on_one_cpu(device, "auto", "auto")
    plan = LaunchPlan(target, drafters=(chosen,), port=port, together=together, device=device, dtype=dtype)
    end_on_signals()
    with Starting(console) as view, stack(plan, view.tick) as running:
        view.done()
        with Client(running.endpoints) as client:
            same = _show_both(console, client, max_tokens, plan)
    if not same:
        raise OutriderError("the texts differ; this is a bug, please report it")


_DEMO_PROMPTS = {
    "a question": "Explain in a few sentences how a bicycle stays upright.",
    "a text to quote": "Repeat the following Python code exactly, then stop.\n\n"
    f"```python\n{inspect.getsource(options.output_form)}```",
}


def _show_both(console: Console, client: Client, max_tokens: int, plan: LaunchPlan) -> bool:
    """Answer both prompts plain and speculated; return whether the texts are equal."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    # Warm-up, so that neither run pays for cold caches.
    client.complete(chat=[("user", "Say hello.")], params=SamplingParams(temperature=0.0, max_tokens=8), gamma=0)
    table = Table("", "plain tokens/s", "speculated", "tokens per step", "× plain", "texts equal")
    equal = True
    for name, prompt in _DEMO_PROMPTS.items():
        console.print(Rule(f"{name}, plain decoding"))
        plain = _run(console, client, prompt, params, gamma=0)
        console.print(Rule(f"{name}, speculated"))
        console.print(LEGEND)
        speculated = _run(console, client, prompt, params, gamma=None)
        before, after = plain.finished.stats.tokens_per_second, speculated.finished.stats.tokens_per_second
        per_step = speculated.finished.output_tokens / max(1, speculated.finished.stats.steps)
        same = speculated.text == plain.text
        times = f"{after / before:.2f}" if before else "-"
        table.add_row(name, f"{before:.1f}", f"{after:.1f}", f"{per_step:.2f}", times, str(same))
        equal &= same
    console.print(table)
    console.print(f"{DEFAULT_NAME if plan.target == DEFAULT else plan.target} with {plan.drafters[0][0]}")
    return equal


def _run(console: Console, client: Client, prompt: str, params: SamplingParams, *, gamma: int | None) -> Generation:
    replies: list[Reply] = []
    for reply in client.generate(chat=[("user", prompt)], params=params, gamma=gamma):
        replies.append(reply)
        if isinstance(reply, Tokens):
            show_tokens(console, reply, colour=True)
    generation = collect(replies)
    show_text(console, f"{generation.finished.text}\n")
    console.print(summary(generation.finished.stats, generation.finished), style="dim")
    return generation


def _tls_flags(plan: LaunchPlan) -> str:
    """Return the TLS flags of a client on this machine."""
    if not plan.tls_cert:
        return ""
    name = "" if plan.tls else f" --tls-name {plan.tls_name}"  # our own certificate names this machine
    return f" --tls-ca {shlex.quote(plan.tls_ca or SYSTEM)}{name}"


def _from_here(address: str, host: str) -> str:
    """Return the address for callers on this machine, whose certificate names no 0.0.0.0."""
    return address.replace(bracketed(host), "127.0.0.1") if host in ANY_HOST else address


class Starting:
    """Display of starting processes: a live table in a terminal, otherwise one line per stage."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=10, transient=True) if console.is_interactive else None
        self._printed: dict[str, str] = {}
        self._spinner = Spinner("dots")

    def __enter__(self) -> Starting:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done()

    def done(self) -> None:
        if self._live is not None:
            self._live.stop()

    def tick(self, running: Stack) -> None:
        table = Table(box=None, show_header=False)
        for child in running.children:
            mark = "[green]●[/green]" if child.ready.is_set() else self._spinner
            table.add_row(mark, child.name, escape(child.state), escape(child.address))
            if self._live is None and self._printed.get(child.name) != child.state:
                self._printed[child.name] = child.state
                self._console.print(escape(f"{child.name}: {child.state} {child.address}".rstrip()))
        if self._live is not None:
            self._live.update(table)
