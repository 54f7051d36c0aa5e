"""The programs under examples/ as a newcomer runs them, behind a proxy that must not be asked for local services."""

from __future__ import annotations

import ast
import asyncio
import re
import sys

import pytest

from examples.verify_only import PROMPT
from tests.cluster import ROOT, environment
from tests.contract.conftest import Greedy, House

pytestmark = pytest.mark.timeout(120)


async def run(name: str, *arguments: str) -> str:
    """Run an example; return what it prints."""
    nowhere = dict.fromkeys(("http_proxy", "grpc_proxy"), "http://127.0.0.1:9")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, f"examples/{name}.py", *arguments),
        cwd=ROOT,
        env=environment(PYTHONPATH=str(ROOT), **nowhere),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    printed, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return printed.decode()


async def test_a_verifier_alone(verifier: str, greedy: Greedy) -> None:
    *verdicts, tokens = (await run("verify_only", verifier)).splitlines()
    decoded = ast.literal_eval(tokens)
    assert decoded == greedy(PROMPT, 32)[: len(decoded)]
    committed = [ast.literal_eval(re.sub(r".*: (\[.*\]), .*", r"\1", verdict)) for verdict in verdicts]
    assert [token for tokens in committed for token in tokens] == decoded


async def test_streams(house: House) -> None:
    assert re.search(r"\n\d+ tokens in \d+ steps of the target\n$", await run("stream", "Hello?", house.coordinator))
    answers = (await run("async_stream", house.coordinator)).splitlines()
    asked = [answer.partition(".")[0] for answer in answers]
    assert sorted(asked) == ["Name three mountains", "Name three rivers", "Name three seas", "Tell me a long story"]
    assert answers[-1].endswith(", and so on")
