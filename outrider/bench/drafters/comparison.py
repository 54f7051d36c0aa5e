"""What `outrider bench drafters` has measured, and what follows from it. Pure: no process, no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from outrider.bench.common.report import Row
from outrider.protocol.statistics import GenerationStats

MODES = ("greedy", "coupled", "block")
EXACT = ("greedy", "coupled")  # where guesses must not change a single token
OUTRIDER = "outrider"
PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt in one mode. All contestants are asked it in turn, round by round."""

    kind: str
    number: int  # of the prompt
    turn: int  # which round
    mode: str
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int

    @property
    def place(self) -> tuple[str, int, int]:
        return self.mode, self.number, self.turn


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    tokens: tuple[int, ...] = ()
    times: tuple[tuple[int, float], ...] = ()  # so many tokens were there after so many seconds
    stats: GenerationStats | None = None  # Outrider's own
    error: str = ""

    @property
    def first_ms(self) -> float | None:
        return 1000 * self.times[0][1] if self.times else None

    @property
    def tokens_per_s(self) -> float | None:
        """After the first: the prompt costs all of them alike, and guesses cannot help there."""
        if len(self.times) < 2:
            return None
        (first, began), (last, ended) = self.times[0], self.times[-1]
        return (last - first) / (ended - began)


@dataclass(frozen=True, slots=True)
class Contestant:
    engine: str  # outrider, transformers or vllm
    drafter: str  # for other engines: their way to decode
    gamma: int | None = None  # Outrider's, where it is fixed

    @property
    def plain(self) -> bool:
        return self.engine == OUTRIDER and self.drafter == PLAIN


@dataclass(frozen=True, slots=True)
class Trial:
    who: Contestant
    question: Question
    answer: TimedAnswer


class Comparison:
    """Every row and ratio, from runs that took turns."""

    def __init__(self, runs: Sequence[Trial]) -> None:
        self.runs = runs
        self._plain = {run.question.place: run.answer for run in runs if run.who.plain}
        self.kinds = list(dict.fromkeys(run.question.kind for run in runs))

    def rows(self) -> list[Row]:
        """One for each contestant, kind and mode."""
        groups: dict[tuple[str, str, str, str], list[Trial]] = {}
        for run in self.runs:
            question = run.question
            groups.setdefault((question.mode, question.kind, run.who.engine, run.who.drafter), []).append(run)
        order = sorted(groups, key=lambda key: MODES.index(key[0]))
        return [
            {"mode": mode, "kind": kind, "engine": engine, "drafter": drafter} | self._row(groups[key])
            for key in order
            for mode, kind, engine, drafter in [key]
        ]

    def summary(self) -> dict[str, Any]:
        """The drafter that was the fastest over all kinds of prompts, in greedy mode, kind by kind."""
        rows = self.rows()
        name = best_drafter(rows)
        own = {row["kind"]: row for row in rows if row["mode"] == "greedy" and row["drafter"] == name}
        found: dict[str, Any] = {
            "drafter": name,
            "speedup_vs_plain": {kind: row["speedup_vs_plain"] for kind, row in own.items()},
            "speedup_vs_best_transformers": {kind: self._against(name, "transformers", kind) for kind in own},
            "acceptance_first": {kind: row["acceptance_first"] for kind, row in own.items()},
            "acceptance_length": {kind: row["acceptance_length"] for kind, row in own.items()},
        }
        if any(run.who.engine == "vllm" for run in self.runs):
            found["speedup_vs_best_vllm"] = {kind: self._against(name, "vllm", kind) for kind in own}
        found["differences"] = self.differences()
        return found

    def differences(self) -> list[Row]:
        """Texts that are not what plain Outrider wrote, though they should be."""
        return [
            {
                "engine": run.who.engine,
                "drafter": run.who.drafter,
                "gamma": run.who.gamma,
                "mode": run.question.mode,
                "kind": run.question.kind,
                "prompt": run.question.number,
                "first_different_token": _first_difference(run.answer.tokens, self._plain[run.question.place].tokens),
            }
            for run in self.runs
            if self._equal(run) is False
        ]

    def _row(self, runs: Sequence[Trial]) -> Row:
        timed = [run for run in runs if run.who.gamma is None and not run.answer.error]
        fixed = [run for run in runs if run.who.gamma is not None]
        rates = [rate for run in timed if (rate := run.answer.tokens_per_s) is not None]
        equal = [same for run in runs if (same := self._equal(run)) is not None]
        row: Row = {
            "answers": len(timed),
            "tokens": sum(len(run.answer.tokens) for run in timed),
            "tokens_per_s": _median(rates),
            "tokens_per_s_of_each": rates,
            "first_token_ms": _median(ms for run in timed if (ms := run.answer.first_ms) is not None),
            "speedup_vs_plain": _median(self._speedups(timed)),
            "texts_equal": all(equal) if equal else None,
        }
        stats = [run.answer.stats for run in timed if run.answer.stats is not None]
        if fixed:
            row |= {"adaptive": pace(stats), "gamma": fixed[0].who.gamma}
            row |= acceptance([run.answer.stats for run in fixed if run.answer.stats is not None])
        errors = sorted({run.answer.error for run in runs if run.answer.error})
        return row | ({"error": "; ".join(errors)} if errors else {})

    def _speedups(self, runs: Sequence[Trial]) -> list[float]:
        pairs = [(run.answer.tokens_per_s, self._plain[run.question.place].tokens_per_s) for run in runs]
        return [own / plain for own, plain in pairs if own is not None and plain is not None]

    def _against(self, drafter: str, engine: str, kind: str) -> float | None:
        """How much faster than the best that another engine can do: median of the ratios within a turn."""
        own = {
            run.question.place: run.answer.tokens_per_s
            for run in self.runs
            if run.who == Contestant(OUTRIDER, drafter) and run.question.kind == kind
        }
        ratios: dict[str, list[float]] = {}
        for run in self.runs:
            rate, ours = run.answer.tokens_per_s, own.get(run.question.place)
            if run.who.engine == engine and rate is not None and ours is not None:
                ratios.setdefault(run.who.drafter, []).append(ours / rate)
        return min((statistics.median(values) for values in ratios.values()), default=None)

    def _equal(self, run: Trial) -> bool | None:
        """None: nothing to be equal to."""
        if run.who.plain or run.answer.error or run.question.mode not in EXACT:
            return None
        return run.answer.tokens == self._plain[run.question.place].tokens


