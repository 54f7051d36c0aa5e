"""Published drafters behind a coordinator and a verifier, over real sockets: the text is always the target's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import LlamaForCausalLM

from coordinator.api.service import CoordinatorService
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
from outrider.models.drafter_choice import choose_drafter
from outrider.settings.coordinator import CoordinatorSettings
from outrider.testing.toy_models import make_model
from outrider.v1 import common_pb2 as common
from tests import published
from tests.cluster import Redis, in_process
from tests.contract.conftest import HEARTBEAT_MS, Home, drafter_serving, verifier_serving

pytestmark = pytest.mark.timeout(120)

LENGTH = 40
KINDS = ("eagle", "eagle-layers", "mimo-mtp")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose next token depends on the last one more than on those before."""
    folder = make_model(
        tmp_path_factory.mktemp("models") / "target", seed=7, hidden=published.HIDDEN, layers=6, sharpness=2.0
    )
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(0.001)
    model.save_pretrained(folder)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def home(target: Path, redis_server: Redis, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Home]:
    settings = CoordinatorSettings(http_port=0, heartbeat_ms=HEARTBEAT_MS, worker_wait_s=5)
    service = CoordinatorService(settings, redis_server.url)
    loaded = load_model(str(target), EngineOptions(device="cpu"))
    async with (
        in_process(service, settings) as coordinator,
        verifier_serving(loaded, tmp_path_factory.mktemp("tokenizer"), coordinators=coordinator),
    ):
        home = Home(coordinator, service)
        await home.knows(0)
        yield home


def flags(checkpoint: Path, target: Path) -> dict[str, Any]:
    """Return the flags of `outrider up --drafter DIR`: no kind is named."""
    kind, model = choose_drafter(str(checkpoint), str(target))
    return {"kind": kind, "model": model, "target": str(target), "device": "cpu", "kv_tokens": 4096}


@pytest.mark.parametrize("name", KINDS)
async def test_text_is_the_targets_and_guesses_are_accepted(
    home: Home, target: Path, name: str, tmp_path: Path
) -> None:
    params: dict[str, Any] = {"max_tokens": LENGTH, "seed": 5}
    greedy, drawn = [await home.answer(gamma=0, temperature=t, **params) for t in (0.0, 1.0)]
    checkpoint = published.agreeing(published.CASES[name](tmp_path), published.weights_of(target))
    chosen = flags(checkpoint, checkpoint if name == "mimo-mtp" else target) | {"target": str(target)}
    assert (chosen["kind"], chosen["model"]) == ("published", str(checkpoint)), "no kind was named"
    async with drafter_serving(**chosen, coordinators=home.coordinator):
        await home.knows(1)
        same = await asyncio.gather(
            *(home.answer(gamma=4, branches=b, temperature=0.0, **params) for b in (1, 3)),
        )
        sampled = await asyncio.gather(*(home.answer(gamma=4, branches=b, temperature=1.0, **params) for b in (1, 3)))
        others = await asyncio.gather(
            *(
                home.answer(gamma=4, temperature=1.0, verification=mode, **params)
                for mode in (common.VERIFICATION_REJECTION, common.VERIFICATION_BLOCK)
            )
        )
    await home.knows(0)
    assert [output.token_ids for output in same] == [greedy.token_ids] * 2
    assert [output.token_ids for output in sampled] == [drawn.token_ids] * 2
    assert all(len(output.token_ids) == LENGTH for output in others)
    for output in (*same, *sampled, *others):
        assert output.stats.draft_tokens > 0
        assert output.stats.drafter_losses == 0
        assert output.stats.accepted_tokens > LENGTH / 8
