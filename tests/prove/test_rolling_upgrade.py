"""A fleet of the release before becomes one of this release under load, process by process, and partly goes back.

Both releases run with the same interpreter and libraries, each from its own tree.
"""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outrider.engine.paged.arithmetic import USUAL_KERNELS, combine, kernel_arithmetic
from outrider.protocol.errors import OutriderError, PeerLost
from outrider.security.channels import Channels
from tests.cluster import ROOT, Cluster, Output, Process, ask, generate_resuming, known_workers, until
from tests.conftest import Models

pytestmark = [pytest.mark.prove, pytest.mark.timeout(900)]

# Commits of releases before, and whether their fingerprints name a machine's arithmetic where it is not the usual one.
RELEASES = {
    "a5354cb": False,  # before drafters had a key of their own, and API keys were tenants
    "dec8887": True,  # before fields of messages had the names of the types, and Steer was two messages
}
API_KEY = "key-of-a-client"
CLIENTS = 8
STREAM_S = 120.0
LEAVE_AT = 40  # tokens
PACE = "1:15,64:15"
REQUESTS = [
    ask(f"Item {number}: the quick brown fox", max_tokens=120, ignore_eos=True, temperature=temperature, seed=number)
    for number, temperature in enumerate((0.0, 0.8) * (CLIENTS // 2))
]


@pytest.fixture(scope="module", params=RELEASES)
def release_before(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tree, from the history."""
    before: str = request.param
    if not RELEASES[before] and combine("", kernel_arithmetic(USUAL_KERNELS)):
        pytest.skip(f"fingerprints name this machine's arithmetic, those of {before} do not: no failover by design")
    packed = subprocess.run(["git", "archive", before], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        pytest.skip(f"the history does not have {before}, a release before: a shallow clone?")
    folder = tmp_path_factory.mktemp("release-before")
    subprocess.run(["tar", "--extract", "--file=-"], input=packed.stdout, cwd=folder, check=True)
    return folder


@pytest.fixture
def fleet(models: Models, release_before: Path, tmp_path: Path) -> Iterator[Cluster]:
    """Two coordinators, two verifiers and a drafter of the release before; with keys, so that all of them count."""
    (tmp_path / "fleet-key").write_text("secret-of-the-fleet\n")
    (tmp_path / "api-keys").write_text(f"{API_KEY}\n")
    flags = ["--fleet-key", f"@{tmp_path / 'fleet-key'}"]
    cluster = Cluster(tmp_path / "fleet", flags=flags, access=Channels(key=API_KEY))
    for _ in range(2):
        cluster.add_coordinator("--api-keys", f"@{tmp_path / 'api-keys'}")
    for _ in range(2):
        cluster.add_verifier(models.target, "--pace", PACE)
    cluster.add_drafter("ngram")
    for process in cluster.processes:
        process.tree = release_before
    cluster.start()
    yield cluster
    cluster.stop()


def told(output: Output) -> tuple[list[int], str]:
    return output.token_ids, output.text


class Watch:
    """One stream as its client sees it. Every second one is broken off by the client, to be resumed elsewhere."""

    def __init__(self, leaves: bool) -> None:
        self._leaves = leaves
        self._last = time.monotonic()
        self.longest_gap_s = 0.0

    def __call__(self, output: Output) -> None:
        now = time.monotonic()
        self.longest_gap_s = max(self.longest_gap_s, now - self._last)
        self._last = now
        if self._leaves and len(output.token_ids) >= LEAVE_AT:
            self._leaves = False
            raise PeerLost("the client has left")


class Load:
    """Clients that ask the same again and again, and resume what breaks off; every text must be the undisturbed one."""

    def __init__(self, fleet: Cluster, wanted: list[tuple[list[int], str]]) -> None:
        self._fleet = fleet
        self._wanted = wanted
        self.streams = 0
        self.breaks: list[OutriderError] = []
        self.longest_gap_s = 0.0
        self._over = False
        self._clients = [asyncio.create_task(self._client(number)) for number in range(CLIENTS)]

    async def _client(self, number: int) -> None:
        addresses = self._fleet.addresses if number % 2 else self._fleet.addresses[::-1]
        for turn in itertools.count(number):
            if self._over:
                return
            watch = Watch(leaves=turn % 2 == 1)
            output = await one(addresses, number, watch)
            assert told(output) == self._wanted[number], f"request {number}, after {output.breaks}"
            self.streams += 1
            self.breaks += output.breaks
            self.longest_gap_s = max(self.longest_gap_s, watch.longest_gap_s)

    async def go_on(self) -> None:
        """Until every client has had the time for a stream that began after now."""
        wanted = self.streams + 2 * CLIENTS
        while self.streams < wanted:
            self._look()
            await asyncio.sleep(0.1)

    def _look(self) -> None:
        for client in self._clients:
            if client.done():
                client.result()

    async def end(self) -> None:
        self._over = True
        await asyncio.gather(*self._clients)


async def one(addresses: list[str], number: int, on_chunk: Callable[[Output], None] = lambda _: None) -> Output:
    shown = Channels(key=API_KEY)
    return await generate_resuming(addresses, REQUESTS[number], seconds=STREAM_S, on_chunk=on_chunk, access=shown)


async def replace(fleet: Cluster, process: Process, tree: Path) -> None:
    """As an orchestrator does it: asked to leave, then started again from another tree, in the same place."""

    def swap() -> None:
        process.terminate()
        process.wait(60)
        process.tree = tree
        process.start().wait_ready()
        if process not in fleet.coordinators:
            until(lambda: known(fleet, process), 60, f"{process.name} known to a coordinator")

    await asyncio.to_thread(swap)


def known(fleet: Cluster, process: Process) -> bool:
    found = itertools.chain(*(known_workers(address, fleet.access) for address in fleet.addresses))
    return process.address in {worker.address for worker in found}


async def test_no_stream_is_lost_on_the_way_there_and_back(fleet: Cluster, release_before: Path) -> None:
    undisturbed = await asyncio.gather(*(one(fleet.addresses, number) for number in range(CLIENTS)))
    assert not [output.breaks for output in undisturbed if output.breaks]
    load = Load(fleet, [told(output) for output in undisturbed])
    await load.go_on()
    there = [(process, ROOT) for process in (*fleet.verifiers, *fleet.drafters, *fleet.coordinators)]
    back = [(process, release_before) for process in (fleet.verifiers[0], fleet.coordinators[0])]
    for process, tree in (*there, *back):
        await replace(fleet, process, tree)
        await load.go_on()
        said = f"{load.streams} streams, {len(load.breaks)} breaks, at most {load.longest_gap_s:.1f} s without a token"
        print(f"{process.name}: {said}")
    await load.end()
    assert load.breaks
