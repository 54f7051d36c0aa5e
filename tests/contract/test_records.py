"""What is kept of a session: its end, its log probabilities, what its idempotency key stands for."""

from __future__ import annotations

import secrets
from typing import Any

import grpc
import httpx2 as httpx
import pytest
import redis.asyncio as redis

from coordinator.api.service import CoordinatorService
from coordinator.persistence import write_behind
from coordinator.persistence.session_record import SessionRecord
from coordinator.persistence.store import Store
from coordinator.sessions.streams import VerifierStream
from outrider.base.aio import until
from outrider.protocol.errors import Unavailable
from outrider.protocol.speculation import FinishReason
from outrider.settings.coordinator import CoordinatorSettings
from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2 as pb
from tests.cluster import Output, ask, client, failure, follow, generate, in_process, until_async
from tests.contract.conftest import House, slowed

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = "What is kept of a session is kept whole. What is kept "
ENDS = ["a stop id", "the end token", "a stop string", "max_tokens", "a grammar"]


@pytest.fixture(autouse=True)
def _time_to_write_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Redis be slow on a busy machine: after 250 ms a session would begin without its record."""
    monkeypatch.setattr("coordinator.persistence.write_behind.FIRST_WRITE_S", 10.0)


async def no_batch() -> None:
    """Write nothing, in place of a batch."""


async def lose_the_end(house: House, session_id: str, tokens: int) -> None:
    """As if its coordinator had died when only these output tokens were in Redis."""
    key = f"outrider:session:{{{session_id}}}"
    async with redis.Redis.from_url(house.redis.url) as store:

        async def finished() -> bool:
            return await store.hget(key, "finish") is not None

        await until_async(finished, 5, "the end in Redis")
        await store.hdel(key, "finish")
        name = f"outrider:tokens:{{{session_id}}}"
        held = await store.get(name) or b""
        await store.set(name, held[: 4 * tokens])
    house.service.sessions.ended.recent.clear()


def request_that_ends(by: str, whole: Output, eos: int) -> pb.GenerateRequest:
    params: dict[str, Any] = {"seed": 4, "max_tokens": 60, "verification": common.VERIFICATION_REJECTION, "gamma": 0}
    if by == "a stop id":
        params["stop_token_ids"] = [whole.token_ids[20]]
    elif by == "the end token":
        params["logit_bias"] = {eos: 100.0}
    elif by == "a stop string":
        params["stop"] = [whole.text[20:24]]
    elif by == "max_tokens":
        params |= {"max_tokens": 25, "ignore_eos": True}
    else:
        params["grammar"] = common.Grammar(regex="[a-z]{12}")
    return ask(PROMPT, **params)


@pytest.mark.parametrize("by", ENDS)
async def test_an_output_that_had_ended_is_not_run_on(house: House, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client has all of it, the record lacks the end: the reason, the text and the counts are as they were."""
    monkeypatch.setattr("secrets.randbits", lambda bits: 4)  # two texts are to begin alike
    eos = house.service.sessions.targets.named("").info.eos_token_ids[0]
    async with client(house.coordinator) as stub:
        plain = ask(PROMPT, seed=4, max_tokens=60, verification=common.VERIFICATION_REJECTION, gamma=0, ignore_eos=True)
        output = await generate(stub, request_that_ends(by, await generate(stub, plain), eos))
        known = len(output.token_ids)
        for kept in {known, known // 2}:  # with the end in the record, and with the end in the tail alone
            await lose_the_end(house, output.session_id, kept)
            resume = pb.ResumeRequest(session_id=output.session_id, from_position=known, tail=output.token_ids)
            rest = await follow(stub.Resume(resume, timeout=10), Output(token_ids=list(output.token_ids)))
            assert rest.token_ids == output.token_ids
            assert (rest.finish, rest.stop) == (output.finish, output.stop)
            assert output.text.endswith(rest.text)
            again = await follow(stub.Resume(pb.ResumeRequest(session_id=output.session_id), timeout=10), Output())
            assert (again.token_ids, again.text) == (output.token_ids, output.text)
    assert output.finish is (FinishReason.LENGTH if by == "max_tokens" else FinishReason.STOP)


async def test_a_stop_string_in_text_that_was_held_back_is_the_reason(house: House) -> None:
    half = house.service.sessions.targets.named("").encode("é")[0]
    request = ask(PROMPT, temperature=0.0, max_tokens=1, logit_bias={half: 100.0}, stop=["\N{REPLACEMENT CHARACTER}"])
    async with client(house.coordinator) as stub:
        output = await generate(stub, request)
    assert (output.finish, output.stop, output.text) == (FinishReason.STOP, request.params.stop[0], "")


async def test_the_beginning_of_a_session_is_written_once(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write brings something new: the request, tokens, or the end."""
    write, every = Store.write, []

    def written() -> list[tuple[bool, int, int, bool]]:
        return [this for of, this in every if of == session_id]

    async def noted(store: Store, record: SessionRecord, start: int, end: int, *, whole: bool) -> str:
        this = (whole, start, end, record.finished)
        answer = await write(store, record, start, end, whole=whole)
        every.append((record.session_id, this))
        return answer

    monkeypatch.setattr(Store, "write", noted)
    async with client(house.coordinator) as stub:
        call = stub.Generate(ask(PROMPT, max_tokens=400, ignore_eos=True), timeout=30)
        session_id = (await call.read()).started.session_id
        assert written()[0] == (True, 0, 0, False), "it is in Redis before its client hears of it"
        while await call.read() is not grpc.aio.EOF:
            continue
    assert await until(lambda: written()[-1][-1], 5), "the end is in Redis"
    assert [whole for whole, *_ in written()].count(True) == 1
    assert not [each for each in written()[1:] if each[1] == each[2] and not each[-1]], "nothing new"


async def test_what_a_client_says_of_an_output_that_can_be_made_again_is_not_believed(house: House) -> None:
    async with client(house.coordinator) as stub:
        output = await generate(stub, ask(PROMPT, temperature=0.0, max_tokens=30, ignore_eos=True))
        await lose_the_end(house, output.session_id, 10)
        foreign = [(token + 1) % 256 for token in output.token_ids[:20]]
        resume = pb.ResumeRequest(session_id=output.session_id, from_position=20, tail=foreign)
        await follow(stub.Resume(resume, timeout=10), Output(token_ids=foreign))
        again = await follow(stub.Resume(pb.ResumeRequest(session_id=output.session_id), timeout=10), Output())
    assert again.token_ids == output.token_ids


async def test_a_tail_that_contradicts_the_record_is_refused(house: House) -> None:
    request = ask(PROMPT, seed=4, max_tokens=30, ignore_eos=True, verification=common.VERIFICATION_BLOCK, gamma=0)
    async with client(house.coordinator) as stub:
        output = await generate(stub, request)
        await lose_the_end(house, output.session_id, 10)
        foreign = [(token + 1) % 256 for token in output.token_ids[:20]]
        resume = pb.ResumeRequest(session_id=output.session_id, from_position=20, tail=foreign)
        code, _, typed = await failure(stub.Resume(resume, timeout=10))
    assert (code, typed.field) == (grpc.StatusCode.FAILED_PRECONDITION, "tail")


async def test_log_probabilities_come_again_with_the_tokens(house: House) -> None:
    request = ask(PROMPT, seed=9, max_tokens=20, ignore_eos=True, logprobs=2, gamma=3, key=secrets.token_hex(4))
    async with client(house.coordinator) as stub:
        output = await generate(stub, request)
        assert len(output.logprobs) == 20
        assert (await generate(stub, request)).logprobs == output.logprobs, "by idempotency key"
        assert await house.service.sessions.write_behind.flush(5)
        house.service.sessions.ended.recent.clear()
        again = await follow(stub.Resume(pb.ResumeRequest(session_id=output.session_id), timeout=10), Output())
        assert again.logprobs == output.logprobs, "from Redis"
        await lose_the_end(house, output.session_id, 7)
        again = await follow(stub.Resume(pb.ResumeRequest(session_id=output.session_id), timeout=10), Output())
        assert again.token_ids == output.token_ids
        assert again.logprobs[:7] == output.logprobs[:7], "those that were kept"
        for made, first in zip(again.logprobs, output.logprobs, strict=True):
            assert made.logprob == pytest.approx(first.logprob, abs=1e-4), "and those that were made again"


async def test_an_answer_that_cannot_be_drawn_again_is_stored_before_its_end_is_told(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its idempotency key, another coordinator may be asked at once; it would draw another end."""
    monkeypatch.setattr(write_behind, "FIRST_WRITE_S", 5.0)
    monkeypatch.setattr(write_behind, "FIRST_WRITE_DOWN_S", 5.0)
    request = ask(PROMPT, seed=4, max_tokens=20, verification=common.VERIFICATION_REJECTION, gamma=0)
    async with (
        client(house.coordinator) as stub,
        redis.Redis.from_url(house.redis.url) as there,
    ):
        monkeypatch.setattr(house.service.sessions.write_behind, "_write_batch", no_batch)  # no other writes
        output = await generate(stub, request)
        assert await there.hget(f"outrider:session:{{{output.session_id}}}", "finish") is not None
        kept = await there.get(f"outrider:tokens:{{{output.session_id}}}")
    assert len(kept or b"") == 4 * len(output.token_ids)


@pytest.mark.parametrize("mode", [common.VERIFICATION_REJECTION, common.VERIFICATION_BLOCK])
async def test_a_session_under_rejection_has_noise_of_its_own_and_keeps_its_tokens(house: House, mode: int) -> None:
    request = ask(PROMPT, seed=4, max_tokens=40, ignore_eos=True, verification=mode, gamma=0)
    async with client(house.coordinator) as stub:
        one, other = [await generate(stub, request) for _ in range(2)]
        assert one.token_ids != other.token_ids, "begun twice, drawn twice"
        await lose_the_end(house, one.session_id, 10)
        resume = pb.ResumeRequest(session_id=one.session_id, from_position=10, tail=one.token_ids[:10])
        await follow(stub.Resume(resume, timeout=10), Output(token_ids=one.token_ids[:10]))
    assert house.service.sessions.ended.recent[one.session_id].tokens[:10] == one.token_ids[:10]


async def test_an_answer_that_is_stopped_after_its_last_token_is_complete(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by its coordinator's shutdown, while the streams to its workers are closed."""
    close = VerifierStream.__aexit__

    async def stop_first(stream: VerifierStream, *given: Any) -> None:
        for session in house.service.sessions.live:
            session.stop(Unavailable("this coordinator is shutting down"))
        await close(stream, *given)

    monkeypatch.setattr(VerifierStream, "__aexit__", stop_first)
    async with client(house.coordinator) as stub:
        output = await generate(stub, ask(PROMPT, max_tokens=4, ignore_eos=True, temperature=0.0))
    assert (len(output.token_ids), output.finish) == (4, FinishReason.LENGTH)


async def test_another_seed_makes_another_request(house: House) -> None:
    key = secrets.token_hex(4)
    async with client(house.coordinator) as stub:
        await generate(stub, ask(PROMPT, seed=1, max_tokens=4, key=key))
        code, _, typed = await failure(stub.Generate(ask(PROMPT, seed=2, max_tokens=4, key=key), timeout=10))
        assert (code, typed.field) == (grpc.StatusCode.FAILED_PRECONDITION, "idempotency_key")
        code, _, typed = await failure(stub.Generate(ask(PROMPT, max_tokens=4, key=key), timeout=10))
        assert (code, typed.field) == (grpc.StatusCode.FAILED_PRECONDITION, "idempotency_key")
    async with httpx.AsyncClient(base_url=f"http://{house.service.http_address}", timeout=30) as web:
        body = {"prompt": PROMPT, "max_tokens": 4, "seed": 1, "n": 2}
        headers = {"Idempotency-Key": secrets.token_hex(4)}
        replies = [await web.post("/v1/completions", json=body | {"seed": s}, headers=headers) for s in (1, 1, 2)]
    assert [reply.status_code for reply in replies] == [200, 200, 409]
    assert replies[0].json()["choices"] == replies[1].json()["choices"]


async def test_a_retry_at_a_coordinator_that_reads_it_otherwise_is_the_same_request(house: House) -> None:
    """After an upgrade or with another setting, what a coordinator makes of the same words is another request."""
    limit = f"{house.loaded.engine.info.name}=output:9"
    settings = CoordinatorSettings(http_port=0, heartbeat_ms=100, worker_wait_s=5, model_limits=limit)
    service = CoordinatorService(settings, house.redis.url)
    echo = {"prompt": PROMPT, "echo": True, "logprobs": 1}
    bodies = [{"prompt": PROMPT}, {"prompt": PROMPT, "n": 2, "temperature": 1}, echo]
    async with in_process(service, settings) as address, client(address) as other, client(house.coordinator) as stub:
        assert await until(service.ready, 10)
        request = ask(PROMPT, ignore_eos=True, key=secrets.token_hex(4), temperature=0.0)
        output = await generate(stub, request)
        again = await generate(other, request)
        assert (again.session_id, again.token_ids) == (output.session_id, output.token_ids)
        assert len(output.token_ids) > 9
        code, _, typed = await failure(other.Generate(ask(PROMPT, key=request.idempotency_key), timeout=10))
        assert (code, typed.field) == (grpc.StatusCode.FAILED_PRECONDITION, "idempotency_key")
        for body in bodies:
            headers, answers = {"Idempotency-Key": secrets.token_hex(4)}, []
            for one in (house.service, service):
                async with httpx.AsyncClient(base_url=f"http://{one.http_address}", timeout=30) as web:
                    answers.append(await web.post("/v1/completions", json=body, headers=headers))
                    changed = await web.post("/v1/completions", json=body | {"seed": 1}, headers=headers)
                    assert changed.status_code == 409
            assert [answer.status_code for answer in answers] == [200, 200]
            assert answers[0].json()["choices"] == answers[1].json()["choices"]


async def test_a_prompt_that_was_another_when_its_key_was_used_has_no_log_probabilities(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a template that tells the day. The verifier was blamed for it, with a status that clients retry."""
    tokenizer = house.service.sessions.targets.named("").tokenizer
    body = {"messages": [{"role": "user", "content": "So?"}], "max_tokens": 3, "seed": 1, "prompt_logprobs": 1}
    headers, replies = {"Idempotency-Key": secrets.token_hex(4)}, []
    async with httpx.AsyncClient(base_url=f"http://{house.service.http_address}", timeout=30) as web:
        for day in ("Monday", "Monday", "Sunday"):
            monkeypatch.setattr(tokenizer, "chat_template", f"{day}: {{{{ messages[0]['content'] }}}}")
            replies.append(await web.post("/v1/chat/completions", json=body, headers=headers))
    assert [reply.status_code for reply in replies] == [200, 200, 409]
    assert replies[0].json()["prompt_logprobs"] == replies[1].json()["prompt_logprobs"]
    assert replies[2].json()["error"]["param"] == "idempotency_key"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_retry_is_not_read_in_another_form_of_calls(house: House, path: str) -> None:
    """The calls of the first answer would be text in the second."""
    settings = CoordinatorSettings(http_port=0, heartbeat_ms=100, worker_wait_s=5, tool_parser="llama3")
    service = CoordinatorService(settings, house.redis.url)
    schema = {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"]}
    chat = {"type": "function", "function": {"name": "note", "parameters": schema}}
    tool, choice = (chat, "required") if "chat" in path else ({"name": "note", "input_schema": schema}, {"type": "any"})
    body = {"messages": [{"role": "user", "content": "So?"}], "max_tokens": 300, "seed": 1, "tools": [tool]}
    body["tool_choice"] = choice
    headers, statuses = {"Idempotency-Key": secrets.token_hex(4)}, []
    async with in_process(service, settings):
        assert await until(service.ready, 10)
        for one in (house.service, house.service, service):
            async with httpx.AsyncClient(base_url=f"http://{one.http_address}", timeout=30) as web:
                statuses.append((await web.post(path, json=body, headers=headers)).status_code)
    assert statuses == [200, 200, 409]


# --- who has it -------------------------------------------------------------------------------------------------------


async def test_a_client_that_comes_back_before_its_coordinator_knows_of_another_loses_nothing(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another coordinator has claimed the session meanwhile; the next write would end it with an error."""
    request = ask(PROMPT, seed=8, max_tokens=600, ignore_eos=True, gamma=0)
    async with client(house.coordinator) as stub, redis.Redis.from_url(house.redis.url) as there:
        wanted = await generate(stub, request)
        with monkeypatch.context() as patch:
            patch.setattr(house.service.sessions.write_behind, "_write_batch", no_batch)
            first = stub.Generate(request, timeout=30)
            session_id = (await first.read()).started.session_id
            await there.hincrby(f"outrider:session:{{{session_id}}}", "epoch", 1)
            again = stub.Resume(pb.ResumeRequest(session_id=session_id), timeout=30)
            assert (await again.read()).started.session_id == session_id
        tokens: list[int] = []
        while (reply := await again.read()) is not grpc.aio.EOF:
            assert not reply.HasField("error"), reply
            tokens.extend(reply.chunk.token_ids)
        first.cancel()
    assert tokens == wanted.token_ids


async def test_a_client_that_comes_back_after_redis_has_lost_who_had_its_session_goes_on(house: House) -> None:
    """The verifier knows that another coordinator had it: its refusal ended the session with an error, `fenced`."""
    settings = CoordinatorSettings(http_port=-1, heartbeat_ms=100, worker_wait_s=5)
    service, tokens, session_id = CoordinatorService(settings, house.redis.url), list[int](), ""
    request = ask(PROMPT, temperature=0.0, max_tokens=400, ignore_eos=True, gamma=0)
    async with (
        in_process(service, settings) as address,
        client(address) as other,
        client(house.coordinator) as stub,
        redis.Redis.from_url(house.redis.url) as there,
    ):
        assert await until(service.ready, 10)
        wanted = await generate(stub, request)
        with slowed(house.loaded, 0.005):
            for turn, (one, sessions) in enumerate(2 * [(stub, house.service.sessions), (other, service.sessions)]):
                resume = pb.ResumeRequest(session_id=session_id, from_position=len(tokens))
                call, wanting = one.Resume(resume, timeout=30) if turn else one.Generate(request, timeout=30), 2
                while wanting and (reply := await call.read()) is not grpc.aio.EOF:
                    assert not reply.HasField("error"), reply
                    session_id = reply.started.session_id or session_id
                    tokens.extend(reply.chunk.token_ids)
                    wanting -= bool(reply.chunk.token_ids)
                call.cancel()
                assert await until(lambda has=sessions, name=session_id: name not in has._sessions, 5)
                if turn:  # both coordinators have had it
                    assert await sessions.write_behind.flush(5)
                    await there.flushall()
    assert tokens == wanted.token_ids[: len(tokens)]


@pytest.mark.parametrize("logprobs", [None, 2])
async def test_what_a_client_had_when_another_coordinator_cancelled_is_kept(house: House, logprobs: int | None) -> None:
    """Its coordinator wrote nothing more: what it had sent since the last write was lost to `Resume` and usage."""
    request = ask(PROMPT, temperature=0.0, max_tokens=1500, ignore_eos=True, gamma=0, logprobs=logprobs)
    other = Store(house.redis.url, "another coordinator", 60)
    with slowed(house.loaded, 0.005):
        async with client(house.coordinator) as stub:
            call, output = stub.Generate(request, timeout=30), Output()
            session_id = (await call.read()).started.session_id
            while not output.token_ids:
                output.token_ids.extend((await call.read()).chunk.token_ids)
            assert await other.cancel(session_id)
            while (reply := await call.read()) is not grpc.aio.EOF:
                output.token_ids.extend(reply.chunk.token_ids)
                last = reply
            assert last.complete.finish_reason == FinishReason.CANCELLED
            assert last.complete.output_tokens == len(output.token_ids)
            assert await house.service.sessions.write_behind.flush(5)
            house.service.sessions.ended.recent.clear()
            again = await follow(stub.Resume(pb.ResumeRequest(session_id=session_id), timeout=10), Output())
    record = await other.claim(session_id)
    await other.connection.close()
    assert record is not None
    assert (record.tokens, record.finish_reason) == (output.token_ids, FinishReason.CANCELLED)
    assert (again.token_ids, again.finish) == (output.token_ids, FinishReason.CANCELLED)
    assert len([entry for entry in record.logprobs if entry]) == (len(output.token_ids) if logprobs else 0)


async def test_a_coordinator_that_drains_does_not_claim_what_it_refuses(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = house.service.sessions
    async with client(house.coordinator) as stub, redis.Redis.from_url(house.redis.url) as there:
        call = stub.Generate(ask(PROMPT, max_tokens=1500, ignore_eos=True, gamma=0), timeout=30)
        session_id = (await call.read()).started.session_id
        call.cancel()
        await until(lambda: session_id not in sessions._sessions, 5)
        monkeypatch.setattr(sessions, "_draining", True)
        status, _, typed = await failure(stub.Resume(pb.ResumeRequest(session_id=session_id), timeout=10))
        assert (status, typed.code) == (grpc.StatusCode.UNAVAILABLE, "unavailable")
        assert await there.hget(f"outrider:session:{{{session_id}}}", "epoch") == b"1"
