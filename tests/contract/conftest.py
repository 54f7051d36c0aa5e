"""Services on real sockets inside the test's own process: verifier, drafters, and a house with a coordinator."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI
from transformers import LlamaForCausalLM

from coordinator.api.service import CoordinatorService
from coordinator.sessions.stats import RequestStats
from drafter.methods.registry import make
from drafter.service import DrafterService
from outrider.base.aio import until as soon
from outrider.base.grpc_options import channel_options
from outrider.engine.interface import SessionTokens, StepResult
from outrider.engine.loading.loader import LoadedModel, load_model
from outrider.engine.loading.options import EngineOptions
from outrider.models.tokenizer import save_tokenizer
from outrider.settings.coordinator import CoordinatorSettings
from outrider.settings.drafter import DrafterSettings
from outrider.settings.verifier import VerifierSettings
from outrider.v1 import common_pb2 as common
from outrider.v1 import verifier_pb2 as verify
from outrider.v1 import verifier_pb2_grpc as verifier_rpc
from tests.cluster import Output, Redis, ask, client, generate, in_process
from tests.conftest import Models
from verifier.engine_target import EngineTarget
from verifier.service import VerifierService

Greedy = Callable[[list[int], int], list[int]]
JOIN_S = 20.0
UNGUESSED_STEP_S = 0.02


Refused = Callable[..., str]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run the command `outrider` with wrong flags, here: return the only line that it prints."""

    from outrider.cli.app import main  # here: few tests need the command line

    def run(*flags: str) -> str:
        monkeypatch.setattr("sys.argv", ["outrider", *flags])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 1
        (line,) = capsys.readouterr().err.strip().splitlines()
        return line

    return run


@pytest.fixture(scope="session")
def loaded(models: Models) -> LoadedModel:
    return load_model(str(models.target), EngineOptions(device="cpu"))


@pytest.fixture(scope="session")
def plain_target(models: Models) -> LlamaForCausalLM:
    """The target as transformers runs it."""
    return LlamaForCausalLM.from_pretrained(models.target, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="session")
