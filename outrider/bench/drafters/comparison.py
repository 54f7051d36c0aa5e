"""Comparison of the runs of `outrider bench drafters`: rows, ratios and summary. It needs no process and no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from outrider.bench.common.report import Row, median, ratio
from outrider.protocol.statistics import GenerationStats

MODES = ("greedy", "coupled", "block")
EXACT = ("greedy", "coupled")  # modes in which guesses must not change a token
OUTRIDER = "outrider"
PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One prompt in one mode. All candidates answer it in turn, round by round."""

    kind: str
    number: int  # of the prompt
    turn: int  # number of the round
    mode: str
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int

    @property
    def key(self) -> tuple[str, int, int]:
        return self.mode, self.number, self.turn


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    tokens: tuple[int, ...] = ()
    times: tuple[tuple[int, float], ...] = ()  # number of tokens, seconds since the request
    stats: GenerationStats | None = None  # of Outrider only
    error: str = ""

    @property
    def first_ms(self) -> float | None:
        return 1000 * self.times[0][1] if self.times else None

    @property
    def tokens_per_s(self) -> float | None:
        """Return the throughput after the first token: speculation does not affect the prefill."""
        if len(self.times) < 2:
            return None
        (first, began), (last, ended) = self.times[0], self.times[-1]
        return (last - first) / (ended - began)


@dataclass(frozen=True, slots=True)
class Candidate:
    engine: str  # outrider, transformers or vllm
    drafter: str  # for other engines: their decoding method
    gamma: int | None = None  # of Outrider, if fixed

    @property
    def plain(self) -> bool:
        return self.engine == OUTRIDER and self.drafter == PLAIN


@dataclass(frozen=True, slots=True)
class Trial:
    candidate: Candidate
    request: BenchRequest
    answer: TimedAnswer


class Comparison:
    """Rows and ratios of runs that took turns."""

    def __init__(self, runs: Sequence[Trial]) -> None:
        self.runs = runs
        self._plain = {run.request.key: run.answer for run in runs if run.candidate.plain}
        self.kinds = list(dict.fromkeys(run.request.kind for run in runs))

    def rows(self) -> list[Row]:
        """Return one row for each candidate, kind and mode."""
        groups: dict[tuple[str, str, str, str], list[Trial]] = {}
        for run in self.runs:
            request = run.request
            groups.setdefault((request.mode, request.kind, run.candidate.engine, run.candidate.drafter), []).append(run)
        order = sorted(groups, key=lambda key: MODES.index(key[0]))
        names = ("mode", "kind", "engine", "drafter")
        return [dict(zip(names, key, strict=True)) | self._row(groups[key]) for key in order]

    def summary(self) -> dict[str, Any]:
        """Return the figures, by kind, of the drafter that was fastest over all kinds of prompts in the first mode."""
        rows = self.rows()
        name = best_drafter(rows)
        own = {row["kind"]: row for row in rows if row["mode"] == rows[0]["mode"] and row["drafter"] == name}
        summary: dict[str, Any] = {
            "drafter": name,
            "speedup_vs_plain": {kind: row["speedup_vs_plain"] for kind, row in own.items()},
            "acceptance_first": {kind: row["acceptance_first"] for kind, row in own.items()},
            "acceptance_length": {kind: row["acceptance_length"] for kind, row in own.items()},
        }
        for engine in sorted({run.candidate.engine for run in self.runs} - {OUTRIDER}):
            against = {kind: self._against(name, engine, kind) for kind in own}
            summary[f"speedup_vs_best_{engine.replace('.', '_')}"] = against
        summary["differences"] = self.differences()
        return summary

    def differences(self) -> list[Row]:
        """Return the answers that differ from those of plain Outrider in modes that must give equal texts."""
        return [
            {
                "engine": run.candidate.engine,
                "drafter": run.candidate.drafter,
                "gamma": run.candidate.gamma,
                "mode": run.request.mode,
                "kind": run.request.kind,
                "prompt": run.request.number,
                "first_different_token": _first_difference(run.answer.tokens, self._plain[run.request.key].tokens),
            }
            for run in self.runs
            if self._equal(run) is False
        ]

    def _row(self, runs: Sequence[Trial]) -> Row:
        timed = [run for run in runs if run.candidate.gamma is None and not run.answer.error]
        fixed = [run for run in runs if run.candidate.gamma is not None]
        rates = [rate for run in timed if (rate := run.answer.tokens_per_s) is not None]
        equal = [same for run in runs if (same := self._equal(run)) is not None]
        row: Row = {
            "answers": len(timed),
            "tokens": sum(len(run.answer.tokens) for run in timed),
            "tokens_per_s": median(rates),
            "tokens_per_s_of_each": rates,
            "first_token_ms": median(ms for run in timed if (ms := run.answer.first_ms) is not None),
            "speedup_vs_plain": median(self._speedups(timed)),
            "texts_equal": all(equal) if equal else None,
        }
        if len(speedups := self._speedups(timed)) > 1:
            row["speedup_quartiles"] = statistics.quantiles(speedups, method="inclusive")
        stats = [run.answer.stats for run in timed if run.answer.stats is not None]
        if fixed:
            row |= {"adaptive": adaptive_gamma(stats), "gamma": fixed[0].candidate.gamma}
            row |= acceptance([run.answer.stats for run in fixed if run.answer.stats is not None])
        errors = sorted({run.answer.error for run in runs if run.answer.error})
        return row | ({"error": "; ".join(errors)} if errors else {})

    def _speedups(self, runs: Sequence[Trial]) -> list[float]:
        pairs = [(run.answer.tokens_per_s, self._plain[run.request.key].tokens_per_s) for run in runs]
        return [own / plain for own, plain in pairs if own is not None and plain is not None]

    def _against(self, drafter: str, engine: str, kind: str) -> float | None:
        """Return the speed-up over the best method of another engine: the median of the ratios within a turn."""
        own = {
            run.request.key: run.answer.tokens_per_s
            for run in self.runs
            if run.candidate == Candidate(OUTRIDER, drafter) and run.request.kind == kind
        }
        ratios: dict[str, list[float]] = {}
        for run in self.runs:
            rate, own_rate = run.answer.tokens_per_s, own.get(run.request.key)
            if run.candidate.engine == engine and rate is not None and own_rate is not None:
                ratios.setdefault(run.candidate.drafter, []).append(own_rate / rate)
        return min((statistics.median(values) for values in ratios.values()), default=None)

    def _equal(self, run: Trial) -> bool | None:
        """Return whether the text equals that of plain Outrider; None if they need not be equal."""
        if run.candidate.plain or run.answer.error or run.request.mode not in EXACT:
            return None
        return run.answer.tokens == self._plain[run.request.key].tokens


