"""The public service and the registry over real sockets, all services in this process."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import redis.asyncio as redis
import structlog

from coordinator.persistence import write_behind
from coordinator.persistence.store import Store
from outrider.base.aio import until as soon
from outrider.base.grpc_options import channel_options
from outrider.client.aio import AsyncClient
from outrider.client.sync import Client
from outrider.engine.loading.loader import LoadedModel
from outrider.protocol import convert
from outrider.protocol.errors import NotFound, PeerLost
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo
from outrider.protocol.speculation import FinishReason, TokenKind
from outrider.protocol.vocabulary import Vocabulary
from outrider.runtime.registration_client import RegistrationClient
from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc
from tests.cluster import Output, ask, client, failure, follow, free_port, generate, generate_all, until_async
from tests.contract.conftest import HEARTBEAT_MS, Greedy, House, after_joining, slowed, verifying

pytestmark = pytest.mark.timeout(60)

PROMPT = "The contract says what each side may rely on. "


# Generating.


@pytest.mark.parametrize("drafter", ["model", "ngram"])
@pytest.mark.parametrize("gamma", [0, 3, None])
async def test_generate_streams_text_tokens_and_kinds(
    house: House, loaded: LoadedModel, greedy: Greedy, drafter: str, gamma: int | None
) -> None:
    request = ask(PROMPT, temperature=0.0, max_tokens=24, ignore_eos=True, gamma=gamma, drafter=drafter)
    async with client(house.coordinator) as stub:
        with after_joining(house.loaded, house.service):
            output = await generate(stub, request)
    prompt = loaded.tokenizer.encode(PROMPT)
    assert output.token_ids == greedy(prompt, 24)
    assert output.text == loaded.tokenizer.decode(prompt + output.token_ids, skip_special_tokens=True)[len(PROMPT) :]
    assert output.prompt_tokens == len(prompt)
    assert output.finish is FinishReason.LENGTH
    assert output.kinds.count(TokenKind.ACCEPTED) == output.stats.accepted_tokens
    assert TokenKind.NONE not in output.kinds
    if gamma == 0:
        assert set(output.kinds) == {TokenKind.PLAIN}
    elif gamma and drafter == "model":
        assert output.stats.accepted_tokens > 0
        assert output.stats.drafter == "model"
        assert output.stats.acceptance_length > 1
        assert sum(output.stats.accepted_per_position) == output.stats.accepted_tokens
        assert sum(output.stats.offered_per_position) == output.stats.draft_tokens


async def test_short_outputs_end_while_their_drafter_is_being_attached(house: House) -> None:
    """The end of the output and the drafter's answer come together in some of these: none may wait for ever."""
    requests = [
        ask([65 + number % 50], temperature=0.0, max_tokens=1 + number % 8, ignore_eos=True, gamma=4, drafter=drafter)
        for number in range(200)
        for drafter in ("model", "ngram")
    ]
    outputs = await generate_all(house.coordinator, requests, timeout=20)
    assert [len(output.token_ids) for output in outputs] == [request.params.max_tokens for request in requests]


async def test_tokens_as_input(house: House, loaded: LoadedModel, greedy: Greedy) -> None:
    ids = loaded.tokenizer.encode(PROMPT)
    async with client(house.coordinator) as stub:
        output = await generate(stub, ask(ids, temperature=0.0, max_tokens=8, ignore_eos=True))
    assert output.token_ids == greedy(ids, 8)


async def test_cached_prompt_tokens_are_told_and_kept_apart_by_salt(house: House, loaded: LoadedModel) -> None:
    ids = [(11 * i) % 251 for i in range(100)]

    async def cached(salt: str) -> int:
        request = ask(ids, temperature=0.0, max_tokens=4, ignore_eos=True)
        request.cache_salt = salt
        async with client(house.coordinator) as stub:
            return (await generate(stub, request)).stats.cached_tokens

    assert [await cached(salt) for salt in ("a", "a", "b", "")] == [0, 96, 0, 0]
    request = ask(ids, max_tokens=4)
    request.cache_salt = "x" * 257
    async with client(house.coordinator) as stub:
        code, _, typed = await failure(stub.Generate(request, timeout=10))
    assert (code, typed.field) == (grpc.StatusCode.INVALID_ARGUMENT, "cache_salt")


