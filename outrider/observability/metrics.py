"""Every metric of the three services: name, type, labels, meaning. Nowhere else is one made.

Each service makes its own set, in a registry of its own, so that several live
in one process. What vLLM has too has vLLM's name and type, with the prefix
`outrider_`; what benchmark tools look for is shown under vLLM's own names as
well. What changes with every verdict is bound to its labels beforehand: the
token path only adds.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from outrider.observability.collectors import (
    PREFIX,
    CallbackCounter,
    CallbackGauge,
    PerPosition,
    UnderVllmNames,
)
from outrider.protocol.errors import KINDS, OutriderError
from outrider.protocol.speculation import FinishReason, Verdict

ABANDONED = "abandoned"  # in place of a finish reason: its clients went away, and it can be resumed

_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640),
)
_BETWEEN_TOKENS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_WHOLE_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_STEP_S = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1, 2, 4, 8)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_GAMMA = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
_BYTES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 200, 400, 800, 1600)
_SESSIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class Metrics:
    """What the sets of all services have."""

    def __init__(self, service: str, refused: str) -> None:
        """`refused`: what of this service may be refused, as in `requests_refused`."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        build = Info(f"{PREFIX}build", "Which version of which service this is.", registry=self.registry)
        build.info({"version": version("outrider"), "service": service})
        self._refused = self._counter(f"{refused}_refused", "Refused before they began, by the error's code.", "code")
        for code in KINDS:
            self._refused.labels(code)

    def render(self) -> tuple[bytes, str]:
        """All of it as text for Prometheus, and the content type to send it with."""
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Count what is refused inside."""
        try:
            yield
        except OutriderError as error:
            self._refused.labels(error.code).inc()
            raise

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(PREFIX + name, text, labels, registry=self.registry, buckets=buckets)

    def _reading(self, name: str, text: str, *labels: str) -> CallbackGauge:
        return CallbackGauge(name, text, labels, self.registry)


class CoordinatorMetrics(Metrics):
    def __init__(self, ways: Iterable[str] = ()) -> None:
        """`ways`: to speculate, that there are; shown from the start."""
        super().__init__("coordinator", "requests")
        self._ways = tuple(ways)
        self._targets: dict[str, TargetMetrics] = {}
        model = "model_name"

        # Requests.
        self.running = self._reading("num_requests_running", "Requests that have begun to bring tokens.", model)
        self.waiting = self._reading(
            "num_requests_waiting", "Requests without a token yet: for lack of room, or their prompt is read.", model
        )
        self.success = self._counter(
            "request_success", "Requests that ended without an error, by why.", model, "finished_reason"
        )
        self.failed = self._counter("requests_failed", "Requests that ended by an error, by its code.", model, "code")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of the requests that were begun.", model)
        self.generation_tokens = self._counter("generation_tokens", "Tokens committed.", model)
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _FIRST_TOKEN_S, model
        )
        self.between = self._histogram(
            "inter_token_latency_seconds",
            "Between two verdicts of a request that follow each other; each may bring several tokens.",
            _BETWEEN_TOKENS_S,
            model,
        )
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Per finished request: time per token after the first verdict.",
            _BETWEEN_TOKENS_S,
            model,
        )
        self.whole = self._histogram(
            "e2e_request_latency_seconds", "Per finished request: from its arrival to its end.", _WHOLE_S, model
        )
        self.prompt = self._histogram("request_prompt_tokens", "Per finished request: prompt tokens.", _TOKENS, model)
        self.output = self._histogram(
            "request_generation_tokens", "Per finished request: output tokens.", _TOKENS, model
        )

        # Speculation.
        self.drafts = self._counter("spec_decode_num_drafts", "Verifier steps that had guesses to check.", model)
        self.draft_tokens = self._counter(
            "spec_decode_num_draft_tokens", "Guessed tokens checked, along the longest path of each step.", model
        )
        self.accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Guessed tokens accepted.", model)
        self.accepted_at = PerPosition(
            "spec_decode_num_accepted_tokens_per_pos", "Steps that accepted a guess so far ahead.", self.registry
        )
        self.offered_at = PerPosition(
            "spec_decode_num_draft_tokens_per_pos", "Steps that checked a guess so far ahead.", self.registry
        )
        # These four and no more: `vllm bench serve` adds up every name that contains one of theirs.
        UnderVllmNames((self.drafts, self.draft_tokens, self.accepted_tokens, self.accepted_at), self.registry)
        self.gamma = self._histogram("gamma", "γ in force, per verifier step; 0 is plain decoding.", _GAMMA, model)
        self.plan_steps = self._counter("plan_steps", "Verifier steps by the way to speculate in force.", model, "way")
        self.guessed_tokens = self._counter("guessed_tokens", "Tokens that drafters sent.", model, "drafter")
        self.guess_bytes = self._counter(
            "guess_bytes", "Guess messages on the drafter hop, framing included, bytes.", model, "drafter"
        )
        self.accepted_guesses = self._counter(
            "accepted_guesses", "Accepted tokens by who had guessed them; several may have.", model, "drafter"
        )
        self.bytes_per_accepted = self._histogram(
            "bytes_per_accepted_token", "Per finished request: bytes of guesses per accepted token.", _BYTES, model
        )
        self.hidden_bytes = self._counter(
            "hidden_state_bytes", "Hidden states that crossed to drafters, bytes, counted when a request ends.", model
        )

        # The fleet.
        self.failovers = self._counter("failovers", "Verifiers lost in the middle of a request.", model)
        self.drafter_losses = self._counter("drafter_losses", "Drafters lost in the middle of a request.", model)
        self.workers = self._reading(
            "workers",
            "Workers known: usable, draining, resting after a failure, or shunned after breaking the protocol.",
            "role",
            "state",
        )
        self.violations = CallbackCounter(
            "protocol_violations",
            "Times that a worker sent what no honest one sends.",
            ("role",),
            self.registry,
        )
        self.round_trips = self._reading(
            "worker_round_trip_seconds", "Round trip to a worker, smoothed.", "role", "kind", "worker"
        )
        self.worker_sessions = self._reading(
            "worker_sessions", "Sessions that this coordinator has at a worker.", "role", "kind", "worker"
        )
        self.redis_up = self._reading("redis_up", "1 while Redis answers: sessions survive this coordinator.")
        self.unwritten = self._reading("unwritten_sessions", "Sessions with news that Redis does not have yet.")
        self.records_skipped = self._counter(
            "redis_records_skipped",
            "Records in Redis that were not believed, by what they are and why.",
            "record",
            "reason",
        )

    def record_skipped(self, record: str, reason: str) -> None:
        self.records_skipped.labels(record, reason).inc()

    def of(self, model: str) -> TargetMetrics:
        """What is counted for requests to this target."""
        if model not in self._targets:
            self._targets[model] = TargetMetrics.bound(self, model, self._ways)
        return self._targets[model]


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """What is counted for one kind of drafter."""

    guessed_tokens: Counter
    guess_bytes: Counter
    accepted_guesses: Counter

    def guessed(self, tokens: int, wire_bytes: int) -> None:
        self.guessed_tokens.inc(tokens)
        self.guess_bytes.inc(wire_bytes)


@dataclass(frozen=True, slots=True)
class TargetMetrics:
    """A coordinator's metrics bound to one target."""

    metrics: CoordinatorMetrics
    model: str
    prompt_tokens: Counter
    generation_tokens: Counter
    first_token: Histogram
    between: Histogram
    drafts: Counter
    draft_tokens: Counter
    accepted_tokens: Counter
    accepted_lengths: Tally[int]
    offered_lengths: Tally[int]
    gamma: Histogram
    plan_steps: dict[str, Counter]
    failovers: Counter
    drafter_losses: Counter
    drafters: dict[str, DrafterKind]

    @classmethod
    def bound(cls, metrics: CoordinatorMetrics, model: str, ways: Iterable[str]) -> TargetMetrics:
        for reason in (*(reason.name.lower() for reason in FinishReason if reason), ABANDONED):
            metrics.success.labels(model, reason)
        for code in KINDS:
            metrics.failed.labels(model, code)
        for histogram in (metrics.per_token, metrics.whole, metrics.prompt, metrics.output, metrics.bytes_per_accepted):
            histogram.labels(model)
        metrics.hidden_bytes.labels(model)
        return cls(
            metrics=metrics,
            model=model,
            prompt_tokens=metrics.prompt_tokens.labels(model),
            generation_tokens=metrics.generation_tokens.labels(model),
            first_token=metrics.first_token.labels(model),
            between=metrics.between.labels(model),
            drafts=metrics.drafts.labels(model),
            draft_tokens=metrics.draft_tokens.labels(model),
            accepted_tokens=metrics.accepted_tokens.labels(model),
            accepted_lengths=metrics.accepted_at.lengths(model),
            offered_lengths=metrics.offered_at.lengths(model),
            gamma=metrics.gamma.labels(model),
            plan_steps={way: metrics.plan_steps.labels(model, way) for way in ways},
            failovers=metrics.failovers.labels(model),
            drafter_losses=metrics.drafter_losses.labels(model),
            drafters={},
        )

    def drafter(self, kind: str) -> DrafterKind:
        if kind not in self.drafters:
            self.drafters[kind] = DrafterKind(
                self.metrics.guessed_tokens.labels(self.model, kind),
                self.metrics.guess_bytes.labels(self.model, kind),
                self.metrics.accepted_guesses.labels(self.model, kind),
            )
        return self.drafters[kind]

    def judged(self, verdict: Verdict, gamma: int, way: str) -> None:
        """The token path: microseconds."""
        self.generation_tokens.inc(len(verdict.tokens))
        self.gamma.observe(gamma)
        self.plan_steps[way].inc()
        if verdict.proposed:
            self.drafts.inc()
            self.draft_tokens.inc(verdict.proposed)
            self.accepted_tokens.inc(verdict.accepted)
            self.offered_lengths[verdict.proposed] += 1
            self.accepted_lengths[verdict.accepted] += 1

    def finished(self, *, seconds: float, per_token_s: float | None, prompt: int, output: int, reason: str) -> None:
        self.metrics.success.labels(self.model, reason).inc()
        self.metrics.whole.labels(self.model).observe(seconds)
        self.metrics.prompt.labels(self.model).observe(prompt)
        self.metrics.output.labels(self.model).observe(output)
        if per_token_s is not None:
            self.metrics.per_token.labels(self.model).observe(per_token_s)

    def left_off(self, code: str = "") -> None:
        """A request has ended unfinished: by an error, or because nobody reads it any more."""
        if code:
            self.metrics.failed.labels(self.model, code).inc()
        else:
            self.metrics.success.labels(self.model, ABANDONED).inc()

    def crossed(self, *, bytes_per_accepted: float | None, hidden_bytes: int) -> None:
        """What one request has cost the wire."""
        if bytes_per_accepted is not None:
            self.metrics.bytes_per_accepted.labels(self.model).observe(bytes_per_accepted)
        self.metrics.hidden_bytes.labels(self.model).inc(hidden_bytes)


