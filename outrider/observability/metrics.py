"""Every metric of the three services: name, type, labels, help. No other module defines one.

Each service has its own set in its own registry, so that several fit in one process. Metrics that vLLM has too have
vLLM's name and type with the prefix `outrider_`; those that benchmark tools read are exported under vLLM's own names
as well. Metrics that change with every verdict are bound to their labels beforehand, so the token path only adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from outrider.observability.collectors import PREFIX, CallbackGauge, PerPosition, Sums, UnderVllmNames, WholeNumbers
from outrider.protocol.errors import KINDS, OutriderError
from outrider.protocol.speculation import FinishReason, Verdict

_KEY_LIMITS = ("key.sessions", "key.max_sessions", "key.requests_per_minute", "key.tokens_per_minute")
_MODEL_LIMITS = ("model.sessions", "model.waiting", "model.key_sessions")
_LIMITS = ("sessions", "request", "timeout", *_KEY_LIMITS, *_MODEL_LIMITS)  # fields of the errors that name them
_MOST_KINDS = 64  # of drafters, of which metrics are told apart
ABANDONED = "abandoned"  # in place of a finish reason: its clients disconnected or it moved, and it can be resumed

_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640),
)
_BETWEEN_TOKENS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_WHOLE_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_STEP_S = (5e-5, 1e-4, 2e-4, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1, 2, 4, 8)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_GAMMA = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
_BYTES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 200, 400, 800, 1600)
_SESSIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class Metrics:
    """Metrics of every service."""

    def __init__(self, service: str, refused: str, **own: str) -> None:
        """Make the set; `refused` is the noun in the metric `{refused}_refused`, `own` are the labels of a worker."""
        self._own = own
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        build = Info(f"{PREFIX}build", "Service and version.", registry=self.registry)
        build.info({"version": version("outrider"), "service": service})
        self._refused = self._sums(f"{refused}_refused", "Rejected before they started, by error code.", "code")
        for code in KINDS:
            self._refused.add(code, number=0)

    def render(self) -> tuple[bytes, str]:
        """Return the metrics as text for Prometheus, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4

    @contextmanager
    def count_refusals(self) -> Iterator[None]:
        """Count the errors raised inside the block."""
        try:
            yield
        except OutriderError as error:
            self._count_refusal(error)
            raise

    def _count_refusal(self, error: OutriderError) -> None:
        self._refused.add(error.code)

    def bind_gauge(self, gauge: CallbackGauge, source: Callable[[], float]) -> None:
        """Let a gauge of this service's own labels show what `source` returns when it is read."""
        gauge.source = lambda: [(tuple(self._own.values()), source())]

    def _sums(self, name: str, text: str, *labels: str) -> Sums:
        return Sums(name, text, labels, self.registry)

    # Without labels they have the service's own.

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, tuple(self._own), registry=self.registry).labels(**self._own)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        made = Histogram(PREFIX + name, text, labels or tuple(self._own), registry=self.registry, buckets=buckets)
        return made if labels or not self._own else made.labels(**self._own)

    def _gauge(self, name: str, text: str, *labels: str) -> CallbackGauge:
        return CallbackGauge(name, text, labels or tuple(self._own), self.registry)


