"""Hidden states after layers of a target on vLLM, and a published drafter that reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

from coordinator.api.service import CoordinatorService
from drafter.methods.published import make
from drafter.service import DrafterService
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
from outrider.engine.vllm.loading import LoadedCore, load_core
from outrider.hidden_states.rows import decode
from outrider.protocol.errors import InvalidRequest, StartupError
from outrider.protocol.hidden_states.messages import StateSpec, StateSpecs
from outrider.protocol.sampling_params import SamplingParams
from outrider.settings.coordinator import CoordinatorSettings
from outrider.settings.drafter import DrafterSettings
from outrider.settings.verifier import VerifierSettings
from outrider.testing.toy_models import byte_tokenizer
from tests import published, turning
from tests.cluster import in_process
from tests.contract.conftest import HEARTBEAT_MS, Home, save_tokenizer
from tests.vllm.conftest import RUNNER, Request, loop_over, options, run, vllm_target
from verifier.engine_target import EngineTarget
from verifier.hidden_states.buffer import PROMPT_WINDOW
from verifier.service import VerifierService
from verifier.vllm_target import VllmTarget, vllm_options

pytestmark = [pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]

LAYERS = (2, 3, 6)  # those of an EAGLE-3 drafter for six layers
LENGTH = 32


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return turning.target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def capturing(target: Path) -> Iterator[tuple[VllmTarget, LoadedCore]]:
    with vllm_target(target, layers=LAYERS) as made:
        yield made


def asked() -> list[Request]:
    return [
        Request(
            f"request {number}",
            [(11 * i + number) % 251 for i in range(90)],
            SamplingParams(seed=number, max_tokens=12, temperature=0.0),
            gamma=3,
            draft_wait_s=0.2,
            salt="no prefix of others",
            states=StateSpecs((StateSpec(layers=(6, 2), number=1),)),
        )
        for number in range(3)
    ]


def rows_of(request: Request) -> torch.Tensor:
    parts = [part for verdict in request.verdicts for part in verdict.layer_states]
    assert all(a.position + a.count == b.position for a, b in pairwise(parts))
    return torch.cat([decode(part) for part in parts])


async def test_states_after_layers_are_those_of_our_own_engine(
    capturing: tuple[VllmTarget, LoadedCore], target: Path
) -> None:
    """Prompts come in chunks, guesses fail in the middle, and layers are asked for in another order."""
    own = EngineTarget(load_model(str(target), EngineOptions(engine="transformers")).engine)
    ours, theirs = asked(), asked()
    truth = await run(loop_over(own), ours)
    own.close()

    def half_right(request: Request) -> list[int]:
        at, text = len(request.tokens), truth[int(request.name[-1])]
        right = text[at : min(at + 3, len(text) - 1)]
        return [*right[:1], *((token + 1) % 251 for token in right[1:])]

    assert await run(loop_over(capturing[0]), theirs, half_right) == truth
    assert sum(request.accepted for request in theirs) > 0
    for mine, other in zip(map(rows_of, ours), map(rows_of, theirs), strict=True):
        assert mine.shape == other.shape == (90 + 11, 2 * published.HIDDEN)
        assert torch.allclose(mine, other, rtol=0, atol=2e-2)


def bloom(folder: Path) -> Path:
    config = BloomConfig(vocab_size=257, hidden_size=64, n_layer=1, n_head=2)
    BloomForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


async def test_a_prefix_that_was_cached_without_states_is_computed_again(
    capturing: tuple[VllmTarget, LoadedCore], target: Path
) -> None:
    """From the last window on, for the session that asks first. The states before it are gone, and kept after it."""
    prompt, spec = [(7 * i + 3) % 251 for i in range(400)], StateSpec(layers=LAYERS, number=1)
    window, loop = (len(prompt) - PROMPT_WINDOW) // 32 * 32, loop_over(capturing[0])
    params = SamplingParams(seed=1, max_tokens=4, temperature=0.0)

    def request(name: str, salt: str, *specs: StateSpec) -> Request:
        return Request(name, prompt, params, salt=salt, states=StateSpecs(specs))

    sessions = [
        request("plain", "shared"),
        request("first", "shared", spec),
        request("second", "shared", spec),
        request("computed", "of its own", spec),
    ]
    for each in sessions:
        await run(loop, [each])
    cached = [each.verdicts[0].timings.cached_tokens for each in sessions]
    assert cached == [0, window, len(prompt) // 32 * 32, 0]
    first, second, computed = map(rows_of, sessions[1:])
    assert len(computed) == PROMPT_WINDOW + 3
    for found in (first, second):
        assert torch.allclose(found, computed, rtol=0, atol=2e-2)


async def test_layers_that_are_not_captured_are_refused(capturing: tuple[VllmTarget, LoadedCore], target: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"\[2, 3, 6\], its --state-layers"):
        capturing[0].projections.check(StateSpec(layers=(2, 4)))
    with pytest.raises(StartupError, match="no layers"):
        vllm_options(VerifierSettings(state_layers="2,three"))
    assert vllm_options(VerifierSettings(state_layers="6,2,6")).layers == (2, 6)
    with pytest.raises(StartupError, match="the model has 6 layers"):
        load_core(str(target), options(layers=(2, 7)), lambda stage: None)


@pytest.mark.prove
def test_a_family_whose_layers_vllm_keeps_to_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no hidden states of the layers of BloomForCausalLM"):
        load_core(str(bloom(tmp_path)), options(layers=(1,)), lambda stage: None)


@pytest.mark.skipif(RUNNER == "v2", reason="the states are compared there")
async def test_a_published_drafter_reads_them(
    capturing: tuple[VllmTarget, LoadedCore], target: Path, tmp_path: Path
) -> None:
    """The agreeing one guesses by the last token, which its projection must not spoil."""
    vllm, loaded = capturing
    checkpoint = published.agreeing(
        published.eagle3(tmp_path, attention_bias=True, draft_vocab=200), published.weights_of(target)
    )
    settings = CoordinatorSettings(http_port=0, heartbeat_ms=HEARTBEAT_MS, worker_wait_s=5)
    files = save_tokenizer(loaded.tokenizer, tmp_path / "tokenizer")
    service = CoordinatorService(settings, "redis://127.0.0.1:1")
    async with in_process(service, settings) as address:
        chosen = VerifierSettings(coordinators=address)
        drafting = DrafterSettings(
            kind="published",
            model=str(checkpoint),
            target=str(target),
            device="cpu",
            kv_tokens=4096,
            coordinators=address,
        )
        async with in_process(VerifierService(vllm, loaded.vocabulary, files, chosen), chosen):
            home = Home(address, service)
            await home.knows(0)
            plain = await home.answer(gamma=0, temperature=0.0, max_tokens=LENGTH)
            async with in_process(DrafterService(make(drafting, lambda _: None), drafting), drafting):
                await home.knows(1)
                accepted = 0
                async with asyncio.timeout(60):
                    while accepted < LENGTH:
                        output = await home.answer(gamma=4, temperature=0.0, max_tokens=LENGTH)
                        assert output.token_ids == plain.token_ids
                        accepted += output.stats.accepted_tokens
