"""Figures of `outrider bench network`: answers by link and mode, the rows of the report and its summary."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.bench.common.report import Row, ratio
from outrider.bench.network.cases import ADAPTIVE, PLAIN, LinkCase, NetworkMode
from outrider.protocol.statistics import GenerationStats

_TOLERANCE = 0.1
_FIRST_TOKENS = 64  # in which a session measures its pair


@dataclass(frozen=True, slots=True)
class NetworkRun:
    """One answer."""

    tokens: tuple[int, ...]
    gaps_ms: tuple[float, ...]  # between tokens; tokens of one message arrive together
    stats: GenerationStats


@dataclass(slots=True)
class NetworkRuns:
    """List of answers of one mode over one link."""

    runs: list[NetworkRun] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(run.stats.tokens_per_second for run in self.runs)

    @property
    def step_ms(self) -> float:
        """Return the mean time from one step to the next."""
        return 1000.0 * self.tokens_per_step / self.tokens_per_s

    @property
    def tokens_per_step(self) -> float:
        return sum(len(run.tokens) for run in self.runs) / sum(run.stats.steps for run in self.runs)

    @property
    def first_tokens_per_s(self) -> float:
        """Return the throughput of the first tokens, not counting the first one."""
        firsts = [run.gaps_ms[:_FIRST_TOKENS] for run in self.runs]
        return statistics.median(1000 * len(gaps) / max(1e-6, sum(gaps)) for gaps in firsts)

    def row(self) -> Row:
        stats = [run.stats for run in self.runs]
        gaps = sorted(gap for run in self.runs for gap in run.gaps_ms)
        duration = sum(each.duration_ms for each in stats)
        missed, waited = sum(each.missed for each in stats), sum(each.mean_wait_ms for each in stats)
        return {
            "tokens_per_s": self.tokens_per_s,
            "first_tokens_per_s": self.first_tokens_per_s,
            "itl_p50_ms": statistics.median(gaps),
            "itl_p99_ms": gaps[int(0.99 * (len(gaps) - 1))],
            "tokens_per_step": self.tokens_per_step,
            "acceptance_first": ratio(
                sum(each.accepted_per_position[0] for each in stats if each.accepted_per_position),
                sum(each.offered_per_position[0] for each in stats if each.offered_per_position),
            )
            or 0.0,
            "bytes_per_accepted_token": statistics.fmean(each.bytes_per_accepted_token for each in stats),
            "bytes_per_guess": statistics.fmean(each.bytes_per_guessed_token for each in stats),
            "missed_at_hand": ratio(sum(each.missed_at_hand for each in stats), missed) or 0.0,
            "drafter_idle": max(0.0, 1.0 - sum(each.draft_ms for each in stats) / duration),
            "verifier_idle": ratio(waited, waited + sum(each.mean_step_ms for each in stats)) or 0.0,
            "plans": sum(
                (Counter({share.plan: share.steps}) for each in stats for share in each.plans), Counter[str]()
            ),
        }


Measured = dict[LinkCase, dict[NetworkMode, NetworkRuns]]
Predicted = Mapping[tuple[LinkCase, NetworkMode], float]  # tokens per second


@dataclass(slots=True)
class NetworkResults:
    """Results of all drafters."""

    measured: Measured = field(default_factory=dict)
    worlds: dict[LinkCase, dict[str, Any]] = field(default_factory=dict)  # input of the simulator
    texts: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by seed
    texts_equal: bool = True

    def add_text(self, seed: int, tokens: tuple[int, ...]) -> None:
        """Compare the answer with earlier ones of its seed: link and mode must not change it."""
        self.texts_equal &= self.texts.setdefault(seed, tokens) == tokens


def summarise(
    measured: Measured, predicted: Predicted, drift: Mapping[str, Any], *, texts_equal: bool
) -> dict[str, Any]:
    speeds = {link: {mode.name: runs.tokens_per_s for mode, runs in modes.items()} for link, modes in measured.items()}
    firsts = [{mode.name: runs.first_tokens_per_s for mode, runs in modes.items()} for modes in measured.values()]
    shortest = min(measured, key=lambda link: link.rtt_ms)
    in_turns = [mode.name for mode in measured[shortest] if mode.gamma and mode.ahead is False]
    colocated = max(speeds[shortest][name] for name in in_turns)
    adaptive_vs_plain = {link: by_name[ADAPTIVE] / by_name[PLAIN] for link, by_name in speeds.items()}
    regret = {
        link: 1.0 - by_name[ADAPTIVE] / max(v for name, v in by_name.items() if name != ADAPTIVE)
        for link, by_name in speeds.items()
    }
    errors = [abs(value / measured[link][mode].tokens_per_s - 1.0) for (link, mode), value in predicted.items()]
    stats = [run.stats for by_mode in measured.values() for runs in by_mode.values() for run in runs.runs]
    by_rtt = {link.rtt_ms: link for link in measured if link == LinkCase(link.rtt_ms)}
    return {
        **{f"adaptive_vs_colocated_rtt{rtt:g}": speeds[to][ADAPTIVE] / colocated for rtt, to in sorted(by_rtt.items())},
        **{f"adaptive_vs_plain_rtt{rtt:g}": adaptive_vs_plain[link] for rtt, link in sorted(by_rtt.items())},
        "colocated_vs_plain": colocated / speeds[shortest][PLAIN],
        "worst_vs_plain": min(adaptive_vs_plain.values()),
        "worst_vs_plain_first64": min(first[ADAPTIVE] / first[PLAIN] for first in firsts),
        "worst_regret": max(0.0, *regret.values()),
        "worst_regret_drift": drift["regret"],
        "predicted_within_10pct": sum(error <= _TOLERANCE for error in errors) / max(1, len(errors)),
        "bytes_per_guess": max((s.bytes_per_guessed_token for s in stats if s.drafts), default=0.0),
        "texts_equal": texts_equal,
    }


def report_rows(measured: Measured, predicted: Predicted) -> list[Row]:
    return [
        {
            "rtt_ms": link.rtt_ms,
            "jitter_ms": link.jitter_ms,
            "kib_per_s": link.kib_per_s,
            "drafter": link.drafter,
            "mode": mode.name,
            **runs.row(),
            "predicted_tokens_per_s": predicted.get((link, mode)),
        }
        for link, by_mode in measured.items()
        for mode, runs in by_mode.items()
    ]
