"""Options of the load test, each declared once for both command lines: ours and locust's."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from loadtest.settings import (
    DEFAULT_HTTP_ENDPOINT,
    DEFAULT_MAX_TOKENS,
    DEFAULT_MAX_USERS,
    DEFAULT_SECONDS,
    DEFAULT_SPAWN_RATE,
    DEFAULT_TIMEOUT_S,
    DEFAULT_TIMES,
    DEFAULT_USERS,
    MAX_GAMMA,
)
from loadtest.shapes import SHAPES
from outrider.client.sync import DEFAULT_ENDPOINT


class LoadOption(NamedTuple):
    """One option. `on_page`: locust's web page may change it for each run."""

    name: str
    kind: Any
    default: Any
    text: str
    min: float | None = None
    max: float | None = None
    on_page: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def locust_flag(self) -> str:
        """Return locust's flag: it has --tls-cert and --tls-key for its own page."""
        return self.flag.replace("--tls-cert", "--client-cert").replace("--tls-key", "--client-key")

    @property
    def variable(self) -> str:
        return f"OUTRIDER_{self.name.upper()}"

    def parameter(self, variable: str | None = None) -> inspect.Parameter:
        """Return the parameter that typer turns into an option."""
        option: Any = typer.Option(self.flag, envvar=variable, help=self.text, min=self.min, max=self.max)
        annotation = Annotated[self.kind, option]  # type: ignore[name-defined]
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=self.default, annotation=annotation)

    def add_to(self, parser: Any) -> None:
        """Add the option to locust's command line. Its web page sends numbers that may be absent as text."""
        more: dict[str, Any] = {"type": self.kind if isinstance(self.kind, type) else str, "default": self.default}
        if self.kind is bool:
            more = {"action": "store_true"}
        elif self.default is None:
            more["default"] = ""
        if self.name == "shape":
            more["choices"] = SHAPES
        if not self.on_page:
            more["include_in_web_ui"] = False
        parser.add_argument(self.locust_flag, env_var=self.variable, help=self.text, **more)


# Of our command line alone: locust has its own options of the first three.
OWN = (
    LoadOption("users", int, DEFAULT_USERS, "Concurrent users; each sends its requests in sequence.", 1),
    LoadOption("spawn_rate", float, DEFAULT_SPAWN_RATE, "Users added per second.", 0.01),
    LoadOption("seconds", int, DEFAULT_SECONDS, "Duration of the load, after the reference outputs are ready.", 1),
    LoadOption("report", Path | None, None, "Directory for the reports; default: loadtest/results/TIME."),
    LoadOption("html", Path | None, None, "Path of the HTML report; default: in the report directory."),
    LoadOption("json", Path | None, None, "Path of the JSON summary; default: in the report directory."),
)
_PEAK = "Peak as a multiple of the users (spike) or of the fleet's capacity (overload)."
_KINDS = "Kinds of prompts with weights, e.g. chat:3,code; empty: all kinds equally."
COMMON = (
    LoadOption("shape", str, SHAPES[0], f"Number of users over time: {', '.join(SHAPES)}.", on_page=True),
    LoadOption("times", float, DEFAULT_TIMES, _PEAK, on_page=True),
    LoadOption("grpc_share", float, 1.0, "Relative number of users over gRPC.", 0, on_page=True),
    LoadOption("http_share", float, 1.0, "Relative number of users over HTTP.", 0, on_page=True),
    LoadOption("kinds", str, "", _KINDS, on_page=True),
    LoadOption("max_tokens", int, DEFAULT_MAX_TOKENS, "Maximum tokens per request.", 1, on_page=True),
    LoadOption("gamma", int | None, None, "Fixed γ under load; empty: adaptive.", 0, MAX_GAMMA, on_page=True),
    LoadOption(
        "endpoint",
        str,
        DEFAULT_ENDPOINT,
        "host:port of the coordinator for gRPC; several, separated by commas, are one fleet.",
    ),
    LoadOption(
        "http_endpoint",
        str,
        DEFAULT_HTTP_ENDPOINT,
        "host:port of the coordinator for HTTP; of several, separated by commas, each user uses one.",
    ),
    LoadOption("api_key", str, "", "API key, or @FILE."),
    LoadOption(
        "tls_ca", str, "", "PEM file: authority that signed the coordinator's certificate; system: the public ones."
    ),
    LoadOption("tls_cert", str, "", "PEM file: client certificate, if the coordinator requires one."),
    LoadOption("tls_key", str, "", "PEM file: private key of the client certificate."),
    LoadOption("tls_name", str, "", "Name in the coordinator's certificate; empty: the host of the endpoint."),
    LoadOption("allow_remote", bool, False, "Allow endpoints on other machines."),
    LoadOption("timeout_s", float, DEFAULT_TIMEOUT_S, "Deadline of a request, seconds.", 0.1),
    LoadOption("max_users", int, DEFAULT_MAX_USERS, "Limit on the users of any shape.", 1),
    LoadOption("capacity", int, 0, "Sessions that the fleet runs at once, for overload; 0: as the fleet reports.", 0),
)


def signature() -> inspect.Signature:
    """Return the signature of `python -m loadtest`."""
    own = [option.parameter() for option in OWN]
    return inspect.Signature([*own[:3], *(option.parameter(option.variable) for option in COMMON), *own[3:]])


def add_arguments(parser: Any) -> None:
    """Add the options to locust's command line."""
    for option in COMMON:
        option.add_to(parser)
    LoadOption("summary", str, "", "Write the figures to this file, as JSON.").add_to(parser)
    parser.set_defaults(
        num_users=DEFAULT_USERS,
        spawn_rate=DEFAULT_SPAWN_RATE,
        run_time=f"{DEFAULT_SECONDS}s",
        stop_timeout=f"{DEFAULT_TIMEOUT_S:.0f}s",  # a user that stops completes its request
        # Locust's defaults listen on every interface.
        web_host="127.0.0.1",
        master_bind_host="127.0.0.1",
    )
