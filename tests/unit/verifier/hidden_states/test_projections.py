"""The projections of a verifier: what it takes, what it refuses and before what, and how many it holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import torch

from outrider.hidden_states.parts import projection_parts
from outrider.hidden_states.projection import MAX_BYTES, PackedProjection, Projection
from outrider.protocol.errors import Expired, InvalidRequest, Overloaded
from outrider.protocol.hidden_states.messages import StateSpec
from outrider.v1 import common_pb2 as common
from verifier.hidden_states import projections
from verifier.hidden_states.projections import Projections

LAYERS, WIDTH, OUT = 8, 6, 5


def packed(seed: int = 0, layers: tuple[int, ...] = (2, 4, 5)) -> PackedProjection:
    weight = torch.randn(OUT, len(layers) * WIDTH, generator=torch.Generator().manual_seed(seed))
    return PackedProjection({"fc.weight": weight}, 1e-5, layers)


def held(shape: tuple[int, int] = (LAYERS, WIDTH)) -> Projections:
    return Projections(shape, torch.device("cpu"))


async def give(to: Projections, spec: StateSpec, data: bytes, size: int | None = None) -> list[bool]:
    async def parts() -> AsyncIterator[common.ProjectionPart]:
        for part in projection_parts(spec, data):
            if part.WhichOneof("message") == "head" and size is not None:
                part.head.size = size
            yield part

    return [wanted async for wanted in to.receive(parts())]


async def test_it_is_sent_once() -> None:
    to, given = held(), packed()
    with pytest.raises(InvalidRequest, match="projection"):
        to.check(given.spec)
    assert await give(to, given.spec, given.data) == [True, False]
    to.check(given.spec)
    assert await give(to, given.spec, given.data) == [False]
    projection = to.find(given.spec.projection)
    assert projection is not None
    assert projection(torch.ones(2, 3 * WIDTH)).shape == (2, OUT)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"layers": (2, 4, LAYERS + 1)}, "states.layers"),
        ({"layers": (0, 2, 4)}, "state_spec.layers"),
        ({"layers": (2,) * 17}, "state_spec.layers"),
        ({"layers": (2, 4)}, "projection.fc.weight"),
        ({"width": OUT + 1}, "head.spec.width"),
        ({"projection": "0" * 64}, "data"),
        ({"projection": "no digest"}, "state_spec.projection"),
        ({"projection": ""}, "head.spec.projection"),
    ],
)
async def test_what_does_not_fit_is_refused(change: dict[str, object], field: str) -> None:
    to, given = held(), packed()
    with pytest.raises(InvalidRequest) as caught:
        await give(to, replace(given.spec, **change), given.data)
    assert caught.value.field == field
    assert to.find(given.spec.projection) is None
    assert await give(to, given.spec, given.data) == [True, False], "a refusal must not keep others waiting"


@pytest.mark.parametrize("layers", [(1,), (), (1, 2, 3, 4)])
async def test_a_held_projection_takes_as_many_states_as_its_data_say(layers: tuple[int, ...]) -> None:
    to, given = held(), packed()
    await give(to, given.spec, given.data)
    other = replace(given.spec, layers=layers)
    with pytest.raises(InvalidRequest, match=r"states\.layers .* 3 layers"):
        to.check(other)
    with pytest.raises(InvalidRequest, match=r"states\.layers .* 3 layers"):
        await give(to, other, given.data)
    to.check(replace(given.spec, layers=(1, 2, 3)))


@pytest.mark.parametrize("size", [0, MAX_BYTES + 1, 10 << 30])
async def test_a_claim_is_refused_before_anything_is_sent(size: int) -> None:
    given = packed()
    with pytest.raises(InvalidRequest) as caught:
        await give(held(), given.spec, given.data, size)
    assert caught.value.field == "head.size"


@pytest.mark.parametrize("wrong", [-1, 1])
async def test_the_claim_is_kept(wrong: int) -> None:
    given = packed()
    with pytest.raises(InvalidRequest) as caught:
        await give(held(), given.spec, given.data, len(given.data) + wrong)
    assert caught.value.field == "data"


async def test_few_are_held_and_the_last_used_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projections, "MAX_HELD", 2)
    to, (a, b, c) = held(), (packed(seed) for seed in range(3))
    for each in (a, b, a, c):
        await give(to, each.spec, each.data)
    assert [to.find(each.spec.projection) is not None for each in (a, b, c)] == [True, False, True]


async def test_what_a_step_has_used_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projections, "MAX_HELD", 2)
    to, (a, b, c, d) = held(), (packed(seed) for seed in range(4))
    for each in (a, b):
        await give(to, each.spec, each.data)
    assert to.find(a.spec.projection)
    await give(to, c.spec, c.data)
    assert sorted(to._held) == sorted(each.spec.projection for each in (a, c)), "the one that no step has used went"
    assert to.find(c.spec.projection)
    with pytest.raises(Overloaded, match="projections in use is 2"):
        await give(to, d.spec, d.data)
    monkeypatch.setattr(projections, "_IN_USE_S", -1.0)
    await give(to, d.spec, d.data)
    assert sorted(to._held) == sorted(each.spec.projection for each in (c, d)), "used longest ago"


async def test_a_transfer_that_trickles_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projections, "_PART_TIMEOUT_S", 0.1)
    given = packed()

    async def trickle() -> AsyncIterator[common.ProjectionPart]:
        head, data = projection_parts(given.spec, given.data)
        yield head
        for byte in data.data:
            await asyncio.sleep(0.01)
            yield common.ProjectionPart(data=bytes([byte]))

    async with asyncio.timeout(2.0):
        with pytest.raises(Expired, match="too slowly"):
            _ = [wanted async for wanted in held().receive(trickle())]


async def test_a_wide_result_is_refused_before_anything_is_sent() -> None:
    given = packed()
    with pytest.raises(InvalidRequest, match="at most 16384"):
        await give(held(), replace(given.spec, width=16_385), given.data)
    with pytest.raises(InvalidRequest, match="at most 18000"):
        held((LAYERS, 9_000)).check(StateSpec((1, 2, 3)))
    held((LAYERS, 9_000)).check(StateSpec((1, 2)))


def test_memory_is_counted_as_it_is_taken() -> None:
    weight = torch.ones(OUT, WIDTH, dtype=torch.bfloat16)
    given = PackedProjection({"fc.weight": weight}, 1e-5, (1,))
    assert Projection(given.data, 1, WIDTH, torch.device("cpu")).num_bytes == 4 * (OUT * WIDTH + 1)


def test_an_engine_without_layers_refuses_in_words() -> None:
    with pytest.raises(InvalidRequest, match="captures no layers"):
        held((0, 0)).check(packed().spec)
    with pytest.raises(InvalidRequest, match="captures no layers"):
        held((0, 1)).check(StateSpec((), "0" * 64))
    held((LAYERS, WIDTH)).check(StateSpec((1, LAYERS)))
    with pytest.raises(InvalidRequest, match="width"):
        held().check(StateSpec((1, LAYERS), width=WIDTH))


async def test_one_is_received_at_a_time() -> None:
    """Each may have the memory of the largest."""
    to, going_on = held(), asyncio.Event()

    async def parts(given: PackedProjection) -> AsyncIterator[common.ProjectionPart]:
        head, *data = projection_parts(given.spec, given.data)
        yield head
        await going_on.wait()
        for part in data:
            yield part

    first = to.receive(parts(packed(0)))
    assert await anext(first)
    asked = to.receive(parts(packed(1)))

    async def is_wanted() -> bool:
        return await anext(asked)

    second = asyncio.create_task(is_wanted())
    await asyncio.sleep(0.05)
    assert not second.done()
    going_on.set()
    assert [wanted async for wanted in first] == [False]
    assert await second
