"""Locust's command line with the options of this load test. Each flag has an environment variable."""

from __future__ import annotations

from typing import Any

from loadtest.settings import (
    DEFAULT_HTTP_ENDPOINT,
    DEFAULT_MAX_TOKENS,
    DEFAULT_MAX_USERS,
    DEFAULT_SECONDS,
    DEFAULT_SPAWN_RATE,
    DEFAULT_TIMEOUT_S,
    DEFAULT_TIMES,
    DEFAULT_USERS,
)
from loadtest.shapes import SHAPES
from outrider.client.sync import DEFAULT_ENDPOINT


def add_arguments(parser: Any) -> None:
    _add_load(parser)
    _add_where(parser)
    parser.set_defaults(
        num_users=DEFAULT_USERS,
        spawn_rate=DEFAULT_SPAWN_RATE,
        run_time=f"{DEFAULT_SECONDS}s",
        stop_timeout=f"{DEFAULT_TIMEOUT_S:.0f}s",  # a user that stops completes its request
        # Locust's defaults listen on every interface.
        web_host="127.0.0.1",
        master_bind_host="127.0.0.1",
    )


def _add_load(parser: Any) -> None:
    """Add the options that the web page may change for each run."""
    add = parser.add_argument
    add("--shape", env_var="OUTRIDER_SHAPE", choices=SHAPES, default=SHAPES[0], help="Number of users over time.")
    add(
        "--times",
        env_var="OUTRIDER_TIMES",
        type=float,
        default=DEFAULT_TIMES,
        help="Peak as a multiple of the users (spike) or of the fleet's capacity (overload).",
    )
    add(
        "--grpc-share",
        env_var="OUTRIDER_GRPC_SHARE",
        type=float,
        default=1.0,
        help="Relative number of users over gRPC.",
    )
    add(
        "--http-share",
        env_var="OUTRIDER_HTTP_SHARE",
        type=float,
        default=1.0,
        help="Relative number of users over HTTP.",
    )
    add(
        "--kinds",
        env_var="OUTRIDER_KINDS",
        default="",
        help="Kinds of prompts with weights, e.g. chat:3,code; empty: all kinds equally.",
    )
    add(
        "--max-tokens",
        env_var="OUTRIDER_MAX_TOKENS",
        type=int,
        default=DEFAULT_MAX_TOKENS,
        help="Maximum tokens per request.",
    )
    add("--gamma", env_var="OUTRIDER_GAMMA", default="", help="Fixed γ under load; empty: adaptive.")


def _add_where(parser: Any) -> None:
    """Add the options that only the command line may set: target and limits."""

    def add(flag: str, **more: Any) -> None:
        twin = "OUTRIDER_" + flag.removeprefix("--").upper().replace("-", "_")
        parser.add_argument(flag, env_var=twin, include_in_web_ui=False, **more)

    add(
        "--endpoint",
        default=DEFAULT_ENDPOINT,
        help="host:port of the coordinator for gRPC; several, separated by commas, are one fleet.",
    )
    add(
        "--http-endpoint",
        default=DEFAULT_HTTP_ENDPOINT,
        help="host:port of the coordinator for HTTP; of several, separated by commas, each user uses one.",
    )
    add("--api-key", default="", help="API key, or @FILE.")
    add(
        "--tls-ca",
        default="",
        help="PEM file: authority that signed the coordinator's certificate; system: the public ones.",
    )
    # Locust has --tls-cert and --tls-key for its own web page.
    for flag, twin, text in (
        ("--client-cert", "OUTRIDER_TLS_CERT", "PEM file: client certificate, if the coordinator requires one."),
        ("--client-key", "OUTRIDER_TLS_KEY", "PEM file: private key of --client-cert."),
    ):
        parser.add_argument(flag, env_var=twin, default="", include_in_web_ui=False, help=text)
    add("--allow-remote", action="store_true", help="Allow endpoints on other machines.")
    add("--timeout-s", type=float, default=DEFAULT_TIMEOUT_S, help="Deadline of a request, seconds.")
    add("--max-users", type=int, default=DEFAULT_MAX_USERS, help="Limit on the users of any shape.")
    add(
        "--capacity",
        type=int,
        default=0,
        help="Sessions that the fleet runs at once, for overload; 0: as the fleet reports.",
    )
    add("--summary", default="", help="Write the figures to this file, as JSON.")
