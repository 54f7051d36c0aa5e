"""The figures of one run: taken from locust's statistics, saved beside its reports, judged by `python -m loadtest`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

REQUEST_TYPE = "grpc"
FIRST_TOKEN = "first token"  # noqa: S105
TOTAL = "total"
TEXT_DIFFERS = "text differs"
NO_REQUESTS = "no request completed"


class Times(Protocol):
    """What is used of locust's StatsEntry."""

    num_requests: int
    num_failures: int
    total_content_length: int

    def get_response_time_percentile(self, percent: float) -> float: ...


class Trouble(Protocol):
    """What is used of locust's StatsError."""

    error: object
    occurrences: int


@dataclass(frozen=True, slots=True)
class Summary:
    """Milliseconds as locust keeps them: two significant digits from 100 ms on."""

    seconds: float
    requests: int
    failures: int
    tokens: int
    first_token_p50_ms: float = 0.0
    first_token_p95_ms: float = 0.0
    total_p50_ms: float = 0.0
    total_p95_ms: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def different_texts(self) -> int:
        return self.errors.get(TEXT_DIFFERS, 0)

    @property
    def verdict(self) -> str:
        """Why this run does not pass; empty when it does."""
        if self.failures:
            return ", ".join(f"{count} × {error}" for error, count in sorted(self.errors.items()))
        return "" if self.requests else NO_REQUESTS

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @staticmethod
    def load(path: Path) -> Summary:
        return Summary(**json.loads(path.read_text()))


def summarise(first: Times, total: Times, troubles: Iterable[Trouble], seconds: float) -> Summary:
    """`first` and `total` are the entries of the two events that a request fires."""
    errors: dict[str, int] = {}
    for trouble in troubles:
        name = str(trouble.error)
        errors[name] = errors.get(name, 0) + trouble.occurrences
    return Summary(
        seconds=seconds,
        requests=total.num_requests,
        failures=total.num_failures,
        tokens=total.total_content_length,
        first_token_p50_ms=_percentile(first, 0.5),
        first_token_p95_ms=_percentile(first, 0.95),
        total_p50_ms=_percentile(total, 0.5),
        total_p95_ms=_percentile(total, 0.95),
        errors=errors,
    )


def _percentile(times: Times, share: float) -> float:
    return float(times.get_response_time_percentile(share) or 0.0) if times.num_requests else 0.0
