"""`outrider up` dies whole, as when its machine does, and the next one goes on with its sessions."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from outrider.v1 import coordinator_pb2 as pb
from tests.cluster import ROOT, START_S, Output, ask, client, environment, follow, generate, until
from tests.conftest import Models
from tests.contract.test_security import OUTRIDER
from tests.sockets import listening_ports

pytestmark = [pytest.mark.prove, pytest.mark.timeout(400)]


@contextmanager
def up(models: Models, folder: Path, run: int) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    log = folder / f"up-{run}.log"
    flags = ["--port", "0", "--http-port", "-1", "--target", str(models.target), "--drafter", "ngram"]
    flags += ["--device", "cpu", "--threads", "1", "--state-dir", str(folder / "state")]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*OUTRIDER, "up", *flags], stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment()
        )

    def ready() -> str:
        assert process.poll() is None, log.read_text()
        found = re.search(r"ready\s+gRPC at (\S+)", log.read_text())
        return found[1] if found else ""

    try:
        yield process, until(ready, 2 * START_S, "ready")
    finally:
        process.terminate()
        process.wait(40)


def family(pid: int) -> list[int]:
    children = (Path("/proc") / str(pid) / "task" / str(pid) / "children").read_text().split()
    return [pid, *(one for child in children for one in family(int(child)))]


async def test_sessions_outlive_a_machine(models: Models, tmp_path: Path) -> None:
    long = ask("One, two, three, ", seed=5, max_tokens=400, ignore_eos=True)
    with up(models, tmp_path, 1) as (process, address):
        async with client(address) as stub:
            whole = await generate(stub, long)
            finished = await generate(stub, ask("Hello", max_tokens=8))
            call = stub.Generate(long, timeout=60)
            output = Output()
            async for reply in call:
                if reply.WhichOneof("message") == "started":
                    output.session_id = reply.started.session_id
                elif reply.WhichOneof("message") == "chunk":
                    output.token_ids.extend(reply.chunk.token_ids)
                    output.kinds.extend(reply.chunk.kinds)
                    output.text += reply.chunk.text
                if len(output.token_ids) > 10:
                    break
            everybody = family(process.pid)
            redis = [pid for pid in everybody if "valkey" in os.readlink(f"/proc/{pid}/exe")]
            assert len(redis) == 1
            assert listening_ports(redis[0]) == []
            for pid in everybody:
                os.kill(pid, signal.SIGKILL)
            call.cancel()
    assert output.session_id
    state = tmp_path / "state"
    assert state.stat().st_mode & 0o777 == 0o700
    assert (state / "fleet-key").stat().st_mode & 0o777 == 0o600
    with up(models, tmp_path, 2) as (_, address):
        async with client(address) as stub:
            resume = pb.ResumeRequest(
                session_id=output.session_id, from_position=len(output.token_ids), tail=output.token_ids
            )
            await follow(stub.Resume(resume, timeout=60), output)
            assert output.token_ids == whole.token_ids
            again = Output()
            await follow(stub.Resume(pb.ResumeRequest(session_id=finished.session_id), timeout=60), again)
            assert again.token_ids == finished.token_ids
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Resume(pb.ResumeRequest(session_id="never-was"), timeout=60).read()
