"""Acceptance in the shapes that benchmark tools read: vLLM's counters, and its metrics of one request."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.api.http.replies import speculative_decoding
from coordinator.api.http.responses import SpeculativeDecoding
from coordinator.control.throughput_model import Mode, SpeculationPlan
from coordinator.sessions.stats import RequestStats
from outrider.observability.metrics import CoordinatorMetrics
from outrider.protocol.speculation import MAX_GAMMA, TokenKind, Verdict
from tests.bench_serve import Counts, read

CHAIN, TREE, PLAIN = SpeculationPlan(gamma=4), SpeculationPlan(gamma=3, branches=3), SpeculationPlan()


def verdict(accepted: int, offered: int, nodes: int = 0, beside: int = 0) -> Verdict:
    """`offered`: the longest path; `nodes`: all guesses of the tree."""
    last = TokenKind.BONUS if offered else TokenKind.PLAIN
    tokens = tuple(range(accepted + 1))
    return Verdict(7, tokens, accepted, last, offered, nodes=nodes or offered, accepted_from_branch=beside)


def told(*steps: tuple[Verdict, SpeculationPlan], metrics: CoordinatorMetrics | None = None) -> SpeculativeDecoding:
    """What a request with these steps is told."""
    stats = RequestStats((metrics or CoordinatorMetrics(Mode)).of("target"))
    for each, plan in steps:
        stats.record_verdict(each, plan)
    return speculative_decoding(stats.values())


def scraped(metrics: CoordinatorMetrics) -> Counts:
    found = read(metrics.render()[0].decode())
    assert found is not None
    return found


def test_a_chain_of_one_length() -> None:
    assert told(*((verdict(accepted, 4), CHAIN) for accepted in (4, 0, 2, 2, 1))) == {
        "mean_acceptance_length": 1 + 9 / 5,
        "draft_acceptance_rate": 9 / 20,
        "acceptance_histogram": [1, 1, 2, 0, 1],
        "num_spec_steps": 5,
        "num_accepted_draft_tokens": 9,
        "num_draft_tokens": 20,
        "num_spec_tokens": 4,
    }


def test_gamma_changes_between_steps() -> None:
    """The histogram is as long as the longest guess asks for, also where nothing of that was accepted."""
    steps = [
        (verdict(1, 1), SpeculationPlan(gamma=1)),
        (verdict(2, 6), SpeculationPlan(gamma=6)),
        (verdict(0, 3), SpeculationPlan(gamma=3)),
    ]
    found = told(*steps)
    assert found["acceptance_histogram"] == [1, 1, 1, 0, 0, 0, 0]
    assert found["num_spec_tokens"] == 6
    assert found["num_draft_tokens"] == 10
    assert found["mean_acceptance_length"] == 2.0


def test_of_a_tree_the_longest_path_counts() -> None:
    """Nine guesses on paths of three: accepted is the depth that the target's own path reached, on any branch."""
    found = told((verdict(2, 3, nodes=9, beside=1), TREE), (verdict(0, 3, nodes=9), TREE))
    assert found["acceptance_histogram"] == [1, 0, 1, 0]
    assert (found["num_draft_tokens"], found["num_spec_tokens"], found["num_spec_steps"]) == (6, 3, 2)


def test_plain_steps_are_no_drafts() -> None:
    steps = [(verdict(0, 0), PLAIN), (verdict(3, 3), CHAIN), (verdict(0, 0), CHAIN)]
    assert told(*steps)["acceptance_histogram"] == [0, 0, 0, 1]
    assert told((verdict(0, 0), PLAIN)) == {
        "mean_acceptance_length": 1.0,
        "draft_acceptance_rate": 0.0,
        "acceptance_histogram": [0],
        "num_spec_steps": 0,
        "num_accepted_draft_tokens": 0,
        "num_draft_tokens": 0,
        "num_spec_tokens": 0,
    }


PATHS = st.integers(0, MAX_GAMMA).flatmap(lambda offered: st.tuples(st.integers(0, offered), st.just(offered)))


@settings(max_examples=50, deadline=None)
@given(st.lists(PATHS, max_size=30))
def test_requests_add_up_to_the_counters(paths: list[tuple[int, int]]) -> None:
    """And every request is such that a reader which checks its sums believes it."""
    metrics = CoordinatorMetrics(Mode)
    halves = paths[::2], paths[1::2]
    answers = [told(*((verdict(*path), CHAIN) for path in half), metrics=metrics) for half in halves]
    for answer in answers:
        histogram = answer["acceptance_histogram"]
        assert len(histogram) == answer["num_spec_tokens"] + 1
        assert min(histogram) >= 0
        assert sum(histogram) == answer["num_spec_steps"]
        assert sum(j * steps for j, steps in enumerate(histogram)) == answer["num_accepted_draft_tokens"]
    counts = scraped(metrics)
    assert counts.drafts == sum(answer["num_spec_steps"] for answer in answers)
    assert counts.draft_tokens == sum(answer["num_draft_tokens"] for answer in answers)
    assert counts.accepted == sum(answer["num_accepted_draft_tokens"] for answer in answers)
    for place, count in counts.accepted_at.items():
        assert count == sum(sum(answer["acceptance_histogram"][place + 1 :]) for answer in answers)
    assert sum(counts.accepted_at.values()) == counts.accepted


def test_the_page_before_the_first_request_has_them_at_zero() -> None:
    metrics = CoordinatorMetrics(Mode)
    assert read(metrics.render()[0].decode()) is None, "no target is known"
    metrics.of("target")
    assert scraped(metrics) == Counts(accepted_at={0: 0})


def test_lines_are_vllm_s_to_the_letter() -> None:
    metrics = CoordinatorMetrics(Mode)
    told((verdict(2, 4), CHAIN), (verdict(0, 1), CHAIN), metrics=metrics)
    lines = [line for line in metrics.render()[0].decode().splitlines() if line.startswith("vllm:")]
    label = 'engine="0",model_name="target"'
    assert lines == [
        f"vllm:spec_decode_num_drafts_total{{{label}}} 2.0",
        f"vllm:spec_decode_num_draft_tokens_total{{{label}}} 5.0",
        f"vllm:spec_decode_num_accepted_tokens_total{{{label}}} 2.0",
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="0"}} 1.0',
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="1"}} 1.0',
    ]


@pytest.mark.parametrize("length", [MAX_GAMMA, 2**40])
def test_there_are_no_more_positions_than_a_guess_may_have(length: int) -> None:
    metrics = CoordinatorMetrics(Mode)
    metrics.of("target").record_verdict(Verdict(7, (1,), length, TokenKind.BONUS, length), 1, Mode.PLAIN)
    page = metrics.render()[0].decode()
    assert len(re.findall(r"^vllm:spec_decode_num_accepted_tokens_per_pos_total\{", page, re.M)) == MAX_GAMMA
