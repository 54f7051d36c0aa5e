"""The drafter's stream over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import pytest_asyncio
import torch
from transformers import LlamaForCausalLM

from drafter.interface import DraftRequest
from drafter.methods.ngram import NgramDrafter
from outrider.base.grpc_options import channel_options
from outrider.protocol.speculation import WHOLE, Guess
from outrider.v1 import common_pb2 as common
from outrider.v1 import drafter_pb2 as pb
from outrider.v1 import drafter_pb2_grpc as rpc
from tests.cluster import failure, until_async
from tests.conftest import Models
from tests.contract.conftest import drafter_serving

pytestmark = pytest.mark.timeout(60)

PROMPT = [*range(40, 80)]
VOCAB = 257
SOON_S = 5.0
QUIET_S = 0.2


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def model_drafter(models: Models) -> AsyncIterator[str]:
    async with drafter_serving(kind="model", model=str(models.draft), device="cpu", open_timeout_s=1.0) as address:
        yield address


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ngram_drafter() -> AsyncIterator[str]:
    async with drafter_serving(kind="ngram", open_timeout_s=1.0) as address:
        yield address


@pytest.fixture(scope="module")
def guesses(models: Models) -> list[int]:
    """What the draft model would say after PROMPT."""
    model = LlamaForCausalLM.from_pretrained(models.draft, dtype=torch.float32, attn_implementation="eager").eval()
    return continued(model, PROMPT, 12)


def continued(model: LlamaForCausalLM, prompt: list[int], length: int) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(length):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


class Draft:
    def __init__(self, call: Any) -> None:
        self.call = call

    async def open(self, tokens: list[int], **fields: Any) -> pb.DraftOpened:
        await self.send_open(tokens, **fields)
        reply = await self.call.read()
        assert reply.WhichOneof("message") == "opened", reply
        return reply.opened

    async def send_open(
        self,
        tokens: list[int],
        *,
        gamma: int = 4,
        vocab_size: int = VOCAB,
        prompt_length: int | None = None,
        branches: int = 1,
        vocabulary_digest: str = "",
        eos_token_ids: Sequence[int] = (),
        **more: Any,
    ) -> None:
        params = {"temperature": 0.0, "seed": 1, "max_tokens": 100} | more
        open_draft = pb.OpenDraft(
            session_id="s",
            epoch=1,
            tokens=tokens,
            prompt_length=len(tokens) if prompt_length is None else prompt_length,
            params=common.SamplingParams(**{name: value for name, value in params.items() if value is not None}),
            steer=pb.DraftSteering(gamma=gamma, branches=branches),
            vocab_size=vocab_size,
            vocabulary_digest=vocabulary_digest,
            eos_token_ids=eos_token_ids,
        )
        await self.call.write(pb.DraftRequest(open=open_draft))

    async def guess(self) -> common.Guess:
        reply = await asyncio.wait_for(self.call.read(), SOON_S)
        assert reply is not grpc.aio.EOF, "the stream has ended"
        return reply.guess

    async def commit(self, position: int, tokens: list[int]) -> None:
        await self.call.write(pb.DraftRequest(committed=pb.Committed(position=position, tokens=tokens)))

    async def steer(self, gamma: int) -> None:
        await self.call.write(pb.DraftRequest(steer=pb.DraftSteering(gamma=gamma)))


@asynccontextmanager
async def drafting(address: str) -> AsyncIterator[Draft]:
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        call = rpc.DrafterStub(channel).Draft(timeout=30)
        try:
            yield Draft(call)
        finally:
            call.cancel()


async def test_runs_ahead_by_gamma(model_drafter: str, guesses: list[int]) -> None:
    async with drafting(model_drafter) as stream:
        await stream.open(PROMPT, gamma=4)
        guess = await stream.guess()
    assert (guess.position, guess.parent, guess.first_id) == (len(PROMPT), 0, 1)
    assert list(guess.tokens) == guesses[:4]
    assert not guess.draft_probs, "no probability crosses the wire unless it is needed"


async def test_commit_that_agrees_lengthens_the_chain(model_drafter: str, guesses: list[int]) -> None:
    async with drafting(model_drafter) as stream:
        await stream.open(PROMPT, gamma=4)
        await stream.guess()
        await stream.commit(len(PROMPT), guesses[:2])
        guess = await stream.guess()
    assert (guess.position, guess.parent, guess.first_id) == (len(PROMPT) + 4, 4, 5)
    assert list(guess.tokens) == guesses[4:6], "only what is new is sent"


async def test_commit_that_disagrees_starts_anew(model_drafter: str, models: Models, guesses: list[int]) -> None:
    other = (guesses[1] + 1) % 256
    async with drafting(model_drafter) as stream:
        await stream.open(PROMPT, gamma=3)
        await stream.guess()
        await stream.commit(len(PROMPT), [guesses[0], other])
        guess = await stream.guess()
    model = LlamaForCausalLM.from_pretrained(models.draft, dtype=torch.float32, attn_implementation="eager").eval()
    assert (guess.position, guess.parent, guess.first_id) == (len(PROMPT) + 2, 0, 4)
    assert list(guess.tokens) == continued(model, [*PROMPT, guesses[0], other], 3)


async def test_commit_told_twice_is_taken_once(model_drafter: str, guesses: list[int]) -> None:
    async with drafting(model_drafter) as stream:
        await stream.open(PROMPT, gamma=4)
        await stream.guess()
        for _ in range(2):
            await stream.commit(len(PROMPT), guesses[:2])
        await stream.commit(len(PROMPT) + 1, guesses[1:3])
        tokens = []
        while len(tokens) < 3:
            tokens.extend((await stream.guess()).tokens)
    assert tokens == guesses[4:7]


async def test_gamma_nought_is_silence_until_steered(model_drafter: str, guesses: list[int]) -> None:
    async with drafting(model_drafter) as stream:
        await stream.open(PROMPT, gamma=0)
        reading = asyncio.create_task(stream.call.read())
        done, _ = await asyncio.wait([reading], timeout=QUIET_S)
        assert not done
        await stream.steer(2)
        assert list((await asyncio.wait_for(reading, SOON_S)).guess.tokens) == guesses[:2]


async def test_nothing_is_guessed_past_max_tokens(model_drafter: str, guesses: list[int]) -> None:
    """The last token is always the target's own: guessing it helps nobody."""
    async with drafting(model_drafter) as stream:
        await stream.open(PROMPT, gamma=8, max_tokens=4)
        assert list((await stream.guess()).tokens) == guesses[:3]