def best_drafter(rows: Sequence[Row]) -> str:
    """Return the drafter with the highest geometric mean of its speed-ups over all kinds, in the first mode."""
    logs: dict[str, list[float]] = {}
    for row in rows:
        if row["engine"] == OUTRIDER and row["mode"] == rows[0]["mode"] and row["drafter"] != PLAIN:
            logs.setdefault(row["drafter"], []).append(math.log(row["speedup_vs_plain"] or 1.0))
    return max(logs, key=lambda name: statistics.fmean(logs[name]))


def adaptive_gamma(stats: Sequence[GenerationStats]) -> Row:
    """Return steps and guesses under adaptive γ."""
    steps = sum(each.steps for each in stats)
    return {
        "steps": steps,
        "mean_gamma": ratio(sum(each.mean_gamma * each.steps for each in stats), steps),
        "guessed_share_of_steps": ratio(sum(each.drafts for each in stats), steps),
        "acceptance_length": _length(stats),
    }


def acceptance(stats: Sequence[GenerationStats]) -> Row:
    """Return acceptance over all answers together. Rates are None without guesses."""
    steps, drafts = sum(each.steps for each in stats), sum(each.drafts for each in stats)
    accepted_tokens, guessed = sum(each.accepted_tokens for each in stats), sum(each.draft_tokens for each in stats)
    proposed_at = sum_positions(each.offered_per_position for each in stats)
    accepted_at = sum_positions(each.accepted_per_position for each in stats)
    return {
        "verdicts": steps,
        "verdicts_with_guess": drafts,
        "guessed_share_of_steps": ratio(drafts, steps),
        "offered_per_position": proposed_at,
        "accepted_per_position": accepted_at,
        "acceptance_per_position": [
            ratio(accepted, proposed) for accepted, proposed in zip(accepted_at, proposed_at, strict=True)
        ],
        "acceptance_first": ratio(accepted_at[0], proposed_at[0]) if proposed_at else None,
        "acceptance_length": _length(stats),
        # An estimate: the coordinator reports the time per message, which has about the tokens that a verdict checks.
        "draft_ms_per_token": ratio(sum(each.mean_draft_ms * each.drafts for each in stats), guessed),
        "bytes_per_accepted_token": ratio(
            sum(each.bytes_per_accepted_token * each.accepted_tokens for each in stats), accepted_tokens
        ),
        "sources": _sources(stats),
    }


def _length(stats: Sequence[GenerationStats]) -> float | None:
    return ratio(sum(each.acceptance_length * each.drafts for each in stats), sum(each.drafts for each in stats))


def _sources(stats: Sequence[GenerationStats]) -> dict[str, dict[str, int]]:
    """Return the guessed and accepted tokens of each kind of drafter."""
    sources: dict[str, dict[str, int]] = {}
    for each in stats:
        for share in each.drafters:
            own = sources.setdefault(share.kind, {"guessed": 0, "accepted": 0})
            own["guessed"] += share.guessed
            own["accepted"] += share.accepted
    return sources


def sum_positions(counts: Iterable[Iterable[int]]) -> list[int]:
    """Return the sums by position of sequences of different lengths."""
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    different = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(different, min(len(one), len(other)))
