"""Figures of a fleet under load: throughput, latencies, balance, cache hits, failures, and scaling."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from operator import itemgetter
from typing import Any

from outrider.bench.common.report import Row, Times, median, ratio
from outrider.bench.fleet.load import LoadRecord
from outrider.bench.fleet.options import FleetSize

_BUSY, _CLIENT_BUSY = 0.9, 0.8  # shares of CPU time from which the machine, or the client, limits a fleet
_but_verifiers = itemgetter("coordinators", "drafters", "sessions")


def load_row(size: FleetSize, record: LoadRecord) -> Row:
    """Return the figures of one measurement; those without a sample are None."""
    elapsed = record.ended - record.began
    arrivals = [[it for it in each.arrivals if record.began <= it[0] <= record.ended] for each in record.answers]
    gaps = [1000 * (after - before) for each in arrivals for (before, _), (after, _) in pairwise(each)]
    rates = [sum(count for _, count in each[1:]) / (each[-1][0] - each[0][0]) for each in arrivals if len(each) > 1]
    firsts = [
        1000 * (answer.arrivals[0][0] - answer.asked_at)
        for answer in record.answers
        if answer.arrivals and record.began <= answer.arrivals[0][0] <= record.ended
    ]
    ended = [answer for answer in record.answers if record.began <= answer.ended_at <= record.ended]
    finished = [answer.finished for answer in ended if answer.finished is not None]
    prompts = sum(each.prompt_tokens for each in finished)
    steps = sum(each.stats.steps for each in finished)
    return {
        **asdict(size),
        "sessions": record.sessions,
        "seconds": elapsed,
        "tokens_per_s": sum(count for each in arrivals for _, count in each) / elapsed,
        "session_tokens_per_s": median(rates),
        "between_tokens_p50_ms": median(gaps),
        "between_tokens_p99_ms": _p99(gaps),
        "first_token_p50_ms": median(firsts),
        "first_token_p99_ms": _p99(firsts),
        "imbalance": imbalance(record),
        "cached_share": ratio(sum(each.stats.cached_tokens for each in finished), prompts),
        "tokens_per_step": ratio(sum(each.output_tokens for each in finished), steps),
        "step_ms": ratio(sum(each.stats.mean_step_ms * each.stats.steps for each in finished), steps),
        "wait_ms": ratio(sum(each.stats.mean_wait_ms * each.stats.steps for each in finished), steps),
        "answers": len(finished),
        "failures": dict(Counter(answer.error for answer in ended if answer.error)),
        "cpus": {name: spent / elapsed for name, spent in record.cpu_s.items()},
    }


def imbalance(record: LoadRecord) -> float | None:
    """Return the mean number of sessions of the fullest verifier over the mean of all verifiers."""
    samples = [loads for at, loads in record.verifier_sessions if record.began <= at <= record.ended]
    totals: Counter[str] = Counter()
    for loads in samples:
        totals.update(loads)
    return max(totals.values()) * len(totals) / totals.total() if totals.total() else None


def with_scaling(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with their throughput over that of one verifier, otherwise the same fleet and sessions."""
    alone = {_but_verifiers(row): row["tokens_per_s"] for row in rows if row["verifiers"] == 1}
    return [{**row, "scaling": ratio(row["tokens_per_s"], alone.get(_but_verifiers(row)))} for row in rows]


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the highest throughput of each fleet, and over that of the fleet with one verifier."""
    best: dict[FleetSize, Row] = {}
    for row in rows:
        size = size_of(row)
        best[size] = max(best.get(size, row), row, key=lambda each: each["tokens_per_s"])
    fleets = []
    for size, row in best.items():
        alone = best.get(FleetSize(1, size.coordinators, size.drafters), {})
        scaling = ratio(row["tokens_per_s"], alone.get("tokens_per_s"))
        fleets.append({**asdict(size), **{key: row[key] for key in ("tokens_per_s", "sessions")}, "scaling": scaling})
    return {"fleets": fleets, "failures": sum(sum(row["failures"].values()) for row in rows)}


def size_of(row: Row) -> FleetSize:
    return FleetSize(row["verifiers"], row["coordinators"], row["drafters"])


def machine_share(row: Row) -> float:
    """Return the share of this machine's CPU time that the client and the services here took."""
    return float(sum(row["cpus"].values())) / (os.cpu_count() or 1)


def limit_of(row: Row) -> str:
    """Return what limited this measurement other than the fleet; empty: nothing."""
    if machine_share(row) >= _BUSY:
        return "this machine"
    return "the client" if row["cpus"].get("client", 0.0) >= _CLIENT_BUSY else ""


def _p99(values: Sequence[float]) -> float | None:
    return Times(values).p99 if values else None
