"""JSON that is half said when a process dies is ended by others, as if nothing had been."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import jsonschema
import pytest

from outrider.protocol.speculation import FinishReason
from outrider.testing.toy_models import byte_tokenizer
from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2 as pb
from tests.cluster import SLOW, Cluster, Output, ask, generate_all, generate_resuming
from tests.conftest import Models

pytestmark = pytest.mark.timeout(240)

SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 0, "maximum": 999},
            "name": {"type": "string", "maxLength": 5},
        },
        "required": ["id", "name"],
        "additionalProperties": False,
    },
    "minItems": 12,
    "maxItems": 12,
}
STREAMS = 8
# Spaces instead of line breaks, which indentation may follow, and short numbers: at most 900 tokens, whatever is drawn.
NO_LINE_BREAKS = dict.fromkeys(byte_tokenizer().encode("\n"), -100.0)
MIDDLE = 40  # tokens that every stream has when disaster strikes


@pytest.fixture(scope="module")
def fleet(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    fleet = Cluster(tmp_path_factory.mktemp("fleet"))
    for _ in range(2):
        fleet.add_coordinator()
    for _ in range(2):
        fleet.add_verifier(models.target, *SLOW)
    fleet.add_drafter("model", models.draft)
    fleet.start()
    yield fleet
    fleet.stop()


def requests(gamma: int) -> list[pb.GenerateRequest]:
    return [
        ask(
            "The list of all: ",
            seed=seed,
            gamma=gamma,
            max_tokens=1500,
            temperature=0.7,
            top_p=0.9,
            logit_bias=NO_LINE_BREAKS,
            grammar=common.Grammar(json_schema=json.dumps(SCHEMA)),
        )
        for seed in range(STREAMS)
    ]


@pytest.mark.parametrize(
    "victim",
    [
        "verifier",
        pytest.param("drafter", marks=pytest.mark.prove),
        pytest.param("coordinator", marks=pytest.mark.prove),
    ],
)
async def test_a_crash_in_the_middle_of_json_never_shows(fleet: Cluster, victim: str) -> None:
    wanted = await generate_all(fleet.address, requests(gamma=0))
    for output in wanted:
        assert output.finish is FinishReason.STOP
        jsonschema.validate(json.loads(output.text), SCHEMA)
    process = {"verifier": fleet.verifiers, "drafter": fleet.drafters, "coordinator": fleet.coordinators}[victim][0]
    progress: dict[int, int] = {}
    striking = asyncio.Event()

    def watch(number: int, output: Output) -> None:
        progress[number] = len(output.token_ids)
        if len(progress) == STREAMS and min(progress.values()) >= MIDDLE:
            striking.set()

    streams = [
        asyncio.create_task(
            generate_resuming(fleet.addresses, request, on_chunk=lambda output, n=number: watch(n, output), seconds=90)
        )
        for number, request in enumerate(requests(gamma=4))
    ]
    await asyncio.wait_for(striking.wait(), 60)
    assert not any(stream.done() for stream in streams)
    process.kill()
    await asyncio.to_thread(fleet.restart, process)
    outputs = await asyncio.gather(*streams)
    for output, want in zip(outputs, wanted, strict=True):
        assert (output.token_ids, output.text, output.finish) == (want.token_ids, want.text, want.finish)
    touched = {
        "verifier": sum(output.stats.failovers for output in outputs),
        "drafter": sum(output.stats.drafter_losses for output in outputs),
        "coordinator": sum(len(output.breaks) for output in outputs),
    }
    assert touched[victim] > 0
