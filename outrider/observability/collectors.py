"""Metric types that prometheus_client lacks: read when scraped, counted by position, exported under vLLM's names."""

from __future__ import annotations

import math
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from outrider.protocol.speculation import MAX_GAMMA

PREFIX = "outrider_"
_VLLM_PREFIX = "vllm:"
_VLLM_ENGINE = "0"  # vLLM numbers the engines of a server; a coordinator is one

_Kind = type[GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily]
GaugeValues = Iterable[tuple[Any, ...]]  # label values, and the number


class CallbackGauge:
    """Gauge that is read when scraped: `source` returns label values and a number for each."""

    _kind: _Kind = GaugeMetricFamily

    def __init__(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._family = partial(self._kind, PREFIX + name, text, labels=labels)
        self.source: Callable[[], GaugeValues] = tuple
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return [self._family()]

    def collect(self) -> Iterable[Metric]:
        family = self._family()
        for values in self.source():
            family.add_metric(*values)
        return [family]


class CallbackCounter(CallbackGauge):
    """Counter that is read when scraped, for counts kept elsewhere."""

    _kind: _Kind = CounterMetricFamily


class Sums(CallbackCounter):
    """Counter without the lock and the four calls that each addition to prometheus_client's takes: one thread adds."""

    def __init__(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self.by_labels: Tally[tuple[str, ...]] = Tally()
        super().__init__(name, text, labels, registry)
        self.source = lambda: list(self.by_labels.items())

    def add(self, *labels: str, number: int = 1) -> None:
        self.by_labels[labels] += number


class PerPosition(CallbackCounter):
    """Counter per position of a path, from 0, computed from path lengths: one addition per path."""

    _labels: Sequence[str] = ("model_name", "position")

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._lengths: dict[str, Tally[int]] = {}
        super().__init__(name, text, self._labels, registry)
        self.source = self._counts

    def lengths(self, model: str) -> Tally[int]:
        """Return the counts of a model's paths by length."""
        return self._lengths.setdefault(model, Tally({1: 0}))

    def _counts(self) -> GaugeValues:
        for model, lengths in self._lengths.items():
            longest = min(MAX_GAMMA, max(lengths))
            reached = list(accumulate(lengths.get(length, 0) for length in range(longest, 0, -1)))
            for position, count in enumerate(reversed(reached)):
                yield (model, str(position)), count


class WholeNumbers(PerPosition):
    """Histogram of whole numbers by model: one addition for any number of equal ones."""

    _kind, _labels = HistogramMetricFamily, ("model_name",)

    def __init__(self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._bounds = {str(float(bound)): bound for bound in bounds} | {"+Inf": math.inf}
        super().__init__(name, text, registry)

    def _counts(self) -> GaugeValues:
        for model, times in self._lengths.items():
            upto = [(name, sum(times[it] for it in times if it <= bound)) for name, bound in self._bounds.items()]
            yield (model,), upto, sum(it * times[it] for it in times)


class UnderVllmNames:
    """Export of counters under vLLM's names too, for tools that expect them. Nothing is counted twice."""

    def __init__(self, counters: Iterable[CallbackCounter], registry: CollectorRegistry) -> None:
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
