"""What the engine gives to a verifier's users: shared prefixes, prompts that stall nobody, room that is kept to."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from outrider.base.grpc_options import channel_options
from outrider.engine.loading.loader import LoadedModel
from outrider.models.tokenizer import save_tokenizer
from outrider.protocol import convert
from outrider.protocol.cost_curve import CostCurve
from outrider.protocol.speculation import FinishReason
from outrider.settings.verifier import VerifierSettings
from outrider.v1 import common_pb2 as common
from outrider.v1 import verifier_pb2_grpc as verifier_rpc
from tests.cluster import Cluster, failure, in_process, until_async
from tests.conftest import Models
from tests.contract.conftest import Greedy, Verify, slowed, verifier_serving, verifying
from verifier.engine_target import EngineTarget
from verifier.service import VerifierService
from verifier.step_times import StepTimes

pytestmark = pytest.mark.timeout(90)

PROMPT = [(7 * i) % 251 for i in range(150)]


async def probe(address: str) -> common.ProbeReply:
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        return await verifier_rpc.VerifierStub(channel).Probe(common.ProbeRequest(), timeout=5)  # type: ignore[no-any-return]


async def run(address: str, prompt: list[int], **fields: object) -> Verify:
    async with verifying(address) as stream:
        await stream.open(prompt, **fields)
        await stream.rest()
    return stream


async def test_a_prompt_that_was_there_before_is_not_computed_again(verifier: str, greedy: Greedy) -> None:
    prompt = [*PROMPT, 1]
    first = await run(verifier, prompt, session_id="first")
    second = await run(verifier, [*prompt[:130], 9, 9], session_id="second")
    again = await run(verifier, [*prompt, *first.tokens[:3]], prompt_length=len(prompt), session_id="resumed")
    assert [stream.verdicts[0].timings.cached_tokens for stream in (first, second, again)] == [0, 128, 128]
    assert first.verdicts[1].timings.cached_tokens == 0, "said once"
    assert first.tokens == greedy(prompt, 8)
    assert second.tokens == greedy([*prompt[:130], 9, 9], 8)
    assert again.tokens == first.tokens[3:]


async def test_tenants_with_salts_of_their_own_share_nothing(verifier: str) -> None:
    prompt = [2, *PROMPT]
    found = []
    for salt in ("one", "other", "", "one"):
        stream = await run(verifier, prompt, session_id=f"salt {len(found)}", cache_salt=salt)
        found.append(stream.verdicts[0].timings.cached_tokens)
    assert found == [0, 0, 0, 128]


async def test_a_salt_may_not_be_endless(verifier: str) -> None:
    async with verifying(verifier) as stream:
        await stream.send_open(PROMPT, cache_salt="x" * 257)
        code, _, typed = await failure(stream.call)
    assert (code, typed.field) == (grpc.StatusCode.INVALID_ARGUMENT, "open.cache_salt")


async def test_a_long_prompt_comes_in_pieces_while_others_decode(loaded: LoadedModel, tmp_path: Path) -> None:
    """With rows that cost what they do here, a stretched step has room for the fewest that are ever taken, eight."""
    steep = CostCurve.line(1.0, 1.0)
    settings = VerifierSettings(prefill_rows=512)
    service = VerifierService(
        EngineTarget(loaded.engine), loaded.vocabulary, save_tokenizer(loaded.tokenizer, tmp_path), settings, steep
    )
    async with in_process(service, settings) as address, verifying(address) as talker, verifying(address) as reader:
        await talker.open([3, *PROMPT], session_id="talker", max_tokens=1500)
        before = await talker.verdict()
        assert before.timings.batch_tokens == 1 + len(PROMPT), "nobody to wait for: all at once"
        talking = asyncio.create_task(talker.rest())
        await reader.open([4, *PROMPT, *PROMPT, *PROMPT], session_id="reader", max_tokens=1)
        await reader.rest()
        await talking
    shared = [verdict.timings.batch_tokens for verdict in talker.verdicts[1:] if verdict.timings.batch_tokens > 1]
    assert len(shared) > 20
    assert max(shared) <= 1 + 8


def test_prompts_take_what_the_step_can_be_stretched_by() -> None:
    times = StepTimes(CostCurve((1, 10, 20), (10.0, 11.0, 31.0)))
    assert times.prompt_tokens(1, 1.8, 512) == 12  # 18 ms: ten rows for 11 ms, then 2 ms each
    assert times.prompt_tokens(1, 1000.0, 512) == 512
    for _ in range(100):
        times.record(100, 4 * (31.0 + 80 * 2), has_prompts=True)  # rows of a prompt turn out four times as dear
    assert times.prompt_tokens(1, 1.8, 512) == 8
    assert times.prompt_tokens(10, 8.0, 512) == 7 + 1
    assert StepTimes(CostCurve()).prompt_tokens(4, 1.8, 512) == 512


def test_the_published_curve_follows_the_steps() -> None:
    times = StepTimes(CostCurve((1, 9), (10.0, 14.0)))
    for _ in range(100):
        times.record(5, 24.0, has_prompts=False)
        times.record(500, 9_000.0, has_prompts=True)
    assert times.curve().at(1) == pytest.approx(20.0, rel=0.01)


def test_a_senseless_curve_counts_as_none() -> None:
    for rows, ms in (
        ((1, 1), (1.0, 2.0)),
        ((0, 2), (1.0, 2.0)),
        ((1, 2), (1.0,)),
        ((1, 2), (1.0, float("nan"))),
        ((3,), (-1.0,)),
    ):
        proto = common.WorkerLoad(cost=common.CostCurve(rows=rows, ms=ms))
        assert convert.load_from_proto(proto).cost == CostCurve()


async def test_four_times_what_fits_waits_then_is_refused_and_all_that_was_taken_ends_right(
    loaded: LoadedModel, tmp_path: Path, greedy: Greedy
) -> None:
    """Room for four sessions, sixteen offered: four run, four wait, the rest are told when to come back."""
    prompts = [[i + 1, *PROMPT[:39]] for i in range(16)]
    each = 160  # 40 + 60 tokens and 32 guesses, in pages of 32
    async with verifier_serving(loaded, tmp_path, kv_tokens=4 * each, max_waiting=4) as address:

        async def one(index: int) -> list[int] | grpc.StatusCode:
            async with verifying(address) as stream:
                await stream.send_open(prompts[index], session_id=f"full {index}", max_tokens=60)
                try:
                    assert (await stream.call.read()).HasField("opened")
                except grpc.aio.AioRpcError:
                    code, _, typed = await failure(stream.call)
                    assert typed.retry_after_ms > 0
                    return code
                await stream.rest()
            return stream.tokens

        with slowed(loaded, 0.005):  # the first must not end before the last has asked
            ended = await asyncio.gather(*(one(index) for index in range(16)))
        refused = [result for result in ended if isinstance(result, grpc.StatusCode)]
        assert refused, "what is too much is refused"
        assert set(refused) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        taken = [index for index, result in enumerate(ended) if not isinstance(result, grpc.StatusCode)]
        assert len(taken) >= 8
        for index in taken:
            assert ended[index] == greedy(prompts[index], 60)

        async def empty() -> bool:
            load = (await probe(address)).load
            return load.sessions == load.waiting == load.kv_tokens_used == 0

        await until_async(empty, 5, "all room given back")
    assert loaded.engine.blocks.pool.num_used == 0


@pytest.mark.prove
async def test_memory_after_two_thousand_sessions_is_that_after_two_hundred(models: Models, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    verifier = cluster.add_verifier(models.target, "--prefix-tokens", "2048")
    try:
        verifier.start().wait_ready()
        async with grpc.aio.insecure_channel(verifier.address, options=channel_options()) as channel:
            stub = verifier_rpc.VerifierStub(channel)

            async def one(index: int) -> None:
                stream = Verify(stub.Verify(timeout=30))
                prompt = [index % 256, index // 256, *PROMPT[: 30 + index % 40]]
                await stream.open(prompt, session_id=f"m{index}", max_tokens=4)
                await stream.rest()
                assert stream.verdicts[-1].finish_reason == FinishReason.LENGTH

            async def many(first: int, last: int) -> None:
                for start in range(first, last, 10):
                    await asyncio.gather(*(one(index) for index in range(start, start + 10)))

            await many(0, 200)
            early = verifier.memory_mb()
            await many(200, 2000)
            late = verifier.memory_mb()
            load = (await stub.Probe(common.ProbeRequest(), timeout=5)).load
        assert late <= 1.05 * early, f"{early:.0f} MB grew to {late:.0f}"
        assert load.kv_tokens_used == 0
        assert 0 < load.kv_tokens_idle <= 2048
        assert list(load.cost.rows) == sorted(load.cost.rows)
        assert len(load.cost.rows) > 2, "the curve is published"
    finally:
        cluster.stop()
