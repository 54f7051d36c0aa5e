"""Flags of `outrider bench capacity --fleet`, and what they mean: which fleets, under how many sessions, how long."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.base.config import option
from outrider.protocol.errors import InvalidRequest

_PANEL = {"rich_help_panel": "Fleets"}
_MOST = {"--verifiers": 16, "--coordinators": 8, "--drafters": 16, "--sessions": 1024}
_MOST_POINTS = 100
_DEFAULTS = {"verifiers": "1,2,3", "coordinators": "1", "drafters": "0,1", "sessions": "8,32,96"}
_QUICK = {"verifiers": "1,2", "coordinators": "1", "drafters": "0,1", "sessions": "4,16"}
_SIZES = ("verifiers", "coordinators", "drafters")
_OF_STARTED = (*_SIZES, "target", "drafter", "verify_pace", "settings")
_OF_RUNNING = ("endpoint", "api_key", "tls_ca", "tls_cert", "tls_key", "tls_name", "model")
_OF_BOTH = ("sessions", "seconds", "tokens", "system_prompts", "prompts", "plot_file")

Fleet = Annotated[bool, option("--fleet", "Measure whole fleets under concurrent sessions: flags below.", **_PANEL)]
Verifiers = Annotated[
    str, option("--verifiers", "Numbers of verifiers. Empty: 1,2,3; with --quick 1,2.", metavar="N,N,...", **_PANEL)
]
Coordinators = Annotated[str, option("--coordinators", "Coordinators. Empty: 1.", metavar="N,N,...", **_PANEL)]
Drafters = Annotated[
    str, option("--drafters", "Numbers of drafters; 0: plain decoding. Empty: 0,1.", metavar="N,N,...", **_PANEL)
]
Sessions = Annotated[
    str, option("--sessions", "Concurrent sessions. Empty: 8,32,96; with --quick 4,16.", metavar="N,N,...", **_PANEL)
]
Seconds = Annotated[
    float | None,
    option("--seconds", "Per measurement; 10, or 4 with --quick.", min=1, max=60, show_default=False, **_PANEL),
]
Tokens = Annotated[
    int, option("--tokens", "Mean length of an answer; answers have half to one and a half of it.", min=2, **_PANEL)
]
SystemPrompts = Annotated[
    int, option("--system-prompts", "Number of system prompts that sessions share; 0: none.", min=0, max=1000, **_PANEL)
]
Prompts = Annotated[
    Path | None,
    option("--prompts", "File with your prompts: one JSON object per line, with prompt and optionally kind.", **_PANEL),
]
Target = Annotated[
    str,
    option("--target", "Target of the fleets, as for `outrider up`. Empty: toy models, engines throttled.", **_PANEL),
]
Drafter = Annotated[str, option("--drafter", "With --target: the drafters, as for `outrider up`.", **_PANEL)]
VerifyPace = Annotated[
    str,
    option(
        "--verify-pace",
        "Minimum time of a verifier's step by its tokens, tokens:ms. Empty: that of a large model for toy models, "
        "none with --target.",
        **_PANEL,
    ),
]
Set = Annotated[
    list[str] | None,
    option(
        "--set",
        "Any setting of a service, as for `outrider up`: verifier-2.device=cuda:1. Repeatable.",
        metavar="SERVICE.SETTING=VALUE",
        **_PANEL,
    ),
]
Endpoint = Annotated[
    str,
    option(
        "--endpoint",
        "Start nothing: measure the running fleet with this coordinator, host:port, or with several, separated by "
        "commas, over which the sessions are spread.",
        **_PANEL,
    ),
]
ApiKey = Annotated[str, option("--api-key", "With --endpoint: API key, or @FILE.", **_PANEL)]
TlsCa = Annotated[str, option("--tls-ca", "With --endpoint: PEM file with the authority, or system.", **_PANEL)]
TlsCert = Annotated[str, option("--tls-cert", "With --endpoint: PEM file with a client certificate.", **_PANEL)]
TlsKey = Annotated[str, option("--tls-key", "With --endpoint: PEM file with its private key.", **_PANEL)]
TlsName = Annotated[str, option("--tls-name", "With --endpoint: name in the certificate.", **_PANEL)]
Model = Annotated[str, option("--model", "With --endpoint: target, by name or alias.", envvar=None, **_PANEL)]


@dataclass(frozen=True, slots=True)
class FleetSize:
    """Number of processes of each kind."""

    verifiers: int
    coordinators: int
    drafters: int

    def __str__(self) -> str:
        counts = zip(_SIZES, (self.verifiers, self.coordinators, self.drafters), strict=True)
        return ", ".join(f"{count} {name if count != 1 else name[:-1]}" for name, count in counts)


@dataclass(frozen=True, slots=True)
class FleetExtent:
    """Measurements to make. Without sizes a running fleet is measured."""

    sizes: tuple[FleetSize, ...]
    sessions: tuple[int, ...]
    seconds: float
    tokens: int
    system_prompts: int
    gamma: int | None  # None: adaptive

    @classmethod
    def of(cls, flags: Mapping[str, Any]) -> FleetExtent:
        """Read the flags; raise InvalidRequest for numbers that are wrong or too many."""
        defaults = _QUICK if flags["quick"] else _DEFAULTS
        counts = {name: _numbers(name, flags[name] or default) for name, default in defaults.items()}
        # The smallest fleet comes first: the others are compared with it.
        by_size = itertools.product(counts["coordinators"], counts["drafters"], counts["verifiers"])
        sizes = () if flags["endpoint"] else tuple(FleetSize(v, c, d) for c, d, v in by_size)
        points = max(1, len(sizes)) * len(counts["sessions"])
        if points > _MOST_POINTS:
            limit = f"at most {_MOST_POINTS}: fewer numbers of verifiers, coordinators, drafters or sessions"
            raise InvalidRequest.of("the number of measurements", points, limit)
        seconds = flags["seconds"] or (4.0 if flags["quick"] else 10.0)
        return cls(sizes, counts["sessions"], seconds, flags["tokens"], flags["system_prompts"], flags["gamma"])


def check_flags(context: typer.Context) -> None:
    """Raise InvalidRequest for a flag on the command line that would have no effect."""
    flags = context.params
    fleet, running, target = flags["fleet"], bool(flags["endpoint"]), bool(flags["target"])
    rules: list[tuple[bool, tuple[str, ...], str]] = [
        (not fleet, (*_OF_STARTED, *_OF_RUNNING, *_OF_BOTH), "needs --fleet"),
        (not fleet and flags["gamma"] == 0, ("gamma",), "0 needs --fleet"),
        (running, (*_OF_STARTED, "acceptance"), "is for fleets that are started: leave it out with --endpoint"),
        (not running, _OF_RUNNING, "needs --endpoint"),
        (target, ("acceptance",), "is for toy models: leave it out with --target"),
        (not target, ("drafter",), "needs --target"),
    ]
    names = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    for applies, useless, why in rules:
        for name in useless:
            source = context.get_parameter_source(name)
            if applies and source is not None and source.name == "COMMANDLINE":
                raise InvalidRequest(f"{names[name]} {why}", field=names[name], value=flags[name])


def _numbers(name: str, text: str) -> tuple[int, ...]:
    """Read numbers separated by commas, in ascending order."""
    flag, least = f"--{name}", 0 if name == "drafters" else 1
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 9 and least <= int(part) <= _MOST[flag] for part in parts):
        raise InvalidRequest.of(flag, text, f"numbers from {least} to {_MOST[flag]}, separated by commas")
    return tuple(sorted({int(part) for part in parts}))
