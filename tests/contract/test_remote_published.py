"""A drafter 20 and 80 ms away: as many guesses accepted as beside its coordinator, at how many bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from drafter.interface import Drafter
from drafter.methods.registry import make
from outrider.base.aio import until
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
from outrider.models.hub import DEFAULT
from outrider.settings.drafter import DrafterSettings
from outrider.testing.link_emulator import LinkShape
from outrider.train.data import shipped
from tests import published, turning
from tests.cluster import Prompt, Redis
from tests.contract.test_layer_drafters import PER_MESSAGE, Fleet, fed, fleet

pytestmark = pytest.mark.timeout(900)

KINDS = (*turning.KINDS, "peagle")
ROUND_TRIPS_MS = (0, 20, 80)
GAMMA = 4  # of the sessions of `fleet`
LEAST = 0.95  # of the accept length beside the coordinator
ATTEMPTS = 20
LATE = 8  # steps at most before a drafter has joined, in a session that counts
PACE = "1:30"  # of the target: a drafter joins within few of its steps
REAL_PROMPTS, REAL_TOKENS = 10, 64


@dataclass
class Measured:
    """What sessions at one distance came to."""

    proposed: int = 0
    accepted: int = 0
    positions: int = 0  # whose states the drafter got
    state_bytes: int = 0
    socket_bytes: int = 0  # to the drafter, its messages too
    steps: int = 0
    texts: list[list[int]] = field(default_factory=list)

    @property
    def length(self) -> float:
        """Return the tokens of a verdict on guesses."""
        return 1 + GAMMA * self.accepted / max(1, self.proposed)

    def __str__(self) -> str:
        """Return a row of the table in docs/drafters.md."""
        per = [count / self.positions for count in (self.state_bytes, self.socket_bytes)]
        return f"{self.length:.2f} tokens per verdict, {per[0]:.0f} bytes of states, {per[1]:.0f} at the socket"


async def measured(running: Fleet, prompts: Sequence[Prompt], tokens: int, **params: Any) -> Measured:
    """Answer prompts one by one; a session that its drafter joined late is repeated."""
    found = Measured()
    for prompt in prompts:
        for _ in range(ATTEMPTS):
            before = running.num_bytes[1]
            output = await running.generate(prompt, max_tokens=tokens, **params)
            if output.stats.steps - output.stats.draft_tokens / GAMMA <= LATE:
                break
        else:
            raise AssertionError(f"its drafter joined late: {output.stats}")
        found.proposed += output.stats.draft_tokens
        found.accepted += output.stats.accepted_tokens
        found.positions += output.prompt_tokens + len(output.token_ids)
        found.state_bytes += output.stats.feature_bytes
        found.socket_bytes += running.num_bytes[1] - before
        found.steps += output.stats.steps
        found.texts.append(output.token_ids)
    return found


def check(found: dict[int, Measured], row_bytes: int) -> None:
    """Compare the distances, and the bytes with those of one row of a state for each position."""
    for round_trip_ms, each in found.items():
        print(f"{round_trip_ms} ms: {each}")
        assert 0.9 * row_bytes <= each.state_bytes / each.positions <= row_bytes
        assert each.socket_bytes <= each.positions * row_bytes + PER_MESSAGE * (each.steps + 20 * len(each.texts))
    local, *remote = found.values()
    assert local.length > 1.25
    for each in remote:
        assert each.texts == local.texts
        assert each.length >= LEAST * local.length


@asynccontextmanager
async def serving(
    kind: str, redis: Redis, folder: Path, feature_dtype: str = "float16", from_state: float = turning.FROM_STATE
) -> AsyncIterator[Fleet]:
    """Serve a toy target, and a drafter that agrees with it."""
    target = turning.target(folder / "target")
    if kind == "peagle":
        made = partial(published.eagle3, layout="speculators", kind=kind, draft_vocab=200, attention_bias=True)
        checkpoint = published.agreeing(made(folder / "drafter", mask_token_id=5), published.weights_of(target))
    else:
        checkpoint = turning.drafter(kind, folder / "drafter", target, from_state=from_state)
    chosen = DrafterSettings(kind="published", model=str(checkpoint), target=str(target), device="cpu")
    async with behind_links(make(chosen, lambda _: None), str(target), redis, folder, feature_dtype, PACE) as running:
        yield running


@asynccontextmanager
async def behind_links(
    drafter: Drafter, target: str, redis: Redis, folder: Path, feature_dtype: str, pace: str = ""
) -> AsyncIterator[Fleet]:
    loaded = load_model(target, EngineOptions(device="cpu", pace=pace))
    async with fleet(loaded, redis, folder, drafter, feature_dtype) as running:
        projection = getattr(drafter, "projection", None)
        assert await until(lambda: projection is None or fed(running.service, projection), 20)
        assert await until(lambda: bool(running.drafters()), 20)
        yield running


async def at_all_distances(
    running: Fleet, prompts: Sequence[Prompt], tokens: int, **params: Any
) -> dict[int, Measured]:
    found = {}
    for round_trip_ms in ROUND_TRIPS_MS:
        running.links[1].shape = LinkShape(delay_ms=round_trip_ms / 2)
        found[round_trip_ms] = await measured(running, prompts, tokens, **params)
    return found


@pytest.mark.parametrize("kind", turning.KINDS)
async def test_states_from_afar_are_those_of_their_positions(kind: str, redis_server: Redis, tmp_path: Path) -> None:
    """A drafter that guesses by the states alone holds every time, or never."""
    async with serving(kind, redis_server, tmp_path, from_state=1.0) as running:
        running.links[1].shape = LinkShape(delay_ms=10)
        found = await measured(running, [list(range(20, 50))], 30)
    assert found.accepted == found.proposed > 0


@pytest.mark.prove
@pytest.mark.parametrize(("feature_dtype", "temperature"), [("float16", 0.0), ("float16", 1.0), ("fp8", 1.0)])
@pytest.mark.parametrize("kind", KINDS)
async def test_remote_equals_local(
    kind: str, feature_dtype: str, temperature: float, redis_server: Redis, tmp_path: Path
) -> None:
    row_bytes = 2 * published.HIDDEN if feature_dtype == "float16" else 1 + published.HIDDEN
    prompts = [list(range(first, first + 30)) for first in (20, 90)]
    from_state = turning.FROM_STATE if temperature else 1.0
    async with serving(kind, redis_server, tmp_path, feature_dtype, from_state) as running:
        found = await at_all_distances(running, prompts, 100, temperature=temperature)
    print(f"{kind}, {feature_dtype}, temperature {temperature:g}")
    check(found, row_bytes)


@pytest.mark.prove
async def test_a_prefix_that_plain_sessions_computed_costs_no_acceptance(redis_server: Redis, tmp_path: Path) -> None:
    """The bundled drafter reads the whole context. Of plain sessions the verifier keeps no states."""
    drafter = make(DrafterSettings(kind="eagle", device="cpu"), lambda _: None)
    prompts = [each.text for each in shipped("heldout") if each.kind in ("summarise", "edit")][:REAL_PROMPTS]
    async with behind_links(drafter, DEFAULT, redis_server, tmp_path, "float16") as running:
        for prompt in prompts:
            plain = await running.generate(prompt, max_tokens=1, gamma=0)
            assert not plain.stats.feature_bytes
        cached, computed = [await measured(running, prompts, REAL_TOKENS, salt=salt) for salt in ("", "another")]
    print(f"computed: {computed}\ncached: {cached}")
    assert cached.texts == computed.texts
    assert cached.state_bytes == computed.state_bytes
    assert cached.length >= LEAST * computed.length


@pytest.mark.prove
@pytest.mark.parametrize("feature_dtype", ["float16", "fp8"])
async def test_the_bundled_pair(feature_dtype: str, redis_server: Redis, tmp_path: Path) -> None:
    drafter = make(DrafterSettings(kind="eagle", device="cpu"), lambda _: None)
    every = shipped("heldout")
    prompts = [each.text for each in every[:: len(every) // REAL_PROMPTS]]
    async with behind_links(drafter, DEFAULT, redis_server, tmp_path, feature_dtype, PACE) as running:
        found = await at_all_distances(running, prompts, REAL_TOKENS, temperature=0.0)
    print(f"bundled pair, {feature_dtype}")
    check(found, 2 * 576 if feature_dtype == "float16" else 577)
