"""Which drafters guess for an engine, and what an engine's name for its model reaches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from coordinator.attachment import session
from coordinator.attachment.session import AttachedSession
from coordinator.control.throughput_model import Mode
from coordinator.sessions.drafting import DraftingContext
from outrider.observability.metrics import CoordinatorMetrics
from outrider.protocol import convert
from outrider.protocol.errors import Expired, InvalidRequest, PeerLost, ProtocolViolation
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import FinishReason, TokenKind, Verdict, VerifyTimings
from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import verifier_pb2 as verify

MODEL = ModelInfo("engine", "target", vocab_size=100, vocabulary_digest="words", weights_digest="weights")
DRAFTER = WorkerInfo("drafter", Role.DRAFTER, "d:1", ModelInfo("small", "small", vocabulary_digest="words"))
STEPS = 200


def attached(
    model: ModelInfo = MODEL, metrics: CoordinatorMetrics | None = None, output: Sequence[int] = ()
) -> AttachedSession:
    opening = pb.OpenAttached(
        tokens=[1, 2, *output],
        prompt_length=2,
        params=convert.params_to_proto(SamplingParams(temperature=0.0, seed=1, max_tokens=STEPS + 1)),
        model=convert.model_to_proto(model),
        max_guesses=4,
    )
    context: Any = DraftingContext(worker_pool=None, pairs=None, gamma_max=0, drafters=0)  # type: ignore[arg-type]
    return AttachedSession(opening, "", "key-1", context, metrics or CoordinatorMetrics(Mode))


@pytest.mark.parametrize(
    ("drafter", "fits"),
    [
        (DRAFTER, True),
        (replace(DRAFTER, model=ModelInfo("any", "any")), True),
        (replace(DRAFTER, model=replace(DRAFTER.model, vocabulary_digest="others")), False),
        (replace(DRAFTER, model=replace(DRAFTER.model, target_digest="weights")), True),
        (replace(DRAFTER, model=replace(DRAFTER.model, target_digest="other weights")), False),
        (replace(DRAFTER, hidden_states=True), False),
    ],
)
def test_only_drafters_of_its_vocabulary_and_weights_guess_for_an_engine(drafter: WorkerInfo, fits: bool) -> None:
    assert attached()._drafting._chooser.suits(drafter) is fits


def test_an_engine_names_no_model_of_others() -> None:
    names = {attached(replace(MODEL, fingerprint=f"any {i}")).connection.info.model.fingerprint for i in range(200)}
    assert all(name.startswith("attached key-1 ") for name in names)
    assert len(names) == session._HISTORIES, "each has a history of its own, in Redis for a month"


@pytest.mark.parametrize("field", [{"vocab_size": 2**32 - 1}, {"eos_token_ids": (100,)}])
def test_sizes_that_no_target_has_are_refused(field: dict[str, Any]) -> None:
    """Drafters would refuse the session, or take memory for each id."""
    with pytest.raises(InvalidRequest, match=f"open.model.{next(iter(field))}"):
        attached(replace(MODEL, **field))


async def stream(*messages: pb.AttachRequest, then_s: float = 0.0) -> AsyncIterator[pb.AttachRequest]:
    for message in messages:
        yield message
    await asyncio.sleep(then_s)


def plain_steps(number: int, position: int = 2) -> pb.AttachRequest:
    verdict = Verdict(position, (1,) * number, 0, TokenKind.PLAIN, timings=VerifyTimings(step_us=10))
    return pb.AttachRequest(reply=verify.VerifyReply(verdict=convert.verdict_to_proto(verdict)))


@pytest.mark.parametrize("together", [1, 8])
async def test_verdicts_are_read_no_faster_than_engines_run(together: int) -> None:
    requests = [plain_steps(together, 2 + i) for i in range(0, STEPS, together)]
    engine = attached()
    started = asyncio.get_running_loop().time()
    await engine.follow(stream(*requests))
    least_s = (STEPS - session._BURST) * session._SHORTEST_STEP_S
    assert asyncio.get_running_loop().time() - started >= 0.9 * least_s


async def test_an_engine_that_reads_no_guesses_is_lost_and_no_drafter_is_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "_MAX_UNSENT", 3)
    engine = attached()
    for _ in range(10):  # as a drafter's task does
        engine.guess(common.Guess(position=2, tokens=[1]))
    assert engine.outbox.qsize() == 4
    with pytest.raises(PeerLost, match="does not read"):
        await engine.follow(stream(plain_steps(1)))


async def test_an_engine_whose_drafters_rest_sends_several_steps_in_one_verdict() -> None:
    engine = attached()
    await engine.follow(stream(plain_steps(8), plain_steps(1, 10)))
    assert engine._record.tokens == [1] * 9
    assert engine._record.kinds == [TokenKind.PLAIN] * 9
    (tally,) = engine._drafting.control.tallies.values()
    assert tally.tokens == 9
    assert tally.ms == pytest.approx(9 * 0.01), "each step took as long as the last one"
    assert tally.steps == engine._stats.values().plans[0].steps == 9
    steering = engine.outbox.get_nowait()
    assert steering is not None
    assert steering.steer.plain_steps == 8
    with pytest.raises(ProtocolViolation, match=r"verdict\.accepted"):
        await attached().follow(stream(plain_steps(9)))


async def test_an_attached_request_that_its_limit_ends_is_counted_so() -> None:
    metrics = CoordinatorMetrics(Mode)
    for length in (STEPS, STEPS + 1):
        engine = attached(metrics=metrics)
        steps = [plain_steps(1, 2 + i) for i in range(STEPS)]
        last = Verdict(2 + STEPS, (1,), 0, TokenKind.PLAIN, finish_reason=FinishReason.LENGTH)
        steps.append(pb.AttachRequest(reply=verify.VerifyReply(verdict=convert.verdict_to_proto(last))))
        await engine.follow(stream(*steps[:length]))
    for reason in ("stop", "length"):
        labels = {"model_name": session.METRICS_NAME, "finished_reason": reason}
        assert metrics.registry.get_sample_value("outrider_request_success_total", labels) == 1


async def test_the_prompt_of_an_attached_request_is_counted_once() -> None:
    """Its coordinator is lost, and the engine attaches it to another one with the output so far."""
    metrics = CoordinatorMetrics(Mode)
    for output in ((), (1, 1, 1)):
        await attached(metrics=metrics, output=output).follow(stream())
    assert metrics.registry.get_sample_value("outrider_prompt_tokens_total", {"model_name": "attached"}) == 2


async def test_a_silent_engine_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_SILENCE_S", 0.05)
    with pytest.raises(Expired, match="no verdict"):
        await attached().follow(stream(then_s=5.0))