async def test_chat_goes_through_the_template(house: House, loaded: LoadedModel, greedy: Greedy) -> None:
    chat = [("system", "Be brief."), ("user", "Hello?")]
    ids = loaded.tokenizer.encode("<system>Be brief.\n<user>Hello?\n<assistant>")
    async with client(house.coordinator) as stub:
        output = await generate(stub, ask("", chat=chat, temperature=0.0, max_tokens=8, ignore_eos=True))
    assert output.prompt_tokens == len(ids)
    assert output.token_ids == greedy(ids, 8)


async def test_drawn_seed_is_told_and_makes_the_same_text_again(house: House) -> None:
    async with client(house.coordinator) as stub:
        first = await generate(stub, ask(PROMPT, max_tokens=24, ignore_eos=True))
        second = await generate(stub, ask(PROMPT, max_tokens=24, ignore_eos=True))
        again = await generate(stub, ask(PROMPT, max_tokens=24, ignore_eos=True, seed=first.seed, gamma=2))
    assert first.seed != second.seed
    assert first.token_ids != second.token_ids
    assert again.seed == first.seed
    assert (again.token_ids, again.text) == (first.token_ids, first.text)


async def test_stop_string_ends_the_text_before_it(house: House) -> None:
    async with client(house.coordinator) as stub:
        whole = await generate(stub, ask(PROMPT, seed=4, max_tokens=40, ignore_eos=True))
        stop = whole.text[10:13]
        cut = await generate(stub, ask(PROMPT, seed=4, max_tokens=40, ignore_eos=True, stop=["never there", stop]))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish, cut.stop) == (FinishReason.STOP, stop)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


async def test_logprobs_for_every_token(house: House) -> None:
    async with client(house.coordinator) as stub:
        output = await generate(
            stub, ask(PROMPT, temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2, gamma=3, drafter="model")
        )
    assert len(output.logprobs) == len(output.token_ids)
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert entry.top_ids[0] == token, "greedy takes the likeliest"
        assert entry.logprob == pytest.approx(entry.top_logprobs[0])


@pytest.mark.parametrize("mode", [common.VERIFICATION_REJECTION, common.VERIFICATION_BLOCK])
async def test_modes_with_probabilities(house: House, mode: int) -> None:
    request = ask(PROMPT, seed=4, max_tokens=40, ignore_eos=True, verification=mode, gamma=3, drafter="model")
    async with client(house.coordinator) as stub:
        with after_joining(house.loaded, house.service):
            output = await generate(stub, request)
    assert len(output.token_ids) == 40
    assert output.stats.accepted_tokens > 0


# Sessions.


async def test_same_key_is_the_same_session(house: House) -> None:
    key = secrets.token_hex(4)
    request = ask(PROMPT, max_tokens=24, ignore_eos=True, key=key)
    async with client(house.coordinator) as stub:
        first, second = await asyncio.gather(generate(stub, request), generate(stub, request))
        third = await generate(stub, request)
        sessions = {output.session_id for output in (first, second, third)}
        other = await generate(stub, ask(PROMPT, max_tokens=24, ignore_eos=True, key=key + "x"))
    assert len(sessions) == 1
    assert first.token_ids == second.token_ids == third.token_ids
    assert first.seed == third.seed
    assert other.session_id not in sessions


async def test_same_key_for_another_request_is_a_conflict(house: House) -> None:
    key = secrets.token_hex(4)
    async with client(house.coordinator) as stub:
        await generate(stub, ask(PROMPT, max_tokens=4, key=key))
        code, _, typed = await failure(stub.Generate(ask(PROMPT, max_tokens=5, key=key), timeout=10))
    assert (code, typed.code) == (grpc.StatusCode.FAILED_PRECONDITION, "conflict")
    assert (typed.field, typed.value) == ("idempotency_key", key)


async def test_resume_from_any_position(house: House) -> None:
    async with client(house.coordinator) as stub:
        output = await generate(stub, ask(PROMPT, seed=6, max_tokens=20, ignore_eos=True))
        for start in (0, 7, 20):
            resume = pb.ResumeRequest(session_id=output.session_id, from_position=start)
            rest = await follow(stub.Resume(resume, timeout=10), Output(token_ids=output.token_ids[:start]))
            assert rest.token_ids == output.token_ids
            assert rest.kinds == output.kinds[start:]
            assert output.text.endswith(rest.text)


