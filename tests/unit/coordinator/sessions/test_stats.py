"""What a request's statistics cost the event loop: an answer over HTTP reads numbers and works nothing out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from coordinator.api.http.replies import metrics, usage
from coordinator.control.estimator import BestDrafter, Estimator, PairHistory
from coordinator.control.gamma import Controller, FixedChoices
from coordinator.control.throughput_model import PLAIN, Mode
from coordinator.persistence.session_record import SessionRecord, SessionRequest
from coordinator.sessions.session import Session
from coordinator.sessions.stats import RequestStats
from outrider.observability.metrics import CoordinatorMetrics
from outrider.observability.tracing import OFF, Span
from outrider.protocol import convert
from outrider.protocol.cost_curve import CostCurve
from outrider.protocol.errors import Expired
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import FinishReason, SourceTally, TokenKind, Verdict, VerifyTimings
from outrider.v1 import common_pb2 as common

GAMMA_MAX = 16


def session_after(*accepted: int, offered: int = 4) -> Session:
    """One whose steps accepted so many of `offered` guesses, with γ control at work."""
    stats = RequestStats(CoordinatorMetrics(Mode).of("target"))
    estimator = Estimator(GAMMA_MAX)
    estimator.attach_verifier(CostCurve.line(40.0, 0.0))
    estimator.pair.start_from(PairHistory(acceptance=[0.8] * GAMMA_MAX))
    drafter = BestDrafter(round_trips_ms=4.0, draft_ms=2.0)
    stats.control = Controller(GAMMA_MAX, estimator, FixedChoices())
    stats.control.decide(drafter)
    stats.record_drafter(1, "ngram")
    stats.drafter_kind = "ngram"
    for count in accepted:
        stats.record_guess(common.Guess(tokens=[7] * offered, source=1))
        verdict = _verdict(count, offered)
        stats.control.observe(verdict, drafter)
        stats.record_verdict(verdict, stats.control.plan)
    params = SimpleNamespace(seed=5)
    record = SimpleNamespace(session_id="s", tokens=[7] * 9, request=SimpleNamespace(prompt=(1,) * 6, params=params))
    return cast(Session, SimpleNamespace(stats=stats, record=record, output=SimpleNamespace(thought=2)))


def _verdict(accepted: int, offered: int) -> Verdict:
    return Verdict(
        position=0,
        tokens=(7,) * (accepted + 1),
        accepted=accepted,
        last=TokenKind.RECOVERED if accepted < offered else TokenKind.BONUS,
        proposed=offered,
        nodes=offered,
        sources=(SourceTally(1, offered, accepted),),
        timings=VerifyTimings(step_us=40_000, cached_tokens=3),
    )


def test_an_answer_over_http_works_out_nothing_that_it_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else was considered takes milliseconds to find, in which no other session gets a token."""
    session = session_after(4, 1)

    def looked(*_: object) -> None:
        pytest.fail("best_per_mode() blocks the event loop for a number that is not told")

    monkeypatch.setattr(Controller, "best_per_mode", looked)
    told = usage([session], 1)
    assert told["prompt_tokens_details"] == {"cached_tokens": 3, "cache_write_tokens": 0}
    assert told["completion_tokens_details"] == {"reasoning_tokens": 2}
    assert metrics([session])["metrics"]["outrider"]["plans"]


def test_http_and_grpc_tell_the_same_numbers() -> None:
    session = session_after(4, 1, 0)
    told, proto = metrics([session])["metrics"], convert.stats_to_proto(session.stats.values(considered=True))
    assert convert.stats_from_proto(proto).plans == session.stats.values(considered=True).plans
    speculative, own = told["speculative_decoding"], told["outrider"]
    assert speculative == {
        "mean_acceptance_length": 1.0 + 5 / 3,
        "draft_acceptance_rate": 5 / 12,
        "acceptance_histogram": [1, 1, 0, 0, 1],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 12,
        "num_spec_tokens": 4,
    }
    assert (proto.drafts, proto.accepted_tokens, proto.draft_tokens, proto.acceptance_rate) == (3, 5, 12, 5 / 12)
    assert list(proto.accepted_per_position) == [2, 1, 1, 1]
    for name in ("tokens_per_second", "time_to_first_token_ms", "steps", "mean_gamma", "bytes_per_accepted_token"):
        assert own[name] == getattr(proto, name), name
    assert own["drafter"] == proto.drafter == "ngram"
    assert own["plans"] == [{"plan": share.plan, "steps": share.steps} for share in proto.plans if share.steps]


def test_the_trace_of_a_failed_request_tells_its_error() -> None:
    class Spy(Span):
        def __init__(self) -> None:
            self.attributes: dict[str, object] = {}

        def set(self, attributes: Mapping[str, object]) -> None:
            self.attributes |= attributes

    stats, spy = RequestStats(CoordinatorMetrics(Mode).of("target")), Spy()
    stats.span = spy
    record = SessionRecord("s", SessionRequest((1, 2), SamplingParams(seed=1)))
    stats.finish(record, Expired("too late"))
    assert spy.attributes["gen_ai.response.finish_reasons"] == ["expired"]


def test_a_resumed_request_is_counted_once() -> None:
    """Its prompt and its first token belong to the stream that had them."""
    metrics = CoordinatorMetrics(Mode)
    record = SessionRecord("s", SessionRequest((1, 2), SamplingParams(seed=1)))
    for _ in range(2):
        stats = RequestStats(metrics.of("target"))
        stats.start(record, OFF, "target")
        stats.record_verdict(_verdict(4, 4), PLAIN)
        stats.finish(record, None)
        record = replace(record, epoch=2, tokens=[7])
    counted = metrics.registry.get_sample_value
    labels = {"model_name": "target"}
    assert counted("outrider_prompt_tokens_total", labels) == 2
    assert counted("outrider_time_to_first_token_seconds_count", labels) == 1


@pytest.mark.parametrize("reason", FinishReason)
def test_bytes_per_accepted_token_are_those_of_finished_requests(reason: FinishReason) -> None:
    metrics = CoordinatorMetrics(Mode)
    stats = RequestStats(metrics.of("target"))
    stats.record_drafter(1, "ngram")
    stats.record_guess(common.Guess(tokens=[7] * 4, source=1))
    stats.record_verdict(_verdict(4, 4), PLAIN)
    stats.finish(SessionRecord("s", SessionRequest((1, 2), SamplingParams(seed=1)), finish_reason=reason), None)
    counted = metrics.registry.get_sample_value("outrider_bytes_per_accepted_token_count", {"model_name": "target"})
    assert counted == (reason is not FinishReason.NONE)
