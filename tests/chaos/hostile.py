"""Process of a hostile drafter: it accepts every session and misbehaves in a different way in each."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
from collections.abc import AsyncIterator
from typing import Annotated, Any

import grpc
import typer

from outrider.base.config import Settings
from outrider.base.grpc_options import server_options
from outrider.base.logs import set_up_logs
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo
from outrider.runtime.registration_client import RegistrationClient
from outrider.security.channels import Channels
from outrider.v1 import common_pb2 as common
from outrider.v1 import drafter_pb2 as draft
from outrider.v1 import drafter_pb2_grpc as drafter_rpc

MANNERS = ("lies", "floods", "stalls", "mute", "nonsense", "hangs up")
FLOOD_S = 0.002
EVER_S = 3600


class Hostile(drafter_rpc.DrafterServicer):
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.sessions = 0

    async def Probe(self, request: common.ProbeRequest, context: Any) -> common.ProbeReply:
        return common.ProbeReply()

    async def Draft(self, requests: AsyncIterator[draft.DraftRequest], context: Any) -> AsyncIterator[draft.DraftReply]:
        opening = (await anext(requests)).open
        self.sessions += 1
        manner = self._random.choice(MANNERS)
        ids = itertools.count(1)
        position = len(opening.tokens)
        if manner == "mute":
            await asyncio.sleep(EVER_S)
        yield draft.DraftReply(opened=draft.DraftOpened())
        if manner == "hangs up":
            return
        if manner == "stalls":
            yield _guess(position, ids, [1])
            await asyncio.sleep(EVER_S)
        while manner == "floods":
            yield _guess(position, ids, [self._random.randrange(200)])
            await asyncio.sleep(FLOOD_S)
        if manner == "nonsense":
            yield draft.DraftReply(guess=self._nonsense(position))
        async for request in requests:  # a full chain of wrong tokens after every commit
            if request.HasField("committed"):
                position = request.committed.position + len(request.committed.tokens)
                yield _guess(position, ids, [7, 7, 7, 7])

    def _nonsense(self, position: int) -> common.Guess:
        return self._random.choice(
            (
                common.Guess(position=2**31, first_id=1, tokens=[1]),
                common.Guess(position=position, first_id=1, parent=999, tokens=[1, 2]),
                common.Guess(position=position, first_id=1, tokens=[2**31]),
                common.Guess(position=position, first_id=1, tokens=[1, 2, 3], parents=[3, 2, 1]),
                common.Guess(position=position, first_id=0, tokens=[1]),
                common.Guess(position=position, first_id=1, tokens=[5] * 5000),
            )
        )


def _guess(position: int, ids: Any, tokens: list[int]) -> draft.DraftReply:
    first = next(ids)
    for _ in tokens[1:]:
        next(ids)
    return draft.DraftReply(guess=common.Guess(position=position, first_id=first, tokens=tokens, draft_us=100))


def main(
    port: Annotated[int, typer.Option()],
    advertise: Annotated[str, typer.Option()],
    coordinators: Annotated[str, typer.Option()],
    seed: Annotated[int, typer.Option()] = 0,
    drafter_key: Annotated[str, typer.Option(envvar="OUTRIDER_DRAFTER_KEY")] = "",
) -> None:
    """Serve and stay registered until SIGTERM."""
    asyncio.run(_serve(port, advertise, coordinators.split(","), seed, drafter_key))


async def _serve(port: int, advertise: str, coordinators: list[str], seed: int, key: str) -> None:
    server = grpc.aio.server(options=server_options(Settings()))
    drafter_rpc.add_DrafterServicer_to_server(Hostile(seed), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    set_up_logs("info", as_json=False, service="drafter")  # a full disk must not end its registration
    leave = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leave.set)
    info = WorkerInfo(
        worker_id=f"drafter-hostile-{random.Random().getrandbits(32):08x}",
        role=Role.DRAFTER,
        address=advertise,
        kind="hostile",
        capacity=64,
        model=ModelInfo(
            name="hostile",
            fingerprint="hostile",
            architecture="",
            vocab_size=0,
            vocabulary_digest="",
            context_length=0,
            eos_token_ids=(),
            dtype="",
            device="",
            parameters=0,
        ),
    )
    enlistment = asyncio.create_task(
        RegistrationClient(coordinators, lambda: info, None, lambda: Channels(None, key)).run()
    )
    print(f"progress: ready at 127.0.0.1:{port}", flush=True)
    await leave.wait()
    enlistment.cancel()
    await asyncio.gather(enlistment, return_exceptions=True)
    await server.stop(None)


if __name__ == "__main__":
    typer.run(main)