async def test_two_can_follow_one_session(house: House) -> None:
    """A second reader gets everything from where it asks, while the first goes on."""
    async with client(house.coordinator) as stub:
        call = stub.Generate(ask(PROMPT, temperature=0.0, max_tokens=400, ignore_eos=True, gamma=0), timeout=30)
        started = await call.read()
        resume = pb.ResumeRequest(session_id=started.started.session_id)
        second = await follow(stub.Resume(resume, timeout=30), Output())
        tokens: list[int] = []
        while (reply := await call.read()) is not grpc.aio.EOF:
            tokens.extend(reply.chunk.token_ids)
    assert second.token_ids == tokens
    assert len(tokens) == 400


async def test_cancel(house: House) -> None:
    async with client(house.coordinator) as stub:
        call = stub.Generate(ask(PROMPT, temperature=0.0, max_tokens=1500, ignore_eos=True), timeout=30)
        session_id = (await call.read()).started.session_id
        assert (await stub.Cancel(pb.CancelRequest(session_id=session_id), timeout=5)).cancelled
        replies = []
        while (reply := await call.read()) is not grpc.aio.EOF:
            replies.append(reply)
        assert replies[-1].complete.finish_reason == FinishReason.CANCELLED
        assert not (await stub.Cancel(pb.CancelRequest(session_id=session_id), timeout=5)).cancelled, "ended already"


async def test_a_session_that_another_coordinator_cancels_ends_as_cancelled(house: House) -> None:
    """Behind a load balancer, `Cancel` goes to any of them. Its client was told that another one owns the session."""
    request = ask(PROMPT, temperature=0.0, max_tokens=1500, ignore_eos=True, gamma=0)
    other = Store(house.redis.url, "another coordinator", 60)
    with slowed(house.loaded, 0.005):
        async with client(house.coordinator) as stub:
            call = stub.Generate(request, timeout=30)
            session_id, received = (await call.read()).started.session_id, 0
            while received < 8:
                received += len((await call.read()).chunk.token_ids)
            assert await other.cancel(session_id)
            while (reply := await call.read()) is not grpc.aio.EOF:
                last = reply
            assert last.complete.finish_reason == FinishReason.CANCELLED, last
            assert not await other.cancel(session_id)

            # Its record lacks what was committed since the last write, which a client may have.
            resumed = stub.Resume(pb.ResumeRequest(session_id=session_id, from_position=1500), timeout=10)
            assert (await resumed.read()).started.session_id == session_id
            assert (await resumed.read()).complete.finish_reason == FinishReason.CANCELLED
    await other.connection.close()


async def test_short_calls_of_a_client_go_to_the_endpoint_that_answers(house: House) -> None:
    """Before any stream has found out that the first one is gone."""
    gone = f"127.0.0.1:{free_port()}"
    name = house.service.sessions.targets.named("").info.name
    for first in (gone, house.coordinator):
        async with AsyncClient([first, house.coordinator]) as several:
            assert (await several.model()).name == name
        async with AsyncClient([first, gone, house.coordinator]) as several:
            assert (await several.server()).durable
            with pytest.raises(NotFound):
                await several.cancel("nobody")
        with Client([first, gone, house.coordinator]) as synchronous:
            assert (await asyncio.to_thread(synchronous.model)).name == name
            assert (await asyncio.to_thread(synchronous.server)).durable
            with pytest.raises(NotFound):
                await asyncio.to_thread(synchronous.cancel, "nobody")
    with Client([gone, gone]) as nobody, pytest.raises(PeerLost):
        await asyncio.to_thread(nobody.model)


@pytest.mark.parametrize("method", ["Resume", "Cancel"])
async def test_unknown_session(house: House, method: str) -> None:
    request = {"Resume": pb.ResumeRequest, "Cancel": pb.CancelRequest}[method](session_id="nobody")
    async with client(house.coordinator) as stub:
        code, _, typed = await failure(getattr(stub, method)(request, timeout=10))
    assert code is grpc.StatusCode.NOT_FOUND
    assert (typed.code, typed.field, typed.value) == ("not_found", "session_id", "nobody")


