"""One verifier over two processes: the same text, one readiness, one end. Real ranks, gloo on a CPU."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
import torch
from transformers import LlamaForCausalLM

from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
from outrider.testing.toy_models import byte_tokenizer, make_model
from outrider.v1 import verifier_pb2 as verify
from tests.cluster import START_S, Process, free_port, until
from tests.contract.conftest import verifier_serving, verifying

pytestmark = pytest.mark.timeout(300)

GONE_S = 60.0
PATIENCE_US = 5_000_000
IDLE_US = 10_000_000
PROMPT = [*range(40, 140)]  # more than a step takes: some steps ask for no logits
EXTRA = ("<|extra|>",)
COUPLED = {"temperature": 1.0, "seed": 5, "top_p": 0.95}
FLAGS = ("--device", "cpu", "--prefill-rows", "48", "--drain-s", "0.5")


@dataclass(frozen=True, slots=True)
class Launched:
    """All start together: most of the time goes into imports."""

    own: Process
    doomed: Process
    orphaning: Process
    by_torchrun: Process

    def all(self) -> list[Process]:
        return [self.own, self.doomed, self.orphaning, self.by_torchrun]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An even number of tokens: older releases of transformers split no other vocabulary."""
    return make_model(tmp_path_factory.mktemp("even"), seed=7, sharpness=4.0, focus=0.1, extra_tokens=EXTRA)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    """The target with one matrix for both ends, as small models have it."""
    folder = tmp_path_factory.mktemp("tied")
    given = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    given.config.tie_word_embeddings = True
    model = LlamaForCausalLM(given.config)
    model.load_state_dict(given.state_dict() | {"model.embed_tokens.weight": given.lm_head.weight})
    model.save_pretrained(folder)
    byte_tokenizer(EXTRA).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory, target: Path, tied: Path) -> Iterator[Launched]:
    folder = tmp_path_factory.mktemp("ranks")

    def verifier(name: str, model: Path, *starter: str) -> Process:
        port = free_port()
        flags = ["--tensor-parallel", "2", "--target", str(model), "--port", str(port), *FLAGS]
        return Process(name, [sys.executable, *starter, "-m", "verifier", *flags], port, folder)

    launched = Launched(
        own=verifier("own", target),
        doomed=verifier("doomed", target),
        orphaning=verifier("orphaning", target),
        by_torchrun=verifier("torchrun", tied, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
    )
    try:
        for process in launched.all():
            process.start()
        yield launched
    finally:
        for process in launched.all():
            process.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def alone(target: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """The same target in one process."""
    loaded = load_model(str(target), EngineOptions(device="cpu"))
    async with verifier_serving(loaded, tmp_path_factory.mktemp("alone"), prefill_rows=48) as address:
        yield address


def children(pid: int) -> list[int]:
    """Processes that this one has started and that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(stat.parent.name))
    return found


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pid_of(process: Process) -> int:
    assert process._running is not None
    return process._running.pid


def wrong(token: int) -> int:
    return (token + 1) % 256


async def guessed(address: str, truth: list[int], **fields: object) -> tuple[list[int], verify.Opened]:
    """What a verifier says when it is sent guesses: a wrong branch first, so that what is kept has to move."""
    at = len(PROMPT)
    async with verifying(address) as stream:
        await stream.send_open(PROMPT, max_tokens=24, gamma=4, draft_wait_us=PATIENCE_US, **fields)
        await stream.guess(at, [wrong(truth[0]), 7, 8])
        await stream.guess(at, [truth[0], wrong(truth[1])], first_id=4)
        await stream.guess(at + 1, truth[1:4], first_id=6, parent=4)
        opened = (await stream.call.read()).opened
        await stream.verdict()
        await stream.steer(gamma=0)
        await stream.rest()
    assert sum(verdict.accepted for verdict in stream.verdicts) >= 2, "guesses were of use"
    return stream.tokens, opened


async def plain(address: str, **fields: object) -> tuple[list[int], verify.Opened]:
    async with verifying(address) as stream:
        opened = await stream.open(PROMPT, max_tokens=24, **fields)
        await stream.rest()
    return stream.tokens, opened


def test_rank_0_killed_while_it_loads_leaves_no_orphan(launched: Launched) -> None:
    leader = pid_of(launched.orphaning)
    (other,) = until(lambda: children(leader), START_S, "a second rank")
    launched.orphaning.kill()
    until(lambda: not runs(other), GONE_S, "no second rank")


@pytest.mark.parametrize("params", [{}, COUPLED], ids=["greedy", "coupled"])
async def test_two_ranks_say_what_one_process_says(launched: Launched, alone: str, params: dict[str, float]) -> None:
    own = launched.own.wait_ready()
    truth, described = await plain(alone, session_id="plain", **params)
    tokens, opened = await guessed(own.address, truth, session_id="guessed", **params)
    assert tokens == truth
    assert_same_but_for_arithmetic(opened, described)
    again, _ = await plain(own.address, session_id="again", **params)
    assert again == truth, "the second time from cached pages"


async def test_sessions_side_by_side(launched: Launched, alone: str) -> None:
    own = launched.own.wait_ready()
    several = [{"session_id": f"s{seed}", "temperature": 1.0, "seed": seed} for seed in range(6)]
    told, truth = [
        [tokens for tokens, _ in await asyncio.gather(*(plain(address, **fields) for fields in several))]
        for address in (own.address, alone)
    ]
    assert told == truth


async def test_a_killed_rank_is_the_end_of_the_verifier(launched: Launched) -> None:
    """Also while there is nothing to do: a step would find out by itself."""
    doomed = launched.doomed.wait_ready()
    (other,) = children(pid_of(doomed))
    async with verifying(doomed.address) as stream:
        await stream.open(PROMPT, max_tokens=1000, gamma=4, draft_wait_us=IDLE_US)
        await stream.verdict()
        os.kill(other, signal.SIGKILL)
        assert doomed.wait(GONE_S) == 1
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await stream.rest()
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    # The watch finds it, and not a step: no step is due before the wait for guesses ends.
    assert "rank lost, shutting down" in doomed.log()
    assert "of 2 ended with status" in doomed.log()


def test_sigterm_leaves_no_process(launched: Launched) -> None:
    own = launched.own.wait_ready()
    (other,) = children(pid_of(own))
    own.terminate()
    assert own.wait(GONE_S) == 0
    assert not runs(other), "rank 0 leaves last"
    assert "critical" not in own.log()


def assert_same_but_for_arithmetic(opened: verify.Opened, described: verify.Opened) -> None:
    assert opened.model.fingerprint != described.model.fingerprint, "sums in another order: no failover between them"
    opened.model.fingerprint = described.model.fingerprint
    assert opened.model == described.model, "drafters fit all the same"


async def test_torchrun_starts_them_too(
    launched: Launched, tied: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    by_torchrun = launched.by_torchrun.wait_ready()
    loaded = load_model(str(tied), EngineOptions(device="cpu"))
    async with verifier_serving(loaded, tmp_path_factory.mktemp("tied-alone"), prefill_rows=48) as address:
        truth, described = await plain(address)
    tokens, opened = await plain(by_torchrun.address)
    assert tokens == truth
    assert_same_but_for_arithmetic(opened, described)
    ranks = children(pid_of(by_torchrun))
    assert len(ranks) == 2
    by_torchrun.terminate()
    by_torchrun.wait(GONE_S)
    until(lambda: not any(map(runs, ranks)), GONE_S, "no rank")
