"""Whatever strangers send: a typed error naming field, value and limit, and nobody else notices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx2 as httpx
import pytest
from structlog.testing import capture_logs

from outrider.base.grpc_options import channel_options
from outrider.protocol import convert
from outrider.protocol.errors import MAX_SHOWN
from outrider.protocol.speculation import WHOLE
from outrider.testing.toy_models import EOS
from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc
from outrider.v1 import verifier_pb2 as verify
from tests.cluster import ask, client, failure, generate
from tests.contract.conftest import Greedy, House, Verify, opening, verifying

pytestmark = pytest.mark.timeout(60)

PROMPT = [*range(40, 80)]
CONTEXT = 2048
VOCAB = 257
LONG_PATIENCE_US = 10_000_000
GOOD_TOKENS = 60


@pytest.fixture(scope="module")
def truth(greedy: Greedy) -> list[int]:
    return greedy(PROMPT, GOOD_TOKENS)


@asynccontextmanager
async def bystander(address: str, truth: list[int]) -> AsyncIterator[None]:
    """A good stream that is under way while the block runs, and must end as if alone."""
    async with verifying(address) as stream:
        await stream.open(
            PROMPT, session_id="bystander", max_tokens=GOOD_TOKENS, gamma=4, draft_wait_us=LONG_PATIENCE_US
        )
        await stream.verdict()
        yield
        await stream.steer(gamma=0)
        await stream.rest()
        assert stream.tokens == truth


def assert_refused(failed: tuple[grpc.StatusCode, Any, common.Error], field: str, value: str, limit: str) -> None:
    code, error, typed = failed
    kind = "context_length_exceeded" if "maximum context length" in typed.message else "invalid_request"
    assert (code, typed.code) == (grpc.StatusCode.INVALID_ARGUMENT, kind), error
    assert typed.field == field
    assert value in typed.value
    assert limit in typed.limit
    assert field in typed.message
    assert len(typed.message) < 4 * MAX_SHOWN, "megabytes are never echoed"


# What clients send to the coordinator.

_REQUESTS = {
    "no input": (pb.GenerateRequest(), "input", "absent", "one of prompt, chat, tokens"),
    "empty prompt": (ask("", max_tokens=4), "prompt", "empty", "some text"),
    "empty tokens": (ask([], max_tokens=4), "tokens", "no tokens", "at least one"),
    "empty chat": (pb.GenerateRequest(chat=pb.Chat()), "chat.messages", "0 messages", "1 to"),
    "prompt over the context": (ask("x" * (CONTEXT + 1), max_tokens=4), "prompt", "2049 tokens", "2048 tokens"),
    "prompt that fills the context": (ask("x" * CONTEXT, max_tokens=4), "prompt", "2048 tokens", "2048 tokens"),
    "prompt that leaves too little": (ask("x" * 1900), "prompt", "1900 tokens", "at most 1792"),
    "max_tokens 0": (ask("hi", max_tokens=0), "params.max_tokens", "0", "[1,"),
    "max_tokens over the context": (ask("hi", max_tokens=CONTEXT), "params.max_tokens", "2048", "at most 2046"),
    "max_tokens huge": (ask("hi", max_tokens=2**32 - 1), "params.max_tokens", "4294967295", "[1,"),
    "temperature -1": (ask("hi", temperature=-1.0), "params.temperature", "-1.0", "[0, 10]"),
    "temperature NaN": (ask("hi", temperature=float("nan")), "params.temperature", "nan", "[0, 10]"),
    "temperature infinite": (ask("hi", temperature=float("inf")), "params.temperature", "inf", "[0, 10]"),
    "top_p 0": (ask("hi", top_p=0.0), "params.top_p", "0.0", "(0, 1]"),
    "top_p 1.5": (ask("hi", top_p=1.5), "params.top_p", "1.5", "(0, 1]"),
    "min_p 2": (ask("hi", min_p=2.0), "params.min_p", "2.0", "[0, 1]"),
    "repetition_penalty 0": (ask("hi", repetition_penalty=0.0), "params.repetition_penalty", "0.0", "[0.01, 10]"),
    "presence_penalty 3": (ask("hi", presence_penalty=3.0), "params.presence_penalty", "3.0", "[-2, 2]"),
    "frequency_penalty NaN": (ask("hi", frequency_penalty=float("nan")), "params.frequency_penalty", "nan", "[-2, 2]"),
    "logprobs 21": (ask("hi", logprobs=21), "params.logprobs", "21", "[0, 20]"),
    "token id": (ask([1, VOCAB], max_tokens=4), "tokens.ids[1]", "257", "[0, 256]"),
    "stop id": (ask("hi", stop_token_ids=[9999]), "params.stop_token_ids[0]", "9999", "[0, 256]"),
    "bias id": (ask("hi", logit_bias={9999: 1.0}), "params.logit_bias[9999]", "9999", "[0, 256]"),
    "bias value": (ask("hi", logit_bias={5: 101.0}), "params.logit_bias[5]", "101.0", "[-100, 100]"),
    "empty stop": (ask("hi", stop=[""]), "params.stop[0]", "0 characters", "1 to"),
    "many stops": (ask("hi", stop=["x"] * 17), "params.stop", "17 entries", "at most 16"),
    "greedy and warm": (
        ask("hi", temperature=0.5, verification=common.VERIFICATION_GREEDY),
        "params.temperature",
        "0.5",
        "0 when verification is greedy",
    ),
    "block and cold": (
        ask("hi", temperature=0.0, verification=common.VERIFICATION_BLOCK),
        "params.verification",
        "block",
        "greedy when temperature is 0",
    ),
    "verification 99": (ask("hi", verification=99), "params.verification", "99", "enum"),
    "gamma 65": (ask("hi", gamma=65), "speculation.gamma", "65", "[0, 64]"),
    "patience": (ask("hi", patience_us=10_000_001), "speculation.patience_us", "10000001", "[0, 10000000]"),
    "key": (ask("hi", key="k" * 257), "idempotency_key", "257 characters", "at most 256"),
    "10 MB prompt": (ask("x" * 10_000_000, max_tokens=4), "prompt", "10000000 bytes", "at most 4194304 bytes"),
}


@pytest.mark.parametrize("name", _REQUESTS)
async def test_bad_request(house: House, truth: list[int], name: str) -> None:
    request, field, value, limit = _REQUESTS[name]
    async with client(house.coordinator) as stub:
        good = stub.Generate(ask(PROMPT, temperature=0.0, max_tokens=GOOD_TOKENS, ignore_eos=True, gamma=3), timeout=30)
        started = await good.read()
        assert_refused(await failure(stub.Generate(request, timeout=20)), field, value, limit)
        tokens: list[int] = []
        while (reply := await good.read()) is not grpc.aio.EOF:
            tokens.extend(reply.chunk.token_ids)
    assert started.started.session_id
    assert tokens == truth


@pytest.mark.timeout(150)
async def test_the_server_answers_while_a_large_prompt_is_tokenised(house: House) -> None:
    """Seconds of tokenising must not be seconds of silence for everybody else, however slow the machine is."""
    async with client(house.coordinator) as stub, client(house.coordinator) as other:
        loop = asyncio.get_running_loop()
        began = loop.time()
        large = asyncio.create_task(failure(stub.Generate(ask("y" * (2048 * 1024), max_tokens=4), timeout=120)))
        slowest = 0.0
        while not large.done():
            asked = loop.time()
            await other.GetServerInfo(pb.GetServerInfoRequest(), timeout=120)
            slowest = max(slowest, loop.time() - asked)
        whole = loop.time() - began
        code, _, typed = await large
    assert (code, typed.field) == (grpc.StatusCode.INVALID_ARGUMENT, "prompt")
    assert slowest < whole / 2, f"an empty question took {slowest:.1f} s of {whole:.1f} s"


@pytest.mark.parametrize(
    "data",
    [b"\x0a\x02\xff\xfe", b"\x0a\x7f", b"\x22\x04\x5a\x02\xc3\x28", b"\x00\x01\x02"],
    ids=["prompt not UTF-8", "cut off", "stop string not UTF-8", "no message"],
)
async def test_bytes_that_are_no_message(house: House, data: bytes) -> None:
    async with grpc.aio.insecure_channel(house.coordinator, options=channel_options()) as channel:
        raw = channel.unary_stream("/outrider.v1.Outrider/Generate")
        assert_refused(await failure(raw(data, timeout=10)), "request", "", "UTF-8")


async def test_bytes_that_are_no_message_on_a_stream(verifier: str, truth: list[int]) -> None:
    async with (
        bystander(verifier, truth),
        grpc.aio.insecure_channel(verifier, options=channel_options()) as channel,
    ):
        call = channel.stream_stream("/outrider.v1.Verifier/Verify")(timeout=10)
        await call.write(b"\x0a\xff\xff")
        assert_refused(await failure(call), "request", "", "protobuf")


async def test_bytes_that_are_no_message_in_the_middle_of_a_stream(verifier: str, truth: list[int]) -> None:
    """They end the stream that sent them and no other."""
    opened = verify.VerifyRequest(open=opening(PROMPT, session_id="garbler", gamma=4, draft_wait_us=LONG_PATIENCE_US))
    async with (
        bystander(verifier, truth),
        grpc.aio.insecure_channel(verifier, options=channel_options()) as channel,
    ):
        call = channel.stream_stream("/outrider.v1.Verifier/Verify")(timeout=10)
        await call.write(opened.SerializeToString())
        await call.read()
        await call.write(b"\x12\xff\xff")
        assert_refused(await failure(call), "request", "", "protobuf")


@pytest.mark.parametrize(("position", "limit"), [(9, "at most 8"), (2**32 - 1, "at most 8")])
async def test_resume_past_the_end(house: House, position: int, limit: str) -> None:
    async with client(house.coordinator) as stub:
        output = await generate(stub, ask(PROMPT, temperature=0.0, max_tokens=8, ignore_eos=True))
        resume = pb.ResumeRequest(session_id=output.session_id, from_position=position)
        assert_refused(await failure(stub.Resume(resume, timeout=10)), "from_position", str(position), limit)


# What coordinators, or others in their place, send to a verifier.

_OPENINGS = {
    "no tokens": (opening([]), "open.tokens", "empty", "at least one"),
    "token id": (opening([1, 2, VOCAB]), "open.tokens[2]", "257", "[0, 256]"),
    "no session": (opening(PROMPT, session_id=""), "open.session_id", "", "1 to 128"),
    "long session": (opening(PROMPT, session_id="s" * 129), "open.session_id", "129", "at most 128"),
    "prompt_length 0": (opening(PROMPT, prompt_length=0), "open.prompt_length", "0", "[1, 40]"),
    "prompt_length 41": (opening(PROMPT, prompt_length=41), "open.prompt_length", "41", "[1, 40]"),
    "no seed": (opening(PROMPT, seed=None), "params.seed", "absent", "given"),
    "no limit": (opening(PROMPT, max_tokens=None), "params.max_tokens", "absent", "given"),
    "over the context": (opening(PROMPT, max_tokens=CONTEXT), "params.max_tokens", "2048", "at most 2008"),
    "nothing left": (opening(PROMPT, prompt_length=30, max_tokens=10), "open.tokens", "10 output", "fewer than"),
    "temperature": (opening(PROMPT, temperature=-1.0), "params.temperature", "-1.0", "[0, 10]"),
    "gamma": (opening(PROMPT, gamma=65), "steer.gamma", "65", "[0, 64]"),
    "patience": (opening(PROMPT, draft_wait_us=2**31), "steer.draft_wait_us", "2147483648", "[0,"),
}


@pytest.mark.parametrize("name", _OPENINGS)
async def test_bad_open(verifier: str, truth: list[int], name: str) -> None:
    request, field, value, limit = _OPENINGS[name]
    async with bystander(verifier, truth), verifying(verifier) as stream:
        await stream.call.write(verify.VerifyRequest(open=request))
        assert_refused(await failure(stream.call), field, value, limit)


async def test_stream_that_does_not_open_first(verifier: str, truth: list[int]) -> None:
    async with bystander(verifier, truth), verifying(verifier) as stream:
        await stream.guess(0, [1])
        assert_refused(await failure(stream.call), "first message", "guess", "open")


async def test_stream_that_says_nothing(verifier: str, truth: list[int]) -> None:
    async with bystander(verifier, truth), verifying(verifier) as stream:
        code, _, typed = await failure(stream.call)
    assert (code, typed.code) == (grpc.StatusCode.DEADLINE_EXCEEDED, "expired")
    assert (typed.field, typed.value, typed.limit) == ("first message", "none", "1 s")


async def test_stream_that_ends_at_once(verifier: str) -> None:
    async with verifying(verifier) as stream:
        await stream.call.done_writing()
        code, _, typed = await failure(stream.call)
    assert (code, typed.field) == (grpc.StatusCode.INVALID_ARGUMENT, "first message")


def distribution(deltas: list[int], weights: list[int]) -> list[common.Distribution]:
    return [common.Distribution(id_deltas=deltas, weights=weights)]


AT = len(PROMPT) + 1
_GREEDY_GUESSES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "position ahead": ({"position": AT + 1, "tokens": [1]}, "guess.position", str(AT + 1), f"at most {AT}"),
    "position huge": ({"position": 2**32 - 1, "tokens": [1]}, "guess.position", "4294967295", f"at most {AT}"),
    "unknown parent": ({"position": AT + 1, "tokens": [1], "first_id": 9, "parent": 8}, "guess.parent", "8", "0 or"),
    "first_id 0": ({"position": AT, "tokens": [1], "first_id": 0}, "guess.first_id", "0", "at least 1"),
    "token id": ({"position": AT, "tokens": [1, VOCAB]}, "guess.tokens[1]", "257", "[0, 256]"),
    "too many tokens": ({"position": AT, "tokens": [1] * 65}, "guess.tokens", "65 tokens", "at most 64"),
    "probabilities": (
        {"position": AT, "tokens": [1], "draft_probs": distribution([1], [WHOLE])},
        "guess.draft_probs",
        "1 distributions",
        "0 in greedy mode",
    ),
}


@pytest.mark.parametrize("name", _GREEDY_GUESSES)
async def test_bad_guess_is_refused_and_the_session_goes_on(verifier: str, truth: list[int], name: str) -> None:
    guess, field, value, limit = _GREEDY_GUESSES[name]
    async with bystander(verifier, truth), verifying(verifier) as stream:
        await stream.open(PROMPT, max_tokens=12, gamma=4, draft_wait_us=LONG_PATIENCE_US)
        await stream.verdict()
        await stream.guess(**guess)
        refused = await stream.refused()
        assert (refused.code, refused.field) == ("invalid_request", field)
        assert value in refused.value
        assert limit in refused.limit
        await goes_on(stream, truth)


async def test_guess_with_a_wrong_position_for_its_parent(verifier: str, truth: list[int]) -> None:
    async with verifying(verifier) as stream:
        await stream.open(PROMPT, max_tokens=12, gamma=2, draft_wait_us=LONG_PATIENCE_US)
        await stream.verdict()
        await stream.guess(AT, truth[1:3])
        assert (await stream.verdict()).accepted == 2
        await stream.guess(AT + 1, [7], first_id=3, parent=2)
        refused = await stream.refused()
        assert (refused.field, refused.value) == ("guess.position", str(AT + 1))
        assert f"{AT + 2}" in refused.limit


_DISTRIBUTIONS: dict[str, tuple[list[common.Distribution], str, str]] = {
    "twice the whole": (distribution([5, 1], [WHOLE, WHOLE]), "guess.draft_probs[0].weights", "131072"),
    "nothing": (distribution([5], [0]), "guess.draft_probs[0].weights", "0"),
    "a weight of 0": (distribution([5, 1], [WHOLE, 0]), "guess.draft_probs[0].weights", "65536"),
    "not ascending": (distribution([5, 0], [WHOLE - 1, 1]), "guess.draft_probs[0].id_deltas", "not ascending"),
    "id out of range": (distribution([5, 300], [WHOLE - 1, 1]), "guess.draft_probs[0].id_deltas", "305"),
    "id past 64 bits": (distribution([2**32 - 1] * 9, [WHOLE - 8, *[1] * 8]), "guess.draft_probs[0].id_deltas", ""),
    "empty": (distribution([], []), "guess.draft_probs[0]", "0 ids"),
    "unequal lengths": (distribution([5, 1], [WHOLE]), "guess.draft_probs[0]", "2 ids and 1 weights"),
    "without the token": (distribution([6], [WHOLE]), "guess.tokens[0]", "5"),
    "none": ([], "guess.draft_probs", "0 distributions"),
    "too many": (distribution([5], [WHOLE]) * 2, "guess.draft_probs", "2 distributions"),
}


@pytest.mark.parametrize("mode", [common.VERIFICATION_REJECTION, common.VERIFICATION_BLOCK])
@pytest.mark.parametrize("name", _DISTRIBUTIONS)
async def test_bad_distribution_is_refused_and_the_session_goes_on(
    verifier: str, truth: list[int], name: str, mode: int
) -> None:
    draft_probs, field, value = _DISTRIBUTIONS[name]
    async with bystander(verifier, truth), verifying(verifier) as stream:
        await stream.open(
            PROMPT, max_tokens=12, gamma=4, draft_wait_us=LONG_PATIENCE_US, temperature=0.8, verification=mode
        )
        await stream.verdict()
        await stream.guess(AT, [5], draft_probs=draft_probs)
        refused = await stream.refused()
        assert (refused.code, refused.field) == ("invalid_request", field)
        assert value in refused.value
        assert refused.limit
        await stream.steer(gamma=0)
        await stream.rest()
    assert len(stream.tokens) == 12


async def test_open_twice_is_refused_and_the_session_goes_on(verifier: str, truth: list[int]) -> None:
    async with verifying(verifier) as stream:
        await stream.open(PROMPT, max_tokens=12, gamma=4, draft_wait_us=LONG_PATIENCE_US)
        await stream.verdict()
        await stream.send_open(PROMPT)
        assert (await stream.refused()).field == "message"
        await goes_on(stream, truth)


async def test_bad_steer_is_refused_and_the_session_goes_on(verifier: str, truth: list[int]) -> None:
    async with verifying(verifier) as stream:
        await stream.open(PROMPT, max_tokens=12, gamma=4, draft_wait_us=LONG_PATIENCE_US)
        await stream.verdict()
        await stream.steer(gamma=4_000_000_000)
        assert (await stream.refused()).field == "steer.gamma"
        await goes_on(stream, truth)


async def test_flood_of_guesses_is_bounded(verifier: str, truth: list[int]) -> None:
    """Thousands of branches cost a bounded amount and no correctness."""
    async with bystander(verifier, truth), verifying(verifier) as stream:
        await stream.open(PROMPT, max_tokens=GOOD_TOKENS, gamma=4, draft_wait_us=LONG_PATIENCE_US)
        await stream.verdict()

        async def flood() -> None:
            for number in range(2000):
                await stream.guess(AT, [number % 256, 1, 2], first_id=1 + 3 * number)
            await stream.steer(gamma=0)

        await asyncio.gather(flood(), stream.rest())
        assert stream.tokens == truth
        assert max(verdict.timings.session_tokens for verdict in stream.verdicts) <= len(PROMPT) + 32


async def goes_on(stream: Verify, truth: list[int]) -> None:
    await stream.steer(gamma=0)
    await stream.rest()
    assert stream.tokens == truth[:12]


# Texts as long as a message may be, and faults of our own.

HUGE = 10_000_000


async def test_long_texts_are_refused_and_not_echoed(house: House) -> None:
    async with client(house.coordinator) as stub:
        for call, field in (
            (stub.Cancel(pb.CancelRequest(session_id="x" * HUGE), timeout=20), "session_id"),
            (stub.Resume(pb.ResumeRequest(session_id="x" * HUGE), timeout=20), "session_id"),
            (stub.Generate(ask("hi", drafter="x" * HUGE), timeout=20), "speculation.drafter"),
            (stub.Generate(ask("", chat=[("x" * HUGE, "hi")]), timeout=20), "chat.messages[0].role"),
        ):
            assert_refused(await failure(call), field, f"{HUGE} characters", "at most")
        code, _, typed = await failure(stub.Cancel(pb.CancelRequest(session_id="🙂" * 128), timeout=20))
        assert (code, typed.code) == (grpc.StatusCode.NOT_FOUND, "not_found")


@asynccontextmanager
async def asked_for_vocabulary(house: House) -> AsyncIterator[tuple[Any, pb.Worker]]:
    """Register a drafter with another digest; yield the call and the drafter when its vocabulary is asked for."""
    async with grpc.aio.insecure_channel(house.coordinator, options=channel_options()) as channel:
        call: Any = rpc.RegistryStub(channel).Register(timeout=20)  # type: ignore[call-arg]
        info = server_info_worker(house)
        info.model.vocabulary_digest = "another"
        await call.write(pb.RegisterRequest(worker=info))
        assert (await call.read()).send_vocabulary
        yield call, info


async def test_vocabularies_that_are_no_text_are_refused(house: House) -> None:
    async with asked_for_vocabulary(house) as (call, _):
        await call.write(pb.RegisterRequest(vocabulary=pb.Vocabulary(tokens=[b"\xff\xfe"], last=True)))
        assert_refused(await failure(call), "vocabulary.tokens", "xff", "UTF-8")


async def test_a_flood_in_place_of_a_vocabulary_holds_up_its_sender_only(house: House) -> None:
    async with asked_for_vocabulary(house) as (call, info):
        began = time.monotonic()
        for _ in range(30):
            await call.write(pb.RegisterRequest(worker=info))
        await call.write(pb.RegisterRequest(vocabulary=pb.Vocabulary(tokens=[b"no token of its"], last=True)))
        assert "vocabulary differs" in (await failure(call))[1].message
        assert time.monotonic() - began > 1.0, "as reports, 20 messages a second are read"


def server_info_worker(house: House) -> pb.Worker:
    """A drafter like one of the house."""
    (worker,) = [one for one in house.service.sessions.worker_pool.infos() if one.kind == "ngram"]
    made = convert.worker_to_proto(worker)
    made.worker_id = "stranger"
    return made


async def test_faults_of_ours_are_told_by_a_reference(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> Any:
        raise ZeroDivisionError("secret of ours")

    monkeypatch.setattr(house.service.sessions, "cancel", broken)
    monkeypatch.setattr(house.service.sessions, "take_over", broken)
    with capture_logs() as logs:
        async with client(house.coordinator) as stub:
            for call in (
                stub.Cancel(pb.CancelRequest(session_id="x"), timeout=20),
                stub.Resume(pb.ResumeRequest(session_id="x"), timeout=20),
            ):
                code, error, _ = await failure(call)
                assert code is grpc.StatusCode.INTERNAL
                assert "secret" not in error.message
                assert sum(entry.get("reference", "-") in error.message for entry in logs) == 1


async def test_a_user_ends_no_turn(house: House) -> None:
    """The control token is as many tokens as it has letters, over both protocols."""
    lengths = []
    for text in ("x" * len(EOS), EOS):
        async with client(house.coordinator) as stub:
            over_grpc = await generate(stub, ask("", chat=[("user", text)], max_tokens=1, temperature=0.0))
        async with httpx.AsyncClient(base_url=f"http://{house.service.http_address}") as web:
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, "temperature": 0}
            over_http = (await web.post("/v1/chat/completions", json=body)).json()
        assert over_http["usage"]["prompt_tokens"] == over_grpc.prompt_tokens
        lengths.append(over_grpc.prompt_tokens)
    assert lengths[0] == lengths[1]
