"""Statistics of one request, counted from its guesses and verdicts, and recorded in metrics and trace."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

import structlog

from coordinator.control.gamma import Controller
from coordinator.control.throughput_model import SpeculationPlan
from coordinator.persistence.session_record import SessionRecord
from outrider.observability.metrics import ABANDONED, TargetMetrics
from outrider.observability.request_context import current
from outrider.observability.tracing import NO_SPAN, Span, Tracing
from outrider.protocol import convert
from outrider.protocol.errors import Fenced, OutriderError
from outrider.protocol.speculation import TokenKind, Verdict
from outrider.protocol.statistics import DrafterStats, GenerationStats, PlanStats
from outrider.v1 import common_pb2 as common

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _KindTally:
    """Guesses of one kind of drafter for this request."""

    labels: tuple[str, str]  # of its metrics
    guessed: int = 0
    accepted: int = 0


class RequestStats:
    """Counters of one request."""

    def __init__(self, metrics: TargetMetrics) -> None:
        self._metrics = metrics
        self.span: Span = NO_SPAN
        self._started = time.monotonic()
        self._first_token: float | None = None
        self._resumes = False  # after tokens of an earlier stream
        self._last_token = self._started
        self._sums: Counter[str] = Counter()
        self._proposed: Counter[int] = Counter()  # steps that checked guesses, by the length of their longest path
        self._accepted: Counter[int] = Counter()  # the same steps by the number of accepted guesses
        self.cached_tokens = self.failovers = self.drafter_losses = self.hidden_bytes = 0
        self.moves = False  # to another coordinator: this one shuts down
        self.drafter_kind = ""
        self.control: Controller | None = None
        self._kinds: dict[str, _KindTally] = {}  # in the order in which they were attached
        self._drafters: dict[int, _KindTally] = {}  # by source

    @property
    def waiting(self) -> bool:
        """Return whether the request has no token yet."""
        return self._first_token is None

    def start(self, record: SessionRecord, tracing: Tracing, model: str) -> None:
        context, request = current(), record.request
        self.span = tracing.start(
            "generate",
            context.carrier,
            {
                "outrider.session_id": record.session_id,
                "outrider.request_id": context.request_id,
                "outrider.verification": request.params.mode.name.lower(),
                "gen_ai.operation.name": "text_completion",  # of tokens: chats were made a prompt
                "gen_ai.request.model": model,
                "gen_ai.request.max_tokens": request.params.max_tokens,
                "gen_ai.usage.input_tokens": len(request.prompt),
            },
        )
        self._resumes = bool(record.tokens)
        if record.epoch == 1 and not self._resumes:  # a resumed request was counted where it started
            self._metrics.all.prompt_tokens.add(self._metrics.model, number=len(request.prompt))

    def record_drafter(self, source: int, kind: str) -> None:
        self._drafters[source] = self._kinds.setdefault(kind, _KindTally(self._metrics.drafter(kind)))

    def record_verifier_loss(self, error: OutriderError) -> None:
        self.failovers += 1
        self._metrics.all.failovers.add(self._metrics.model)
        self.span.event("verifier lost", {"error": error.message})

    def record_drafter_loss(self, error: OutriderError) -> None:
        self.drafter_losses += 1
        self._metrics.all.drafter_losses.add(self._metrics.model)
        self.span.event("drafter lost", {"error": error.message})

    def record_guess(self, guess: common.Guess) -> None:
        payload_bytes, wire_bytes = convert.guess_bytes(guess)
        self.record_guessed(guess.source, len(guess.tokens), guess.draft_us)
        self._metrics.all.guess_bytes.by_labels[self._drafters[guess.source].labels] += wire_bytes
        self._sums["payload_bytes"] += payload_bytes
        self._sums["wire_bytes"] += wire_bytes

    def record_guessed(self, source: int, num_tokens: int, draft_us: int) -> None:
        drafter = self._drafters[source]
        drafter.guessed += num_tokens
        self._metrics.all.guessed_tokens.by_labels[drafter.labels] += num_tokens
        self._sums["messages"] += num_tokens > 0
        self._sums["draft_us"] += draft_us

    def record_verdict(self, verdict: Verdict, plan: SpeculationPlan) -> None:
        now = time.monotonic()
        self._metrics.record_verdict(verdict, plan.gamma, plan.mode)
        sums, num_tokens, steps = self._sums, len(verdict.tokens), verdict.steps
        sums["steps"] += steps
        sums["tokens"] += num_tokens
        sums["gamma"] += steps * plan.gamma
        sums["step_us"] += steps * verdict.timings.step_us
        sums["wait_us"] += steps * verdict.timings.wait_us
        self.cached_tokens = max(self.cached_tokens, verdict.timings.cached_tokens)
        if self._first_token is None:
            self._first_token = now
            self._sums["tokens_at_first"] = num_tokens
            if not self._resumes:
                self._metrics.first_token.observe(now - self._started)
            self.span.event("first token")
        else:
            self._metrics.between.observe(now - self._last_token)
        self._last_token = now
        for tally in verdict.sources:
            if (drafter := self._drafters.get(tally.source)) is not None:
                drafter.accepted += tally.accepted
                self._metrics.all.accepted_guesses.by_labels[drafter.labels] += tally.accepted
        if verdict.proposed:
            self._proposed[verdict.proposed] += 1
            self._accepted[verdict.accepted] += 1
            sums["committed_with_drafts"] += num_tokens
            if verdict.last is TokenKind.RECOVERED:
                sums["missed"] += 1
                sums["missed_at_hand"] += verdict.remaining_depth > 0

    def finish(self, record: SessionRecord, error: OutriderError | None) -> None:
        """Record the end of the request in metrics, trace and log."""
        seconds = time.monotonic() - self._started
        stats = self.values()
        ended = record.finish_reason.name.lower() if record.finished else ABANDONED
        reason = ended if error is None else error.code
        self._metrics.all.hidden_bytes.add(self._metrics.model, number=self.hidden_bytes)
        if record.finished and error is None:
            self._metrics.count_ended(reason)
            self._metrics.whole.observe(seconds)
            self._metrics.prompt.observe(len(record.request.prompt))
            self._metrics.output.observe(len(record.tokens))
            if after_first := self._sums["tokens"] - self._sums["tokens_at_first"]:
                self._metrics.per_token.observe((self._last_token - (self._first_token or 0.0)) / after_first)
            if stats.accepted_tokens:
                self._metrics.bytes_per_accepted.observe(stats.bytes_per_accepted_token)
        else:
            moves = self.moves or isinstance(error, Fenced)
            self._metrics.count_ended(ABANDONED, "" if error is None or moves else error.code)
        self.span.set(
            {
                "gen_ai.usage.output_tokens": len(record.tokens),
                "gen_ai.response.finish_reasons": [reason],
                "outrider.steps": stats.steps,
                "outrider.acceptance_length": stats.acceptance_length,
                "outrider.mean_gamma": stats.mean_gamma,
                "outrider.cached_tokens": self.cached_tokens,
                "outrider.failovers": self.failovers,
                "outrider.drafter_losses": self.drafter_losses,
            }
        )
        self.span.end(error)
        log.info(
            "request ended",
            request_id=current().request_id,
            session_id=record.session_id,
            **({"tenant": record.tenant} if record.tenant else {}),
            reason=reason,
            prompt_tokens=len(record.request.prompt),
            output_tokens=len(record.tokens),
            seconds=round(seconds, 3),
            acceptance_length=round(stats.acceptance_length, 2),
            **({"error": error.message} if error is not None else {}),
        )

    def values(self, *, considered: bool = False) -> GenerationStats:
        """Return the figures as they are now; with plans that were only `considered`, it takes a millisecond."""
        first = self._started if self._first_token is None else self._first_token
        drafts, positions = self._proposed.total(), max(self._proposed, default=0)
        proposed, accepted = sum(self._proposed.elements()), sum(self._accepted.elements())
        guessed = sum(kind.guessed for kind in self._kinds.values())
        return GenerationStats(
            steps=self._sums["steps"],
            drafts=drafts,
            draft_tokens=proposed,
            accepted_tokens=accepted,
            offered_per_position=_per_position(self._proposed, positions),
            accepted_per_position=_per_position(self._accepted, positions),
            acceptance_length=_ratio(self._sums["committed_with_drafts"], drafts),
            acceptance_rate=_ratio(accepted, proposed),
            mean_gamma=_ratio(self._sums["gamma"], self._sums["steps"]),
            bytes_per_accepted_token=_ratio(self._sums["wire_bytes"], accepted),
            bytes_per_guessed_token=_ratio(self._sums["payload_bytes"], guessed),
            time_to_first_token_ms=1000 * (first - self._started),
            duration_ms=1000 * (time.monotonic() - self._started),
            tokens_per_second=_ratio(self._sums["tokens"] - self._sums["tokens_at_first"], self._last_token - first),
            failovers=self.failovers,
            drafter_losses=self.drafter_losses,
            drafter=self.drafter_kind,
            mean_step_ms=_ratio(self._sums["step_us"] / 1000, self._sums["steps"]),
            mean_wait_ms=_ratio(self._sums["wait_us"] / 1000, self._sums["steps"]),
            mean_draft_ms=_ratio(self._sums["draft_us"] / 1000, self._sums["messages"]),
            cached_tokens=self.cached_tokens,
            feature_bytes=self.hidden_bytes,
            drafters=tuple(
                DrafterStats(kind=kind, attached_order=order, guessed=tally.guessed, accepted=tally.accepted)
                for order, (kind, tally) in enumerate(self._kinds.items(), start=1)
            ),
            plans=self._plans(considered=considered),
            missed=self._sums["missed"],
            draft_ms=self._sums["draft_us"] / 1000,
            missed_at_hand=self._sums["missed_at_hand"],
        )

    def _plans(self, *, considered: bool) -> tuple[PlanStats, ...]:
        """Return the plans in use so far, most steps first."""
        if self.control is None:
            return ()
        tallies = self.control.tallies
        taken = [
            PlanStats(
                plan=plan.label,
                steps=tally.steps,
                expected_tokens_per_second=_ratio(tally.expected, tally.steps),
                tokens_per_second=1000.0 * _ratio(tally.tokens, tally.ms),
            )
            for plan, tally in sorted(tallies.items(), key=lambda item: -item[1].steps)
        ]
        modes = {plan.mode for plan in tallies}
        others = [
            PlanStats(plan=choice.plan.label, expected_tokens_per_second=choice.tokens_per_s)
            for choice in (self.control.best_per_mode() if considered else ())
            if choice.plan.mode not in modes
        ]
        return (*taken, *others)


def _per_position(lengths: Counter[int], positions: int) -> tuple[int, ...]:
    """Return for each position the number of paths that reach beyond it."""
    return tuple(sum(count for length, count in lengths.items() if length > at) for at in range(positions))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
