"""Who is there to work, where what Redis says crosses what workers do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import grpc
import pytest
import structlog

from coordinator.persistence.redis_connection import StoreDown
from coordinator.persistence.store import Store
from coordinator.workers import compatibility
from coordinator.workers import registrations as module
from coordinator.workers.fleet_keys import FleetKeys
from coordinator.workers.registrations import Registrations
from coordinator.workers.target import Target
from coordinator.workers.worker_connection import SILENT_S, Stream, WorkerConnection
from coordinator.workers.worker_pool import WorkerPool
from outrider.base.aio import cancel_all, until
from outrider.protocol.errors import Conflict, ModelMismatch, OutriderError, Overloaded, Unavailable
from outrider.protocol.fleet import ModelInfo, Role, SamplingDefaults, WorkerInfo, WorkerLoad
from outrider.settings.coordinator import CoordinatorSettings
from outrider.testing.toy_models import byte_tokenizer

DRAFTER = WorkerInfo("d", Role.DRAFTER, "127.0.0.1:1", ModelInfo("m", "f"))


class SlowStore:
    """Records at once, and answers a question with what was recorded when it was asked."""

    up = True

    def __init__(self) -> None:
        self.records: dict[str, WorkerInfo] = {}
        self.asked = asyncio.Event()
        self.answer = asyncio.Event()
        self.written = asyncio.Event()
        self.written.set()

    async def put_worker(self, info: WorkerInfo, ttl_ms: int) -> None:
        await self.written.wait()
        self.records[info.worker_id] = info

    async def remove_worker(self, worker_id: str) -> None:
        self.records.pop(worker_id, None)

    async def workers(self, max_age_s: float) -> list[WorkerInfo]:
        if not self.up:
            raise StoreDown("away")
        found = list(self.records.values())
        self.asked.set()
        await self.answer.wait()
        return found


@pytest.fixture
def store() -> SlowStore:
    return SlowStore()


@pytest.fixture
async def registrations(store: SlowStore) -> AsyncIterator[Registrations]:
    """With a store that is asked, and whose answer comes when the test lets it."""
    made = Registrations(WorkerPool(FleetKeys(), CoordinatorSettings()), cast(Store, store), 500)
    yield made
    await made.worker_pool.workers.close()


@pytest.fixture
def prompt(store: SlowStore, registrations: Registrations) -> Registrations:
    """With a store that answers at once."""
    store.answer.set()
    return registrations


async def known_from_a_record(store: SlowStore, registrations: Registrations) -> WorkerConnection:
    """Return a worker that another coordinator has recorded; its record is gone again."""
    store.records[DRAFTER.worker_id] = DRAFTER
    await registrations.synchronise()
    (connection,) = registrations.worker_pool.connections()
    store.records.clear()
    return connection


async def test_a_worker_that_left_does_not_come_back_from_an_older_record(
    store: SlowStore, registrations: Registrations
) -> None:
    worker_pool = registrations.worker_pool
    await registrations.admit(DRAFTER)
    looking = asyncio.create_task(registrations.synchronise())
    await store.asked.wait()
    await registrations.remove(DRAFTER.worker_id)
    store.answer.set()
    await looking
    assert not worker_pool.connections()
    store.records[DRAFTER.worker_id] = DRAFTER  # it reports to another coordinator now
    await registrations.synchronise()
    assert [connection.info.worker_id for connection in worker_pool.connections()] == [DRAFTER.worker_id]


async def test_a_worker_is_not_forgotten_while_its_first_record_is_written(
    store: SlowStore, prompt: Registrations
) -> None:
    """It then reported for ever to a coordinator that did not know it."""
    store.written.clear()
    admitting = asyncio.create_task(prompt.admit(DRAFTER))
    worker_pool = prompt.worker_pool
    assert await until(lambda: bool(worker_pool.connections()), 5)
    (connection,) = worker_pool.connections()
    connection.seen_at -= 60.0  # this process stood still
    await prompt.synchronise()
    assert worker_pool.connections() == [connection]
    store.written.set()
    assert await admitting is connection
    assert connection.registrations == 1


async def test_a_stream_that_breaks_off_while_its_record_is_written_does_not_count(
    store: SlowStore, prompt: Registrations
) -> None:
    store.written.clear()
    admitting = asyncio.create_task(prompt.admit(DRAFTER))
    assert await until(lambda: bool(prompt.worker_pool.connections()), 5)
    (connection,) = prompt.worker_pool.connections()
    admitting.cancel()
    await asyncio.gather(admitting, return_exceptions=True)
    connection.seen_at -= 60.0
    connection.silent_s = SILENT_S
    await prompt.synchronise()
    assert not prompt.worker_pool.connections()


async def test_a_worker_that_answers_is_not_forgotten_with_its_record(store: SlowStore, prompt: Registrations) -> None:
    """The coordinator that it reports to hangs, or does not reach Redis."""
    connection = await known_from_a_record(store, prompt)
    connection.seen_at -= 20.0
    await prompt.synchronise()
    assert prompt.worker_pool.connections() == [connection]
    connection.silent_s = SILENT_S
    await prompt.synchronise()
    assert not prompt.worker_pool.connections()


async def test_a_worker_that_is_not_seen_for_long_is_forgotten_though_something_answers(
    store: SlowStore, prompt: Registrations
) -> None:
    """Another process at its address may answer: a probe does not ask who it is."""
    connection = await known_from_a_record(store, prompt)
    connection.seen_at -= 60.0
    await prompt.synchronise()
    assert not prompt.worker_pool.connections()


async def test_a_worker_restarted_with_other_weights_is_checked_without_its_ghost(
    store: SlowStore, prompt: Registrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new process answers the probes of the old connection, so the old worker seems to be there."""
    ghost = await known_from_a_record(store, prompt)
    present: list[list[str]] = []

    def check(info: WorkerInfo) -> bool:
        present.append([each.info.worker_id for each in prompt.worker_pool.connections()])
        return False

    monkeypatch.setattr(prompt.worker_pool.compatibility, "check", check)
    restarted = replace(DRAFTER, worker_id="restarted", model=ModelInfo("m", "other weights"))
    store.records = {restarted.worker_id: restarted}
    ghost.seen_at -= 5.0
    await prompt.synchronise()
    assert present == [[]]
    assert [each.info.worker_id for each in prompt.worker_pool.connections()] == ["restarted"]