def greedy(plain_target: LlamaForCausalLM) -> Greedy:
    """The target's own greedy output for a prompt of tokens, past any end token. Many tests ask for the same."""

    @cache
    def next_token(*tokens: int) -> int:
        with torch.inference_mode():
            return int(plain_target(torch.tensor([tokens])).logits[0, -1].argmax())

    def run(prompt: list[int], length: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(length):
            tokens.append(next_token(*tokens))
        return tokens[len(prompt) :]

    return run


@pytest.fixture(scope="session")
def prompt(loaded: LoadedModel) -> list[int]:
    return list(loaded.tokenizer.encode("The contract says what each side may rely on. "))


@asynccontextmanager
async def verifier_serving(loaded: LoadedModel, folder: Path, **settings: Any) -> AsyncIterator[str]:
    chosen = VerifierSettings(**settings)
    files = save_tokenizer(loaded.tokenizer, folder)
    async with in_process(
        VerifierService(EngineTarget(loaded.engine), loaded.vocabulary, files, chosen), chosen
    ) as address:
        yield address


@asynccontextmanager
async def drafter_serving(**settings: Any) -> AsyncIterator[str]:
    chosen = DrafterSettings(**settings)
    async with in_process(DrafterService(make(chosen, lambda _: None), chosen), chosen) as address:
        yield address


@contextmanager
def after_joining(loaded: LoadedModel | None, service: CoordinatorService, drafters: int = 1) -> Iterator[None]:
    """Hold the target's steps until each session with a given γ has this many drafters; slow them until it has guesses.

    Without that, a toy target can end an answer before a drafter on a busy machine has joined or made its first guess,
    which may need the states of a step.
    """
    assert loaded is not None
    extend = loaded.engine.extend

    def asking(batch: Sequence[SessionTokens]) -> list[RequestStats]:
        lives = (service.sessions._sessions.get(new.session.partition("@")[0]) for new in batch)
        return [live.stats for live in lives if live and not live.ended and live.record.request.speculation.gamma]

    def extend_after_joining(batch: Sequence[SessionTokens]) -> StepResult:
        deadline = time.monotonic() + JOIN_S
        while any(len(stats._kinds) < drafters for stats in asking(batch)):
            assert time.monotonic() < deadline, f"not within {JOIN_S:g} s: {drafters} drafters on each session"
            time.sleep(0.001)
        if any(not stats._proposed for stats in asking(batch)):
            time.sleep(UNGUESSED_STEP_S)
        return extend(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaded.engine, "extend", extend_after_joining)
        yield


@contextmanager
def slowed(loaded: LoadedModel, step_s: float) -> Iterator[None]:
    """Make each step of the target longer, for answers that something must reach before their end."""
    extend = loaded.engine.extend

    def extend_slowly(batch: Sequence[SessionTokens]) -> StepResult:
        time.sleep(step_s)
        return extend(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaded.engine, "extend", extend_slowly)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def verifier(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """Address of a verifier with a second's patience for silent streams."""
    async with verifier_serving(loaded, tmp_path_factory.mktemp("tokenizer"), open_timeout_s=1.0) as address:
        yield address


class Verify:
    """One stream to a verifier, from the far end of the wire."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.verdicts: list[verify.Verdict] = []

    async def open(self, tokens: list[int], **fields: Any) -> verify.Opened:
        """Sends Open and reads Opened. Takes the fields of OpenVerify, VerifySteering and SamplingParams together."""
        await self.send_open(tokens, **fields)
        reply = await self.call.read()
        assert reply.WhichOneof("message") == "opened", reply
        return reply.opened

    async def send_open(self, tokens: list[int], **fields: Any) -> None:
        await self.call.write(verify.VerifyRequest(open=opening(tokens, **fields)))

    async def guess(self, position: int, tokens: list[int], *, first_id: int = 1, parent: int = 0, **more: Any) -> None:
        guess = common.Guess(position=position, first_id=first_id, parent=parent, tokens=tokens, **more)
        await self.call.write(verify.VerifyRequest(guess=guess))

    async def steer(self, **fields: Any) -> None:
        await self.call.write(verify.VerifyRequest(steer=verify.VerifySteering(**fields)))

    async def verdict(self) -> verify.Verdict:
        reply = await self.call.read()
        assert reply is not grpc.aio.EOF, "the stream has ended"
        assert reply.WhichOneof("message") == "verdict", reply
        self.verdicts.append(reply.verdict)
        return reply.verdict

    async def refused(self) -> common.Error:
        """The next refusal; verdicts before it are kept."""
        while True:
            reply = await self.call.read()
            assert reply is not grpc.aio.EOF, "the stream has ended"
            if reply.WhichOneof("message") == "refused":
                return reply.refused
            self.verdicts.append(reply.verdict)

    async def rest(self) -> list[verify.Verdict]:
        """All verdicts until the stream ends in order: the verifier says that it is over, we hang up, it agrees."""
        while (reply := await self.call.read()) is not grpc.aio.EOF:
            assert reply.WhichOneof("message") == "verdict", reply
            assert not self.over, "nothing follows the end"
            self.verdicts.append(reply.verdict)
            if self.over:
                await self.call.done_writing()
        assert await self.call.code() is grpc.StatusCode.OK
        return self.verdicts

    @property
    def over(self) -> bool:
        return bool(self.verdicts and self.verdicts[-1].finish_reason)

    @property
    def tokens(self) -> list[int]:
        """Everything committed, checked to be without gap."""
        at = self.verdicts[0].position
        tokens: list[int] = []
        for verdict in self.verdicts:
            assert verdict.position == at + len(tokens)
            tokens.extend(verdict.tokens)
        return tokens


_OPEN = ("session_id", "epoch", "prompt_length", "hidden_states", "cache_salt")
_STEER = ("gamma", "draft_wait_us", "states", "plain_steps")


def opening(tokens: list[int], **fields: Any) -> verify.OpenVerify:
    given = {name: fields.pop(name) for name in _OPEN if name in fields}
    steer = {name: fields.pop(name) for name in _STEER if name in fields}
    params = {"temperature": 0.0, "seed": 1, "max_tokens": 8, "ignore_eos": True} | fields
    return verify.OpenVerify(
        tokens=tokens,
        **({"session_id": "s", "epoch": 1, "prompt_length": len(tokens)} | given),
        params=common.SamplingParams(**{name: value for name, value in params.items() if value is not None}),
        steer=verify.VerifySteering(**steer),
    )


@asynccontextmanager
async def verifying(address: str) -> AsyncIterator[Verify]:
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        call = verifier_rpc.VerifierStub(channel).Verify(timeout=30)
        try:
            yield Verify(call)
        finally:
            call.cancel()


@dataclass(frozen=True, slots=True)
class House:
    """A coordinator with a verifier and both drafters, all in this process, around a Redis that is not."""

    coordinator: str
    verifier: str
    drafters: dict[str, str]
    redis: Redis
    service: CoordinatorService
    loaded: LoadedModel  # the verifier's


HEARTBEAT_MS = 100
HOME_PROMPT = "Two heads are better than one, and two heads are better than none. Two heads are "
HOME_LENGTH = 120


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    server = Redis(tmp_path_factory.mktemp("redis"))
    server.start()
    server.wait_ready(10)
    yield server
    server.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def house(
    loaded: LoadedModel, models: Models, redis_server: Redis, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[House]:
    settings = CoordinatorSettings(http_port=0, heartbeat_ms=HEARTBEAT_MS, worker_wait_s=5, open_timeout_s=1.0)
    service = CoordinatorService(settings, redis_server.url)
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(in_process(service, settings))
        verifier = await stack.enter_async_context(
            verifier_serving(loaded, tmp_path_factory.mktemp("tokenizer"), coordinators=coordinator)
        )
        drafters = {
            "ngram": await stack.enter_async_context(drafter_serving(kind="ngram", coordinators=coordinator)),
            "model": await stack.enter_async_context(
                drafter_serving(kind="model", model=str(models.draft), device="cpu", coordinators=coordinator)
            ),
        }
        await _whole(service, 3)
        yield House(coordinator, verifier, drafters, redis_server, service, loaded)


async def _whole(service: CoordinatorService, workers: int) -> None:
    assert await soon(lambda: service.ready() and len(service.sessions.worker_pool.connections()) == workers, 20)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def apis(
    request: pytest.FixtureRequest, loaded: LoadedModel, redis_server: Redis, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[str, AsyncOpenAI]]:
    """A client for each of the module's DIALECTS, of a coordinator of its own; all of them share the workers."""
    dialects = request.module.DIALECTS
    async with AsyncExitStack() as stack:
        services, addresses = [], []
        for dialect in dialects:
            settings = CoordinatorSettings(http_port=0, heartbeat_ms=HEARTBEAT_MS, worker_wait_s=5, tool_parser=dialect)
            services.append(CoordinatorService(settings, redis_server.url))
            addresses.append(await stack.enter_async_context(in_process(services[-1], settings)))
        everywhere = {"coordinators": ",".join(addresses)}
        await stack.enter_async_context(verifier_serving(loaded, tmp_path_factory.mktemp("tokenizer"), **everywhere))
        await stack.enter_async_context(drafter_serving(kind="ngram", **everywhere))
        clients = {}
        for dialect, service in zip(dialects, services, strict=True):
            await _whole(service, 2)
            base = f"http://{service.http_address}/v1"
            made = AsyncOpenAI(base_url=base, api_key="none", max_retries=0, timeout=60)
            clients[dialect] = await stack.enter_async_context(made)
        yield clients


@dataclass(frozen=True, slots=True)
class Home:
    """A coordinator and a verifier; drafters are the tests' own."""

    coordinator: str
    service: CoordinatorService
    loaded: LoadedModel | None = None  # the verifier's; None: vLLM runs it

    async def knows(self, drafters: int) -> None:
        assert await soon(
            lambda: self.service.ready() and len(self.service.sessions.worker_pool.connections()) == 1 + drafters, 20
        )

    async def answer(self, *, gamma: int | None = None, branches: int | None = None, **params: Any) -> Output:
        """To HOME_PROMPT."""
        request = ask(HOME_PROMPT, **({"max_tokens": HOME_LENGTH, "ignore_eos": True} | params), gamma=gamma)
        if branches is not None:
            request.speculation.branches = branches
        async with client(self.coordinator) as stub:
            return await generate(stub, request)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def home(
    loaded: LoadedModel, redis_server: Redis, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Home]:
    settings = CoordinatorSettings(http_port=0, heartbeat_ms=HEARTBEAT_MS, worker_wait_s=5, drafters_per_session=2)
    service = CoordinatorService(settings, redis_server.url)
    folder = tmp_path_factory.mktemp("tokenizer")
    async with (
        in_process(service, settings) as coordinator,
        verifier_serving(loaded, folder, coordinators=coordinator),
    ):
        home = Home(coordinator, service, loaded)
        await home.knows(0)
        yield home
