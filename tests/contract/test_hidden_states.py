"""Hidden states of several layers over real sockets: what arrives is the projection of the target's own states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from transformers import LlamaForCausalLM

from outrider.engine.loading.loader import LoadedModel
from outrider.hidden_states.parts import projection_parts
from outrider.hidden_states.projection import PackedProjection, Projection
from outrider.hidden_states.rows import decode
from outrider.protocol import convert
from outrider.protocol.hidden_states.messages import HiddenStates, StateSpec
from outrider.v1 import common_pb2 as common
from outrider.v1 import verifier_pb2 as verify
from outrider.v1 import verifier_pb2_grpc as rpc
from tests.contract.conftest import Greedy, verifier_serving, verifying

LONG_WAIT_US = 10_000_000
PROMPT = [(5 * i + 2) % 251 for i in range(40)]
LAYERS = (1, 2)


@pytest.fixture(scope="module")
def packed(plain_target: LlamaForCausalLM) -> PackedProjection:
    """A projection as EAGLE-3.1 has it: a norm of each state, then the linear map."""
    width, generator = plain_target.config.hidden_size, torch.Generator().manual_seed(0)
    weights = {"fc.weight": torch.randn(width, len(LAYERS) * width, generator=generator) / width**0.5}
    weights |= {f"fc_norm.{i}.weight": 1 + 0.2 * torch.randn(width, generator=generator) for i in range(len(LAYERS))}
    return PackedProjection(weights, 1e-5, LAYERS)


async def put_parts(address: str, parts: Iterator[common.ProjectionPart]) -> list[bool]:
    """Offer a projection as a coordinator does: its data once they are wanted. Return the verifier's replies."""
    async with grpc.aio.insecure_channel(address) as channel:
        call: Any = rpc.VerifierStub(channel).PutProjection()
        await call.write(next(parts))
        replies = [(await call.read()).wanted]
        if replies[0]:
            for part in parts:
                await call.write(part)
            replies.append((await call.read()).wanted)
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        return replies


async def put(address: str, spec: StateSpec, data: bytes) -> list[bool]:
    return await put_parts(address, projection_parts(spec, data))


def asked(*specs: StateSpec) -> common.StateSpecs:
    """Return these states, numbered from 1 on."""
    given = [convert.state_spec_to_proto(replace(spec, number=number)) for number, spec in enumerate(specs, 1)]
    return common.StateSpecs(specs=given)


def sent(verdicts: list[verify.Verdict], number: int) -> HiddenStates:
    """Return what verdicts carry under a number, 0 for the final states; positions have no gaps."""
    parts: list[HiddenStates] = []
    for verdict in verdicts:
        carried = [verdict.hidden_states, *verdict.layer_states]
        (states,) = (convert.hidden_states_from_proto(each) for each in carried if each.number == number)
        assert states.position == (parts[-1].position + parts[-1].count if parts else 0)
        assert states.position + states.count == verdict.position + len(verdict.tokens) - 1
        parts.append(states)
    return replace(parts[0], rows=b"".join(part.rows for part in parts))


def states_of(model: LlamaForCausalLM, tokens: list[int]) -> list[torch.Tensor]:
    """Return transformers' states after each number of layers, then the final one.  # [tokens, width] each"""
    last: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
    with torch.inference_mode():
        *states, final = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    hook.remove()
    return [each[0] for each in (*states, *last, final)]


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)


async def test_projected_states_are_those_of_transformers(
    loaded: LoadedModel, tmp_path: Path, plain_target: LlamaForCausalLM, greedy: Greedy, packed: PackedProjection
) -> None:
    """In pieces of a prompt, after accepted guesses and refused ones, beside the final states and in float8."""
    truth, spec = greedy(PROMPT, 8), packed.spec
    async with verifier_serving(loaded, tmp_path, prefill_rows=7) as address, verifying(address) as stream:
        assert await put(address, spec, packed.data) == [True, False]
        assert await put(address, spec, packed.data) == [False]
        states = asked(spec, StateSpec((2,)), replace(spec, float8=True))
        await stream.open(
            PROMPT, max_tokens=8, gamma=1, draft_wait_us=LONG_WAIT_US, hidden_states=True, cache_salt="l", states=states
        )
        verdicts = [await stream.verdict()]
        await stream.guess(len(PROMPT) + 1, [*truth[1:4], (truth[4] + 1) % 251])
        verdicts.append(await stream.verdict())
    assert [len(verdict.tokens) for verdict in verdicts] == [1, 4]
    tokens = (PROMPT + truth)[: len(PROMPT) + 4]
    _, first, second, final = states_of(plain_target, tokens)
    wanted = Projection(packed.data, 2, first.shape[1], torch.device("cpu"))(torch.cat([first, second], dim=1))
    near(decode(sent(verdicts, 1)), wanted)
    near(decode(sent(verdicts, 2)), second)
    near(decode(sent(verdicts, 0)), final)
    assert float((decode(sent(verdicts, 3)) - wanted).abs().max()) < float(wanted.abs().max()) / 14
    width = spec.width
    assert [len(sent(verdicts, n).rows) for n in (1, 3)] == [len(tokens) * 2 * width, len(tokens) * (1 + width)]


async def test_states_that_do_not_exist_are_refused_and_the_session_goes_on(
    verifier: str, greedy: Greedy, packed: PackedProjection
) -> None:
    unknown = replace(packed.spec, projection="0" * 64)
    async with verifying(verifier) as stream:
        waiting = {"gamma": 1, "draft_wait_us": LONG_WAIT_US}  # so that the session does not end before it is steered
        await stream.open(PROMPT, max_tokens=4, cache_salt="no", states=asked(StateSpec((3,)), unknown), **waiting)
        fields = [(await stream.refused()).field for _ in range(2)]
        await stream.steer(states=asked(*[StateSpec((1,))] * 5))
        fields.append((await stream.refused()).field)
        await stream.steer(draft_wait_us=0)
        verdicts = await stream.rest()
    assert fields == ["states.layers", "states.projection", "states.number"]
    assert stream.tokens == greedy(PROMPT, 4)
    assert not any(verdict.layer_states for verdict in verdicts)


async def test_a_held_projection_of_other_layers_is_refused_and_the_steps_go_on(
    verifier: str, greedy: Greedy, packed: PackedProjection
) -> None:
    """A second drafter knows the digest of a public checkpoint, and declares other layers with it."""
    other = replace(packed.spec, layers=(1,))
    await put(verifier, packed.spec, packed.data)
    with pytest.raises(grpc.aio.AioRpcError, match="2 layers") as caught:
        await put_parts(verifier, islice(projection_parts(other, packed.data), 1))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    async with verifying(verifier) as stream:
        await stream.open(PROMPT, max_tokens=4, cache_salt="other", states=asked(other, packed.spec))
        assert (await stream.refused()).field == "states.layers"
        verdicts = await stream.rest()
    assert stream.tokens == greedy(PROMPT, 4)
    assert [[states.number for states in verdict.layer_states] for verdict in verdicts] == [[2]] * len(verdicts)


async def test_a_claim_of_ten_gigabytes_is_refused(verifier: str, packed: PackedProjection) -> None:
    head = common.ProjectionHead(spec=convert.state_spec_to_proto(packed.spec), size=10 << 30)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await put_parts(verifier, iter([common.ProjectionPart(head=head)]))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "head.size" in (caught.value.details() or "")
