"""Volume at the edges of real processes: bombs, silent connections, bodies held back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from outrider.access import Access
from outrider.serving import channel_options
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc
from outrider.v1 import verifier_pb2 as verify
from tests.cluster import Cluster, Process, server_info
from tests.conftest import Models
from tests.http2 import Http2, bomb, message

pytestmark = pytest.mark.timeout(120)

API_KEY = "key-of-a-client"
FLEET_KEY = "secret-of-the-fleet"
BOMB_MIB = 160


@pytest.fixture(scope="module")
def fleet(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A coordinator and a verifier without a model, behind keys."""
    cluster = Cluster(
        tmp_path_factory.mktemp("edges"), flags=["--fleet-key", FLEET_KEY], access=Access(key=API_KEY), redis=False
    )
    cluster.add_coordinator("--api-keys", API_KEY)
    cluster.add_verifier(models.target, "--engine", "instant")
    cluster.start()
    yield cluster
    cluster.stop()


def peak_mb(process: Process, *, anew: bool = False) -> float:
    """The most that it had in memory since this was last asked `anew`."""
    if anew:
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1000


# --- compressed messages ---------------------------------------------------------------------------------------------

_METHODS = {
    "coordinator, unary": ("coordinators", "/outrider.v1.Outrider/Cancel", API_KEY),
    "coordinator, one message in": ("coordinators", "/outrider.v1.Outrider/Generate", API_KEY),
    "coordinator, stream": ("coordinators", "/outrider.v1.Registry/Register", FLEET_KEY),
    "verifier, unary": ("verifiers", "/outrider.v1.Verifier/Probe", FLEET_KEY),
    "verifier, stream": ("verifiers", "/outrider.v1.Verifier/Verify", FLEET_KEY),
    "health": ("verifiers", "/grpc.health.v1.Health/Check", ""),
}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("keyed", [False, True], ids=["stranger", "with a key"])
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "snappy", "identity"])
@pytest.mark.parametrize("method", _METHODS)
def test_a_compressed_message_is_never_inflated(fleet: Cluster, method: str, encoding: str, keyed: bool) -> None:
    group, path, key = _METHODS[method]
    process: Process = getattr(fleet, group)[0]
    before = peak_mb(process, anew=True)
    authorized = [("authorization", f"Bearer {key}")] if keyed and key else []
    with Http2(process.address) as peer:
        peer.call(1, path, ("grpc-encoding", encoding), *authorized)
        peer.data(1, message(bomb(BOMB_MIB, encoding), compressed=True), end=True)
        peer.until_ended(1)
    assert peak_mb(process) - before < BOMB_MIB / 8
    assert server_info(fleet.address, fleet.access).coordinator_id


async def test_an_answer_that_is_compressed_is_never_inflated() -> None:
    """A worker may be as hostile as a client."""
    server = grpc.aio.server(compression=grpc.Compression.Gzip)

    class Hostile(rpc.OutriderServicer):
        async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.ServerInfo:
            return pb.ServerInfo(version="0" * 10_000_000)

    rpc.add_OutriderServicer_to_server(Hostile(), server)  # type: ignore[no-untyped-call,unused-ignore]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        reply = await rpc.OutriderStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=10)
    await server.stop(None)
    assert reply is None, "gRPC hands the compressed bytes on as they are, and they are no message"


@pytest.mark.parametrize("method", [name for name in _METHODS if name != "health"])
def test_a_strangers_message_is_not_read(fleet: Cluster, method: str) -> None:
    """No more of it than fits into the connection's window."""
    group, path, _ = _METHODS[method]
    with Http2(getattr(fleet, group)[0].address) as peer:
        peer.call(1, path)
        assert not peer.data(1, message(verify.FileChunk(data=bytes(24 << 20)).SerializeToString()), end=True)
        peer.until_ended(1)
        assert b"valid key" in peer.said()
