"""Workers of `pytest -n`: tests of processes run beside tests that compute, and no two workers use one port."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.cluster import free_port, ports_of_this_worker
from tests.parallel import RealBesideComputing

FILES = (
    "tests/contract/test_a.py",
    "tests/e2e/test_b.py",
    "tests/unit/test_c.py",
    "tests/unit/test_d.py",
    "tests/contract/test_trained_drafters.py",  # long
)
TESTS = [f"{file}::test_{number}" for file in FILES for number in range(3)]


class Worker:
    """As much of a worker as the scheduler knows."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.shutting_down = False
        self.given: list[str] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += [TESTS[index] for index in indices]

    def shutdown(self) -> None:
        self.shutting_down = True

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(test.split("::")[0] for test in self.given))


def scheduled() -> tuple[RealBesideComputing, Worker, Worker]:
    option = SimpleNamespace(loadscopereorder=False)
    scheduler = RealBesideComputing(SimpleNamespace(getvalue=lambda _: ["2*popen"], option=option))
    workers = Worker("gw0"), Worker("gw1")
    for worker in workers:
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, TESTS)
    scheduler.schedule()
    return scheduler, *workers


def finish(scheduler: RealBesideComputing, worker: Worker, tests: list[str]) -> None:
    for test in tests:
        scheduler.mark_test_complete(worker, TESTS.index(test))


def test_the_first_worker_begins_with_processes_and_the_other_with_unit_tests() -> None:
    _, first, second = scheduled()
    assert (first.files, second.files) == ([FILES[1]], [FILES[2]])


def test_a_worker_that_has_finished_its_kind_takes_of_the_other() -> None:
    scheduler, first, second = scheduled()
    finish(scheduler, second, TESTS[6:12])
    assert second.files == [FILES[2], FILES[3], FILES[4]], "the longer file first: the last one is run beside nothing"
    finish(scheduler, first, TESTS[3:6])
    assert first.files == [FILES[1], FILES[0]]
    assert sorted(first.given + second.given) == sorted(TESTS)


def test_workers_share_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "3")
    found = []
    for worker in range(3):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{worker}")
        found += ports_of_this_worker()
    assert sorted(found) == list(range(15_000, 32_000))


def test_no_port_is_given_out_twice() -> None:
    ports = [free_port() for _ in range(300)]
    assert len(set(ports)) == 300
