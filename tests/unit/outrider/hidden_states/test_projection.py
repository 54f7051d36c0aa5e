"""Projections: the same numbers as the published modules, and refusals of everything that is not a projection."""

from __future__ import annotations

import hashlib

import pytest
import torch
from safetensors.torch import save
from torch import nn

from outrider.hidden_states.projection import PackedProjection, Projection
from outrider.protocol.errors import InvalidRequest

WIDTH, STATES, OUT = 6, 3, 5
CPU = torch.device("cpu")


def weights(seed: int = 0, **more: tuple[int, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"fc.weight": (OUT, STATES * WIDTH), **more}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def norms(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": ({"input_norm": STATES * WIDTH, "hidden_norm": OUT}[name],)}


def read(data: bytes) -> Projection:
    return Projection(data, STATES, WIDTH, CPU)


@pytest.mark.parametrize(
    "more",
    [
        {},
        norms("input_norm"),
        norms("hidden_norm"),
        {"fc.bias": (OUT,)},
        {f"fc_norm.{i}.weight": (WIDTH,) for i in range(STATES)},
    ],
)
def test_it_computes_what_the_modules_compute(more: dict[str, tuple[int, ...]]) -> None:
    given = weights(**more)
    packed = PackedProjection(given, 1e-5, (2, 5, 9))
    assert packed.spec.projection == hashlib.sha256(packed.data).hexdigest()
    assert (packed.spec.layers, packed.spec.width) == ((2, 5, 9), OUT)
    states = torch.randn(4, STATES * WIDTH, generator=torch.Generator().manual_seed(1))

    def norm(name: str, values: torch.Tensor) -> torch.Tensor:
        module = nn.RMSNorm(values.shape[-1], 1e-5)
        module.weight = nn.Parameter(given[name])
        normed: torch.Tensor = module(values)
        return normed

    wanted = norm("input_norm.weight", states) if "input_norm.weight" in given else states
    if "fc_norm.0.weight" in given:
        wanted = torch.cat([norm(f"fc_norm.{i}.weight", part) for i, part in enumerate(states.chunk(3, -1))], -1)
    wanted = wanted @ given["fc.weight"].T + given.get("fc.bias", torch.zeros(OUT))
    if "hidden_norm.weight" in given:
        wanted = norm("hidden_norm.weight", wanted)
    torch.testing.assert_close(read(packed.data)(states), wanted.detach(), atol=1e-5, rtol=1e-5)


def packed(given: dict[str, torch.Tensor]) -> bytes:
    return save({"eps": torch.tensor([1e-5]), **given})


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "unreadable"),
        (b"\x80\x04cos\nsystem\n", "unreadable"),  # a pickle is not run
        ((10 << 30).to_bytes(8, "little") + b"{}", "unreadable"),
        (packed({}), "fc.weight"),
        (packed({"fc.weight": torch.zeros(OUT, WIDTH)}), f"of shape [{OUT}, {STATES * WIDTH}]"),
        (packed({"fc.weight": torch.zeros(OUT)}), "of shape"),
        (packed({"fc.weight": torch.zeros(())}), "rows"),
        (packed(weights(other=(3,))), "projection.other"),
        (packed({"fc.weight": torch.full((OUT, STATES * WIDTH), torch.nan)}), "finite"),
        (packed({"fc.weight": torch.full((OUT, STATES * WIDTH), torch.inf)}), "finite"),
        (packed({"fc.weight": torch.zeros(OUT, STATES * WIDTH, dtype=torch.int64)}), "torch.float32"),
        (packed(weights(**{"fc_norm.0.weight": (WIDTH,)})), "all fc_norm"),
        (packed({**weights(), "eps": torch.tensor([2.0])}), "eps"),
        (save(weights()), "eps"),
    ],
)
def test_what_is_no_projection_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(data)
    assert says in caught.value.message
