"""The default model on vLLM: texts over many prompts, and a drafter that reads the target's hidden states."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.models.hub import DEFAULT, locate_safetensors
from outrider.train.data import shipped
from outrider.v1 import common_pb2 as common
from outrider.v1 import drafter_pb2 as draft
from outrider.v1 import drafter_pb2_grpc as drafter_rpc
from tests.cluster import Cluster, Output, ask, client, generate, registered_drafter
from tests.vllm.conftest import RUNNER

pytestmark = [
    pytest.mark.prove,
    pytest.mark.timeout(3600),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(RUNNER == "v2", reason="processes start without Triton's interpreter"),
]

PROMPTS = 100
LENGTH = 24
AT_ONCE = 10
MODES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1},
    {"temperature": 1.0, "top_k": 50, "presence_penalty": 0.3},
]
DRAFTED: list[dict[str, Any]] = [
    {"gamma": gamma, "drafter": drafter} for gamma in (3, 6) for drafter in ("suffix", "suffix+eagle", "ngram")
]
VLLM = ("--engine", "vllm", "--kv-tokens", "32768", "--max-sessions", "16", "--guess-rows", "8")


class Knowing(drafter_rpc.DrafterServicer):
    """Knows the plain texts: its guesses are right, wrong, or right up to a wrong one in the middle."""

    MANNERS = ("right", "wrong", "mixed")

    def __init__(self, plain: list[Output]) -> None:
        self.manner = ""
        self._texts = {output.seed: output.token_ids for output in plain}

    async def Probe(self, request: common.ProbeRequest, context: Any) -> common.ProbeReply:
        return common.ProbeReply()

    async def Draft(self, requests: AsyncIterator[draft.DraftRequest], context: Any) -> AsyncIterator[draft.DraftReply]:
        opening = (await anext(requests)).open
        text = self._texts[opening.params.seed]
        yield draft.DraftReply(opened=draft.DraftOpened())
        done, first_id = len(opening.tokens) - opening.prompt_length, 1
        async for request in requests:
            if request.HasField("committed"):
                committed = request.committed
                done = committed.position + len(committed.tokens) - opening.prompt_length
                tokens = list(text[done : min(done + 6, LENGTH - 1)])
                wrong = {"right": len(tokens), "wrong": 0, "mixed": 3}[self.manner]
                tokens[wrong:] = [token - 1 if token else 1 for token in tokens[wrong:]]
                if tokens:
                    position = opening.prompt_length + done
                    yield draft.DraftReply(guess=common.Guess(position=position, first_id=first_id, tokens=tokens))
                    first_id += len(tokens)


@pytest.fixture(scope="module")
def target() -> Path:
    return Path(locate_safetensors(DEFAULT, print))


def fleet(target: Path, folder: Path, *flags: str) -> Cluster:
    made = Cluster(folder)
    made.add_coordinator()
    made.add_verifier(target, *flags)
    for kind in ("suffix", "suffix+eagle", "ngram"):
        made.add_drafter(kind, None, "--target", "default")
    return made


@pytest.fixture(scope="module")
def vllm(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = fleet(target, tmp_path_factory.mktemp("vllm"), *VLLM, "--vllm-args", "--enforce-eager")
    made.start()
    yield made
    made.stop()


async def answers(
    cluster: Cluster, wishes: dict[str, Any], number: int = PROMPTS, length: int = LENGTH
) -> list[Output]:
    prompts = [prompt.text for prompt in (*shipped("heldout"), *shipped("train"))][:number]
    seats = asyncio.Semaphore(AT_ONCE)

    async def one(index: int, prompt: str) -> Output:
        async with seats, client(cluster.address) as stub:
            request = ask(prompt, seed=index, max_tokens=length, ignore_eos=True, **wishes)
            return await generate(stub, request, timeout=600)

    return list(await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts))))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: f"T {mode['temperature']}")
async def test_a_hundred_prompts_have_one_text_each_whatever_is_guessed(vllm: Cluster, mode: dict[str, Any]) -> None:
    plain = await answers(vllm, mode | {"gamma": 0})
    assert len(plain) == PROMPTS
    for wishes in DRAFTED:
        found = await answers(vllm, mode | wishes)
        different = [i for i, (a, b) in enumerate(zip(plain, found, strict=True)) if a.token_ids != b.token_ids]
        accepted = sum(output.stats.accepted_tokens for output in found)
        print(f"{mode} {wishes}: {accepted} accepted, {len(different)} texts differ")
        assert not different
        assert accepted > 0
    knowing = Knowing(plain)
    async with registered_drafter(vllm, knowing, "knowing"):
        for manner in Knowing.MANNERS:
            knowing.manner = manner
            found = await answers(vllm, mode | {"gamma": 6, "drafter": "knowing"})
            different = [i for i, (a, b) in enumerate(zip(plain, found, strict=True)) if a.token_ids != b.token_ids]
            drafted = sum(output.stats.draft_tokens for output in found)
            accepted = sum(output.stats.accepted_tokens for output in found)
            print(f"{mode} {manner} guesses: {accepted} of {drafted} accepted, {len(different)} texts differ")
            assert not different
            assert drafted > PROMPTS
            assert {"right": accepted == drafted, "wrong": accepted == 0}.get(manner, 0 < accepted < drafted)


async def test_a_drafter_that_reads_hidden_states_is_as_good_as_on_our_own_engine(
    vllm: Cluster, target: Path, tmp_path: Path
) -> None:
    wishes = {"temperature": 0.0, "gamma": 4, "drafter": "suffix+eagle"}
    on_vllm = await answers(vllm, wishes, 30, 64)
    own = fleet(target, tmp_path, "--engine", "native")
    own.start()
    try:
        on_own = await answers(own, wishes, 30, 64)
    finally:
        own.stop()
    equal = [i for i, (a, b) in enumerate(zip(on_vllm, on_own, strict=True)) if a.token_ids == b.token_ids]
    print(f"{len(equal)} of 30 texts are equal on both engines")

    def rate(outputs: list[Output]) -> float:
        drafted = sum(outputs[i].stats.draft_tokens for i in equal)
        return sum(outputs[i].stats.accepted_tokens for i in equal) / drafted

    print(f"acceptance: vLLM {rate(on_vllm):.4f}, own engine {rate(on_own):.4f}")
    assert len(equal) >= 28
    assert abs(rate(on_vllm) / rate(on_own) - 1) <= 0.02