async def test_ids_that_the_target_has_not_are_never_guessed(model_drafter: str) -> None:
    async with drafting(model_drafter) as stream:
        await stream.open(PROMPT, gamma=16, vocab_size=90)
        assert max((await stream.guess()).tokens) < 90


@pytest.mark.parametrize("mode", [common.VERIFICATION_REJECTION, common.VERIFICATION_BLOCK])
@pytest.mark.parametrize("kind", ["model", "ngram"])
async def test_probabilities_come_with_guesses(model_drafter: str, ngram_drafter: str, kind: str, mode: int) -> None:
    async with drafting(model_drafter if kind == "model" else ngram_drafter) as stream:
        await stream.open(PROMPT[:10] * 3, gamma=4, temperature=0.8, verification=mode)
        guess = await stream.guess()
    assert len(guess.draft_probs) == len(guess.tokens) > 0
    for token, distribution in zip(guess.tokens, guess.draft_probs, strict=True):
        ids = [sum(distribution.id_deltas[: i + 1]) for i in range(len(distribution.id_deltas))]
        assert ids == sorted(set(ids))
        assert token in ids
        assert sum(distribution.weights) == WHOLE
        assert min(distribution.weights) > 0


async def test_ngram_copies_what_followed_before(ngram_drafter: str) -> None:
    async with drafting(ngram_drafter) as stream:
        await stream.open([1, 2, 3, 4, 5, 6, 1, 2, 3], gamma=3)
        assert list((await stream.guess()).tokens) == [4, 5, 6]


async def test_ngram_says_when_it_has_nothing(ngram_drafter: str) -> None:
    async with drafting(ngram_drafter) as stream:
        await stream.open([1, 2, 3, 4, 5], gamma=3)
        guess = await stream.guess()
        assert (guess.position, list(guess.tokens)) == (5, [])
        await stream.commit(5, [1, 2])
        assert list((await stream.guess()).tokens) == [3, 4, 5]


async def test_half_closing_ends_the_session(model_drafter: str) -> None:
    async with drafting(model_drafter) as stream:
        await stream.open(PROMPT)
        await stream.guess()
        assert (await probe(model_drafter)).load.sessions == 1
        await stream.call.done_writing()
        assert await stream.call.read() is grpc.aio.EOF
        assert await stream.call.code() is grpc.StatusCode.OK
    assert (await probe(model_drafter)).load.sessions == 0


