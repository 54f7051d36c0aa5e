"""Settings of a run: the target, fixed when the program starts, and the load, which may change per run.

They are separate because others may have access to locust's web page. Its
fields must never change the target or exceed the limits set at start.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from loadtest.shapes import SHAPES
from loadtest.workload import cases
from outrider.base.endpoint import allowed
from outrider.protocol.errors import InvalidRequest, StartupError

DEFAULT_HTTP_ENDPOINT = "127.0.0.1:8000"
DEFAULT_USERS = 16
DEFAULT_SPAWN_RATE = 8.0
DEFAULT_SECONDS = 60
DEFAULT_TIMES = 3.0
DEFAULT_MAX_TOKENS = 48
DEFAULT_MAX_USERS = 1000
DEFAULT_TIMEOUT_S = 120.0
MAX_SECONDS = 24 * 3600
MAX_TIMES = 20.0
MAX_GAMMA = 64


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """Addresses, and the limits of every run."""

    grpc: tuple[str, ...]
    http: tuple[str, ...]
    timeout_s: float
    max_users: int
    capacity: int  # sessions that the fleet runs at once; 0: as the fleet reports

    @classmethod
    def of(cls, options: Any) -> Self:
        """Validate the options of either command line; an endpoint on another machine needs `allow_remote`."""
        _between("timeout_s", options.timeout_s, 0.1, MAX_SECONDS)
        _between("max_users", options.max_users, 1, math.inf)
        _between("capacity", options.capacity, 0, math.inf)
        given = (options.endpoint, options.http_endpoint)
        grpc, http = (tuple(allowed(each, allow_remote=options.allow_remote)) for each in given)
        return cls(grpc, http, options.timeout_s, options.max_users, options.capacity)

    def packed(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def unpacked(cls, data: dict[str, Any]) -> Self:
        return cls(**(data | {"grpc": tuple(data["grpc"]), "http": tuple(data["http"])}))


@dataclass(frozen=True, slots=True)
class Load:
    """Load of one run."""

    shape: str
    users: int
    spawn_rate: float
    seconds: int
    times: float
    grpc_share: float
    http_share: float
    kinds: str
    max_tokens: int
    gamma: int | None

    @classmethod
    def of(cls, options: Any) -> Self:
        """Build the load from locust's options, which the web page may change; raise if they are invalid."""
        load = cls(
            shape=options.shape,
            users=options.num_users or DEFAULT_USERS,
            spawn_rate=float(options.spawn_rate or DEFAULT_SPAWN_RATE),
            seconds=int(options.run_time or DEFAULT_SECONDS),
            times=options.times,
            grpc_share=options.grpc_share,
            http_share=options.http_share,
            kinds=options.kinds,
            max_tokens=options.max_tokens,
            gamma=_gamma(options.gamma),
        )
        load.check()
        return load

    def check(self) -> None:
        if self.shape not in SHAPES:
            raise InvalidRequest.of("shape", self.shape, f"of {', '.join(SHAPES)}")
        _between("users", self.users, 1, math.inf)
        _between("spawn_rate", self.spawn_rate, 0.01, 1000)
        _between("seconds", self.seconds, 1, MAX_SECONDS)
        _between("times", self.times, 1, MAX_TIMES)
        _between("grpc_share", self.grpc_share, 0, 1000)
        _between("http_share", self.http_share, 0, 1000)
        if not self.grpc_share and not self.http_share:
            raise InvalidRequest.of("grpc_share", self.grpc_share, "above 0 where http_share is 0")
        _between("max_tokens", self.max_tokens, 1, math.inf)
        cases(self.kinds, self.max_tokens)

    def packed(self) -> dict[str, Any]:
        return asdict(self)


def check_writable(*files: Path) -> None:
    """Make the folders of results; raise StartupError if a file could not be written after the load."""
    for file in files:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            there = file.exists()
            file.open("ab").close()
            if not there:
                file.unlink()
        except OSError as error:
            raise StartupError(f"cannot write {file}: {error.strerror}") from error


def _gamma(given: str) -> int | None:
    """Parse γ: the web page sends text; empty means adaptive."""
    if not given.strip():
        return None
    if not given.strip().isdecimal() or int(given) > MAX_GAMMA:
        raise InvalidRequest.of("gamma", given, f"empty, or 0 to {MAX_GAMMA}")
    return int(given)


def _between(name: str, value: float, minimum: float, maximum: float) -> None:
    if not minimum <= value <= maximum:
        raise InvalidRequest.of(
            name, value, f"{minimum:g} to {maximum:g}" if maximum < math.inf else f"at least {minimum:g}"
        )