class CoordinatorMetrics(Metrics):
    def __init__(self, plans: Iterable[str] = ()) -> None:
        """Make the set; `plans` are the speculation plans, exported from the start."""
        super().__init__("coordinator", "requests")
        self._plans = tuple(plans)
        self._targets: dict[str, TargetMetrics] = {}
        model, counter, gauge, histogram = "model_name", self._sums, self._gauge, self._histogram

        # Requests.
        self._refused_by = counter("requests_refused_by_limit", "Rejected because of a limit.", "limit")
        for limit in _LIMITS:
            self._refused_by.add(limit, number=0)
        self.running = gauge("num_requests_running", "Requests that have produced tokens.", model)
        self.waiting = gauge("num_requests_waiting", "Requests without a token yet: queued, or in prefill.", model)
        self.waiting_by_class = gauge("requests_waiting_by_priority", "The same by priority class.", model, "priority")
        self.success = counter("request_success", "Requests that did not fail, by reason.", model, "finished_reason")
        self.failed = counter("requests_failed", "Requests that ended by an error, by error code.", model, "code")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of started requests.", model)
        self.generation_tokens = counter("generation_tokens", "Tokens committed.", model)
        self.first_token = histogram(
            "time_to_first_token_seconds", "From a session's start to its first token.", _FIRST_TOKEN_S, model
        )
        self.between = histogram(
            "inter_token_latency_seconds",
            "Time between consecutive verdicts of a request; each may commit several tokens.",
            _BETWEEN_TOKENS_S,
            model,
        )
        self.per_token = histogram(
            "request_time_per_output_token_seconds",
            "Per finished request: time per token after the first verdict.",
            _BETWEEN_TOKENS_S,
            model,
        )
        self.whole = histogram("e2e_request_latency_seconds", "Finished sessions: start to end.", _WHOLE_S, model)
        self.prompt = histogram("request_prompt_tokens", "Per finished request: prompt tokens.", _TOKENS, model)
        self.output = histogram("request_generation_tokens", "Per finished request: output tokens.", _TOKENS, model)

        # Speculation.
        self.drafts = counter("spec_decode_num_drafts", "Verifier steps that had guesses to check.", model)
        self.draft_tokens = counter(
            "spec_decode_num_draft_tokens", "Guessed tokens checked, along the longest path of each step.", model
        )
        self.accepted_tokens = counter("spec_decode_num_accepted_tokens", "Guessed tokens accepted.", model)
        self.accepted_at = PerPosition(
            "spec_decode_num_accepted_tokens_per_pos", "Steps that accepted a guess at this position.", self.registry
        )
        self.offered_at = PerPosition(
            "spec_decode_num_draft_tokens_per_pos", "Steps that checked a guess at this position.", self.registry
        )
        # Only these four: `vllm bench serve` adds up every metric whose name contains one of its names.
        UnderVllmNames((self.drafts, self.draft_tokens, self.accepted_tokens, self.accepted_at), self.registry)
        self.gamma = WholeNumbers("gamma", "γ in force, per verifier step; 0 is plain decoding.", _GAMMA, self.registry)
        self.plan_steps = counter("plan_steps", "Verifier steps by speculation plan.", model, "plan")
        self.guessed_tokens = counter("guessed_tokens", "Tokens that drafters sent.", model, "drafter")
        self.guess_bytes = counter("guess_bytes", "Guess messages of drafters, with framing, bytes.", model, "drafter")
        self.accepted_guesses = counter(
            "accepted_guesses", "Accepted tokens by drafter; several may have guessed the same token.", model, "drafter"
        )
        self.bytes_per_accepted = histogram(
            "bytes_per_accepted_token", "Per finished request: bytes of guesses per accepted token.", _BYTES, model
        )
        self.hidden_bytes = counter("hidden_state_bytes", "Hidden states for drafters, bytes, at the end.", model)

        # The fleet.
        self.failovers = counter("failovers", "Verifiers lost during a request.", model)
        self.drafter_losses = counter("drafter_losses", "Drafters lost during a request.", model)
        self.workers = gauge(
            "workers",
            "Known workers: usable, draining, resting (failed or silent), or shunned after a protocol violation.",
            "role",
            "state",
        )
        self.violations = counter("protocol_violations", "Violations by workers.", "role")
        self.round_trips = gauge("worker_round_trip_seconds", "Round trip, smoothed.", "role", "kind", "worker")
        self.worker_sessions = gauge("worker_sessions", "Our sessions on a worker.", "role", "kind", "worker")
        self.redis_up = gauge("redis_up", "1 while Redis answers: sessions survive this coordinator.")
        self.unwritten = gauge("unwritten_sessions", "Sessions with changes not yet written to Redis.")
        self.records_skipped = counter("redis_records_skipped", "Invalid records in Redis.", "record", "reason")

    def _count_refusal(self, error: OutriderError) -> None:
        super()._count_refusal(error)
        if error.field in _LIMITS:
            self._refused_by.add(error.field)

    def of(self, model: str) -> TargetMetrics:
        """Return the metrics of requests to this target."""
        if model not in self._targets:
            self._targets[model] = TargetMetrics(self, model, self._plans)
        return self._targets[model]


