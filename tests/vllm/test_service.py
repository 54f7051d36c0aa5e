"""Verifiers on vLLM as processes, behind a coordinator and with drafters."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.testing.toy_models import make_model
from outrider.v1 import coordinator_pb2 as pb
from tests.cluster import Cluster, Output, Process, ask_stories, free_port, generate_resuming, server_info, until
from tests.vllm.conftest import RUNNER

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(RUNNER == "v2", reason="processes start without Triton's interpreter"),
]

STREAMS = 10
LENGTH = 160
MIDDLE = 10  # tokens that every stream has when a verifier dies
VLLM = ("--engine", "vllm", "--kv-tokens", "8192", "--max-sessions", "16", "--guess-rows", "8", "--vllm-args")
VLLM_ARGS = "--enforce-eager --block-size 32"


@pytest.fixture(scope="module")
def draft(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("draft") / "draft", seed=99, hidden=128, like=model, blur=0.05)


@pytest.fixture(scope="module")
def fleet(model: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One verifier on vLLM, one on our own engine, and a drafter."""
    fleet = Cluster(tmp_path_factory.mktemp("fleet"))
    fleet.add_coordinator()
    fleet.add_verifier(model, *VLLM, VLLM_ARGS)
    fleet.add_verifier(model, "--engine", "native")
    fleet.add_drafter("model", draft)
    fleet.start()
    yield fleet
    fleet.stop()


def requests() -> list[pb.GenerateRequest]:
    drafted = {"gamma": 4, "drafter": "model"}
    return ask_stories(STREAMS, LENGTH, ({}, drafted, drafted))


async def texts(fleet: Cluster, dies: Process | None = None) -> list[Output]:
    """Run ten streams, and kill a verifier when all of them are in the middle."""
    progress: dict[int, int] = {}

    def watch(number: int, output: Output) -> None:
        progress[number] = len(output.token_ids)
        if dies is not None and dies.alive and len(progress) == STREAMS and min(progress.values()) >= MIDDLE:
            dies.kill()

    return list(
        await asyncio.gather(
            *(
                generate_resuming(fleet.addresses, request, seconds=120, on_chunk=lambda out, n=number: watch(n, out))
                for number, request in enumerate(requests())
            )
        )
    )


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
    engines = {
        worker.model.fingerprint: worker.model.text_digest
        for worker in server_info(fleet.address).workers
        if worker.role == pb.ROLE_VERIFIER
    }
    assert len(engines) == 2, "two fingerprints"
    assert len({text or fingerprint for fingerprint, text in engines.items()}) == 1, "one promised text"
    undisturbed = await texts(fleet)
    for victim in fleet.verifiers:
        found = await texts(fleet, victim)
        assert not victim.alive, "it died in the middle"
        assert [output.token_ids for output in found] == [output.token_ids for output in undisturbed]
        assert sum(output.stats.failovers for output in found) > 0
        fleet.restart(victim)
        fleet.wait_whole()


async def test_guesses_are_accepted_on_vllm(fleet: Cluster) -> None:
    own = fleet.verifiers[1]
    own.kill()
    outputs = await texts(fleet)
    drafted = [output for number, output in enumerate(outputs) if number % 3]
    assert all(output.stats.accepted_tokens > LENGTH / 4 for output in drafted), [
        output.stats.accepted_tokens for output in drafted
    ]
    fleet.restart(own)
    fleet.wait_whole()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--engine", "vllm", "--vllm-args", "--no-such-flag"), "vLLM refuses its settings"),
        (("--engine", "vllm", "--pipeline-parallel", "2"), "pipeline parallelism does not work on vLLM yet"),
        (("--engine", "vllm", "--quantization", "int8"), "int8 is a format of engine native"),
        (("--engine", "native", "--gpu-memory", "0.5"), "--gpu-memory needs --engine vllm"),
    ],
)
def test_what_cannot_work_is_told_in_words(model: Path, tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    process = Cluster(tmp_path).add_verifier(model, *flags).start()
    assert process.wait(120) == 1
    assert message in process.log()
    assert "Traceback" not in process.log()


async def test_a_model_split_over_two_processes_gives_the_same_text(
    model: Path, draft: Path, fleet: Cluster, tmp_path: Path
) -> None:
    whole = await texts(fleet)
    split = Cluster(tmp_path)
    split.add_coordinator()
    split.add_verifier(model, "--tensor-parallel", "2", *VLLM, VLLM_ARGS)
    split.add_drafter("model", draft)
    split.start()
    try:
        found = await texts(split)
        assert [output.token_ids for output in found] == [output.token_ids for output in whole]
        assert sum(output.stats.accepted_tokens for output in found) > 0
        verifier = split.verifiers[0]
        os.kill(ranks(verifier)[-1], signal.SIGKILL)
        failed = await asyncio.gather(asyncio.wait_for(texts(split), 30), return_exceptions=True)
        assert isinstance(failed[0], BaseException), "there is no other verifier"
        await asyncio.to_thread(until, lambda: not verifier.alive, 60, "the end of a verifier that lost a rank")
    finally:
        split.stop()


@pytest.mark.prove
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