class VerifierMetrics(Metrics):
    def __init__(self, model: str) -> None:
        super().__init__("verifier", "verifier_sessions")
        self._model = model
        name = "model_name"
        self.sessions = self._reading("verifier_sessions", "Sessions that have room in the cache.", name)
        self.waiting = self._reading("verifier_sessions_waiting", "Sessions that wait for room in the cache.", name)
        self.cache_usage = self._reading("kv_cache_usage_ratio", "Share of the KV cache that sessions hold.", name)
        self.cache_idle = self._reading(
            "kv_cache_idle_ratio",
            "Share of the KV cache with tokens of ended sessions, for others that begin alike.",
            name,
        )
        self.queued = self._histogram(
            "request_queue_time_seconds", "From a session's opening until it had room.", _FIRST_TOKEN_S, name
        ).labels(model)
        self.prefix_queries = self._counter("prefix_cache_queries", "Tokens that sessions began with.", name).labels(
            model
        )
        self.prefix_hits = self._counter(
            "prefix_cache_hits", "Of these, tokens that were found in the cache.", name
        ).labels(model)
        self.step_s = self._histogram(
            "verifier_step_seconds", "A step: forward pass, sampling and acceptance.", _STEP_S, name
        ).labels(model)
        self.forward_s = self._histogram(
            "verifier_forward_seconds", "The forward pass of a step.", _STEP_S, name
        ).labels(model)
        self.batch = self._histogram("verifier_batch_sessions", "Sessions that shared a step.", _SESSIONS, name).labels(
            model
        )
        self.rows = self._histogram(
            "verifier_step_rows", "Tokens that went through the model in a step.", _ROWS, name
        ).labels(model)
        self.guesses_refused = self._counter(
            "verifier_guesses_refused", "Guesses and steers that were not taken.", name
        ).labels(model)

    def shows(self, reading: CallbackGauge, source: Callable[[], float]) -> None:
        reading.source = lambda: [((self._model,), source())]

    def began(self, *, tokens: int, found: int) -> None:
        self.prefix_queries.inc(tokens)
        self.prefix_hits.inc(found)

    def stepped(self, *, sessions: int, rows: int, forward_us: int, step_us: int) -> None:
        self.step_s.observe(step_us / 1e6)
        self.forward_s.observe(forward_us / 1e6)
        self.batch.observe(sessions)
        self.rows.observe(rows)


class DrafterMetrics(Metrics):
    def __init__(self, model: str, kind: str) -> None:
        super().__init__("drafter", "drafter_sessions")
        self._labels = (model, kind)
        names = ("model_name", "kind")
        self.sessions = self._reading("drafter_sessions", "Sessions that are drafted for.", *names)
        self.step_s = self._histogram(
            "drafter_step_seconds", "A step: guesses for all sessions that ask.", _STEP_S, *names
        ).labels(model, kind)
        self.batch = self._histogram(
            "drafter_batch_sessions", "Sessions that shared a step.", _SESSIONS, *names
        ).labels(model, kind)
        self.guessed = self._counter("drafter_guessed_tokens", "Tokens guessed, sent or not.", *names).labels(
            model, kind
        )

    def shows(self, reading: CallbackGauge, source: Callable[[], float]) -> None:
        reading.source = lambda: [(self._labels, source())]

    def stepped(self, *, sessions: int, tokens: int, seconds: float) -> None:
        self.step_s.observe(seconds)
        self.batch.observe(sessions)
        self.guessed.inc(tokens)
