"""Sessions that vLLM leaves out of a step: preempted ones, and those for which its budget has no room."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
from outrider.engine.vllm.messages import Opening, PlannedSession
from outrider.hidden_states.projection import PackedProjection, Projection
from outrider.hidden_states.rows import decode
from outrider.protocol.hidden_states.messages import HiddenStates, StateSpecs
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import Verdict
from tests.vllm.conftest import RUNNER, Request, loop_over, run, vllm_target
from tests.vllm.test_target import from_truth, requests
from verifier.engine_target import EngineTarget
from verifier.vllm_target import VllmTarget

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(RUNNER == "v2", reason="too slow through the interpreter"),
]

WIDTH = 128  # of the toy model
WEIGHT = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))
PROJECTION = PackedProjection({"fc.weight": WEIGHT / WIDTH**0.5}, 1e-5, (1,))
FINAL, PROJECTED = 0, 1  # numbers of states


def asked(gamma: int = 0) -> list[Request]:
    made = requests(12, gamma=gamma)
    for request in made:
        request.hidden_states, request.states = True, StateSpecs((PROJECTION.spec.numbered(PROJECTED),))
    return made


def hold_projection(target: Any) -> None:
    held = Projection(PROJECTION.data, 1, WIDTH, torch.device("cpu"))
    target.projections._held[PROJECTION.spec.projection] = held


@pytest.fixture(scope="module")
def truth(model: Path) -> list[Request]:
    """Return the sessions as Outrider's own engine computes them."""
    target = EngineTarget(load_model(str(model), EngineOptions(engine="transformers")).engine)
    hold_projection(target)
    made = asked()
    asyncio.run(run(loop_over(target), made))
    target.close()
    return made


def states(request: Request, number: int) -> dict[int, torch.Tensor]:
    """Return a session's states by position; what is computed again is equal."""
    parts = [_part(verdict, number) for verdict in request.verdicts]
    assert all(part.position <= before.position + before.count for before, part in pairwise(parts)), "a gap"
    found: dict[int, torch.Tensor] = {}
    for part in parts:
        rows = torch.frombuffer(bytearray(part.rows), dtype=torch.float16).reshape(-1, part.width).float()
        for position, row in enumerate(rows if number == FINAL else decode(part), start=part.position):
            assert torch.allclose(found.setdefault(position, row), row, rtol=0, atol=2e-2)
    return found


def _part(verdict: Verdict, number: int) -> HiddenStates:
    [part] = [verdict.hidden_states] if number == FINAL else verdict.layer_states
    assert part is not None
    return part


def logprobs(request: Request) -> list[float]:
    return [each.logprob for verdict in request.verdicts for each in verdict.logprobs]


@pytest.mark.parametrize(
    ("kv_tokens", "more", "preempts"), [(512, "", True), (8192, " --max-num-batched-tokens 20", False)]
)
async def test_sessions_that_are_left_out_of_steps_lose_nothing(
    model: Path, truth: list[Request], monkeypatch: pytest.MonkeyPatch, kv_tokens: int, more: str, preempts: bool
) -> None:
    """Neither text nor log probabilities nor states change, and nothing that a session was promised is refused."""
    texts = [request.tokens for request in truth]
    flags = "--enforce-eager --block-size 32" + more
    with vllm_target(model, max_model_len=256, layers=(1,), kv_tokens=kv_tokens, more=flags) as (target, loaded):
        hold_projection(target)
        core, preempted, left_out = loaded.core, 0, 0
        step, preempt, free = core.step, core.scheduler._preempt_request, core.free_tokens

        def watched_step(self: Any, plan: Any, masks: Any) -> None:
            nonlocal left_out
            step(plan, masks)
            left_out += len(plan.keys() - core.scheduler.computed.keys())

        def watched_preempt(*args: Any, **kwargs: Any) -> None:
            nonlocal preempted
            preempted += 1
            preempt(*args, **kwargs)

        monkeypatch.setattr(type(core), "step", watched_step)
        monkeypatch.setattr(core.scheduler, "_preempt_request", watched_preempt)
        loop, found = loop_over(target), asked(gamma=4)
        assert await run(loop, found, from_truth(texts, "mixed")) == texts
        assert sum(request.accepted for request in found) > 0
        assert left_out
        assert bool(preempted) is preempts
        for mine, other in zip(truth, found, strict=True):
            assert logprobs(other) == pytest.approx(logprobs(mine), abs=1e-4)
            for number in (FINAL, PROJECTED):
                ours, theirs = states(mine, number), states(other, number)
                assert ours.keys() == theirs.keys()
                assert all(torch.allclose(ours[at], theirs[at], rtol=0, atol=2e-2) for at in ours)
        loop._admission.free_closed()
        assert core.free_tokens == free, "no block is left behind"


def test_a_preempted_session_that_waits_keeps_no_other_from_beginning(vllm: VllmTarget) -> None:
    """One whose client does not read may wait for ever, and all of it but the last token may be cached."""
    core, params = vllm._core, SamplingParams(seed=1, temperature=0.0, max_tokens=8)
    for name, length in (("waits", core.block_tokens), ("begins", 3)):
        core.add(name, [len(name)] * length, Opening(params, length))
        core.step({name: PlannedSession(length)})
        assert core.scheduler.computed[name].verified is not None
        if name == "waits":
            preempted = core.scheduler.running.pop()
            core.scheduler._preempt_request(preempted, time.monotonic())
    core.step({"waits": PlannedSession(1)})
    assert core.scheduler.computed["waits"].verified is not None, "it goes on where it was"
    for session in (SimpleNamespace(key=name) for name in ("waits", "begins")):
        vllm._known.add(session.key)
        vllm.free(session)  # type: ignore[arg-type]
        assert session.key not in core.scheduler.cached_prefix, "nothing of an ended session is left"
