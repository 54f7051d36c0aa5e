"""Statistics of one request, counted from its guesses and verdicts, and recorded in metrics and trace."""

from __future__ import annotations

import time
from collections import Counter

import structlog

from coordinator.control.gamma import Controller, PlanTally
from coordinator.control.throughput_model import SpeculationPlan
from coordinator.persistence.session_record import SessionRecord
from outrider.observability.metrics import ABANDONED, TargetMetrics
from outrider.observability.request_context import current
from outrider.observability.tracing import NO_SPAN, Span
from outrider.protocol import convert
from outrider.protocol.errors import OutriderError
from outrider.protocol.speculation import TokenKind, Verdict
from outrider.protocol.statistics import DrafterStats, GenerationStats, PlanStats
from outrider.v1 import common_pb2 as common

log = structlog.get_logger(__name__)


class RequestStats:
    """Counters of one request. The properties are cheap; `values` also computes the plans that were considered."""

    def __init__(self, metrics: TargetMetrics) -> None:
        self._metrics = metrics
        self.span: Span = NO_SPAN
        self._started = time.monotonic()
        self._first_token: float | None = None
        self._last_token = self._started
        self._tokens = 0
        self._tokens_at_first = 0
        self._steps = 0
        self._drafts = 0
        self._committed_with_drafts = 0
        self._gamma_sum = 0
        self._proposed: list[int] = []
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
        self.hidden_bytes = 0
        self.control: Controller | None = None
        self._missed = 0
        self._missed_at_hand = 0
        self._kinds: dict[int, str] = {}  # of each drafter so far, by source
        self._proposed_by: Counter[str] = Counter()
        self._accepted_by: Counter[str] = Counter()

    @property
    def waiting(self) -> bool:
        """Return whether the request has no token yet."""
        return self._first_token is None

    def start(self, record: SessionRecord, span: Span) -> None:
        self.span = span
        self._metrics.prompt_tokens.inc(len(record.request.prompt))

    def record_drafter(self, source: int, kind: str) -> None:
        self._kinds[source] = kind

    def record_verifier_loss(self, error: OutriderError) -> None:
        self.failovers += 1
        self._metrics.failovers.inc()
        self.span.event("verifier lost", {"error": error.message})

    def record_drafter_loss(self, error: OutriderError) -> None:
        self.drafter_losses += 1
        self._metrics.drafter_losses.inc()
        self.span.event("drafter lost", {"error": error.message})

    def record_guess(self, guess: common.Guess) -> None:
        payload_bytes, wire_bytes = convert.guess_bytes(guess)
        kind = self._kinds[guess.source]
        self._metrics.drafter(kind).record_guess(len(guess.tokens), wire_bytes)
        self._proposed_by[kind] += len(guess.tokens)
        self._messages += 1
        self._draft_us += guess.draft_us
        self._guessed += len(guess.tokens)
        self._payload_bytes += payload_bytes
        self._wire_bytes += wire_bytes

    def record_verdict(self, verdict: Verdict, plan: SpeculationPlan) -> None:
        now = time.monotonic()
        self._metrics.record_verdict(verdict, plan.gamma, plan.mode)
        self._steps += 1
        self._gamma_sum += plan.gamma
        self._step_us += verdict.timings.step_us
        self._wait_us += verdict.timings.wait_us
        self.cached_tokens = max(self.cached_tokens, verdict.timings.cached_tokens)
        self._tokens += len(verdict.tokens)
        if self._first_token is None:
            self._first_token = now
            self._tokens_at_first = len(verdict.tokens)
            self._metrics.first_token.observe(now - self._started)
            self.span.event("first token")
        else:
            self._metrics.between.observe(now - self._last_token)
        self._last_token = now
        for tally in verdict.sources:
            kind = self._kinds.get(tally.source, "")
            self._metrics.drafter(kind).accepted_guesses.inc(tally.accepted)
            self._accepted_by[kind] += tally.accepted
        if verdict.proposed:
            self._drafts += 1
            if verdict.last is TokenKind.RECOVERED:
                self._missed += 1
                self._missed_at_hand += verdict.remaining_depth > 0
            self._committed_with_drafts += len(verdict.tokens)
            _count_up_to(self._proposed, verdict.proposed)
            _count_up_to(self._accepted, verdict.accepted)

    def finish(self, record: SessionRecord, error: OutriderError | None) -> None:
        """Record the end of the request in metrics, trace and log."""
        seconds = time.monotonic() - self._started
        accepted = sum(self._accepted)
        reason = record.finish_reason.name.lower() if record.finished else ABANDONED
        if record.finished and error is None:
            after_first = self._tokens - self._tokens_at_first
            self._metrics.record_finished(
                seconds=seconds,
                per_token_s=(self._last_token - (self._first_token or 0.0)) / after_first if after_first else None,
                prompt=len(record.request.prompt),
                output=len(record.tokens),
                reason=reason,
            )
        else:
            self._metrics.record_unfinished(error.code if error is not None else "")
        self._metrics.record_bytes(
            bytes_per_accepted=self._wire_bytes / accepted if accepted else None, hidden_bytes=self.hidden_bytes
        )
        self._finish_trace(record, error, reason)
        log.info(
            "request ended",
            request_id=current().request_id,
            session_id=record.session_id,
            **({"tenant": record.tenant} if record.tenant else {}),
            reason=reason if error is None else error.code,
            prompt_tokens=len(record.request.prompt),
            output_tokens=len(record.tokens),
            seconds=round(seconds, 3),
            acceptance_length=round(_ratio(self._committed_with_drafts, self._drafts), 2),
            **({"error": error.message} if error is not None else {}),
        )

    def _finish_trace(self, record: SessionRecord, error: OutriderError | None, reason: str) -> None:
        self.span.set(
            {
                "gen_ai.usage.output_tokens": len(record.tokens),
                "gen_ai.response.finish_reasons": [reason],
                "outrider.steps": self._steps,
                "outrider.acceptance_length": _ratio(self._committed_with_drafts, self._drafts),
                "outrider.mean_gamma": _ratio(self._gamma_sum, self._steps),
                "outrider.cached_tokens": self.cached_tokens,
                "outrider.failovers": self.failovers,
                "outrider.drafter_losses": self.drafter_losses,
            }
        )
        if error is not None:
            self.span.failed(error.message)
        self.span.end()

    @property
    def steps(self) -> int:
        return self._steps

    @property
    def drafts(self) -> int:
        """Return the number of steps that checked guesses."""
        return self._drafts

    @property
    def draft_tokens(self) -> int:
        """Return the number of guesses that were checked."""
        return sum(self._proposed)

    @property
    def accepted_tokens(self) -> int:
        return sum(self._accepted)

    @property
    def accepted_per_position(self) -> list[int]:
        """Return, per position of a guess, the number of steps that accepted it."""
        return self._accepted + [0] * (len(self._proposed) - len(self._accepted))

    @property
    def acceptance_rate(self) -> float:
        return _ratio(self.accepted_tokens, self.draft_tokens)

    @property
    def mean_gamma(self) -> float:
        return _ratio(self._gamma_sum, self._steps)

    @property
    def bytes_per_accepted_token(self) -> float:
        return _ratio(self._wire_bytes, self.accepted_tokens)

    @property
    def time_to_first_token_ms(self) -> float:
        return 1000 * (self._first - self._started)

    @property
    def tokens_per_second(self) -> float:
        """Return the speed after the first token."""
        return _ratio(self._tokens - self._tokens_at_first, self._last_token - self._first)

    @property
    def taken(self) -> list[tuple[SpeculationPlan, PlanTally]]:
        """Return the plans in use so far, most steps first."""
        tallies = {} if self.control is None else self.control.tallies
        return sorted(tallies.items(), key=lambda item: -item[1].steps)

    @property
    def _first(self) -> float:
        """Return the time of the first token, or of the start if there is none."""
        return self._started if self._first_token is None else self._first_token

    def values(self) -> GenerationStats:
        """Return the figures as they are now."""
        return GenerationStats(
            steps=self._steps,
            drafts=self._drafts,
            draft_tokens=self.draft_tokens,
            accepted_tokens=self.accepted_tokens,
            offered_per_position=tuple(self._proposed),
            accepted_per_position=tuple(self.accepted_per_position),
            acceptance_length=_ratio(self._committed_with_drafts, self._drafts),
            acceptance_rate=self.acceptance_rate,
            mean_gamma=self.mean_gamma,
            bytes_per_accepted_token=self.bytes_per_accepted_token,
            bytes_per_guessed_token=_ratio(self._payload_bytes, self._guessed),
            time_to_first_token_ms=self.time_to_first_token_ms,
            duration_ms=1000 * (time.monotonic() - self._started),
            tokens_per_second=self.tokens_per_second,
            failovers=self.failovers,
            drafter_losses=self.drafter_losses,
            drafter=self.drafter_kind,
            mean_step_ms=_ratio(self._step_us / 1000, self._steps),
            mean_wait_ms=_ratio(self._wait_us / 1000, self._steps),
            mean_draft_ms=_ratio(self._draft_us / 1000, self._messages),
            cached_tokens=self.cached_tokens,
            feature_bytes=self.hidden_bytes,
            drafters=tuple(
                DrafterStats(
                    kind=kind,
                    attached_order=order,
                    guessed=self._proposed_by[kind],
                    accepted=self._accepted_by[kind],
                )
                for order, kind in enumerate(dict.fromkeys(self._kinds.values()), start=1)
            ),
            plans=self._plans(),
            missed=self._missed,
            draft_ms=self._draft_us / 1000,
            missed_at_hand=self._missed_at_hand,
        )

    def _plans(self) -> tuple[PlanStats, ...]:
        if self.control is None:
            return ()
        taken = [
            PlanStats(
                plan=plan.label,
                steps=tally.steps,
                expected_tokens_per_second=_ratio(tally.expected, tally.steps),
                tokens_per_second=1000.0 * _ratio(tally.tokens, tally.ms),
            )
            for plan, tally in self.taken
        ]
        modes = {plan.mode for plan in self.control.tallies}
        return (
            *taken,
            *(
                PlanStats(plan=choice.plan.label, expected_tokens_per_second=choice.tokens_per_s)
                for choice in self.control.best_per_mode()
                if choice.plan.mode not in modes
            ),
        )


def _count_up_to(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))
    for i in range(length):
        counts[i] += 1


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