async def test_session_taken_by_a_higher_epoch_is_left(house: House) -> None:
    """Another coordinator has claimed it: whoever follows here is told, and its writes are fenced off."""
    with slowed(house.loaded, 0.005):
        async with client(house.coordinator) as stub, redis.Redis.from_url(house.redis.url) as store:
            call = stub.Generate(ask(PROMPT, temperature=0.0, max_tokens=1500, ignore_eos=True, gamma=0), timeout=30)
            session_id = (await call.read()).started.session_id
            key = f"outrider:session:{{{session_id}}}"

            async def written() -> bool:
                return bool(await store.exists(key))

            await until_async(written, 5, "the session in Redis")
            await store.hincrby(key, "epoch", 1)
            error = None
            while (reply := await call.read()) is not grpc.aio.EOF:
                error = reply.error if reply.HasField("error") else error
            assert error is not None
            assert (error.code, error.value) == ("fenced", session_id)
            assert int(await store.hget(key, "finish") or 0) == FinishReason.NONE


async def test_a_stream_that_was_opened_before_and_comes_late_ends_no_session(house: House) -> None:
    """The network was cut, and the verifier gets what was sent over the lost connection after the one in its place."""
    request = ask(PROMPT, temperature=0.0, max_tokens=100, ignore_eos=True, gamma=0)
    async with client(house.coordinator) as stub:
        plain = await generate(stub, request)
        with slowed(house.loaded, 0.005):
            answer = asyncio.create_task(generate(stub, request))
            running = house.service.sessions
            assert await soon(lambda: any(not each.ended and each.record.tokens for each in running.live), 5)
            (record,) = (each.record for each in running.live if not each.ended)
            async with verifying(house.verifier) as late:
                name, epoch = record.session_id, record.epoch
                await late.open([*record.request.prompt], session_id=name, epoch=epoch, max_tokens=100)
            output = await answer
    assert output.token_ids == plain.token_ids
    assert output.stats.failovers == 1


async def test_model_and_server_info(house: House, loaded: LoadedModel) -> None:
    async with client(house.coordinator) as stub:
        model = await stub.GetModelInfo(common.GetModelInfoRequest(), timeout=10)
        info = await stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=10)
    assert model.fingerprint == loaded.engine.info.fingerprint
    assert model.name == "target"
    assert info.durable
    assert info.version
    assert info.coordinator_id
    kinds = {worker.kind: worker for worker in info.workers}
    assert set(kinds) == {"target", "ngram", "model"}
    assert kinds["target"].role == pb.ROLE_VERIFIER
    assert kinds["target"].address == house.verifier
    assert kinds["model"].model.vocabulary_digest == model.vocabulary_digest
    assert not any(worker.draining for worker in info.workers)


# Registering.


def worker(as_role: pb.Role.ValueType, model: common.ModelInfo, **fields: Any) -> pb.RegisterRequest:
    given = {"worker_id": secrets.token_hex(4), "role": as_role, "address": f"127.0.0.1:{free_port()}", "kind": "test"}
    given["capacity"] = 8
    return pb.RegisterRequest(worker=pb.Worker(model=model, **(given | fields)))


@asynccontextmanager
async def registering(house: House) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(house.coordinator, options=channel_options()) as channel:
        call = rpc.RegistryStub(channel).Register(timeout=30)
        try:
            yield call
        finally:
            call.cancel()


async def known(house: House) -> set[str]:
    async with client(house.coordinator) as stub:
        info = await stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=10)
    return {worker.worker_id for worker in info.workers}


async def test_worker_registers_and_leaves(house: House) -> None:
    request = worker(pb.ROLE_DRAFTER, common.ModelInfo(name="any"), draining=True)
    worker_id = request.worker.worker_id
    async with registering(house) as call:
        await call.write(request)
        reply = await call.read()
        assert reply.accepted
        assert reply.heartbeat_ms == HEARTBEAT_MS
        assert worker_id in await known(house)
        request.worker.capacity = 77
        await call.write(request)

        async def updated() -> bool:
            return any(link.info.capacity == 77 for link in house.service.sessions.worker_pool.connections())

        await until_async(updated, 5, "the heartbeat taken in")

    async def gone() -> bool:
        return worker_id not in await known(house)

    await until_async(gone, 5, "the worker gone with its stream")


