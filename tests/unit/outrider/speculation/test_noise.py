"""The shared randomness: the same everywhere, and good enough to be called random."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from outrider.speculation import noise
from outrider.speculation.noise import Use

MANY = 200_000
LOWEST_P = 1e-4
SEEDS = st.integers(0, 2**64 - 1)
POSITIONS = st.integers(0, 2**32 - 1)
MASK = 2**64 - 1

GOLDEN_KEYS = {
    (0, Use.COUPLED, 0, 0): 0x45F53BA19FD8D8CF,
    (7, Use.DRAFT, 5, 3): 0xEFF2C41843C3D17D,
    (2**64 - 1, Use.ACCEPT, 2147483648, 17): 0x3D414CD6D44A761C,
    (123456789, Use.FINAL, 1000, 0): 0x2CC381C2AD42A85A,
}
GOLDEN_UNIFORM = 0.023943812792395824
GOLDEN_EXPONENTIALS = [0.24846728121778167, 0.9631829122215242, 0.8479100835451829]
GOLDEN_RACE = [3, 0, 2, 3, 3, 3, 3, 3, 3, 1, 3, 2]


def stream(seed: int, use: Use, position: int, count: int = MANY, block: int = 0) -> torch.Tensor:
    """The noise of ids 0, 1, 2, …"""
    return noise.exponentials(torch.tensor(noise._signed(noise.key(seed, use, position, block))), torch.arange(count))


# --- the same on every machine and for ever --------------------------------------------------------------------------


def test_keys_are_pinned() -> None:
    """Changing the hash changes every seeded text that a user has kept."""
    assert [noise.key(seed, use, position, block) for seed, use, position, block in GOLDEN_KEYS] == list(
        GOLDEN_KEYS.values()
    )


def test_uniforms_are_pinned() -> None:
    assert noise.uniform(7, Use.ACCEPT, 5, 3) == GOLDEN_UNIFORM


def test_exponentials_are_pinned() -> None:
    assert stream(7, Use.COUPLED, 5, 3).tolist() == pytest.approx(GOLDEN_EXPONENTIALS, rel=1e-15)


def test_a_race_is_pinned() -> None:
    keys = [noise.key(7, Use.COUPLED, position) for position in range(12)]
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4]).expand(12, 4)
    assert noise.exponential_race(keys, torch.arange(4), weights).tolist() == GOLDEN_RACE


def independent_key(seed: int, use: int, position: int, block: int) -> int:
    """The hash once more, in numpy's arithmetic."""

    def mix(x: np.uint64) -> np.uint64:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    with np.errstate(over="ignore"):
        state = mix(np.uint64((seed + 0x9E3779B97F4A7C15 * use) & MASK))
        more = (0xD6E8FEB86659FD93 * (position + 1) + 0xA0761D6478BD642F * block) & MASK
        return int(mix(state + np.uint64(more)))


@given(seed=SEEDS, use=st.sampled_from(Use), position=POSITIONS, block=POSITIONS)
def test_the_hash_is_splitmix(seed: int, use: Use, position: int, block: int) -> None:
    assert noise.key(seed, use, position, block) == independent_key(seed, use, position, block)


@given(seed=SEEDS, use=st.sampled_from(Use), position=POSITIONS, block=POSITIONS)
def test_python_and_tensor_arithmetic_agree(seed: int, use: Use, position: int, block: int) -> None:
    """`uniform` is the hash of id 0 in plain integers; `exponentials` the same in int64 tensors."""
    key = noise.key(seed, use, position, block)
    of_id_0 = noise.exponentials(torch.tensor([noise._signed(key)]), torch.tensor([0]))
    expected = -np.log1p(-noise.uniform(seed, use, position, block))
    assert float(of_id_0) == pytest.approx(expected, rel=1e-12)