def best_drafter(rows: Iterable[Row]) -> str:
    """One for all kinds of prompts: the highest geometric mean of its speed-ups."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["engine"] == OUTRIDER and row["mode"] == "greedy" and row["drafter"] != PLAIN:
            found.setdefault(row["drafter"], []).append(math.log(row["speedup_vs_plain"] or 1.0))
    return max(found, key=lambda name: statistics.fmean(found[name]))


def pace(stats: Sequence[GenerationStats]) -> Row:
    """What adaptive γ made of it."""
    steps = sum(each.steps for each in stats)
    return {
        "steps": steps,
        "mean_gamma": _ratio(sum(each.mean_gamma * each.steps for each in stats), steps),
        "guessed_share_of_steps": _ratio(sum(each.drafts for each in stats), steps),
        "acceptance_length": _length(stats),
    }


def acceptance(stats: Sequence[GenerationStats]) -> Row:
    """How guesses fared, all answers together. Nothing guessed leaves no rates."""
    steps, drafts = sum(each.steps for each in stats), sum(each.drafts for each in stats)
    accepted, guessed = sum(each.accepted_tokens for each in stats), sum(each.draft_tokens for each in stats)
    offered_at = columns(each.offered_per_position for each in stats)
    accepted_at = columns(each.accepted_per_position for each in stats)
    return {
        "verdicts": steps,
        "verdicts_with_guess": drafts,
        "guessed_share_of_steps": _ratio(drafts, steps),
        "offered_per_position": offered_at,
        "accepted_per_position": accepted_at,
        "acceptance_per_position": [_ratio(held, tried) for held, tried in zip(accepted_at, offered_at, strict=True)],
        "acceptance_first": _ratio(accepted_at[0], offered_at[0]) if offered_at else None,
        "acceptance_length": _length(stats),
        # An estimate: the coordinator reports the time per message, and a message has about what a verdict checks.
        "draft_ms_per_token": _ratio(sum(each.mean_draft_ms * each.drafts for each in stats), guessed),
        "bytes_per_accepted_token": _ratio(
            sum(each.bytes_per_accepted_token * each.accepted_tokens for each in stats), accepted
        ),
        "sources": _sources(stats),
    }


def _length(stats: Sequence[GenerationStats]) -> float | None:
    return _ratio(sum(each.acceptance_length * each.drafts for each in stats), sum(each.drafts for each in stats))


def _sources(stats: Sequence[GenerationStats]) -> dict[str, dict[str, int]]:
    """Each kind's part, where several drafters guess for one answer."""
    found: dict[str, dict[str, int]] = {}
    for each in stats:
        for share in each.drafters:
            own = found.setdefault(share.kind, {"guessed": 0, "accepted": 0})
            own["guessed"] += share.guessed
            own["accepted"] += share.accepted
    return found


def columns(counts: Iterable[Iterable[int]]) -> list[int]:
    """Sums by position; some are longer than others."""
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