async def test_a_worker_that_registers_again_is_the_same_one(house: House) -> None:
    """Its connection broke and it came back before we noticed: sessions go on with the link they hold."""
    request = worker(pb.ROLE_DRAFTER, common.ModelInfo(name="any"), draining=True)
    worker_id = request.worker.worker_id

    def link() -> Any:
        return next(
            link for link in house.service.sessions.worker_pool.connections() if link.info.worker_id == worker_id
        )

    async with registering(house) as second:
        async with registering(house) as first:
            await first.write(request)
            assert (await first.read()).accepted
            held = link()
            request.worker.capacity = 78
            await second.write(request)
            assert (await second.read()).accepted
            assert link() is held
            assert held.info.capacity == 78

        async def first_is_over() -> bool:
            return bool(held.registrations == 1)

        await until_async(first_is_over, 5, "the old stream's end seen")
        assert worker_id in await known(house), "it still reports over its new stream"


async def test_worker_of_another_coordinator_comes_and_goes_with_redis(house: House) -> None:
    """Its coordinator dies without a word: the record ends by its time to live."""
    other = Store(house.redis.url, "another-coordinator", 60)
    info = WorkerInfo(
        "far-away", Role.DRAFTER, f"127.0.0.1:{free_port()}", ModelInfo("any", "any"), "test", draining=True
    )
    try:
        await other.put_worker(info, ttl_ms=60_000)

        async def here() -> bool:
            return info.worker_id in await known(house)

        async def gone() -> bool:
            return not await here()

        await until_async(here, 10, "heard of it through Redis")
        await other.put_worker(info, ttl_ms=1000)  # its last report
        await until_async(gone, 10, "forgotten once silent")
    finally:
        await other.connection.close()