@given(st.lists(st.integers(0, MASK), min_size=1, max_size=8))
def test_the_tensor_mix_is_the_integer_mix(states: list[int]) -> None:
    mixed = noise._mix_tensor(torch.tensor([noise._signed(state) for state in states]))
    assert [value & MASK for value in mixed.tolist()] == [noise._mix(state) for state in states]


def test_an_ids_noise_does_not_depend_on_its_company() -> None:
    """A drafter looks at few ids and the target at all: both must see the same clocks."""
    whole = stream(3, Use.COUPLED, 9, 1000)
    few = torch.tensor([999, 0, 417])
    key = torch.tensor([[noise._signed(noise.key(3, Use.COUPLED, 9))]])
    assert noise.exponentials(key, few[None])[0].tolist() == whole[few].tolist()


def test_a_rows_draw_does_not_depend_on_its_neighbours() -> None:
    keys = [noise.key(1, Use.COUPLED, position) for position in range(50)]
    weights = torch.rand(50, 20, generator=torch.Generator().manual_seed(0))
    together = noise.exponential_race(keys, torch.arange(20), weights).tolist()
    alone = [int(noise.exponential_race([keys[i]], torch.arange(20), weights[i : i + 1])) for i in range(50)]
    assert together == alone


def test_a_race_takes_ids_per_row() -> None:
    keys = [noise.key(1, Use.COUPLED, position) for position in range(40)]
    weights = torch.rand(40, 30, generator=torch.Generator().manual_seed(0))
    order = torch.stack([torch.randperm(30, generator=torch.Generator().manual_seed(i)) for i in range(40)])
    in_order = noise.exponential_race(keys, torch.arange(30), weights)
    shuffled = noise.exponential_race(keys, order, weights.gather(1, order))
    assert order.gather(1, shuffled[:, None])[:, 0].tolist() == in_order.tolist()


# --- good enough -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", Use)
def test_noise_is_exponential_of_rate_one(use: Use) -> None:
    values = stream(42, use, 17).numpy()
    assert values.mean() == pytest.approx(1.0, abs=5 / MANY**0.5)
    assert stats.kstest(values, "expon").pvalue > LOWEST_P


def test_noise_over_positions_is_exponential_too() -> None:
    keys = [noise._signed(noise.key(42, Use.COUPLED, position)) for position in range(50_000)]
    values = noise.exponentials(torch.tensor(keys), torch.tensor(3)).numpy()
    assert stats.kstest(values, "expon").pvalue > LOWEST_P


def test_uniforms_are_uniform() -> None:
    values = [noise.uniform(seed, Use.ACCEPT, position, 3) for seed in range(200) for position in range(100)]
    assert 0.0 < min(values) < max(values) < 1.0
    assert stats.kstest(values, "uniform").pvalue > LOWEST_P


def test_there_is_neither_zero_nor_infinity() -> None:
    values = stream(1, Use.COUPLED, 1, 2_000_000)
    assert bool(torch.isfinite(values).all())
    assert float(values.min()) > 0.0


@pytest.mark.parametrize("bits", [0, 2**53 - 1])
def test_the_extremes_of_the_hash_are_finite_and_positive(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "_mix_tensor", lambda x: torch.full_like(x, noise._signed(bits << 11)))
    value = float(noise.exponentials(torch.tensor([0]), torch.tensor([0])))
    assert 0.0 < value < 40.0


