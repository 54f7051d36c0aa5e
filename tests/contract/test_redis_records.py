"""A coordinator beside a Redis that a stranger can write to: it is told nothing, ends nothing and learns no key."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis

from coordinator.control.estimator import PairHistory
from coordinator.persistence.lua_scripts import MAX_TOKENS_BYTES
from coordinator.persistence.session_record import SessionRecord, SessionRequest, pack
from coordinator.persistence.store import Store
from coordinator.persistence.stored_records import Unreadable, seal_worker
from coordinator.workers.fleet_keys import FleetKeys
from coordinator.workers.registrations import Registrations
from coordinator.workers.worker_pool import WorkerPool
from outrider.protocol import convert
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo
from outrider.protocol.sampling_params import SamplingParams, Verification
from outrider.protocol.speculation import FinishReason, TokenKind, TokenLogprobs
from outrider.runtime.embedded_redis import embedded_redis
from outrider.security.api_keys import ApiKeys
from outrider.security.channels import Channels
from outrider.settings.coordinator import CoordinatorSettings
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc
from tests.cluster import ROOT, Cluster, Output, Redis, ask, client, failure, follow, generate, until
from tests.contract.conftest import House

pytestmark = pytest.mark.timeout(120)

FLEET_KEY = "secret-of-the-fleet"
HEARTBEAT_MS = 100


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A coordinator in a process of its own, with a fleet key; workers are the tests'."""
    cluster = Cluster(
        tmp_path_factory.mktemp("redis-records"),
        heartbeat_ms=HEARTBEAT_MS,
        flags=("--fleet-key", FLEET_KEY),
        access=Channels(key=FLEET_KEY),
    )
    coordinator = cluster.add_coordinator()
    try:
        cluster.redis.start().wait_ready()
        coordinator.start().wait_ready()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def stranger(fleet: Cluster) -> Iterator[Any]:
    with redis.Redis.from_url(fleet.redis.url) as there:
        yield there
        there.flushall()


def record(name: str, address: str = "127.0.0.1:1", **more: Any) -> bytes:
    info = convert.worker_to_proto(WorkerInfo(name, Role.DRAFTER, address, ModelInfo("m", "f"), kind="ngram"))
    for field, value in more.items():
        setattr(info, field, value)
    return info.SerializeToString()