async def test_a_worker_that_was_removed_is_told_to_register_again(prompt: Registrations) -> None:
    connection = await prompt.admit(DRAFTER)
    await prompt.worker_pool.workers.drop(DRAFTER.worker_id)
    with pytest.raises(Unavailable, match="register again"):
        await prompt.update(DRAFTER, connection)


def verifier(name: str, address: str, target: str) -> WorkerInfo:
    return WorkerInfo(name, Role.VERIFIER, address, ModelInfo(target, target))


def target_of(info: ModelInfo) -> Target:
    nothing = cast(Any, None)
    return Target(info, byte_tokenizer(), nothing, nothing, identity=info.text_id)


@pytest.fixture
async def silent() -> AsyncIterator[str]:
    """A process that takes connections and never answers, as a verifier that hangs."""
    accepted: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: accepted.append(writer), "127.0.0.1")
    yield "127.0.0.1:{1}".format(*server.sockets[0].getsockname())
    server.close()
    for writer in accepted:
        writer.close()


async def test_no_worker_waits_for_the_tokenizer_of_another_target(prompt: Registrations, silent: str) -> None:
    """It may take a minute to come, or not to come."""
    prompt.worker_pool.targets.add(target_of(ModelInfo("known", "known")), lambda _: ())
    hanging = asyncio.create_task(prompt.admit(verifier("hangs", silent, "new")))
    await asyncio.sleep(0.1)
    async with asyncio.timeout(5):
        joined = [await prompt.admit(verifier("v", "127.0.0.1:1", "known")), await prompt.admit(DRAFTER)]
    assert prompt.worker_pool.connections() == joined
    assert not hanging.done()
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)


async def test_a_recorded_verifier_that_hangs_holds_up_no_other_record(
    store: SlowStore, prompt: Registrations, silent: str
) -> None:
    prompt.worker_pool.targets.add(target_of(ModelInfo("known", "known")), lambda _: ())
    known = await known_from_a_record(store, prompt)
    infos = [verifier("hangs", silent, "new"), verifier("v", "127.0.0.1:2", "known")]
    store.records = {info.worker_id: info for info in infos}
    running = asyncio.create_task(prompt.run())
    assert await until(lambda: prompt.worker_pool.workers.get("v") is not None, 5)
    known.seen_at -= 60.0
    assert await until(lambda: known not in prompt.worker_pool.connections(), 5), "it has left"
    await cancel_all([running])
    assert not [task for task in asyncio.all_tasks() if "_add_recorded" in repr(task)]


