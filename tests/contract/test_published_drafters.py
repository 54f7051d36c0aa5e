"""Published drafters behind a coordinator and a verifier, over real sockets: the text is always the target's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from coordinator.api.service import CoordinatorService
from outrider.base.aio import until
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
from outrider.models.drafter_choice import choose_drafter
from outrider.protocol.fleet import Role
from outrider.protocol.hidden_states.messages import FINAL_STATES
from outrider.settings.coordinator import CoordinatorSettings
from outrider.v1 import common_pb2 as common
from tests import published, turning
from tests.cluster import Redis, in_process
from tests.contract.conftest import HEARTBEAT_MS, Home, after_joining, drafter_serving, verifier_serving

pytestmark = pytest.mark.timeout(120)

LENGTH = 32
AGREEING: dict[str, published.Maker] = {  # by the last token
    "mimo-mtp": published.mimo,
    "deepseek-mtp": published.deepseek,
    "peagle": partial(
        published.eagle3, layout="speculators", kind="peagle", draft_vocab=200, attention_bias=True, mask_token_id=5
    ),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return turning.target(tmp_path_factory.mktemp("models") / "target")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def home(target: Path, redis_server: Redis, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Home]:
    settings = CoordinatorSettings(http_port=0, heartbeat_ms=HEARTBEAT_MS, worker_wait_s=5)
    service = CoordinatorService(settings, redis_server.url)
    loaded = load_model(str(target), EngineOptions(device="cpu"))
    async with (
        in_process(service, settings) as coordinator,
        verifier_serving(loaded, tmp_path_factory.mktemp("tokenizer"), coordinators=coordinator),
    ):
        home = Home(coordinator, service, loaded)
        await home.knows(0)
        yield home


def flags(checkpoint: Path, target: Path) -> dict[str, Any]:
    """Return the flags of `outrider up --drafter DIR`: no kind is named."""
    kind, model = choose_drafter(str(checkpoint), str(target))
    return {"kind": kind, "model": model, "target": str(target), "device": "cpu", "kv_tokens": 4096}


def fed(service: CoordinatorService) -> bool:
    """Return whether the verifier has the projections of all drafters."""
    workers = [connection.info for connection in service.sessions.worker_pool.connections()]
    (verifier,) = (worker for worker in workers if worker.role is Role.VERIFIER)
    specs = [worker.state_spec or FINAL_STATES for worker in workers if worker.role is Role.DRAFTER]
    return all(service.sessions.delivery.feeds(verifier, spec) for spec in specs)


@pytest.mark.parametrize("name", [*turning.KINDS, *AGREEING])
async def test_text_is_the_targets_and_guesses_are_accepted(
    home: Home, target: Path, name: str, tmp_path: Path
) -> None:
    params: dict[str, Any] = {"max_tokens": LENGTH, "seed": 5}
    greedy, drawn = [await home.answer(gamma=0, temperature=t, **params) for t in (0.0, 1.0)]
    if name in AGREEING:
        checkpoint = published.agreeing(AGREEING[name](tmp_path), published.weights_of(target))
    else:
        checkpoint = turning.drafter(name, tmp_path, target)
    chosen = flags(checkpoint, checkpoint if name.endswith("-mtp") else target) | {"target": str(target)}
    assert (chosen["kind"], chosen["model"]) == ("published", str(checkpoint)), "no kind was named"
    async with drafter_serving(**chosen, coordinators=home.coordinator):
        await home.knows(1)
        assert await until(lambda: fed(home.service), 20)
        modes = (common.VERIFICATION_REJECTION, common.VERIFICATION_BLOCK)
        with after_joining(home.loaded, home.service):
            outputs = await asyncio.gather(
                *(home.answer(gamma=4, branches=b, temperature=t, **params) for t in (0.0, 1.0) for b in (1, 3)),
                *(home.answer(gamma=4, temperature=1.0, verification=mode, **params) for mode in modes),
            )
    await home.knows(0)
    wanted = [greedy.token_ids] * 2 + [drawn.token_ids] * 2
    assert [output.token_ids for output in outputs[:4]] == wanted
    assert all(len(output.token_ids) == LENGTH for output in outputs)
    assert all(output.stats.drafter_losses == 0 for output in outputs)
    for first in (0, 2, 4):  # greedy, coupled, and with draws of the drafter's own
        assert sum(output.stats.accepted_tokens for output in outputs[first : first + 2]) > 0