async def test_cancelling_frees_the_session(model_drafter: str) -> None:
    async with drafting(model_drafter) as stream:
        await stream.open(PROMPT)
        await stream.guess()

    async def free() -> bool:
        return (await probe(model_drafter)).load.sessions == 0

    await until_async(free, SOON_S, "no session left")


async def test_full_drafter_refuses(models: Models) -> None:
    async with (
        drafter_serving(kind="ngram", max_sessions=1) as address,
        drafting(address) as first,
        drafting(address) as second,
    ):
        await first.open(PROMPT)
        await second.send_open(PROMPT)
        code, _, typed = await failure(second.call)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (typed.code, typed.limit) == ("overloaded", "1")
    assert typed.retry_after_ms > 0


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tokens": []}, "open.tokens"),
        ({"tokens": [1, VOCAB]}, "open.tokens[1]"),
        ({"prompt_length": 0}, "open.prompt_length"),
        ({"prompt_length": 99}, "open.prompt_length"),
        ({"vocab_size": 0}, "open.vocab_size"),
        ({"vocab_size": 2**32 - 1}, "open.vocab_size"),
        ({"seed": None}, "params.seed"),
        ({"max_tokens": None}, "params.max_tokens"),
        ({"temperature": -1.0}, "params.temperature"),
        ({"gamma": 65}, "steer.gamma"),
        ({"branches": 9}, "steer.branches"),
    ],
)
async def test_bad_open_is_refused(model_drafter: str, guesses: list[int], fields: dict[str, Any], field: str) -> None:
    async with drafting(model_drafter) as bad, drafting(model_drafter) as good:
        await good.open(PROMPT)
        await bad.send_open(**({"tokens": PROMPT} | fields))
        code, _, typed = await failure(bad.call)
        assert (code, typed.code, typed.field) == (grpc.StatusCode.INVALID_ARGUMENT, "invalid_request", field)
        assert typed.value
        assert typed.limit
        assert list((await good.guess()).tokens) == guesses[:4]


@pytest.mark.parametrize(
    ("position", "tokens", "field"),
    [(len(PROMPT) + 1, [1], "committed.position"), (len(PROMPT), [VOCAB], "committed.tokens[0]")],
)
async def test_bad_commit_ends_the_session(model_drafter: str, position: int, tokens: list[int], field: str) -> None:
    async with drafting(model_drafter) as stream:
        await stream.open(PROMPT)
        await stream.commit(position, tokens)
        code, _, typed = await failure(stream.call)
    assert (code, typed.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)


async def test_a_session_that_cannot_be_drafted_for_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its coordinator uses the drafter no longer for this session, and goes on to use it for others."""
    propose = NgramDrafter.propose

    def fail(drafter: NgramDrafter, request: DraftRequest) -> Guess:
        if 99 in request.tokens:
            raise IndexError("list index out of range")
        return propose(drafter, request)

    monkeypatch.setattr(NgramDrafter, "propose", fail)
    async with drafter_serving(kind="ngram") as address, drafting(address) as bad, drafting(address) as good:
        await bad.open([1, 2, 3, 99, 1, 2])
        code, _, typed = await failure(bad.call)
        assert (code, typed.message) == (grpc.StatusCode.INVALID_ARGUMENT, "drafting for it failed: IndexError")
        await good.open([1, 2, 3, 9, 1, 2])
        assert (await good.guess()).tokens[0] == 3


async def test_silent_stream_is_ended(model_drafter: str) -> None:
    async with drafting(model_drafter) as stream:
        code, _, typed = await failure(stream.call)
    assert (code, typed.code, typed.limit) == (grpc.StatusCode.DEADLINE_EXCEEDED, "expired", "1 s")


async def test_first_message_must_open(model_drafter: str) -> None:
    async with drafting(model_drafter) as stream:
        await stream.steer(3)
        code, _, typed = await failure(stream.call)
    assert (code, typed.field, typed.value) == (grpc.StatusCode.INVALID_ARGUMENT, "first message", "steer")


async def probe(address: str) -> common.ProbeReply:
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        return await rpc.DrafterStub(channel).Probe(common.ProbeRequest(), timeout=5)