class TargetMetrics:
    """Coordinator metrics bound to one target."""

    def __init__(self, metrics: CoordinatorMetrics, model: str, plans: Iterable[str]) -> None:
        """Bind them; all labels that are known now are exported from the start."""
        self.all, self.model = metrics, model
        self._drafters: set[str] = set()  # their kinds
        self.first_token = metrics.first_token.labels(model)
        self.between = metrics.between.labels(model)
        self.whole = metrics.whole.labels(model)
        self.prompt = metrics.prompt.labels(model)
        self.output = metrics.output.labels(model)
        self.per_token = metrics.per_token.labels(model)
        self.bytes_per_accepted = metrics.bytes_per_accepted.labels(model)
        committed = metrics.prompt_tokens, metrics.generation_tokens, metrics.hidden_bytes
        drafted = metrics.drafts, metrics.draft_tokens, metrics.accepted_tokens
        for sums in (*committed, *drafted, metrics.failovers, metrics.drafter_losses):
            sums.add(model, number=0)
        self._accepted_lengths = metrics.accepted_at.lengths(model)
        self._offered_lengths = metrics.offered_at.lengths(model)
        self._gamma = metrics.gamma.lengths(model)
        for plan in plans:
            metrics.plan_steps.add(model, plan, number=0)
        for reason in (*(reason.name.lower() for reason in FinishReason if reason), ABANDONED):
            metrics.success.add(model, reason, number=0)
        for code in KINDS:
            metrics.failed.add(model, code, number=0)

    def drafter(self, kind: str) -> tuple[str, str]:
        """Return the labels of a kind of drafter."""
        kind = kind if kind in self._drafters or len(self._drafters) < _MOST_KINDS else "other"  # drafters name it
        self._drafters.add(kind)
        for sums in (self.all.guessed_tokens, self.all.guess_bytes, self.all.accepted_guesses):
            sums.add(self.model, kind, number=0)
        return self.model, kind

    def record_verdict(self, verdict: Verdict, gamma: int, plan: str) -> None:
        """Record a verdict. This is on the token path and takes microseconds."""
        to, model, steps = self.all, (self.model,), verdict.steps
        to.generation_tokens.by_labels[model] += len(verdict.tokens)
        self._gamma[gamma] += steps
        to.plan_steps.by_labels[self.model, plan] += steps
        if verdict.proposed:
            to.drafts.by_labels[model] += 1
            to.draft_tokens.by_labels[model] += verdict.proposed
            to.accepted_tokens.by_labels[model] += verdict.accepted
            self._offered_lengths[verdict.proposed] += 1
            self._accepted_lengths[verdict.accepted] += 1

    def count_ended(self, reason: str, code: str = "") -> None:
        """Count a request that has ended: by an error of this code, or for this reason."""
        (self.all.failed if code else self.all.success).add(self.model, code or reason)


class VerifierMetrics(Metrics):
    def __init__(self, model: str) -> None:
        super().__init__("verifier", "verifier_sessions", model_name=model)
        gauge, counter, histogram = self._gauge, self._counter, self._histogram
        self.sessions = gauge("verifier_sessions", "Sessions with space in the KV cache.")
        self.waiting = gauge("verifier_sessions_waiting", "Sessions waiting for space in the KV cache.")
        self.cache_usage = gauge("kv_cache_usage_ratio", "Share of the KV cache that sessions hold.")
        self.cache_idle = gauge(
            "kv_cache_idle_ratio",
            "Share of the KV cache in evictable blocks of ended sessions, kept for prefix matches.",
        )
        self.queued = histogram(
            "request_queue_time_seconds", "From a session's opening until it had space in the KV cache.", _FIRST_TOKEN_S
        )
        self.prefix_queries = counter("prefix_cache_queries", "Tokens looked up in the prefix index.")
        self.prefix_hits = counter("prefix_cache_hits", "Of these, tokens found in the KV cache.")
        self.step_s = histogram("verifier_step_seconds", "Time of a step: forward pass, sampling, acceptance.", _STEP_S)
        self.forward_s = histogram("verifier_forward_seconds", "Time of a step's forward pass.", _STEP_S)
        self.batch = histogram("verifier_batch_sessions", "Sessions that shared a step.", _SESSIONS)
        self.tokens = histogram("verifier_step_rows", "Tokens of a step's batch.", _STEP_TOKENS)
        self.guesses_refused = counter("verifier_guesses_refused", "Guesses and steering messages rejected.")


class DrafterMetrics(Metrics):
    def __init__(self, model: str, kind: str) -> None:
        super().__init__("drafter", "drafter_sessions", model_name=model, kind=kind)
        self.sessions = self._gauge("drafter_sessions", "Open sessions.")
        self.step_s = self._histogram("drafter_step_seconds", "Time of a step for the sessions it takes.", _STEP_S)
        self.batch = self._histogram("drafter_batch_sessions", "Sessions that shared a step.", _SESSIONS)
        self.guessed = self._counter("drafter_guessed_tokens", "Tokens guessed, sent or not.")
