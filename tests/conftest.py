"""Shared fixtures: toy models, and one standard cluster for tests that do not break it.

Nothing here loads torch before it is used: `pytest -n` starts its workers once its own process, which runs no test, has
loaded this module.
"""

from __future__ import annotations

import gc
import inspect
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from outrider.base.openmp import wait_briefly
from tests.cluster import Cluster

wait_briefly()  # as the services do it before they load torch

settings.register_profile("outrider", deadline=None)  # its default measures other programs' load, too
settings.load_profile("outrider")

_TESTS = Path(__file__).parent
_REAL = ("contract", "e2e", "prove")
# `make test` leaves these out: it shows each promise once, with real processes, in minutes. `make check` runs all.
_FULL = (
    "contract/test_bench_drafters.py",
    "contract/test_bench_engine.py",
    "contract/test_bench_network.py",
    "contract/test_drafters.py",
    "contract/test_edges.py",
    "contract/test_fuzz.py",
    "contract/test_grammar.py",
    "contract/test_hostile_verifiers.py",
    "contract/test_http_nasties.py",
    "contract/test_loadtest.py",
    "contract/test_openapi.py",
    "contract/test_published_drafters.py",
    "contract/test_readers.py",
    "contract/test_several_drafters.py",
    "contract/test_tensor_parallel.py",
    "contract/test_trained_drafters.py",
    "contract/test_unread.py",
    "e2e/test_bench_fleet.py",
    "e2e/test_coupled_determinism.py",
    "e2e/test_failures.py",
    "e2e/test_fuzz.py",
    "e2e/test_grammar.py",
    "e2e/test_greedy_equality.py",
    "e2e/test_hostile_drafters.py",
    "e2e/test_http_failures.py",
    "e2e/test_overload.py",
    "e2e/test_playground.py",
    "e2e/test_quantised.py",
    "e2e/test_traces_and_logs.py",
    "e2e/test_up.py",
    "unit/repository/test_chart.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests over sockets in one event loop, as grpc.aio requires. Mark tests that only `make check` runs."""
    for item in items:
        if str(item.path.relative_to(_TESTS)) in _FULL:
            item.add_marker(pytest.mark.full)
        if item.path.parent.name in _REAL and inspect.iscoroutinefunction(getattr(item, "function", None)):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


def pytest_collection_finish() -> None:
    """Leave out of garbage collections what is there for as long as the process: libraries and thousands of tests."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return what chooses the next file of each worker of `pytest -n`."""
    from tests.parallel import RealBesideComputing

    config.option.loadscopereorder = False
    return RealBesideComputing(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Show the logs of a failed test's processes."""
    report = yield
    if report.when != "setup" and report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if isinstance(value, Cluster):
                report.sections.append((f"logs of {name}", value.logs()))
    return report


@dataclass(frozen=True, slots=True)
class Models:
    """A target, a perturbed copy for drafting, and two models that must be rejected."""

    target: Path
    draft: Path
    other_target: Path  # same vocabulary, other weights
    other_vocabulary: Path


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder for sockets, whose paths have 107 bytes at most. Pytest's own grow with the number of runs."""
    with tempfile.TemporaryDirectory(prefix="o-") as name:
        yield Path(name)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Return toy models: peaked enough to sample, aperiodic under argmax, repetitive enough for ngram."""
    return make_models(tmp_path_factory.mktemp("models"))


def make_models(folder: Path) -> Models:
    from outrider.testing.toy_models import make_model

    target = make_model(folder / "target", seed=7, sharpness=4.0, focus=0.1)
    return Models(
        target=target,
        draft=make_model(folder / "draft", seed=99, like=target, blur=0.05),
        other_target=make_model(folder / "other-target", seed=8, sharpness=4.0),
        other_vocabulary=make_model(folder / "other-vocabulary", seed=7, extra_tokens=("<|extra|>",)),
    )


@pytest.fixture(scope="session")
def cluster(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield the standard cluster, for tests that do not change it."""
    cluster = Cluster.standard(tmp_path_factory.mktemp("cluster"), models.target, models.draft)
    cluster.start()
    yield cluster
    cluster.stop()
