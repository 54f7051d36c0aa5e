"""Locust's command line as this load test extends it. Each flag has an environment twin."""

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
        stop_timeout=f"{DEFAULT_TIMEOUT_S:.0f}s",  # a user that leaves finishes its request
        # Locust's own would listen on every interface.
        web_host="127.0.0.1",
        master_bind_host="127.0.0.1",
    )


def _add_load(parser: Any) -> None:
    """What the web page may change from run to run."""
    add = parser.add_argument
    add("--shape", env_var="OUTRIDER_SHAPE", choices=SHAPES, default=SHAPES[0], help="How users come and go.")
    add(
        "--times",
        env_var="OUTRIDER_TIMES",
        type=float,
        default=DEFAULT_TIMES,
        help="The peak: times the users (spike), or times what the fleet takes (overload).",
    )
    add("--grpc-share", env_var="OUTRIDER_GRPC_SHARE", type=float, default=1.0, help="Parts of the users over gRPC.")
    add("--http-share", env_var="OUTRIDER_HTTP_SHARE", type=float, default=1.0, help="Parts of the users over HTTP.")
    add("--kinds", env_var="OUTRIDER_KINDS", default="", help="Kinds of prompts, e.g. chat:3,code; empty: all alike.")
    add(
        "--max-tokens",
        env_var="OUTRIDER_MAX_TOKENS",
        type=int,
        default=DEFAULT_MAX_TOKENS,
        help="Tokens per request, at most.",
    )
    add("--gamma", env_var="OUTRIDER_GAMMA", default="", help="Fix γ under load; empty: adaptive.")


def _add_where(parser: Any) -> None:
    """What is said here only: the page never sends load elsewhere, or more of it."""

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
        help="host:port of the coordinator for HTTP; of several, separated by commas, each user takes one.",
    )
    add("--api-key", default="", help="Key that the coordinator asks for, or @FILE.")
    add("--tls-ca", default="", help="PEM file: who signed the coordinator's certificate; system: a public authority.")
    # Locust has --tls-cert and --tls-key already, for its own page.
    for flag, twin, text in (
        ("--client-cert", "OUTRIDER_TLS_CERT", "PEM file: our own certificate, where the coordinator asks for one."),
        ("--client-key", "OUTRIDER_TLS_KEY", "PEM file: the key to --client-cert."),
    ):
        parser.add_argument(flag, env_var=twin, default="", include_in_web_ui=False, help=text)
    add("--allow-remote", action="store_true", help="Permit endpoints on other machines.")
    add("--timeout-s", type=float, default=DEFAULT_TIMEOUT_S, help="Deadline of one request, seconds.")
    add("--max-users", type=int, default=DEFAULT_MAX_USERS, help="Never more users at once, whatever the shape.")
    add("--capacity", type=int, default=0, help="Sessions the fleet takes at once, for overload; 0: as it says itself.")
    add("--summary", default="", help="Write the figures to this file, as JSON.")
