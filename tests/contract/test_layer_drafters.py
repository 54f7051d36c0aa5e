"""A drafter that reads several layers, through all services: what reaches it, at what cost, and what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from coordinator.api.service import CoordinatorService
from drafter.interface import Drafter, DraftRequest
from drafter.service import DrafterService
from outrider.base.aio import until
from outrider.engine.loading.loader import LoadedModel
from outrider.hidden_states.projection import PackedProjection, Projection
from outrider.hidden_states.rows import decode
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.speculation import Guess
from outrider.settings.coordinator import CoordinatorSettings
from outrider.settings.drafter import DrafterSettings
from outrider.testing.link_emulator import EmulatedLink
from tests.cluster import Output, Prompt, Redis, ask, client, free_port, generate, in_process
from tests.contract.conftest import after_joining, verifier_serving
from tests.contract.test_hidden_states import states_of

pytestmark = pytest.mark.timeout(60)

LAYERS = (1, 2)
OUT = 1024  # so wide that its bytes outweigh those of messages
TOKENS = 100
PROMPT = [(5 * i + 2) % 251 for i in range(30)]
# Of a verdict or commit beside its states, in both directions of the socket: see test_wire_bytes.
PER_MESSAGE = 160


@dataclass(slots=True)
class Reader:
    """A drafter that keeps what it gets, and guesses the text that it was told."""

    projection: PackedProjection
    truth: list[int]
    needs_hidden_states: bool = True
    info: ModelInfo = field(default_factory=lambda: ModelInfo("reader", "reader"))
    vocabulary: None = None
    states: dict[int, torch.Tensor] = field(default_factory=dict)  # by position
    num_bytes: int = 0

    def draft(self, requests: Sequence[DraftRequest]) -> list[Guess]:
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> Guess:
        for part in request.hidden_states:
            self.num_bytes += len(part.rows)
            for offset, row in enumerate(decode(part)):
                self.states[part.position + offset] = row
        at = len(request.tokens)
        return request.chain(self.truth[at : at + request.max_new_tokens], done=True)

    def forget(self, session: str) -> None:
        """Keep everything: there is one session."""


def packed(model: LlamaForCausalLM, *, scale: float = 1.0, inputs: int = len(LAYERS)) -> PackedProjection:
    width, generator = model.config.hidden_size, torch.Generator().manual_seed(0)
    weight = scale * torch.randn(OUT, inputs * width, generator=generator) / width**0.5
    return PackedProjection({"fc.weight": weight}, 1e-5, LAYERS)


@dataclass(frozen=True, slots=True)
class Fleet:
    service: CoordinatorService
    coordinator: str
    links: tuple[EmulatedLink, EmulatedLink]  # to the verifier, to the drafter
    loaded: LoadedModel  # the verifier's

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Return the bytes that carried states: from the verifier, and to the drafter."""
        return self.links[0].down.num_bytes, self.links[1].up.num_bytes

    async def generate(self, prompt: Prompt = PROMPT, salt: str = "", **params: Any) -> Output:
        """Answer a prompt with guesses of four tokens, for which the verifier waits."""
        asked: dict[str, Any] = {"seed": 1, "temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True, "gamma": 4}
        request = ask(prompt, **(asked | {"patience_us": 1_000_000} | params))
        request.cache_salt = salt
        async with client(self.coordinator) as stub:
            return await generate(stub, request)

    def drafters(self) -> list[str]:
        return [
            each.info.kind for each in self.service.sessions.worker_pool.connections() if each.info.kind != "target"
        ]


@asynccontextmanager
async def fleet(
    loaded: LoadedModel, redis: Redis, folder: Path, reader: Drafter, feature_dtype: str = "float16"
) -> AsyncIterator[Fleet]:
    settings = CoordinatorSettings(http_port=0, heartbeat_ms=300)
    service = CoordinatorService(settings, redis.url)
    ports = free_port(), free_port()
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(in_process(service, settings))
        links = [await stack.enter_async_context(EmulatedLink("127.0.0.1", port)) for port in ports]
        await stack.enter_async_context(
            verifier_serving(loaded, folder, coordinators=coordinator, port=ports[0], advertise=links[0].address)
        )
        assert await until(service.ready, 20)
        chosen = DrafterSettings(
            kind="reader",
            port=ports[1],
            coordinators=coordinator,
            advertise=links[1].address,
            feature_dtype=feature_dtype,
        )
        await stack.enter_async_context(in_process(DrafterService(reader, chosen), chosen))
        yield Fleet(service, coordinator, (links[0], links[1]), loaded)


def fed(service: CoordinatorService, spec_of: PackedProjection) -> bool:
    pool = service.sessions.worker_pool
    verifiers = [each.info for each in pool.connections() if each.info.kind == "target"]
    return any(service.sessions.delivery.feeds(verifier, spec_of.spec) for verifier in verifiers)


@pytest.mark.parametrize(("feature_dtype", "row_bytes"), [("float16", 2 * OUT), ("fp8", 1 + OUT)])
async def test_one_projected_vector_per_token_reaches_the_drafter(
    loaded: LoadedModel,
    redis_server: Redis,
    tmp_path: Path,
    plain_target: LlamaForCausalLM,
    feature_dtype: str,
    row_bytes: int,
) -> None:
    with torch.inference_mode():
        text = plain_target.generate(torch.tensor([PROMPT]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
    truth = text[0].tolist()
    projection = packed(plain_target)
    reader = Reader(projection, truth)
    async with fleet(loaded, redis_server, tmp_path, reader, feature_dtype) as running:
        assert await until(lambda: fed(running.service, projection), 20)
        before = running.num_bytes
        with after_joining(running.loaded, running.service):
            output = await running.generate()
        carried = [after - then for after, then in zip(running.num_bytes, before, strict=True)]
    assert output.token_ids == truth[len(PROMPT) :]
    assert output.stats.accepted_tokens > TOKENS // 2
    assert sorted(reader.states) == list(range(len(reader.states))), "from the first token of the prompt, no gap"
    assert len(reader.states) > len(PROMPT) + TOKENS // 2
    _, first, second, _ = states_of(plain_target, truth)
    apply = Projection(projection.data, len(LAYERS), first.shape[1], torch.device("cpu"))
    wanted = apply(torch.cat([first, second], dim=1))[: len(reader.states)]
    found = torch.stack([reader.states[position] for position in range(len(reader.states))])
    allowed = 2e-3 if feature_dtype == "float16" else 1 / 14
    assert float((found - wanted).abs().max()) <= allowed * float(wanted.abs().max())
    assert reader.num_bytes == len(reader.states) * row_bytes
    for num_bytes in carried:
        assert num_bytes <= (len(PROMPT) + TOKENS) * row_bytes + PER_MESSAGE * (output.stats.steps + 20)


@pytest.mark.parametrize("fault", ["shape", "nan"])
async def test_a_refused_projection_costs_its_drafter_the_work_and_sessions_nothing(
    loaded: LoadedModel,
    redis_server: Redis,
    tmp_path: Path,
    plain_target: LlamaForCausalLM,
    fault: str,
) -> None:
    bad = packed(plain_target, inputs=3) if fault == "shape" else packed(plain_target, scale=torch.nan)
    reader = Reader(bad, [])
    async with fleet(loaded, redis_server, tmp_path, reader) as running:
        delivery = running.service.sessions.delivery
        assert await until(lambda: bool(delivery._refused), 20)  # it stays when the drafter is gone
        ((_, why),) = delivery._refused.items()
        assert await until(lambda: not running.drafters(), 20), "its registration ends with the next report"
        output = await running.generate()
    assert "refuses its projection" in why
    assert ("fc.weight is of shape" if fault == "shape" else "finite") in why
    assert len(output.token_ids) == TOKENS
    assert output.stats.accepted_tokens == 0
    assert not reader.states
