"""The metrics of the three services: what they are called, and what a verdict adds to them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from outrider.observability.metrics import ABANDONED, CoordinatorMetrics, DrafterMetrics, Metrics, VerifierMetrics
from outrider.protocol.errors import KINDS, Overloaded
from outrider.protocol.speculation import MAX_GAMMA, FinishReason, TokenKind, Verdict

WAYS = ("plain", "in turns")
UNITS = ("_seconds", "_bytes", "_ratio", "_tokens", "_rows", "_sessions")


def every_set() -> list[Metrics]:
    return [CoordinatorMetrics(WAYS), VerifierMetrics("target"), DrafterMetrics("draft", "model")]


def families(metrics: Metrics) -> Iterator[Metric]:
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    return (family for family in text_string_to_metric_families(body.decode()) if not family.name.endswith("_created"))


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"outrider_{name}", labels)


def verdict(*, tokens: int, accepted: int = 0, offered: int = 0) -> Verdict:
    return Verdict(7, tuple(range(tokens)), accepted, TokenKind.BONUS, offered)


def test_names_are_ours_and_follow_prometheus() -> None:
    for metrics in every_set():
        for family in families(metrics):
            if family.name.startswith("process_"):
                continue
            assert re.fullmatch(r"outrider_[a-z0-9_]+|vllm:spec_decode_num_[a-z_]+", family.name)
            assert family.documentation.endswith("."), family.name
            if family.type == "histogram":
                assert family.name.endswith((*UNITS, "_token", "_gamma")), family.name
            assert not family.name.endswith(("_ms", "_us", "_milliseconds"))


def test_no_two_services_give_one_name_two_meanings() -> None:
    seen: dict[str, str] = {}
    for metrics in every_set():
        for family in families(metrics):
            if not family.name.startswith("process_"):
                assert seen.setdefault(family.name, family.documentation) == family.documentation


def test_several_sets_live_in_one_process() -> None:
    one, other = CoordinatorMetrics(WAYS), CoordinatorMetrics(WAYS)
    one.of("target").all.prompt_tokens.add("target", number=5)
    other.of("target")
    assert value(one, "prompt_tokens_total", model_name="target") == 5
    assert value(other, "prompt_tokens_total", model_name="target") == 0


def test_a_plain_verdict_is_no_draft() -> None:
    metrics = CoordinatorMetrics(WAYS)
    metrics.of("target").record_verdict(verdict(tokens=1), 0, "plain")
    assert value(metrics, "generation_tokens_total", model_name="target") == 1
    assert value(metrics, "spec_decode_num_drafts_total", model_name="target") == 0
    assert value(metrics, "plan_steps_total", model_name="target", plan="plain") == 1
    assert value(metrics, "plan_steps_total", model_name="target", plan="in turns") == 0
    assert value(metrics, "gamma_bucket", model_name="target", le="0.0") == 1


def test_a_verdict_of_many_steps_is_recorded_as_quickly_as_one_of_a_single_step() -> None:
    """On the token path: a plain verdict may stand for 64 steps, each of which counts."""
    target = (metrics := CoordinatorMetrics(WAYS)).of("target")

    def calls(tokens: int) -> int:
        made: list[str] = []
        one = Verdict(7, tuple(range(tokens)), 0, TokenKind.PLAIN)
        sys.setprofile(lambda frame, event, _: made.append(frame.f_code.co_qualname) if event == "call" else None)
        try:
            target.record_verdict(one, 3, "plain")
        finally:
            sys.setprofile(None)
        return len(made)

    before = calls(1)
    assert calls(64) == calls(1) <= min(4, before)
    of = {"model_name": "target"}
    assert value(metrics, "gamma_count", **of) == value(metrics, "gamma_bucket", le="+Inf", **of) == 66
    assert (value(metrics, "gamma_bucket", le="2.0", **of), value(metrics, "gamma_bucket", le="3.0", **of)) == (0, 66)
    assert value(metrics, "gamma_sum", **of) == 3 * 66


def test_verdicts_are_counted_by_position() -> None:
    metrics = CoordinatorMetrics(WAYS)
    target = metrics.of("target")
    for offered, accepted in ((4, 4), (4, 2), (3, 0), (1, 1)):
        target.record_verdict(verdict(tokens=accepted + 1, offered=offered, accepted=accepted), 4, "in turns")

    def at(name: str) -> list[float | None]:
        name = f"spec_decode_num_{name}_tokens_per_pos_total"
        return [value(metrics, name, model_name="target", position=str(place)) for place in range(5)]

    assert at("draft") == [4, 3, 3, 2, None]
    assert at("accepted") == [3, 2, 1, 1, None]
    assert value(metrics, "spec_decode_num_drafts_total", model_name="target") == 4
    assert value(metrics, "spec_decode_num_draft_tokens_total", model_name="target") == 12
    assert value(metrics, "spec_decode_num_accepted_tokens_total", model_name="target") == 7
    assert value(metrics, "generation_tokens_total", model_name="target") == 11
    assert value(metrics, "gamma_sum", model_name="target") == 16


def test_an_absurd_verdict_does_not_stall_who_looks() -> None:
    metrics = CoordinatorMetrics(WAYS)
    metrics.of("target").record_verdict(verdict(tokens=1, offered=2**40, accepted=2**40), 1, "plain")
    positions = {
        sample.labels["position"]
        for family in families(metrics)
        for sample in family.samples
        if "pos" in family.name and "position" in sample.labels
    }
    assert len(positions) == MAX_GAMMA


def test_what_may_come_is_there_from_the_start() -> None:
    """A rate over a series that appears with its first event misses that event."""
    metrics = CoordinatorMetrics(WAYS)
    metrics.of("target")
    reasons = [reason.name.lower() for reason in FinishReason if reason]
    for reason in (*reasons, ABANDONED):
        assert value(metrics, "request_success_total", model_name="target", finished_reason=reason) == 0
    for code in KINDS:
        assert value(metrics, "requests_failed_total", model_name="target", code=code) == 0
        assert value(metrics, "requests_refused_total", code=code) == 0


def test_refusals_are_counted_and_go_on() -> None:
    metrics = VerifierMetrics("target")
    with pytest.raises(Overloaded), metrics.count_refusals():
        raise Overloaded("full")
    with pytest.raises(KeyError), metrics.count_refusals():
        raise KeyError
    assert value(metrics, "verifier_sessions_refused_total", code="overloaded") == 1
    assert sum(value(metrics, "verifier_sessions_refused_total", code=code) or 0 for code in KINDS) == 1


def test_readings_are_read_when_somebody_looks() -> None:
    metrics = CoordinatorMetrics(WAYS)
    workers = {("verifier", "target", "a:1"): 0.25}
    metrics.round_trips.source = lambda: workers.items()
    labels = {"role": "verifier", "kind": "target", "worker": "a:1"}
    assert value(metrics, "worker_round_trip_seconds", **labels) == 0.25
    workers.clear()
    assert value(metrics, "worker_round_trip_seconds", **labels) is None


def test_the_page_tells_of_every_metric() -> None:
    page = (Path(__file__).parents[4] / "docs" / "observability.md").read_text()
    told = set(re.findall(r"`((?:outrider_|vllm:)[a-z0-9_]+)`", page))
    ours = set()
    for metrics in every_set():
        if isinstance(metrics, CoordinatorMetrics):
            metrics.of("target")
        for family in families(metrics):
            if not family.name.startswith("process_"):
                ours.add(family.name + ("_total" if family.type == "counter" else ""))
    assert told == ours


def test_drafters_cannot_add_labels_without_end() -> None:
    """A drafter names its kind itself."""
    metrics = CoordinatorMetrics(WAYS)
    for number in range(1_000):
        metrics.guessed_tokens.add(*metrics.of("m").drafter(f"kind-{number}"))
    kinds = {
        sample.labels["drafter"] for each in families(metrics) for sample in each.samples if "drafter" in sample.labels
    }
    assert len(kinds) <= 65
    assert value(metrics, "guessed_tokens_total", model_name="m", drafter="other") == 1_000 - 64
    assert value(metrics, "guessed_tokens_total", model_name="m", drafter="kind-0") == 1


def test_step_times_of_drafters_without_a_model_are_told_apart() -> None:
    """Steps of `ngram` and `suffix` take 0.1 to 0.3 ms; in one bucket, every quantile of them is its middle."""
    metrics = DrafterMetrics("draft", "ngram")
    for seconds in (0.00012, 0.0003):
        metrics.step_s.observe(seconds)
    counts = [
        value(metrics, "drafter_step_seconds_bucket", model_name="draft", kind="ngram", le=le)
        for le in ("0.0001", "0.0002", "0.0005")
    ]
    assert counts == [0, 1, 2]