@pytest.mark.parametrize("bits", [0, 2**53 - 1])
def test_the_extremes_of_uniform_lie_inside_the_unit_interval(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guess that the target would say for certain must hold, and one that it never says must not."""
    monkeypatch.setattr(noise, "_mix", lambda x: bits << 11)
    assert 0.0 < noise.uniform(0, Use.ACCEPT, 0) < 1.0


STREAMS = {
    "seed": (5, Use.COUPLED, 100, 0),
    "next seed": (6, Use.COUPLED, 100, 0),
    "far seed": (2**63 + 5, Use.COUPLED, 100, 0),
    "next position": (5, Use.COUPLED, 101, 0),
    "another use": (5, Use.DRAFT, 100, 0),
    "yet another use": (5, Use.FINAL, 100, 0),
    "another block": (5, Use.COUPLED, 100, 1),
    "a block that mimics a position": (5, Use.COUPLED, 99, 1),
}


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(STREAMS, 2)))
def test_streams_are_uncorrelated(one: str, other: str) -> None:
    count = 50_000
    a, b = (stream(s, u, p, count, k).numpy() for s, u, p, k in (STREAMS[one], STREAMS[other]))
    assert stats.pearsonr(a, b).pvalue > LOWEST_P
    assert stats.pearsonr(a[1:], b[:-1]).pvalue > LOWEST_P
    assert not set(a.tolist()) & set(b.tolist())


def test_neighbouring_ids_are_uncorrelated() -> None:
    values = stream(5, Use.COUPLED, 100).numpy()
    for lag in (1, 2, 64):
        assert stats.pearsonr(values[lag:], values[:-lag]).pvalue > LOWEST_P


def test_keys_of_a_long_session_never_meet() -> None:
    keys = {noise.key(seed, use, position) for seed in range(3) for use in Use for position in range(20_000)}
    assert len(keys) == 3 * len(Use) * 20_000


# --- the race --------------------------------------------------------------------------------------------------------


def test_weights_of_zero_never_win() -> None:
    keys = [noise.key(1, Use.COUPLED, position) for position in range(5000)]
    weights = torch.tensor([0.0, 1e-9, 0.0, 0.5]).expand(5000, 4)
    assert set(noise.exponential_race(keys, torch.arange(4), weights).tolist()) <= {1, 3}


def test_weights_need_no_normalising() -> None:
    keys = [noise.key(1, Use.COUPLED, position) for position in range(2000)]
    weights = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64).expand(2000, 3)
    assert (
        noise.exponential_race(keys, torch.arange(3), weights).tolist()
        == noise.exponential_race(keys, torch.arange(3), weights * 1e-4).tolist()
    )
    parts = torch.tensor([[2, 5, 3]]).expand(2000, 3)
    assert (
        noise.exponential_race(keys, torch.arange(3), parts).tolist()
        == noise.exponential_race(keys, torch.arange(3), weights).tolist()
    )


@given(st.integers(0, 2**32))
def test_alike_distributions_mostly_draw_alike(seed: int) -> None:
    """What coupling is for: P(equal) ≥ (1 − TV) / (1 + TV)."""
    keys = [noise.key(seed, Use.COUPLED, position) for position in range(400)]
    target = torch.tensor([[0.5, 0.3, 0.2]]).expand(400, 3)
    draft = torch.tensor([[0.45, 0.35, 0.2]]).expand(400, 3)
    same = noise.exponential_race(keys, torch.arange(3), target) == noise.exponential_race(keys, torch.arange(3), draft)
    bound = (1 - 0.05) / (1 + 0.05)
    assert float(same.to(torch.float64).mean()) > bound - 5 * (bound * (1 - bound) / 400) ** 0.5


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    sharpness=st.sampled_from([0.0, 0.5, 3.0, 12.0]),
    zeros=st.sampled_from([0.0, 0.9, 0.999]),
)
def test_a_race_of_many_is_won_by_the_one_who_would_win_it_looked_at_closely(
    seed: int, sharpness: float, zeros: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.arange(40_000)
    weights = torch.softmax(torch.randn((2, len(ids)), generator=generator).double() * sharpness, dim=-1)
    weights = weights * (torch.rand(weights.shape, generator=generator) >= zeros)
    keys = [noise.key(seed, Use.COUPLED, position) for position in (0, 1)]
    states = torch.tensor([key - (1 << 64) if key >= 1 << 63 else key for key in keys])
    closely = (noise.exponentials(states[:, None], ids) / weights).argmin(dim=-1)
    assert torch.equal(noise.exponential_race(keys, ids, weights), closely)
