"""A published drafter 20 and 80 ms away: as many guesses accepted as beside its coordinator, at how many bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafter.methods.published import make
from outrider.base.aio import until
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
from outrider.settings.drafter import DrafterSettings
from outrider.testing.link_emulator import LinkShape
from tests import published
from tests.cluster import Redis
from tests.contract.test_layer_drafters import PER_MESSAGE, PROMPT, TOKENS, Fleet, fed, fleet
from tests.contract.test_published_drafters import near_table

pytestmark = [pytest.mark.prove, pytest.mark.timeout(300)]

ATTEMPTS = 2  # the first brings the drafter into the fleet
ROUND_TRIPS_MS = (0, 20, 80)
WIDTH = published.HIDDEN
GAMMA = 4  # of the sessions of `fleet`
LEAST = 0.95  # of the accept length beside the coordinator


@pytest.mark.parametrize(("feature_dtype", "row_bytes"), [("float16", 2 * WIDTH), ("fp8", 1 + WIDTH)])
async def test_remote_equals_local(redis_server: Redis, tmp_path: Path, feature_dtype: str, row_bytes: int) -> None:
    target = near_table(tmp_path / "target")
    made = published.dflash(tmp_path / "drafter", kind="dspark")
    checkpoint = published.agreeing(made, published.weights_of(target))
    drafter = make(
        DrafterSettings(kind="published", model=str(checkpoint), target=str(target), device="cpu"), lambda _: None
    )
    loaded = load_model(str(target), EngineOptions(device="cpu"))
    lengths: dict[int, float] = {}
    async with fleet(loaded, redis_server, tmp_path, drafter, feature_dtype) as running:
        assert await until(lambda: fed(running.service, drafter.projection), 20)
        for round_trip_ms in ROUND_TRIPS_MS:
            running.links[1].shape = LinkShape(delay_ms=round_trip_ms / 2)
            lengths[round_trip_ms], num_bytes, steps = await measured(running)
            shown = f"{lengths[round_trip_ms]:.2f} tokens a verdict, {num_bytes / (len(PROMPT) + TOKENS):.0f} bytes"
            print(f"{feature_dtype}, {round_trip_ms} ms: {shown}, {steps} steps")
            assert num_bytes <= (len(PROMPT) + TOKENS) * row_bytes + PER_MESSAGE * (steps + 20)
    local = lengths.pop(0)
    assert local > 1.4
    assert min(lengths.values()) >= LEAST * local, lengths


async def measured(running: Fleet) -> tuple[float, int, int]:
    """Return tokens per verdict on guesses, the bytes to the drafter, and the steps, of a session that it joined.

    Steps before it joined have no guesses: how many these are is a matter of the target's speed.
    """
    best = (0.0, 0, 0)
    for _ in range(ATTEMPTS):
        before = running.num_bytes[1]
        stats = (await running.generate()).stats
        length = 1 + GAMMA * stats.accepted_tokens / max(1, stats.draft_tokens)
        best = max(best, (length, running.num_bytes[1] - before, stats.steps))
    return best
