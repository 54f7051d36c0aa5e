"""Every way to draft behind a coordinator and a verifier, over real sockets: the text is always the target's own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from coordinator.api.service import CoordinatorService
from outrider.base.aio import until
from outrider.engine.loading.loader import LoadedModel, load_model
from outrider.engine.loading.options import EngineOptions
from outrider.protocol.fleet import Role
from outrider.protocol.speculation import FinishReason, TokenKind
from outrider.settings.coordinator import CoordinatorSettings
from outrider.testing.toy_models import byte_tokenizer, make_model
from outrider.v1 import common_pb2 as common
from tests.cluster import Output, Redis, ask, generate_all, in_process
from tests.contract.conftest import HEARTBEAT_MS, after_joining, drafter_serving, verifier_serving
from tests.models import added_tokens, permuted_vocabulary

pytestmark = pytest.mark.timeout(120)

# Letters only: bytes at random would seldom be text, and what is no text cannot be told in another vocabulary.
LETTERS = byte_tokenizer().tokenize("".join(map(chr, range(32, 127))) + "\n")
PROMPTS = [
    "The contract says what each side may rely on. ",
    "again and again and again and again and ",
    "Each way to draft is one file. ",
    "0 1 2 3 0 1 2 3 0 1 2",
]
LENGTH = 60
SOME = [id_ for id_ in range(len(LETTERS)) if id_ % 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a near copy of it, and that in a vocabulary of its own."""
    folder = tmp_path_factory.mktemp("models")
    target = make_model(folder / "target", seed=7, sharpness=4.0, focus=0.1, letters=LETTERS)
    draft = make_model(folder / "draft", seed=99, like=target, blur=0.05, letters=LETTERS)
    permuted_vocabulary(folder / "permuted_vocabulary", draft)
    added_tokens(folder / "more", target, "<|user|>", "<|answer|>", rows=len(LETTERS) + 8)
    (folder / "ids.json").write_text(json.dumps(SOME))
    return folder


WAYS: dict[str, tuple[dict[str, str], int]] = {
    "suffix": ({"kind": "suffix"}, 1),
    "suffix with branches": ({"kind": "suffix"}, 3),
    "model": ({"kind": "model", "model": "draft"}, 1),
    "model with branches": ({"kind": "model", "model": "draft"}, 3),
    "suffix and model": ({"kind": "suffix+model", "model": "draft"}, 1),
    "suffix and model with branches": ({"kind": "suffix+model", "model": "draft"}, 3),
    "part of the vocabulary": ({"kind": "model", "model": "draft", "draft_vocabulary": "ids.json"}, 1),
    "part of the vocabulary with branches": ({"kind": "model", "model": "draft", "draft_vocabulary": "ids.json"}, 2),
    "another vocabulary": ({"kind": "translate", "model": "permuted_vocabulary"}, 1),
    "suffix and another vocabulary": ({"kind": "suffix+translate", "model": "permuted_vocabulary"}, 3),
}


class Home:
    """A coordinator and a verifier; a drafter comes for each test."""

    def __init__(self, address: str, service: CoordinatorService, target: Path, loaded: LoadedModel) -> None:
        self._address = address
        self._service = service
        self._target = target
        self._folder = target.parent
        self._loaded = loaded

    async def knows(self, drafters: int) -> None:
        assert await until(
            lambda: self._service.ready() and len(self._service.sessions.worker_pool.connections()) == 1 + drafters, 20
        )

    @asynccontextmanager
    async def drafted(self, way: str) -> AsyncIterator[None]:
        flags, _ = WAYS[way]
        given = {name: value if name == "kind" else str(self._folder / value) for name, value in flags.items()}
        given["target"] = str(self._target)
        async with drafter_serving(**given, device="cpu", threads=1, coordinators=self._address):
            await self.knows(1)
            yield
        await self.knows(0)

    async def answers(self, *, gamma: int, branches: int = 1, before: str = "", **params: Any) -> list[Output]:
        return (await self.in_modes({"": params}, gamma=gamma, branches=branches, before=before))[""]

    async def in_modes(
        self, modes: dict[str, dict[str, Any]], *, gamma: int, branches: int = 1, before: str = ""
    ) -> dict[str, list[Output]]:
        """Ask for the answers of all modes at once."""
        requests = [
            ask(before + prompt, seed=n, gamma=gamma, **({"max_tokens": LENGTH, "ignore_eos": True} | params))
            for params in modes.values()
            for n, prompt in enumerate(PROMPTS)
        ]
        for request in requests:
            request.speculation.branches = branches
            # Long enough for a guess to be there before the verifier goes on alone.
            request.speculation.patience_us = 1_000_000 if gamma else 0
        with after_joining(self._loaded, self._service):
            outputs = iter(await generate_all(self._address, requests))
        return {mode: [next(outputs) for _ in PROMPTS] for mode in modes}


@asynccontextmanager
async def home_of(target: Path, redis_server: Redis, tokenizer: Path) -> AsyncIterator[Home]:
    settings = CoordinatorSettings(http_port=0, heartbeat_ms=HEARTBEAT_MS, worker_wait_s=5)
    service = CoordinatorService(settings, redis_server.url)
    loaded = load_model(str(target), EngineOptions(device="cpu", threads=1))
    async with in_process(service, settings) as address, verifier_serving(loaded, tokenizer, coordinators=address):
        home = Home(address, service, target, loaded)
        await home.knows(0)
        yield home


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def home(folder: Path, redis_server: Redis, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Home]:
    async with home_of(folder / "target", redis_server, tmp_path_factory.mktemp("tokenizer")) as made:
        yield made


MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 1.0},
    "coupled and cut": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
    "of a given form": {"temperature": 1.0, "grammar": common.Grammar(regex=r"([a-z]{1,6} ){10,12}(and|or) so on\.")},
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def plain(home: Home) -> dict[str, list[Output]]:
    return await home.in_modes(MODES, gamma=0)


@pytest.mark.parametrize("way", WAYS)
async def test_the_text_is_the_targets_own(home: Home, plain: dict[str, list[Output]], way: str) -> None:
    accepted = 0
    async with home.drafted(way):
        for mode, outputs in (await home.in_modes(MODES, gamma=4, branches=WAYS[way][1])).items():
            for output, wanted in zip(outputs, plain[mode], strict=True):
                assert output.token_ids == wanted.token_ids, mode
                assert output.text == wanted.text
            accepted += sum(output.stats.accepted_tokens for output in outputs)
            assert sum(output.stats.draft_tokens for output in outputs) > 0
    floor = 5 if WAYS[way][0]["kind"] == "suffix" else 0.3 * len(PROMPTS) * len(MODES) * LENGTH
    assert accepted > floor


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", [common.VERIFICATION_REJECTION, common.VERIFICATION_BLOCK])
async def test_modes_with_probabilities_run(home: Home, way: str, mode: int) -> None:
    """Their law is tested elsewhere; here, that no guess is refused and guesses come true."""
    async with home.drafted(way):
        outputs = await home.answers(gamma=4, branches=WAYS[way][1], temperature=1.0, verification=mode)
    for output in outputs:
        assert (output.finish, len(output.token_ids)) == (FinishReason.LENGTH, LENGTH)
        assert output.kinds.count(TokenKind.ACCEPTED) == output.stats.accepted_tokens
    if WAYS[way][0]["kind"] != "suffix":
        assert sum(output.stats.accepted_tokens for output in outputs) > LENGTH / 2


async def test_another_vocabulary_is_refused_without_the_targets_tokenizer(home: Home, folder: Path) -> None:
    async with drafter_serving(
        kind="model", model=str(folder / "permuted_vocabulary"), device="cpu", threads=1, coordinators=home._address
    ):
        assert not await until(lambda: len(home._service.sessions.worker_pool.connections()) > 1, 1.0)


MORE = len(LETTERS) + 2  # an id that the drafter lacks
IN_TURN = common.Grammar(lark=f"%llguidance {{}}\nstart: (<[{MORE}]> /[a-z]/)+")
BEYOND: dict[str, dict[str, Any]] = MODES | {
    "of tokens in turn": {"temperature": 1.0, "grammar": IN_TURN},
    "of a token with a bias": {"temperature": 1.0, "logit_bias": {MORE: 12.0}},
}


@asynccontextmanager
async def larger_home(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Home]:
    own = Redis(tmp_path_factory.mktemp("redis"))
    own.start()
    own.wait_ready(10)
    try:
        async with home_of(folder / "more", own, tmp_path_factory.mktemp("tokenizer")) as made:
            yield made
    finally:
        own.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def larger(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Home]:
    async with larger_home(folder, tmp_path_factory) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def plain_of_larger(larger: Home) -> dict[str, list[Output]]:
    plain = await larger.in_modes(BEYOND, gamma=0, before="<|user|>")
    assert {MORE} < {token for output in plain["of a token with a bias"] for token in output.token_ids}
    return plain


@pytest.mark.parametrize("way", ["model", "model with branches", "part of the vocabulary", "suffix and model"])
async def test_a_target_with_more_tokens_has_its_own_text(
    larger: Home, plain_of_larger: dict[str, list[Output]], way: str
) -> None:
    """As a tuned target, whose chats have tokens that its base lacks: the base was refused as a drafter."""
    async with larger.drafted(way):
        found = await larger.in_modes(BEYOND, gamma=4, branches=WAYS[way][1], before="<|user|>")
        for mode, outputs in found.items():
            wanted = [output.token_ids for output in plain_of_larger[mode]]
            assert [output.token_ids for output in outputs] == wanted, mode
            if mode in MODES:
                accepted = sum(output.stats.accepted_tokens for output in outputs)
                assert accepted > 0.3 * len(PROMPTS) * LENGTH, mode
        for verification in (common.VERIFICATION_REJECTION, common.VERIFICATION_BLOCK):
            outputs = await larger.answers(gamma=4, before="<|user|>", temperature=1.0, verification=verification)
            assert sum(output.stats.accepted_tokens for output in outputs) > LENGTH / 2


async def test_a_target_with_a_drafters_own_vocabulary_gets_it_whichever_came_first(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The drafter stayed with the one that has more tokens, and the other was decoded plainly."""
    loaded = load_model(str(folder / "target"), EngineOptions(device="cpu", threads=1))
    async with larger_home(folder, tmp_path_factory) as home, home.drafted("model"):

        def vocabularies() -> set[str]:
            infos = home._service.sessions.worker_pool.infos()
            return {each.model.vocabulary_digest for each in infos if each.role is Role.DRAFTER}

        assert vocabularies() == {home._loaded.vocabulary.digest}
        async with verifier_serving(loaded, tmp_path_factory.mktemp("tokenizer"), coordinators=home._address):
            assert await until(lambda: vocabularies() == {loaded.vocabulary.digest}, 20)
