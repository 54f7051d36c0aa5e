"""Requests with the texts that an earlier release gave: `python -m tests.e2e.recorded` writes the file again.

Write it again only when a change of texts is intended, and say so in the CHANGELOG: users who store seeds rely on them.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx

from tests.cluster import Cluster
from tests.e2e.prompts import mixed

FILE = Path(__file__).resolve().parent.parent / "fixtures" / "recorded_requests.jsonl"
COUNT = 240
CONCURRENCY = 12
_SEED = 20261122
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "ages": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}
_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9},
    {"temperature": 1.1, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"temperature": 0, "frequency_penalty": 0.4, "logit_bias": {"65": 2, "66": -3}},
    {"temperature": 0.9, "response_format": {"type": "regex", "regex": "([a-z]{2,8} ){3,12}end"}},
    {"temperature": 0, "response_format": {"type": "regex", "regex": "[0-9]{3}(-[0-9]{2}){2,8}"}},
    {
        "temperature": 0.8,
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA}},
        "frequency_penalty": 0.2,
    },
    {"temperature": 1, "n": 3},
    {"temperature": 0.8, "stop": ["e", "qu"]},
    {"temperature": 0.6, "repetition_penalty": 1.1, "frequency_penalty": 0.5, "top_p": 0.8},
    {"temperature": 0.9, "logprobs": 2},
)


def wanted() -> Iterator[dict[str, Any]]:
    """Return the bodies, every kind in turn."""
    rng = random.Random(_SEED)
    for number, prompt in enumerate(mixed(COUNT)):
        kind = _KINDS[number % len(_KINDS)]
        yield {"prompt": prompt, "seed": rng.getrandbits(40), "max_tokens": rng.randrange(24, 72)} | kind


def outcome(reply: dict[str, Any]) -> list[list[str]]:
    """Return text and finish reason of each choice."""
    return [[choice["text"], choice["finish_reason"]] for choice in reply["choices"]]


async def answers(url: str, bodies: Sequence[dict[str, Any]]) -> list[list[list[str]]]:
    """Send the bodies, a few at a time, and return their outcomes in order."""
    room = asyncio.Semaphore(CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:

        async def answer(body: dict[str, Any]) -> list[list[str]]:
            async with room:
                reply = await http.post("/v1/completions", json=body)
            assert reply.status_code == 200, f"{reply.text} for {body}"
            return outcome(reply.json())

        return list(await asyncio.gather(*map(answer, bodies)))


def recorded() -> list[dict[str, Any]]:
    """Return the lines of the file: a body and its choices each."""
    return [json.loads(line) for line in FILE.read_text().splitlines()]


def _record(folder: Path) -> None:
    from tests.conftest import make_models

    made = make_models(folder)
    cluster = Cluster.standard(folder / "cluster", made.target, made.draft)
    try:
        cluster.start()
        bodies = [body | {"speculation": {"gamma": 0}} for body in wanted()]
        found = asyncio.run(answers(cluster.coordinators[0].web, bodies))
    finally:
        cluster.stop()
    lines = [json.dumps({"body": body, "choices": choices}) for body, choices in zip(wanted(), found, strict=True)]
    FILE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        _record(Path(folder))