def skipped(fleet: Cluster) -> dict[str, float]:
    """How many records were not believed, by why."""
    with urllib.request.urlopen(f"{fleet.coordinators[0].web}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    counts: dict[str, float] = {}
    for line in lines:
        if line.startswith("outrider_redis_records_skipped_total{"):
            counts[line.partition('reason="')[2].partition('"')[0]] = float(line.rpartition(" ")[2])
    return counts


async def test_a_user_with_the_rights_that_the_page_names_is_enough(stranger: Any, fleet: Cluster) -> None:
    rights = re.search(r"`(~outrider:[^`]+)`", (ROOT / "docs" / "security.md").read_text())
    assert rights is not None
    stranger.execute_command("ACL", "SETUSER", "outrider", "on", ">password", *rights[1].split())
    store = Store(fleet.redis.url.replace("//", "//outrider:password@"), "a coordinator", 60)
    request = SessionRequest((1, 2), SamplingParams(seed=1))
    await store.connection.ping()
    assert await store.write(SessionRecord("session", request, 1), 0, 0, whole=True) == "OK"
    assert await store.claim("session") is not None
    assert await store.cancel("session")
    assert await store.reserve("key", "session digest") is None
    await store.put_worker(WorkerInfo("worker", Role.DRAFTER, "127.0.0.1:1", ModelInfo("m", "f")), 1000)
    assert [worker.worker_id for worker in await store.workers(1.0)] == ["worker"]
    await store.remove_worker("worker")
    await store.put_pair("target", "drafter", PairHistory())
    assert await store.pair("target", "drafter") == PairHistory()
    await store.connection.close()


def test_nothing_in_redis_ends_a_coordinator(fleet: Cluster, stranger: Any) -> None:
    now = time.time()
    keys = ApiKeys([FLEET_KEY])

    def put(name: str, data: bytes) -> None:
        stranger.hset(f"outrider:worker:{name}", mapping=seal_worker(data, name, "c", now, keys))

    put("newer-role", record("newer-role", role=7))
    put("no-role", record("no-role", role=0))
    put("bytes", b"\xff\xff\xff")
    put("other-name", record("somebody-else"))
    put("no-address", record("no-address", address=""))
    put("bad-address", record("bad-address", address="unix:///etc/passwd"))
    put("many-rows", record("many-rows", "127.0.0.1:2", capacity=2**32 - 1, round_trip_ms=float("nan")))
    put("good", record("good"))
    stranger.set("outrider:worker:wrong-type", "x")
    stranger.rpush("outrider:worker:a-list", "x")
    stranger.hset("outrider:worker:huge", mapping={"data": b"x" * 10_000_000})
    stranger.hset("outrider:worker:empty", mapping={"other": "x"})
    stranger.hset(b"outrider:worker:\xff\xfe\x1b[2J", mapping={"data": b"x"})
    stranger.hset("outrider:worker:" + "long" * 1000, mapping={"data": b"x", "at": "x" * 5000})

    until(lambda: skipped(fleet).get("unreadable", 0) > 100, 20, "several rounds over all of them")
    process = fleet.coordinators[0]
    assert process.alive, process.log()
    assert process.log().count("newer-role") < 5, "each is told once"
    until(lambda: "good" in names(fleet), 10, "what is right among them is learnt")
    assert not {"newer-role", "no-role", "other-name", "bad-address"} & names(fleet)


def names(fleet: Cluster) -> set[str]:
    with fleet.access.channel(fleet.address) as channel:
        return {
            worker.worker_id for worker in rpc.OutriderStub(channel).GetServerInfo(pb.GetServerInfoRequest()).workers
        }


def test_the_fleet_key_is_shown_to_nobody_that_only_redis_names(fleet: Cluster, stranger: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as evil, socket.create_server(("127.0.0.1", 0)) as good:
        for listener in (evil, good):
            listener.settimeout(10)
        data = record("evil", f"127.0.0.1:{evil.getsockname()[1]}", role=int(Role.VERIFIER))
        for fields in (
            {"data": data, "coordinator": "c"},
            seal_worker(data, "evil", "c", time.time(), ApiKeys(["guessed"])),
            seal_worker(data, "evil", "c", time.time() - 3600, ApiKeys([FLEET_KEY])),
        ):
            before = skipped(fleet)
            stranger.delete("outrider:worker:evil")
            stranger.hset("outrider:worker:evil", mapping=fields)
            until(lambda before=before: skipped(fleet) != before, 10, "it was read")
        vouched = record("vouched", f"127.0.0.1:{good.getsockname()[1]}")
        fields = seal_worker(vouched, "vouched", "c", time.time(), ApiKeys([FLEET_KEY]))
        stranger.hset("outrider:worker:vouched", mapping=fields)
        good.accept()[0].close()  # a probe
        evil.settimeout(1.0)
        with pytest.raises(TimeoutError):
            evil.accept()
    until(lambda: {"unauthenticated", "stale"} <= set(skipped(fleet)), 10, "both reasons counted")


GARBAGE: list[tuple[str, dict[str, Any]]] = [
    ("request", {"request": b"{"}),
    ("request", {"request": json.dumps({"prompt": [10**9]}).encode()}),
    ("epoch", {"epoch": str(2**64 - 1)}),
    ("epoch", {"epoch": "-1"}),
    ("epoch", {"epoch": "soon"}),
    ("finish", {"finish": "x" * 5000}),
    ("finish", {"finish": "soon"}),
]


async def test_an_unreadable_session_is_an_error_of_its_own(house: House) -> None:
    """Resume and Cancel say so; everybody else goes on."""
    fingerprint = house.service.sessions.targets.named("").info.fingerprint
    request = SessionRequest((1, 2), SamplingParams(seed=1, temperature=0.0)).to_json()
    good = {"request": request, "epoch": "1", "model": fingerprint, "owner": "c"}
    with redis.Redis.from_url(house.redis.url) as there:
        async with client(house.coordinator) as stub:
            for number, (_, changed) in enumerate(GARBAGE):
                there.hset(f"outrider:session:{{bad{number}}}", mapping=good | changed)
            there.set("outrider:session:{badtype}", "x")
            there.hset("outrider:session:{badtokens}", mapping=good)
            there.rpush("outrider:tokens:{badtokens}", "x")
            there.hset("outrider:session:{badids}", mapping=good)
            there.set("outrider:tokens:{badids}", pack([2**27], [TokenKind.PLAIN]))
            for name in (*(f"bad{number}" for number in range(len(GARBAGE))), "badtype", "badtokens", "badids"):
                status, error, _ = await failure(stub.Resume(pb.ResumeRequest(session_id=name), timeout=20))
                assert status is grpc.StatusCode.FAILED_PRECONDITION, (name, error)
                assert "Redis has a record that cannot be used" in error.message
            assert (await generate(stub, ask("Hello", max_tokens=8))).finished
            assert house.service.sessions.store.up


async def test_a_session_of_ours_is_written_over_what_a_stranger_put_there(house: House) -> None:
    with redis.Redis.from_url(house.redis.url) as there:
        async with client(house.coordinator) as stub:
            call = stub.Generate(ask("Hello", max_tokens=400, ignore_eos=True))
            session_id = (await call.read()).started.session_id
            keys = [f"outrider:{kind}:{{{session_id}}}" for kind in ("session", "tokens")]
            there.delete(*keys)
            there.set(keys[0], "x")
            there.rpush(keys[1], "x")
            while (await call.read()) is not grpc.aio.EOF:
                pass
            assert await house.service.sessions.write_behind.flush(5)
            assert there.hget(keys[0], "finish") is not None
            assert there.strlen(keys[1]) == 4 * 400


async def test_a_finished_session_that_redis_has_lost_is_stored_again_when_it_is_read(house: House) -> None:
    """Its coordinator remembers it; the others know only what Redis has."""
    with redis.Redis.from_url(house.redis.url) as there:
        async with client(house.coordinator) as stub:
            before = await generate(stub, ask("Hello", max_tokens=9, ignore_eos=True))
            assert await house.service.sessions.write_behind.flush(5)
            there.delete(*(f"outrider:{kind}:{{{before.session_id}}}" for kind in ("session", "tokens")))
            again = await follow(stub.Resume(pb.ResumeRequest(session_id=before.session_id), timeout=10), Output())
            assert (again.token_ids, again.finish) == (before.token_ids, before.finish)
            assert await house.service.sessions.write_behind.flush(5)
            assert there.hget(f"outrider:session:{{{before.session_id}}}", "finish") == b"%d" % FinishReason.LENGTH
            assert there.strlen(f"outrider:tokens:{{{before.session_id}}}") == 4 * 9


class LosingReplies:
    """A way to Redis that loses the first reply to each script, and its connection, after Redis has run it."""

    def __init__(self, server: Redis) -> None:
        self._server = server
        self.lost = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, requests = await asyncio.open_connection("127.0.0.1", self._server.port)
        try:
            while sent := await reader.read(65536):
                requests.write(sent)
                answer = await answers.read(65536)
                if b"EVALSHA" in sent and not answer.startswith(b"-NOSCRIPT") and not self.lost:
                    self.lost += 1
                    break
                writer.write(answer)
        finally:
            requests.close()
            writer.close()


async def test_a_call_whose_reply_was_lost_counts_once(redis_server: Redis) -> None:
    """The Redis client repeats it: a claim must not fence its own coordinator, nor a cancel find itself too late."""
    way = LosingReplies(redis_server)
    server = await asyncio.start_server(way.serve, "127.0.0.1")
    store = Store(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0", "coordinator-2", 60)
    record = SessionRecord("lost", SessionRequest((1, 2), SamplingParams(seed=1)), epoch=4)
    try:
        with redis.Redis.from_url(redis_server.url) as there:
            way.lost = 1
            assert await store.write(record, 0, 0, whole=True) == "OK"
            way.lost = 0
            claimed = await store.claim("lost")
            assert way.lost == 1
            assert claimed is not None
            assert claimed.epoch == 5, "claimed once"
            claimed = await store.claim("lost")
            assert claimed is not None
            assert claimed.epoch == 6, "another claim is another one"
            way.lost = 0
            assert await store.cancel("lost") is True
            assert way.lost == 1
            assert there.hget("outrider:session:{lost}", "epoch") == b"7"
            assert await store.cancel("lost") is False
    finally:
        await store.connection.close()
        server.close()
        await server.wait_closed()


def started(seed: int) -> SessionRecord:
    tokens, kinds = [seed] * 9, [TokenKind.PLAIN] * 9
    request = SessionRequest((1, 2), SamplingParams(seed=seed, max_tokens=9))
    return SessionRecord(f"of-two-{seed // 10}", request, tokens=tokens, kinds=kinds)


async def test_one_epoch_has_one_owner(redis_server: Redis) -> None:
    """A retry with an idempotency key starts the session that its coordinator could not write: two seeds, one text."""
    late, retried = (Store(redis_server.url, name, 60) for name in ("late", "retried"))
    try:
        assert await retried.write(started(18), 0, 9, whole=True) == "OK"
        assert await late.write(started(17), 0, 4, whole=True) == "FENCED"
        record = await late.claim("of-two-1")
        assert record is not None
        assert (record.request.params.seed, record.tokens) == (18, [18] * 9)
    finally:
        await late.connection.close()
        await retried.connection.close()


async def test_a_cancelled_session_takes_tokens_of_the_coordinator_that_ran_it_alone(redis_server: Redis) -> None:
    """One that lost it to another before knows other tokens, or fewer."""
    ran, late, canceller = (Store(redis_server.url, name, 60) for name in ("ran", "late", "canceller"))
    try:
        assert await late.write(started(61), 0, 2, whole=True) == "OK"
        taken = await ran.claim("of-two-6")
        assert taken is not None
        taken.append([62] * 5, [TokenKind.PLAIN] * 5, [])
        assert await ran.write(taken, 2, 5, whole=False) == "OK"
        assert await canceller.cancel("of-two-6")
        assert await late.write(started(61), 2, 9, whole=False) == "CANCELLED"
        taken.finish_reason = FinishReason.LENGTH
        assert await ran.write(taken, 5, 7, whole=False) == "CANCELLED"
        record = await canceller.claim("of-two-6")
        assert record is not None
        assert (record.tokens, record.finish_reason) == ([61] * 2 + [62] * 5, FinishReason.CANCELLED)
        with redis.Redis.from_url(redis_server.url) as full:
            full.delete("outrider:tokens:{of-two-6}")
        assert await ran.write(taken, 7, 7, whole=False) == "GAP"
        assert await ran.write(taken, 0, 7, whole=True) == "CANCELLED"
        record = await canceller.claim("of-two-6")
        assert record is not None
        assert (record.tokens, record.finish_reason) == ([61] * 2 + [62] * 5, FinishReason.CANCELLED)
    finally:
        for store in (ran, late, canceller):
            await store.connection.close()


async def test_a_redis_that_refuses_writes_tells_of_no_worker_that_has_left() -> None:
    """As a full one: records of workers expire there, and coordinators forgot those that reported to another."""
    info = WorkerInfo("w", Role.DRAFTER, "127.0.0.1:1", ModelInfo("m", "f"))
    with embedded_redis() as url, redis.Redis.from_url(url) as there:
        store = Store(url, "mine", 60)
        registrations = Registrations(WorkerPool(FleetKeys(), CoordinatorSettings()), store, 500)
        workers = registrations.worker_pool.workers
        await store.put_worker(info, 60_000)
        await registrations.synchronise()
        (known,) = workers
        there.delete("outrider:worker:w")
        there.config_set("min-replicas-to-write", 1)
        known.seen_at -= 60.0
        await registrations.synchronise()
        assert list(workers) == [known]
        assert not await store.connection.answers(), "a look at the server tells the same"
        there.config_set("min-replicas-to-write", 0)
        await registrations.synchronise()
        assert store.up
        assert list(workers) == [known], "the coordinator that it reports to may not have written yet"
        await workers.close()
        await store.connection.close()


async def test_an_older_state_of_redis_brings_no_older_owner_back(redis_server: Redis) -> None:
    """As after a failover: the claim and what followed it are lost."""
    before, after = (Store(redis_server.url, name, 60) for name in ("before", "after"))
    keys = ["outrider:session:{of-two-3}", "outrider:tokens:{of-two-3}"]
    try:
        assert await before.write(started(35), 0, 4, whole=True) == "OK"
        with redis.Redis.from_url(redis_server.url) as there:
            state = [there.dump(key) for key in keys]
            record = await after.claim("of-two-3")
            assert record is not None
            assert await after.write(record, 0, 4, whole=True) == "OK"
            for key, value in zip(keys, state, strict=True):
                there.restore(key, 0, value, replace=True)  # type: ignore[arg-type]
        assert await after.write(record, 4, 4, whole=False) == "MISSING", "it writes all of it again"
        assert await before.write(replace(started(35), finish_reason=FinishReason.STOP), 4, 9, whole=False) == "OK"
        assert await after.write(record, 0, 4, whole=True) == "OK"
        assert await before.write(started(35), 4, 9, whole=False) == "FENCED"
        written = await after.claim("of-two-3")
        assert written is not None
        assert (len(written.tokens), written.finished) == (4, False), "nothing of what the older one wrote meanwhile"
    finally:
        await before.connection.close()
        await after.connection.close()


async def test_a_text_that_begins_again_has_no_end_of_an_older_one(redis_server: Redis) -> None:
    """Redis had evicted the record and not the tokens, and its idempotency key came again."""
    store = Store(redis_server.url, "other", 60)
    try:
        assert await store.write(started(45), 0, 9, whole=True) == "OK"
        with redis.Redis.from_url(redis_server.url) as full:
            full.delete("outrider:session:{of-two-4}")
        assert await store.write(started(46), 0, 2, whole=True) == "OK"
        assert await store.write(started(46), 0, 1, whole=True) == "OK", "a late one, which Redis takes out of order"
        record = await store.claim("of-two-4")
        assert record is not None
        assert record.tokens == [46, 46]
    finally:
        await store.connection.close()


async def test_an_output_whose_tokens_redis_evicted_is_made_again(redis_server: Redis) -> None:
    store = Store(redis_server.url, "other", 60)
    try:
        ended = started(25)
        ended.finish_reason = FinishReason.LENGTH
        assert await store.write(ended, 0, 9, whole=True) == "OK"
        with redis.Redis.from_url(redis_server.url) as full:
            full.delete("outrider:tokens:{of-two-2}")
        record = await store.claim("of-two-2")
        assert record is not None
        assert (record.tokens, record.finish_reason, record.epoch) == ([], FinishReason.NONE, 2)
    finally:
        await store.connection.close()


def with_logprobs(session_id: str, finish: FinishReason, mode: Verification = Verification.COUPLED) -> SessionRecord:
    """Return a record of four tokens with their log probabilities."""
    params = SamplingParams(seed=1, max_tokens=4, logprobs=1, temperature=1.0, verification=mode)
    known: list[TokenLogprobs | None] = [TokenLogprobs(-1.0, (5,), (-1.0,))] * 4
    request = SessionRequest((1, 2), params)
    return SessionRecord(session_id, request, 1, [5] * 4, [TokenKind.PLAIN] * 4, known, finish)


@pytest.mark.parametrize("finish", [FinishReason.NONE, FinishReason.LENGTH, FinishReason.CANCELLED])
@pytest.mark.parametrize("mode", [Verification.COUPLED, Verification.BLOCK])
async def test_an_output_whose_log_probabilities_redis_evicted_is_made_again_where_it_can_be(
    redis_server: Redis, finish: FinishReason, mode: Verification
) -> None:
    """Another draw would be another text: there, and in a cancelled answer, tokens without log probabilities stay."""
    store, name = Store(redis_server.url, "other", 60), f"evicted-{finish.name}-{mode.name}"
    try:
        assert await store.write(with_logprobs(name, finish, mode), 0, 4, whole=True) == "OK"
        with redis.Redis.from_url(redis_server.url) as full:
            full.delete(f"outrider:logprobs:{{{name}}}")
        record = await store.claim(name)
        assert record is not None
        again = mode is Verification.COUPLED and finish is not FinishReason.CANCELLED
        assert (record.tokens, record.logprobs) == (([], []) if again else ([5] * 4, [None] * 4))
        assert record.finish_reason is (FinishReason.NONE if again else finish)
        assert record.epoch == (2 if again or finish is FinishReason.NONE else 1)
    finally:
        await store.connection.close()


async def test_log_probabilities_that_redis_evicted_from_a_running_session_are_written_again(
    redis_server: Redis,
) -> None:
    store, running = Store(redis_server.url, "owner", 60), with_logprobs("evicted-running", FinishReason.NONE)
    try:
        assert await store.write(running, 0, 2, whole=True) == "OK"
        with redis.Redis.from_url(redis_server.url) as full:
            full.delete("outrider:logprobs:{evicted-running}")
        assert await store.write(running, 2, 4, whole=False) == "GAP"
        assert await store.write(running, 0, 4, whole=True) == "OK"
        record = await store.claim("evicted-running")
        assert record is not None
        assert record.logprobs == running.logprobs
    finally:
        await store.connection.close()


async def test_a_session_of_another_tenant_is_not_there(redis_server: Redis) -> None:
    """Neither its text nor its epoch, which would fence its owner."""
    store, record = Store(redis_server.url, "owner", 60), with_logprobs("alice-1", FinishReason.NONE)
    record.tenant = "alice"
    try:
        assert await store.write(record, 0, 4, whole=True) == "OK"
        for tenant in ("bob", ""):
            assert await store.claim("alice-1", tenant) is None
            assert await store.cancel("alice-1", tenant) is None
        claimed = await store.claim("alice-1", "alice")
        assert claimed is not None
        assert (claimed.epoch, claimed.tokens, claimed.finished) == (2, record.tokens, False)
        assert await store.cancel("alice-1", "alice") is True
        with redis.Redis.from_url(redis_server.url) as there:
            there.setrange("outrider:tokens:{alice-1}", MAX_TOKENS_BYTES, b"x")
        with pytest.raises(Unreadable):
            await store.claim("alice-1", "alice")
        assert store.up
    finally:
        await store.connection.close()


async def test_nothing_stays_in_redis_for_ever(redis_server: Redis) -> None:
    """A session's time begins again with each write and each claim."""
    store, another = (Store(redis_server.url, name, 60) for name in ("owner", "another"))
    record = with_logprobs("ages", FinishReason.NONE)
    info = WorkerInfo("ages", Role.DRAFTER, "127.0.0.1:1", ModelInfo("m", "f"))
    names = [f"outrider:{kind}:{{ages}}" for kind in ("session", "tokens", "logprobs")]
    try:
        with redis.Redis.from_url(redis_server.url) as there:
            for whole in (True, False):
                assert await store.write(record, 0, 4, whole=whole) == "OK"
                assert [there.ttl(name) in range(50, 61) for name in names] == [True] * 3
                assert all(map(there.persist, names))
            assert await store.claim("ages") is not None
            assert [there.ttl(name) in range(50, 61) for name in names] == [True] * 3
            assert await store.reserve("ages", "ages digest") is None
            reserved = await store.reserve("ages", "another digest")
            assert reserved is not None
            assert (reserved[0], 50 < reserved[1] <= 60) == ("ages digest", True)
            assert await store.reserve("sent", "ages digest as-sent") is None
            assert there.get("outrider:idempotency:sent") == b"ages digest", "older versions read all of it"
            assert there.ttl("outrider:idempotency:sent:sent") in range(50, 61)
            reserved = await store.reserve("sent", "another digest again")
            assert reserved is not None
            assert reserved[0] == "ages digest as-sent"
            there.set("outrider:idempotency:sent", "older version's")
            reserved = await store.reserve("sent", "another digest again")
            assert reserved is not None
            assert reserved[0] == "older version's", "what was sent with the key before is no matter"
            await store.put_pair("ages", "d", PairHistory())
            assert there.ttl("outrider:pair:ages:d") > 60
            await store.put_worker(info, 5000)
            assert 0 < there.pttl("outrider:worker:ages") <= 5000
            await another.remove_worker("ages")
            assert there.exists("outrider:worker:ages"), "it reports to the other coordinator now"
            await store.remove_worker("ages")
            assert not there.exists("outrider:worker:ages")
    finally:
        await store.connection.close()
        await another.connection.close()


async def test_pair_histories_and_idempotency_keys_of_a_stranger(house: House) -> None:
    with redis.Redis.from_url(house.redis.url) as there:
        for link in house.service.sessions.worker_pool.connections():
            for key in there.scan_iter(match="outrider:pair:*"):
                there.delete(key)
                there.rpush(key, link.info.worker_id)
        store = house.service.sessions.store
        there.rpush("outrider:pair:t:d", "x")
        assert await store.pair("t", "d") is None
        there.set("outrider:pair:t:e", json.dumps({"acceptance": [float("nan")]}))
        assert await store.pair("t", "e") is None
        assert store.up


def test_an_address_of_a_worker_is_no_file(tmp_path: Path) -> None:
    """What is believed of an address is host:port: gRPC would take others for a socket, or resolve them its own way."""
    from coordinator.persistence.stored_records import read_worker

    for address in ("unix:/tmp/x", "dns:///evil:1/x", "host", "a b:1"):
        data = record("w", address)
        with pytest.raises(Unreadable):
            read_worker("w", [data, b"c", b"1", None], ApiKeys(), time.time(), 5.0)
