"""Metric types that prometheus_client lacks: read when scraped, counted by position, exported under vLLM's names."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from outrider.protocol.speculation import MAX_GAMMA

PREFIX = "outrider_"
_VLLM_PREFIX = "vllm:"
_VLLM_ENGINE = "0"  # vLLM numbers the engines of a server; a coordinator is one

GaugeValues = Iterable[tuple[Sequence[str], float]]


class CallbackGauge:
    """Gauge that is read when scraped: `source` returns label values and a number for each."""

    _kind: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily

    def __init__(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._family = partial(self._kind, PREFIX + name, text, labels=labels)
        self.source: Callable[[], GaugeValues] = tuple
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return [self._family()]

    def collect(self) -> Iterable[Metric]:
        family = self._family()
        for values, number in self.source():
            family.add_metric(values, number)
        return [family]


class CallbackCounter(CallbackGauge):
    """Counter that is read when scraped, for counts kept elsewhere."""

    _kind = CounterMetricFamily


class PerPosition(CallbackCounter):
    """Counter per position of a path, from 0, computed from path lengths: one addition per path."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._lengths: dict[str, Tally[int]] = {}
        super().__init__(name, text, ("model_name", "position"), registry)
        self.source = self._counts

    def lengths(self, model: str) -> Tally[int]:
        """Return the counts of a model's paths by length."""
        return self._lengths.setdefault(model, Tally({1: 0}))

    def _counts(self) -> Iterator[tuple[Sequence[str], float]]:
        for model, lengths in self._lengths.items():
            longest = min(MAX_GAMMA, max(lengths))
            reached = list(accumulate(lengths.get(length, 0) for length in range(longest, 0, -1)))
            for position, count in enumerate(reversed(reached)):
                yield (model, str(position)), count


class UnderVllmNames:
    """Export of counters under vLLM's names too, for tools that expect them. Nothing is counted twice."""

    def __init__(self, counters: Iterable[Counter | PerPosition], registry: CollectorRegistry) -> None:
        self._counters = tuple(counters)
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        return [_as_vllm(family) for counter in self._counters for family in counter.collect()]


def _as_vllm(family: Metric) -> Metric:
    """Return a counter's family under vLLM's name, without creation times, which some parsers take for counts."""
    name = _VLLM_PREFIX + family.name.removeprefix(PREFIX)
    renamed = Metric(name, family.documentation, "counter")
    for sample in family.samples:
        if sample.name.endswith("_total"):
            renamed.add_sample(f"{name}_total", {**sample.labels, "engine": _VLLM_ENGINE}, sample.value)
    return renamed
