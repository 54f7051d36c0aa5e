"""The verification loop when its target fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch

from outrider.engine import SessionTokens, StepResult
from outrider.engine.mock import MockEngine
from outrider.observability.metrics import VerifierMetrics
from outrider.protocol.errors import PeerLost, Unavailable
from outrider.protocol.sampling_params import SamplingParams
from verifier.engine_target import EngineTarget
from verifier.limits import SchedulerLimits
from verifier.loop import VerificationLoop
from verifier.session import Ended, VerifyOpening, VerifySession
from verifier.target import TargetFailed

LIMITS = SchedulerLimits(
    max_sessions=8, max_waiting=0, kv_tokens=4096, prefill_rows=64, prefill_stretch=1.5, guess_rows=8
)


class BrokenEngine(MockEngine):
    """An engine whose forward pass raises."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def extend(self, batch: Sequence[SessionTokens]) -> StepResult:
        raise self.error


def broken_loop(error: Exception) -> VerificationLoop:
    return VerificationLoop(EngineTarget(BrokenEngine(error)), LIMITS, VerifierMetrics("broken"))


def opened(loop: VerificationLoop, name: str) -> VerifySession:
    params = SamplingParams(seed=1, temperature=0.0, max_tokens=8)
    return loop.open(VerifyOpening(name, 1, (1, 2, 3), 3, params))


async def ended(session: VerifySession) -> Ended:
    reply = await asyncio.wait_for(session.outbox.get(), 5)
    assert isinstance(reply, Ended)
    return reply


@pytest.mark.parametrize("error", [torch.AcceleratorError("CUDA error: device-side assert"), torch.OutOfMemoryError()])
async def test_an_error_of_the_device_ends_the_loop_and_moves_its_sessions(error: Exception) -> None:
    loop = broken_loop(error)
    session = opened(loop, "one")
    with pytest.raises(TargetFailed, match="the device failed"):
        await asyncio.wait_for(loop.run(), 5)
    assert isinstance((await ended(session)).error, PeerLost)
    with pytest.raises(Unavailable):
        opened(loop, "two")
    loop.stop()


async def test_another_error_ends_only_the_sessions_of_its_step() -> None:
    loop = broken_loop(ValueError("a bug"))
    first = opened(loop, "one")
    running = asyncio.create_task(loop.run())
    assert isinstance((await ended(first)).error, PeerLost)
    second = opened(loop, "two")
    assert isinstance((await ended(second)).error, PeerLost), "the loop runs on"
    assert not running.done()
    running.cancel()
    loop.stop()
