"""Verifiers on vLLM as processes, behind a coordinator and with drafters."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from outrider.protocol.errors import StartupError
from outrider.settings.verifier import VerifierSettings
from outrider.testing.toy_models import make_model
from outrider.v1 import coordinator_pb2 as pb
from tests.cluster import Cluster, Output, Process, ask_stories, free_port, generate_resuming, server_info, until
from tests.vllm.conftest import RUNNER
from verifier.vllm_target import runs_on_vllm, vllm_options

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(RUNNER == "v2", reason="processes start without Triton's interpreter"),
]

START_S = 240.0  # three processes import vLLM
STREAMS = 10
LENGTH = 160
MIDDLE = 10  # tokens that every stream has when a verifier dies
VLLM = ("--engine", "vllm", "--kv-tokens", "8192", "--max-sessions", "16", "--guess-rows", "8", "--vllm-args")
VLLM_ARGS = "--enforce-eager --block-size 32"


@pytest.fixture(scope="module")
def draft(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("draft") / "draft", seed=99, hidden=128, like=model, blur=0.05)


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.prove), 2])
def fleet(
    request: pytest.FixtureRequest, model: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """One verifier on vLLM, its model in one process or split over two, one on our own engine, and a drafter."""
    fleet = Cluster(tmp_path_factory.mktemp("fleet"))
    fleet.add_coordinator()
    fleet.add_verifier(model, "--tensor-parallel", str(request.param), *VLLM, VLLM_ARGS)
    fleet.add_verifier(model, "--engine", "native", "--pace", "1:20,64:20")  # as slow as vLLM: no stream ends early
    fleet.add_drafter("model", draft)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # --threads does not reach the workers, which share two cores with others
        fleet.start(START_S)
        yield fleet
    fleet.stop()


def requests() -> list[pb.GenerateRequest]:
    drafted = {"gamma": 4, "drafter": "model"}
    return ask_stories(STREAMS, LENGTH, ({}, drafted, drafted))


async def texts(fleet: Cluster, strike: Callable[[], None] | None = None) -> list[Output]:
    """Run ten streams, and call `strike` when all of them are in the middle."""
    progress: dict[int, int] = {}
    waiting = [strike] if strike is not None else []

    def watch(number: int, output: Output) -> None:
        progress[number] = len(output.token_ids)
        if waiting and len(progress) == STREAMS and min(progress.values()) >= MIDDLE:
            waiting.pop()()

    outputs = await asyncio.gather(
        *(
            generate_resuming(fleet.addresses, request, seconds=120, on_chunk=lambda out, n=number: watch(n, out))
            for number, request in enumerate(requests())
        )
    )
    assert not waiting, "no moment had all streams in the middle"
    return list(outputs)


def ranks(verifier: Process) -> list[int]:
    """Return vLLM's worker processes."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = stat.read_text().rpartition(")")
            if int(rest.split()[1]) == verifier.pid and "VLLM" in name:
                found.append(int(stat.parent.name))
    return sorted(found)


async def test_sessions_of_a_mixed_fleet_move_between_engines_with_the_same_text(fleet: Cluster) -> None:
    """They leave our own engine, are drafted for on vLLM alone, and leave vLLM, which ends when it loses a process."""
    engines = {
        worker.model.fingerprint: worker.model.text_digest
        for worker in server_info(fleet.address).workers
        if worker.role == pb.ROLE_VERIFIER
    }
    assert len(engines) == 2, "two fingerprints"
    assert len({text or fingerprint for fingerprint, text in engines.items()}) == 1, "one promised text"
    undisturbed = [output.token_ids for output in await texts(fleet)]
    on_vllm, own = fleet.verifiers

    moved = await texts(fleet, own.kill)
    assert [output.token_ids for output in moved] == undisturbed
    assert sum(output.stats.failovers for output in moved) > 0

    assert not own.alive
    alone = await texts(fleet)
    assert [output.token_ids for output in alone] == undisturbed
    accepted = [output.stats.accepted_tokens for number, output in enumerate(alone) if number % 3]
    assert min(accepted) > LENGTH / 4, accepted
    fleet.restart(own)

    *_, victim = ranks(on_vllm) or [on_vllm.pid]
    moved = await texts(fleet, lambda: os.kill(victim, signal.SIGKILL))
    assert [output.token_ids for output in moved] == undisturbed
    assert sum(output.stats.failovers for output in moved) > 0
    await asyncio.to_thread(until, lambda: not on_vllm.alive, 60, "the end of a verifier that lost a process")


async def test_weights_that_vllm_cannot_load_are_told_in_words(model: Path, tmp_path: Path) -> None:
    """The process that refuses vLLM's arguments would tell it alike; that it refuses them: test_hub_ids.py."""
    folder = copytree(model, tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    process = Cluster(tmp_path).add_verifier(folder, *VLLM, VLLM_ARGS).start()
    assert process.wait(120) == 1
    last = process.log().strip().splitlines()[-1]
    assert "cannot load model" in last
    assert "broken" in last


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"engine": "vllm", "pipeline_parallel": 2}, "pipeline parallelism does not work on vLLM yet"),
        ({"engine": "vllm", "quantization": "int8"}, "int8 is a format of engine native"),
        ({"engine": "native", "gpu_memory": 0.5}, "--gpu-memory needs --engine vllm"),
    ],
)
async def test_settings_that_cannot_work_are_refused(given: dict[str, Any], message: str) -> None:
    """How a process tells such an error: tests/contract/test_processes.py."""
    settings = VerifierSettings(**given)
    with pytest.raises(StartupError, match=message):
        assert runs_on_vllm(settings) and vllm_options(settings)  # noqa: PT018 - one statement may raise


@pytest.mark.prove
@pytest.mark.parametrize("fleet", [2], indirect=True)
async def test_a_model_split_over_two_machines_gives_the_same_text(
    model: Path, draft: Path, fleet: Cluster, tmp_path: Path
) -> None:
    """Two machines are two verifiers here, with one command line but for their ranks, as the chart starts them."""
    whole = await texts(fleet)
    split = Cluster(tmp_path)
    split.add_coordinator()
    nodes = f"{VLLM_ARGS} --nnodes=2 --master-addr=127.0.0.1 --master-port={free_port()} --node-rank="
    split.add_verifier(model, *VLLM, nodes + "0", "--tensor-parallel", "2")
    split.add_drafter("model", draft)
    (tmp_path / "other").mkdir()
    follower = Cluster(tmp_path / "other").add_verifier(model, *VLLM, nodes + "1", "--tensor-parallel", "2").start()
    try:
        split.start()
        assert len(ranks(split.verifiers[0])) == len(ranks(follower)) == 1
        found = await texts(split)
        assert [output.token_ids for output in found] == [output.token_ids for output in whole]
        assert sum(output.stats.accepted_tokens for output in found) > 0
        follower.terminate()
        assert follower.wait(30) == 0
        assert "Traceback" not in follower.log()
    finally:
        follower.stop()
        split.stop()
