"""Figures of `outrider bench engine`, from times that are given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.bench.common.report import Times
from outrider.bench.engine import command, forward_passes
from outrider.bench.engine.results import BASE_CONTEXT, PassTimes, ServedTimes, rows, summary
from outrider.engine.cuda.engine import CudaGraphEngine
from outrider.engine.native import NativeEngine
from outrider.engine.transformers.engine import TransformersEngine
from outrider.launch.stack import LaunchPlan
from tests.architectures import save, tiny_model

PASSES = PassTimes(
    name="toy",
    engine="native",
    weights="float32",
    device="cpu",
    threads=1,
    verification={(BASE_CONTEXT, new): Times(ms) for new, ms in ((1, [5.0, 4.0]), (9, [6.0]), (17, [8.0]))},
    batch={(BASE_CONTEXT, 1): Times([4.0]), (BASE_CONTEXT, 8): Times([8.0]), (BASE_CONTEXT, 32): Times([16.0])},
    eager=Times([16.0, 20.0]),
    read=Times([2.0, 1.0]),
    read_bytes=10_000_000,
    product=Times([1.0]),
    product_flop=3_000_000,
    token_bytes=20_000_000,
    memory_mb={},
)
SERVED = ServedTimes(Times([10.0, 12.0, 14.0]), Times([10.0] * 98 + [36.0] * 2), Times([100.0]), Times([20.0, 30.0]))


def test_the_summary_is_of_the_shortest_times() -> None:
    found = summary(PASSES, SERVED)
    assert found["single_token_vs_eager"] == pytest.approx(4 / 16)
    assert (found["flatness_9"], found["flatness_17"]) == pytest.approx((1.5, 2.0))
    assert found["sessions8_vs_1"] == pytest.approx(4.0), "8 sessions in twice the time"
    assert found["sessions32_vs_1"] == pytest.approx(8.0)
    assert found["bandwidth_gb_s"] == pytest.approx(10.0), "10 MB in a millisecond"
    assert found["matmul_gflop_s"] == pytest.approx(3.0)
    assert found["floor_ms"] == pytest.approx(2.0), "20 MB at 10 GB/s"
    assert found["fraction_of_floor"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("measured", "served"), [(NativeEngine, "native"), (CudaGraphEngine, "cuda"), (TransformersEngine, "transformers")]
)
def test_the_services_run_the_engine_that_was_measured(
    measured: type, served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU `auto` is vLLM for a verifier where that is installed, and never here."""
    passes = replace(PASSES, engine=measured.__name__)
    given: list[str] = []

    def serve(plan: LaunchPlan, *_: object) -> None:
        given.append(plan.engine)
        raise KeyboardInterrupt

    engines = SimpleNamespace(measure=lambda *_: passes, release=lambda: None)
    monkeypatch.setattr(command, "locate", lambda *_: None)
    monkeypatch.setattr(command, "import_on_use", lambda *_: engines)
    monkeypatch.setattr("outrider.bench.engine.streams.measure", serve)
    with pytest.raises(KeyboardInterrupt):
        command.engine()
    assert given == [served]


def test_streams_are_compared_by_their_longest_gaps_and_usual_waits() -> None:
    found = summary(PASSES, SERVED)
    assert found["prefill_gap_ratio"] == pytest.approx(36 / 12)
    assert found["prefix_ttft_ratio"] == pytest.approx(25 / 100)
    one_late = replace(SERVED, during=Times([10.0] * 199 + [36.0]))
    assert summary(PASSES, one_late)["prefill_gap_ratio"] == pytest.approx(10 / 12), "one of 200 is above the p99"


def test_rows_have_the_throughput_of_all_sessions() -> None:
    found = {row["sessions"]: row["tokens_per_s"] for row in rows(PASSES, SERVED) if row["part"] == "batch"}
    assert found == pytest.approx({1: 250.0, 8: 1000.0, 32: 2000.0})


def test_memory_is_told_in_megabytes() -> None:
    """As the weights of a token are; it was in mebibytes, under the name of the others."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    assert forward_passes._resident_mb() == pytest.approx(int(status["VmRSS"].split()[0]) * 1024 / 1e6, rel=0.02)


def test_the_reference_may_be_a_model_that_sees_images(tmp_path: Path) -> None:
    """Outrider serves these for their texts; the benchmark ended with an unknown class."""
    save(tiny_model("mistral3", {}), tmp_path)
    plan = LaunchPlan(target=str(tmp_path), device="cpu", dtype="float32", engine="transformers")
    eager = forward_passes._Eager(plan, [5, 6, 7, 8], lambda _: None)
    assert eager.cached() > 0
    assert eager.weights() > 0
    assert eager.step() > 0
