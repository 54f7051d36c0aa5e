"""What speculation did for one request, counted from its guesses and verdicts."""

from __future__ import annotations

import time
from collections import Counter

from coordinator.gamma import Controller
from outrider import wire
from outrider.messages import TokenKind, Verdict
from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2 as pb


class RequestStats:
    def __init__(self) -> None:
        self._started = time.monotonic()
        self._first_token: float | None = None
        self._last_token = self._started
        self._tokens = 0
        self._tokens_at_first = 0
        self._steps = 0
        self._drafts = 0
        self._committed_with_drafts = 0
        self._gamma_sum = 0
        self._offered: list[int] = []
        self._accepted: list[int] = []
        self._guessed = 0
        self._payload_bytes = 0
        self._wire_bytes = 0
        self._messages = 0
        self._draft_us = 0
        self._step_us = 0
        self._wait_us = 0
        self.cached_tokens = 0
        self.failovers = 0
        self.drafter_losses = 0
        self.drafter_kind = ""
        self.feature_bytes = 0
        self.control: Controller | None = None
        self._missed = 0
        self._missed_at_hand = 0
        self._kinds: dict[int, str] = {}  # of every drafter that there was, by its source
        self._guessed_by: Counter[str] = Counter()
        self._accepted_of: Counter[str] = Counter()

    def attached(self, source: int, kind: str) -> None:
        self._kinds[source] = kind

    def guessed(self, guess: common.Guess) -> None:
        payload_bytes, wire_bytes = wire.guess_bytes(guess)
        self._guessed_by[self._kinds[guess.source]] += len(guess.tokens)
        self._messages += 1
        self._draft_us += guess.draft_us
        self._guessed += len(guess.tokens)
        self._payload_bytes += payload_bytes
        self._wire_bytes += wire_bytes

    def judged(self, verdict: Verdict, gamma: int) -> None:
        now = time.monotonic()
        self._steps += 1
        self._gamma_sum += gamma
        self._step_us += verdict.timings.step_us
        self._wait_us += verdict.timings.wait_us
        self.cached_tokens = max(self.cached_tokens, verdict.timings.cached_tokens)
        self._tokens += len(verdict.tokens)
        if self._first_token is None:
            self._first_token = now
            self._tokens_at_first = len(verdict.tokens)
        self._last_token = now
        for tally in verdict.sources:
            self._accepted_of[self._kinds.get(tally.source, "")] += tally.accepted
        if verdict.offered:
            self._drafts += 1
            if verdict.last is TokenKind.RECOVERED:
                self._missed += 1
                self._missed_at_hand += verdict.left > 0
            self._committed_with_drafts += len(verdict.tokens)
            _count_up_to(self._offered, verdict.offered)
            _count_up_to(self._accepted, verdict.accepted)

    def to_proto(self) -> pb.Stats:
        checked, accepted = sum(self._offered), sum(self._accepted)
        first = self._first_token if self._first_token is not None else self._started
        streaming = self._last_token - first
        return pb.Stats(
            steps=self._steps,
            drafts=self._drafts,
            draft_tokens=checked,
            accepted_tokens=accepted,
            offered_per_position=self._offered,
            accepted_per_position=self._accepted + [0] * (len(self._offered) - len(self._accepted)),
            acceptance_length=_ratio(self._committed_with_drafts, self._drafts),
            acceptance_rate=_ratio(accepted, checked),
            mean_gamma=_ratio(self._gamma_sum, self._steps),
            bytes_per_accepted_token=_ratio(self._wire_bytes, accepted),
            bytes_per_guessed_token=_ratio(self._payload_bytes, self._guessed),
            time_to_first_token_ms=1000 * (first - self._started),
            duration_ms=1000 * (time.monotonic() - self._started),
            tokens_per_second=_ratio(self._tokens - self._tokens_at_first, streaming),
            failovers=self.failovers,
            drafter_losses=self.drafter_losses,
            drafter=self.drafter_kind,
            mean_step_ms=_ratio(self._step_us / 1000, self._steps),
            mean_wait_ms=_ratio(self._wait_us / 1000, self._steps),
            mean_draft_ms=_ratio(self._draft_us / 1000, self._messages),
            cached_tokens=self.cached_tokens,
            feature_bytes=self.feature_bytes,
            drafters=[
                pb.DrafterShare(
                    kind=kind,
                    attached_order=order,
                    guessed=self._guessed_by[kind],
                    accepted=self._accepted_of[kind],
                )
                for order, kind in enumerate(dict.fromkeys(self._kinds.values()), start=1)
            ],
            plans=self._plans(),
            missed=self._missed,
            draft_ms=self._draft_us / 1000,
            missed_at_hand=self._missed_at_hand,
        )

    def _plans(self) -> list[pb.PlanShare]:
        if self.control is None:
            return []
        tallies = sorted(self.control.tallies.items(), key=lambda item: -item[1].steps)
        taken = [
            pb.PlanShare(
                plan=plan.label,
                steps=tally.steps,
                expected_tokens_per_second=_ratio(tally.expected, tally.steps),
                tokens_per_second=1000.0 * _ratio(tally.tokens, tally.ms),
            )
            for plan, tally in tallies
        ]
        ways = {plan.way for plan in self.control.tallies}
        return taken + [
            pb.PlanShare(plan=choice.plan.label, expected_tokens_per_second=choice.tokens_per_s)
            for choice in self.control.considered()
            if choice.plan.way not in ways
        ]


def _count_up_to(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))
    for i in range(length):
        counts[i] += 1


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
