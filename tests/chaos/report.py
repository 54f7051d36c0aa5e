"""Report of a campaign: JSON and a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.chaos.fleet import Reading
from tests.chaos.ledger import Fault, Ledger

AFTER_S = 1.0  # a gap that begins within this time after a fault is attributed to it
MAX_GAP_AFTER_KILL_S = 3.0
NEVER = ("wrong", "lost", "doubled", "error", "hang", "key", "lost session", "not whole")


@dataclass(frozen=True, slots=True)
class Leak:
    name: str
    what: str
    before: float
    after: float
    limit: float


@dataclass(slots=True)
class Outcome:
    seed: int
    seconds: float
    ledger: Ledger
    skipped: list[str]
    leaks: list[Leak] = field(default_factory=list)
    held: list[str] = field(default_factory=list)  # session slots, blocks, ... that were not released
    normal_s: float | None = None  # None: never
    max_gap_s: float = MAX_GAP_AFTER_KILL_S

    @property
    def failures(self) -> list[str]:
        counts = self.ledger.counts
        found = [f"{counts[what]} {what}" for what in NEVER if counts[what]]
        found += [
            f"{leak.name}: {leak.what} {leak.before:g} -> {leak.after:g}, limit {leak.limit:g}" for leak in self.leaks
        ]
        found += self.held
        if self.normal_s is None:
            found.append("the fleet did not come back to normal")
        p99 = gap_after_kills(self.ledger)
        if p99 > self.max_gap_s:
            found.append(f"p99 gap after a kill with a spare worker {p99:.1f} s, limit {self.max_gap_s:g} s")
        return found

    def to_json(self) -> dict[str, Any]:
        ledger = self.ledger
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "faults": len(ledger.faults),
            "sessions": ledger.counts["sessions"],
            "never": {what: ledger.counts[what] for what in NEVER},
            "counts": dict(sorted(ledger.counts.items())),
            "by_fault": by_fault(ledger),
            "p99_gap_after_kill_s": round(gap_after_kills(ledger), 2),
            "lost_by_design": ledger.lost_by_design,
            "violations": ledger.violations,
            "leaks": [asdict(leak) for leak in self.leaks],
            "held": self.held,
            "time_to_normal_s": None if self.normal_s is None else round(self.normal_s, 2),
            "skipped": self.skipped,
            "failures": self.failures,
        }


def gaps_of(ledger: Ledger, fault: Fault) -> list[float]:
    """Return, for each running session, its longest gap during the fault or just after."""
    return [
        talk.longest(fault.start, fault.end + AFTER_S)
        for talk in ledger.talks
        if not talk.paced and talk.began <= fault.start < talk.ended
    ]


def gap_after_kills(ledger: Ledger) -> float:
    """Return the p99 gap over sessions for kills that happened alone, with a healthy replica."""
    kills = [fault for fault in ledger.faults if fault.kind == "kill" and fault.alone and fault.target != "redis"]
    return quantile([gap for fault in kills for gap in gaps_of(ledger, fault)], 0.99)


def by_fault(ledger: Ledger) -> dict[str, dict[str, float]]:
    groups: dict[str, list[Fault]] = defaultdict(list)
    for fault in ledger.faults:
        groups[fault.name].append(fault)
    found = {}
    for name, faults in sorted(groups.items()):
        gaps = [gap for fault in faults for gap in gaps_of(ledger, fault)]
        alone = [gap for fault in faults if fault.alone for gap in gaps_of(ledger, fault)]
        found[name] = {
            "count": len(faults),
            "sessions": len(gaps),
            "p50_s": round(quantile(gaps, 0.5), 2),
            "p99_s": round(quantile(gaps, 0.99), 2),
            "longest_s": round(max(gaps, default=0.0), 2),
            "alone": sum(fault.alone for fault in faults),
            "alone_p99_s": round(quantile(alone, 0.99), 2),
            "alone_longest_s": round(max(alone, default=0.0), 2),
        }
    return found


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def compare(name: str, before: Reading, after: Reading) -> list[Leak]:
    """Return the resources whose growth exceeds noise."""
    limits = {
        "descriptors": before.descriptors + 32,
        "threads": before.threads + 8,
        "memory_mb": 1.25 * before.memory_mb + 40,
    }
    old, new = asdict(before), asdict(after)
    return [Leak(name, what, old[what], new[what], limit) for what, limit in limits.items() if new[what] > limit]


def show(outcome: Outcome, console: Console | None = None) -> None:
    console = console or Console(width=120)
    ledger = outcome.ledger
    table = Table(title=f"chaos, seed {outcome.seed}, {outcome.seconds:.0f} s")
    for column in ("fault", "count", "sessions", "p50 gap s", "p99", "longest", "alone", "p99 alone", "longest alone"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    for name, row in by_fault(ledger).items():
        table.add_row(name, *(f"{value:g}" for value in row.values()))
    console.print(table)
    console.print(f"{len(ledger.faults)} faults, {ledger.counts['sessions']} sessions")
    console.print(", ".join(f"{what}: {ledger.counts[what]}" for what in NEVER))
    console.print(f"p99 gap after a kill with a spare worker: {gap_after_kills(ledger):.2f} s")
    normal = "never" if outcome.normal_s is None else f"{outcome.normal_s:.1f} s"
    console.print(f"normal again after the last fault: {normal}; lost by design: {len(ledger.lost_by_design)}")
    for line in (*outcome.skipped, *ledger.violations):
        console.print(line, markup=False, highlight=False)
    for line in outcome.failures:
        console.print(f"FAILED: {line}", markup=False, highlight=False)
    console.print("FAILED" if outcome.failures else "passed")
