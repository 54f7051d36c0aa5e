"""`outrider up` dies whole, as when its machine does, and the next one goes on with its sessions."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import grpc
import pytest

from outrider.v1 import coordinator_pb2 as pb
from tests.cluster import Output, ask, client, follow, generate
from tests.conftest import Models
from tests.descriptors import listening_ports
from tests.e2e.up import up

pytestmark = [pytest.mark.prove, pytest.mark.timeout(400)]


async def test_sessions_outlive_a_machine(models: Models, tmp_path: Path) -> None:
    long = ask("One, two, three, ", seed=5, max_tokens=400, ignore_eos=True)
    flags = ["--target", str(models.target), "--drafter", "ngram", "--state-dir", str(tmp_path / "state")]
    with up(tmp_path, *flags) as running:
        async with client(running.ready()) as stub:
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
            assert listening_ports(running.redis()) == []
            for pid in running.family():
                with contextlib.suppress(ProcessLookupError):  # it ends when its parent has died
                    os.kill(pid, signal.SIGKILL)
            call.cancel()
    assert output.session_id
    state = tmp_path / "state"
    assert state.stat().st_mode & 0o777 == 0o700
    assert (state / "fleet-key").stat().st_mode & 0o777 == 0o600
    with up(tmp_path, *flags) as running:
        async with client(running.ready()) as stub:
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