async def test_verifiers_of_a_new_target_that_come_together_send_its_tokenizer_once(
    prompt: Registrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = []

    async def fetch(info: ModelInfo, *_: object) -> Target:
        fetched.append(info.name)
        await asyncio.sleep(0.05)
        return target_of(info)

    monkeypatch.setattr(compatibility, "fetch_target", fetch)
    infos = [verifier(f"{target}{i}", f"127.0.0.1:{i}", target[0]) for i, target in enumerate(["a", "a", "b", "b"], 1)]
    other = replace(infos[0], worker_id="c", address="127.0.0.1:9", model=ModelInfo("a", "of other weights"))
    *_, refused = await asyncio.gather(*map(prompt.admit, [*infos, other]), return_exceptions=True)
    assert sorted(fetched) == ["a", "a", "b"], "a second target of one name is found out afterwards"
    assert isinstance(refused, ModelMismatch)
    assert {each.info.worker_id for each in prompt.worker_pool.connections()} == {each.worker_id for each in infos}
    assert {target.info.name for target in prompt.worker_pool.targets} == {"a", "b"}


async def test_tokenizers_that_are_fetched_at_once_are_bounded(
    prompt: Registrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a verifier's key, streams of ever new models filled /tmp and held up the requests' threads."""

    async def fetch(*_: object) -> Target:
        await asyncio.sleep(3600)
        raise AssertionError

    monkeypatch.setattr(compatibility, "fetch_target", fetch)
    infos = [verifier(f"v{i}", f"127.0.0.1:{i}", f"m{i}") for i in range(1, module._MAX_FETCHES + 2)]
    fetching = [asyncio.create_task(prompt.admit(info)) for info in infos[:-1]]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="being fetched"):
        await prompt.admit(infos[-1])
    await cancel_all(fetching)


async def test_a_recorded_worker_that_has_gone_is_not_added_after_its_fetch(
    store: SlowStore, prompt: Registrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = asyncio.Event()

    async def fetch(info: ModelInfo, *_: object) -> Target:
        await answer.wait()
        return target_of(info)

    monkeypatch.setattr(compatibility, "fetch_target", fetch)
    monkeypatch.setattr(prompt, "_heartbeat_s", 0.01)
    gone = verifier("gone", "127.0.0.1:1", "m")
    store.records[gone.worker_id] = gone
    await prompt.synchronise()
    store.up = False
    await prompt.synchronise()
    assert prompt._adding, "Redis tells nothing of it"
    store.up = True
    del store.records[gone.worker_id]
    await prompt.synchronise()
    answer.set()
    await prompt.synchronise()
    assert not prompt._adding
    assert not prompt.worker_pool.connections()
    assert prompt.worker_pool.targets.first is None


async def test_a_verifier_that_comes_back_with_other_end_tokens_has_a_new_target(
    prompt: Registrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fetch(info: ModelInfo, *_: object) -> Target:
        return target_of(info)

    monkeypatch.setattr(compatibility, "fetch_target", fetch)
    first = verifier("first", "127.0.0.1:1", "m")
    await prompt.admit(first)
    model = replace(first.model, eos_token_ids=(2, 7))
    mended = replace(first, worker_id="mended", address="127.0.0.1:2", model=model)
    with pytest.raises(ModelMismatch):
        await prompt.admit(mended)
    await prompt.remove(first.worker_id)
    await prompt.admit(mended)
    assert [target.info.eos_token_ids for target in prompt.worker_pool.targets] == [(2, 7)]


async def test_what_an_older_coordinator_does_not_pass_on_is_taken_from_a_later_report(
    store: SlowStore, prompt: Registrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an upgrade. Else one coordinator samples as the model's makers recommend, and another does not, for good."""

    async def fetch(info: ModelInfo, *_: object) -> Target:
        return target_of(info)

    def recommended() -> list[SamplingDefaults]:
        return [target.info.sampling for target in prompt.worker_pool.targets]

    monkeypatch.setattr(compatibility, "fetch_target", fetch)
    sampling, passed_on = SamplingDefaults(temperature=0.6), verifier("v", "127.0.0.1:1", "m")
    whole = replace(passed_on, model=replace(passed_on.model, sampling=sampling))
    store.records["v"] = passed_on
    await prompt.synchronise()
    assert recommended() == [SamplingDefaults()]
    (connection,) = prompt.worker_pool.connections()
    store.records["v"] = whole
    await prompt.synchronise()
    assert (recommended(), prompt.worker_pool.connections()) == ([sampling], [connection])
    store.records["v"] = passed_on
    await prompt.synchronise()
    assert await prompt.admit(whole) is connection, "it is the same worker"
    assert recommended() == [sampling]


async def test_a_recorded_drafter_that_serves_another_vocabulary_now_is_taken_as_it_is(
    store: SlowStore, prompt: Registrations
) -> None:
    """It has registered again at another coordinator. This one knew it as before, for as long as it lived."""
    await known_from_a_record(store, prompt)
    moved = replace(DRAFTER, model=replace(DRAFTER.model, vocabulary_digest="of another target"))
    store.records[moved.worker_id] = moved
    await prompt.synchronise()
    assert [connection.info for connection in prompt.worker_pool.connections()] == [moved]
    store.records[moved.worker_id] = replace(moved, address="127.0.0.1:7")
    await prompt.synchronise()
    assert [connection.info for connection in prompt.worker_pool.connections()] == [moved], "that is another process"


async def test_verifiers_with_different_sampling_defaults_have_those_of_most_everywhere(
    store: SlowStore, prompt: Registrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each coordinator took those of the first verifier that it met."""

    async def fetch(info: ModelInfo, *_: object) -> Target:
        return target_of(info)

    def sampling() -> list[float | None]:
        return [target.info.sampling.temperature for target in prompt.worker_pool.targets]

    monkeypatch.setattr(compatibility, "fetch_target", fetch)
    given = {"v1": 0.9, "v2": 0.5, "v3": 0.9}
    infos = {
        name: replace(verifier(name, f"127.0.0.1:{name[1]}", "m"), model=ModelInfo("m", "m", sampling=of))
        for name, of in ((name, SamplingDefaults(temperature=each)) for name, each in given.items())
    }
    for order in (["v2", "v1", "v3"], ["v1", "v2", "v3"]):
        for name in order:
            await prompt.admit(infos[name])
        await prompt.synchronise()
        assert sampling() == [0.9], "most have that"
        await prompt.remove("v3")
        await prompt.synchronise()
        assert sampling() == [0.5], "of equally many the same one everywhere"
        for name in ("v1", "v2"):
            await prompt.remove(name)
        await prompt.synchronise()
        assert sampling() == [0.5], "as long as there is no other"
        store.records.clear()


async def test_a_worker_that_is_ignored_is_logged_once(store: SlowStore, prompt: Registrations) -> None:
    """Its record comes with every heartbeat, on every coordinator."""
    await prompt.admit(DRAFTER)
    other = replace(DRAFTER, worker_id="other")
    store.records[other.worker_id] = other

    async def ignored(times: int) -> list[str]:
        with structlog.testing.capture_logs() as logs:
            for _ in range(times):
                await prompt.synchronise()
        return [log["error"] for log in logs if log["event"] == "worker ignored"]

    (error,) = await ignored(3)
    assert "address" in error
    del store.records[other.worker_id]
    assert not await ignored(1)
    store.records[other.worker_id] = other
    assert len(await ignored(2)) == 1, "it was gone"


class HeldStream:
    """Of a session that goes on."""

    def cancel(self, error: OutriderError) -> None:
        pytest.fail(f"its worker lives: {error}")

    def overdue_s(self, tick_s: float, load: WorkerLoad, timeout_s: float) -> float:
        return 0.0


async def test_a_worker_that_registers_again_has_the_connection_that_its_sessions_hold(
    prompt: Registrations,
) -> None:
    """Its registration broke off, the streams of sessions did not: they are to hear that it drains."""
    held = await prompt.admit(DRAFTER)
    held.streams.add(HeldStream())
    await prompt.remove(DRAFTER.worker_id)
    await prompt.synchronise()
    assert not prompt.worker_pool.connections(), "no new session goes there"
    again = await prompt.admit(replace(DRAFTER, draining=True, capacity=9))
    assert again is held
    assert (held.info.draining, held.info.capacity) == (True, 9)
    assert prompt.worker_pool.connections() == [held]


async def test_a_connection_without_sessions_is_closed_when_its_worker_has_left(prompt: Registrations) -> None:
    held = await prompt.admit(DRAFTER)
    stream = HeldStream()
    held.streams.add(stream)
    await prompt.remove(DRAFTER.worker_id)
    held.streams.discard(stream)
    await prompt.synchronise()
    again = await prompt.admit(DRAFTER)
    assert again is not held
    assert held._probing.done()
    await prompt.worker_pool.workers.close()
    assert again._probing.done()


async def test_another_worker_of_the_same_name_has_a_connection_of_its_own(prompt: Registrations) -> None:
    held = await prompt.admit(DRAFTER)
    held.streams.add(HeldStream())
    await prompt.remove(DRAFTER.worker_id)
    other = await prompt.admit(replace(DRAFTER, address="127.0.0.1:2"))
    assert other is not held
    assert held.info.address == "127.0.0.1:1"
    await prompt.worker_pool.workers.close()
    assert held._probing.done()


async def test_a_quiet_workers_name_is_not_for_one_of_another_role(prompt: Registrations) -> None:
    """The drafter key would be enough to send a verifier away."""
    verifier = replace(DRAFTER, worker_id="v", role=Role.VERIFIER)
    known = await prompt.worker_pool.workers.put(verifier)
    known.registrations, known.reported_at = 1, known.reported_at - 60.0
    with pytest.raises(Conflict, match="worker_id"):
        await prompt.admit(replace(DRAFTER, worker_id="v", address="127.0.0.1:2"))
    quiet = await prompt.admit(DRAFTER)
    quiet.reported_at -= 60.0
    moved = await prompt.admit(replace(DRAFTER, address="127.0.0.1:3"))
    assert prompt.worker_pool.connections() == [known, moved]


async def test_a_worker_that_arrives_twice_at_once_has_one_connection(prompt: Registrations) -> None:
    """Over a stream of its own, and in what another coordinator wrote to Redis."""
    workers = prompt.worker_pool.workers
    before = await workers.put(DRAFTER)
    before.streams.clear()
    after = replace(DRAFTER, address="127.0.0.1:2", model=ModelInfo("m", "g"))
    first, second = await asyncio.gather(workers.put(after), workers.put(after))
    assert first is second
    await workers.close()
    assert first._probing.done()


async def test_workers_of_a_role_are_bounded(prompt: Registrations, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WORKERS", 2)
    workers = [replace(DRAFTER, worker_id=f"d{i}", address=f"127.0.0.1:{i}") for i in range(1, 4)]
    for each in workers[:2]:
        await prompt.admit(each)
    with pytest.raises(Overloaded, match="2 workers"):
        await prompt.admit(workers[2])
    await prompt.admit(workers[0])


async def test_without_redis_no_worker_is_forgotten(store: SlowStore, prompt: Registrations) -> None:
    """It reports to another coordinator: while Redis is away, nothing tells that it has left."""
    connection = await known_from_a_record(store, prompt)
    connection.seen_at -= 60.0
    store.up = False
    await prompt.synchronise()
    assert prompt.worker_pool.connections() == [connection]
    store.up = True
    await prompt.synchronise()
    assert prompt.worker_pool.connections() == [connection], "its record may have expired there, and be on its way"
    prompt._down_at -= 60.0
    await prompt.synchronise()
    assert not prompt.worker_pool.connections()


async def test_a_worker_knows_more_of_itself_than_its_record(store: SlowStore, prompt: Registrations) -> None:
    connection = await prompt.admit(DRAFTER)
    store.written.clear()
    reporting = asyncio.create_task(prompt.update(replace(DRAFTER, draining=True), connection))
    await asyncio.sleep(0)
    await prompt.synchronise()
    assert connection.info.draining
    store.written.set()
    await reporting


async def test_a_worker_that_comes_back_while_another_connection_is_closed_keeps_its_own(
    registrations: Registrations, store: SlowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many leave and come back at once after a break of the network; an error there ends the coordinator."""
    workers = registrations.worker_pool.workers
    infos = [replace(DRAFTER, worker_id=name, address=f"127.0.0.1:{port}") for port, name in enumerate("ab", start=1)]
    first, second = [await registrations.admit(info) for info in infos]
    for connection in (first, second):
        connection.streams.add(cast(Stream, object()))
        connection.registrations -= 1
        await registrations.remove(connection.info.worker_id)
        connection.streams.clear()
    close, closing, close_on = WorkerConnection.close, asyncio.Event(), asyncio.Event()

    async def slowly(connection: WorkerConnection) -> None:
        closing.set()
        await close_on.wait()
        await close(connection)

    monkeypatch.setattr(WorkerConnection, "close", slowly)
    unused = asyncio.create_task(workers.close_unused())
    await closing.wait()
    assert await registrations.admit(infos[1]) is second
    close_on.set()
    await unused
    assert list(workers) == [second]
    assert not second._probing.done(), "it is still open"


async def test_the_connection_to_a_worker_is_closed_although_the_one_in_its_place_leaves_at_once(
    store: SlowStore, prompt: Registrations
) -> None:
    """As while a worker restarts again and again: each left a channel and a stream to the process before it."""
    before = await known_from_a_record(store, prompt)
    restarted = asyncio.create_task(prompt.admit(replace(DRAFTER, worker_id="restarted")))
    while prompt.worker_pool.connections():
        await asyncio.sleep(0)
    restarted.cancel()
    await asyncio.wait({restarted})
    assert restarted.cancelled()
    assert before._channel._channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