async def test_whoever_hears_of_a_session_can_ask_for_it_elsewhere(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its coordinator may die right after the first word. Others that grow all the time keep it waiting no more."""
    monkeypatch.setattr(write_behind, "FIRST_WRITE_S", 10.0)  # a session starts without a Redis that is late
    other = Store(house.redis.url, "another-coordinator", 60)
    endless = [ask(PROMPT, seed=seed, max_tokens=400, ignore_eos=True) for seed in range(2)]
    try:
        async with client(house.coordinator) as stub:
            going = [stub.Generate(request) for request in endless]
            for call in going:
                assert (await call.read()).HasField("started")
            for seed in range(20):
                call = stub.Generate(ask(PROMPT, seed=seed, max_tokens=400, ignore_eos=True))
                session_id = (await call.read()).started.session_id
                record = await other.claim(session_id)
                assert record is not None
                assert record.request.params.seed == seed
                call.cancel()
            for call in going:
                call.cancel()
    finally:
        await other.connection.close()


def tokens_of(vocabulary: Vocabulary) -> list[bytes]:
    return [token.encode("utf-8", "surrogatepass") for token in vocabulary.tokens]


@pytest.mark.parametrize("difference", ["changed", "all missing", "more"])
async def test_other_vocabulary_is_refused_naming_the_first_difference(
    house: House, loaded: LoadedModel, difference: str
) -> None:
    theirs = tokens_of(loaded.vocabulary)
    if difference == "changed":
        theirs[5], theirs[90] = b"five", b"ninety"
    elif difference == "all missing":
        theirs.clear()
    else:
        theirs.append(b"more")
    first = {"changed": 5, "all missing": 0, "more": 257}[difference]
    async with registering(house) as call:
        request = worker(pb.ROLE_DRAFTER, common.ModelInfo(name="stranger", vocabulary_digest="another"))
        await call.write(request)
        assert (await call.read()).send_vocabulary
        split = 100 if difference == "more" else 0  # refused at once: nothing more may be on its way
        if split:
            await call.write(pb.RegisterRequest(vocabulary=pb.Vocabulary(tokens=theirs[:split])))
        await call.write(pb.RegisterRequest(vocabulary=pb.Vocabulary(first_id=split, tokens=theirs[split:], last=True)))
        code, error, typed = await failure(call)
    assert (code, typed.code) == (grpc.StatusCode.FAILED_PRECONDITION, "model_mismatch")
    assert typed.field == f"vocabulary[{first}]"
    assert f"token id {first}" in error.message
    assert typed.value != typed.limit
    assert request.worker.worker_id not in await known(house)


async def test_a_vocabulary_that_lacks_the_last_tokens_counts_as_the_targets(house: House, loaded: LoadedModel) -> None:
    """As that of a base model, which lacks what was added for chats. Other coordinators learn it from the record."""
    theirs, digest = tokens_of(loaded.vocabulary)[:-1], loaded.vocabulary.digest
    async with registering(house) as call:
        request = worker(pb.ROLE_DRAFTER, common.ModelInfo(name="base", vocabulary_digest="another"))
        await call.write(request)
        assert (await call.read()).send_vocabulary
        await call.write(pb.RegisterRequest(vocabulary=pb.Vocabulary(tokens=theirs[:100])))
        await call.write(pb.RegisterRequest(vocabulary=pb.Vocabulary(first_id=100, tokens=theirs[100:], last=True)))
        assert (await call.read()).accepted
        request.worker.load.sessions = 3
        await call.write(request)

        def reported() -> bool:
            known = house.service.sessions.worker_pool.workers.get(request.worker.worker_id)
            return known is not None and known.info.load.sessions == 3 and known.info.model.vocabulary_digest == digest

        assert await soon(reported, 5), "its reports go on"
        recorded = {each.worker_id: each for each in await house.service.sessions.store.workers(60)}
        assert recorded[request.worker.worker_id].model.vocabulary_digest == digest
        request.worker.model.vocabulary_digest = "a third one"
        await call.write(request)
        code, _, typed = await failure(call)
        assert (code, typed.field) == (grpc.StatusCode.INVALID_ARGUMENT, "worker")


async def test_drafter_learns_the_first_difference_of_a_large_vocabulary(
    house: House, loaded: LoadedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    """It differs early, and the drafter is still showing the rest when it is refused."""
    vocabulary = Vocabulary((*loaded.vocabulary.tokens[:3], "three", *(f"token {i} " * 20 for i in range(100_000))))
    model = ModelInfo("large", "large", vocabulary_digest=vocabulary.digest)
    info = WorkerInfo("large", Role.DRAFTER, "127.0.0.1:1", model, "test")
    enlistment = RegistrationClient([house.coordinator], lambda: info, vocabulary)
    with structlog.testing.capture_logs() as logs:
        running = asyncio.create_task(enlistment.run())

        async def told() -> bool:
            return any(entry["event"] == "not registered" for entry in logs)

        try:
            await until_async(told, 20, "told why")
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    messages = [entry["error"] for entry in logs if entry["event"] == "not registered"]
    assert "first at token id 3" in messages[0]
    assert f"progress: not registered: {messages[0]}" in capsys.readouterr().out, "which `outrider up` shows"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"fingerprint": "0" * 32}, "model.fingerprint"),
        ({"vocab_size": 300, "fingerprint": "0" * 32}, "model.vocab_size"),
        ({"architecture": "GPT2LMHeadModel", "vocab_size": 300, "fingerprint": "0" * 32}, "model.architecture"),
        ({"dtype": "bfloat16", "fingerprint": "0" * 32}, "model.dtype"),
    ],
)
async def test_second_target_is_refused_naming_the_first_difference(
    house: House, loaded: LoadedModel, changes: dict[str, Any], field: str
) -> None:
    model = convert.model_to_proto(loaded.engine.info)
    wanted = str(getattr(model, field.removeprefix("model.")))
    model.MergeFrom(common.ModelInfo(**changes))
    async with registering(house) as call:
        await call.write(worker(pb.ROLE_VERIFIER, model))
        code, error, typed = await failure(call)
    assert (code, typed.code, typed.field) == (grpc.StatusCode.FAILED_PRECONDITION, "model_mismatch", field)
    assert typed.limit == wanted
    assert typed.value == str(changes[field.removeprefix("model.")])
    assert field.removeprefix("model.") in error.message


@pytest.mark.parametrize(
    ("fields", "field"), [({"worker_id": ""}, "worker"), ({"address": ""}, "worker"), ({"role": 0}, "worker.role")]
)
async def test_nameless_workers_are_refused(house: House, fields: dict[str, Any], field: str) -> None:
    async with registering(house) as call:
        await call.write(worker(pb.ROLE_DRAFTER, common.ModelInfo(name="any"), **fields))
        code, _, typed = await failure(call)
    assert (code, typed.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)


async def test_silent_registration_is_ended(house: House) -> None:
    async with registering(house) as call:
        code, _, typed = await failure(call)
    assert (code, typed.code, typed.field) == (grpc.StatusCode.DEADLINE_EXCEEDED, "expired", "first message")
