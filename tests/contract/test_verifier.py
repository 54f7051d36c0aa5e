"""The verify-only API over a real socket: what docs/verify-api.md promises."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from outrider.base.grpc_options import channel_options
from outrider.engine.loading.loader import LoadedModel
from outrider.models.tokenizer import save_tokenizer
from outrider.protocol.checks import MAX_EPOCH
from outrider.protocol.speculation import FinishReason, TokenKind
from outrider.settings.verifier import VerifierSettings
from outrider.v1 import common_pb2 as common
from outrider.v1 import verifier_pb2 as verify
from outrider.v1 import verifier_pb2_grpc as verifier_rpc
from tests.cluster import failure, in_process, until_async
from tests.contract.conftest import Greedy, verifier_serving, verifying
from verifier.engine_target import EngineTarget
from verifier.service import PEER_CLOSE_TIMEOUT_S, VerifierService

pytestmark = pytest.mark.timeout(60)

LONG_PATIENCE_US = 10_000_000
WAITING = 8  # γ beyond the guesses that a test sends: its step waits until it is steered to fewer
PROMPT = [*range(40, 80)]


@pytest.fixture(scope="module")
def truth(greedy: Greedy) -> list[int]:
    """What the target says after PROMPT."""
    return greedy(PROMPT, 24)


def wrong(token: int) -> int:
    return (token + 1) % 256


async def test_plain_decoding(verifier: str, truth: list[int]) -> None:
    async with verifying(verifier) as stream:
        opened = await stream.open(PROMPT, max_tokens=12)
        assert opened.position == len(PROMPT)
        assert opened.model.architecture == "LlamaForCausalLM"
        verdicts = await stream.rest()
    assert stream.tokens == truth[:12]
    assert {verdict.last for verdict in verdicts} == {TokenKind.PLAIN}
    assert [verdict.finish_reason for verdict in verdicts] == [FinishReason.NONE] * 11 + [FinishReason.LENGTH]
    assert all(verdict.timings.step_us > 0 for verdict in verdicts)


async def test_resumed_in_the_middle(verifier: str, truth: list[int]) -> None:
    """Committed tokens come with Open: the output goes on behind them."""
    async with verifying(verifier) as stream:
        opened = await stream.open(PROMPT + truth[:5], prompt_length=len(PROMPT), max_tokens=12)
        assert opened.position == len(PROMPT) + 5
        await stream.rest()
    assert stream.tokens == truth[5:12]


async def test_guesses_that_hold_and_the_bonus(verifier: str, truth: list[int]) -> None:
    async with verifying(verifier) as stream:
        await stream.open(PROMPT, max_tokens=20, gamma=1, draft_wait_us=LONG_PATIENCE_US)
        first = await stream.verdict()
        assert (list(first.tokens), first.last, first.proposed) == (truth[:1], TokenKind.PLAIN, 0)
        await stream.guess(len(PROMPT) + 1, truth[1:4])
        second = await stream.verdict()
    assert list(second.tokens) == truth[1:5]
    assert (second.accepted, second.proposed) == (3, 3)
    assert second.last == TokenKind.BONUS


async def test_a_guess_that_fails_is_recovered(verifier: str, truth: list[int]) -> None:
    async with verifying(verifier) as stream:
        await stream.open(PROMPT, max_tokens=20, gamma=1, draft_wait_us=LONG_PATIENCE_US)
        await stream.verdict()
        await stream.guess(len(PROMPT) + 1, [truth[1], wrong(truth[2]), truth[3]])
        verdict = await stream.verdict()
        assert list(verdict.tokens) == truth[1:3]
        assert (verdict.accepted, verdict.proposed, verdict.last) == (1, 3, TokenKind.RECOVERED)
        # What followed the failed guess is gone, and its branch is not offered again.
        await stream.guess(len(PROMPT) + 3, truth[3:5], first_id=4)
        verdict = await stream.verdict()
    assert (list(verdict.tokens), verdict.accepted) == (truth[3:6], 2)


async def test_trees_with_branches(loaded: LoadedModel, tmp_path: Path, greedy: Greedy) -> None:
    """A long prompt, taken in small pieces, keeps the verifier busy until all guesses are there."""
    prompt = [*range(200)] * 4
    truth = greedy(prompt, 40)
    at = len(prompt)
    async with verifier_serving(loaded, tmp_path, prefill_rows=2) as address, verifying(address) as stream:
        await stream.send_open(prompt, max_tokens=40, gamma=WAITING, draft_wait_us=LONG_PATIENCE_US)
        await stream.guess(at, [truth[0], truth[1], wrong(truth[2])])
        await stream.guess(at + 1, [wrong(truth[1]), 7, 8], first_id=4, parent=1)
        await stream.guess(at + 2, truth[2:4], first_id=7, parent=2)
        await stream.guess(at, [wrong(truth[0])], first_id=9)
        await stream.steer(gamma=1)
        assert (await stream.call.read()).HasField("opened")
        first, second = await stream.verdict(), await stream.verdict()
        await stream.steer(gamma=0)
        await stream.rest()
    assert stream.tokens == truth, "what was left of the branches does not show"
    assert list(first.tokens) == truth[:1]
    assert list(second.tokens) == truth[1:5]
    assert (second.accepted, second.proposed, second.last) == (3, 3, TokenKind.BONUS)
    assert second.timings.session_tokens > 4, "both branches went through the model"


async def test_two_drafters_in_one_tree_are_tallied(loaded: LoadedModel, tmp_path: Path, greedy: Greedy) -> None:
    prompt = [*range(100)] * 5
    truth = greedy(prompt, 8)
    at = len(prompt)
    async with verifier_serving(loaded, tmp_path, prefill_rows=3) as address, verifying(address) as stream:
        await stream.send_open(prompt, max_tokens=8, gamma=WAITING, draft_wait_us=LONG_PATIENCE_US)
        await stream.guess(at, [*truth[:3], wrong(truth[3])], source=1)
        await stream.guess(at, [*truth[:2], wrong(truth[2])], source=2)
        await stream.steer(gamma=1)
        assert (await stream.call.read()).HasField("opened")
        first, second = await stream.verdict(), await stream.verdict()
    assert not first.sources
    assert first.nodes == 0
    assert [(tally.source, tally.proposed, tally.accepted) for tally in second.sources] == [(1, 3, 2), (2, 2, 1)]
    assert (second.proposed, second.accepted, second.nodes) == (3, 2, 4)


async def test_late_guess_is_skipped_forward(verifier: str, truth: list[int]) -> None:
    async with verifying(verifier) as stream:
        await stream.open(PROMPT, max_tokens=20, gamma=1, draft_wait_us=LONG_PATIENCE_US)
        await stream.verdict()
        await stream.guess(len(PROMPT), truth[0:4])
        verdict = await stream.verdict()
    assert (list(verdict.tokens), verdict.accepted) == (truth[1:5], 3)


@pytest.mark.parametrize("copies", [2, 5])
async def test_duplicates_and_stale_guesses_change_nothing(verifier: str, truth: list[int], copies: int) -> None:
    async with verifying(verifier) as stream:
        await stream.open(PROMPT, max_tokens=16, gamma=WAITING, draft_wait_us=LONG_PATIENCE_US)
        await stream.verdict()
        for copy in range(copies):
            await stream.guess(len(PROMPT) + 1, truth[1:4], first_id=1 + 3 * copy)
            await stream.guess(len(PROMPT) + 1, truth[1:4])
            await stream.guess(len(PROMPT), [wrong(truth[0]), 5, 6], first_id=100 + 3 * copy)
            await stream.guess(0, PROMPT[:4], first_id=200 + 4 * copy)
        await stream.steer(gamma=1)
        await stream.verdict()
        await stream.steer(gamma=0)
        await stream.rest()
    assert stream.tokens == truth[:16]
    assert sum(verdict.accepted for verdict in stream.verdicts) >= 3


async def test_patience_ends_with_a_plain_token(verifier: str, truth: list[int]) -> None:
    async with verifying(verifier) as stream:
        await stream.open(PROMPT, max_tokens=4, gamma=4, draft_wait_us=600_000)
        verdicts = await stream.rest()
    assert stream.tokens == truth[:4]
    assert all(verdict.last == TokenKind.PLAIN for verdict in verdicts)
    assert all(verdict.timings.wait_us >= 600_000 for verdict in verdicts[1:-1])
    assert verdicts[-1].timings.wait_us < 600_000, "no guess could be used for the last token"


async def test_empty_guess_says_do_not_wait(verifier: str, truth: list[int]) -> None:
    async with verifying(verifier) as stream:
        await stream.open(PROMPT, max_tokens=20, gamma=1, draft_wait_us=LONG_PATIENCE_US)
        await stream.verdict()
        await stream.guess(len(PROMPT) + 1, [], first_id=0)
        verdict = await asyncio.wait_for(stream.verdict(), LONG_PATIENCE_US / 1e6 / 2)
    assert (list(verdict.tokens), verdict.last) == (truth[1:2], TokenKind.PLAIN)


async def test_steer_to_plain_decoding_ends_the_wait(verifier: str, truth: list[int]) -> None:
    async with verifying(verifier) as stream:
        await stream.open(PROMPT, max_tokens=6, gamma=1, draft_wait_us=LONG_PATIENCE_US)
        await stream.verdict()
        await stream.steer(gamma=0)
        await asyncio.wait_for(stream.rest(), LONG_PATIENCE_US / 1e6 / 2)
    assert stream.tokens == truth[:6]


async def test_stop_id_inside_a_block_ends_it_there(verifier: str, truth: list[int]) -> None:
    stop = next(token for token in truth[2:6] if token not in truth[:2])
    end = truth.index(stop)
    async with verifying(verifier) as stream:
        await stream.open(PROMPT, max_tokens=20, gamma=6, draft_wait_us=LONG_PATIENCE_US, stop_token_ids=[stop])
        await stream.verdict()
        await stream.guess(len(PROMPT) + 1, truth[1:8])
        verdicts = await stream.rest()
    assert stream.tokens == truth[: end + 1]
    last = verdicts[-1]
    assert (last.accepted, last.last, last.finish_reason) == (end, TokenKind.NONE, FinishReason.STOP)


@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_end_token(verifier: str, loaded: LoadedModel, truth: list[int], ignore_eos: bool) -> None:
    """Bias makes the end token come as the second one; guessed right, it still ends the output."""
    (eos,) = loaded.engine.info.eos_token_ids
    async with verifying(verifier) as stream:
        await stream.open(
            PROMPT + truth[:1],
            prompt_length=len(PROMPT),
            max_tokens=6,
            gamma=4,
            draft_wait_us=LONG_PATIENCE_US if not ignore_eos else 1000,
            ignore_eos=ignore_eos,
            logit_bias={eos: 100.0},
        )
        await stream.guess(len(PROMPT) + 1, [eos, eos, eos])
        verdicts = await stream.rest()
    assert set(stream.tokens) == {eos}
    assert len(stream.tokens) == (5 if ignore_eos else 1)
    assert verdicts[-1].finish_reason == (FinishReason.LENGTH if ignore_eos else FinishReason.STOP)


async def test_max_tokens_inside_a_block(verifier: str, truth: list[int]) -> None:
    async with verifying(verifier) as stream:
        await stream.open(PROMPT, max_tokens=4, gamma=8, draft_wait_us=LONG_PATIENCE_US)
        await stream.verdict()
        await stream.guess(len(PROMPT) + 1, truth[1:9])
        verdicts = await stream.rest()
    assert stream.tokens == truth[:4]
    assert verdicts[-1].finish_reason == FinishReason.LENGTH


async def test_a_prompt_longer_than_a_step_takes(verifier: str, greedy: Greedy) -> None:
    """Alone, so that a step holds nothing but a piece of the prompt."""
    prompt = [i % 251 for i in range(1200)]
    async with verifying(verifier) as stream:
        await stream.open(prompt, max_tokens=3)
        await stream.rest()
    assert stream.tokens == greedy(prompt, 3)


async def test_half_closing_ends_the_session(verifier: str) -> None:
    async with verifying(verifier) as stream:
        await stream.open(PROMPT, max_tokens=20, gamma=1, draft_wait_us=LONG_PATIENCE_US)
        await stream.verdict()
        assert (await probe(verifier)).load.sessions == 1
        await stream.call.done_writing()
        await stream.rest()
    assert (await probe(verifier)).load.sessions == 0


async def test_a_peer_that_is_behind_in_reading_gets_every_verdict(verifier: str, truth: list[int]) -> None:
    """It goes on guessing for seconds after the output has ended, for it does not know that yet."""
    async with verifying(verifier) as stream:
        await stream.open(PROMPT, max_tokens=8)
        until = time.monotonic() + 3.0
        while time.monotonic() < until:
            await stream.guess(len(PROMPT), [wrong(truth[0])])
            await asyncio.sleep(0.1)
        await stream.rest()
    assert stream.tokens == truth[:8]


async def test_higher_epoch_takes_over_and_lower_is_fenced_off(verifier: str, truth: list[int]) -> None:
    async with verifying(verifier) as old, verifying(verifier) as new:
        await old.open(PROMPT, session_id="fenced", epoch=5, gamma=1, draft_wait_us=LONG_PATIENCE_US)
        await old.verdict()
        await new.open(PROMPT, session_id="fenced", epoch=6, max_tokens=8)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await old.rest()
        assert caught.value.code() is grpc.StatusCode.ABORTED
        async with verifying(verifier) as older:
            await older.send_open(PROMPT, session_id="fenced", epoch=4)
            code, error, typed = await failure(older.call)
        assert code is grpc.StatusCode.ABORTED
        assert (typed.code, typed.field, typed.value, typed.limit) == ("fenced", "open.epoch", "4", "at least 6")
        assert "fenced" in error.message
        await new.rest()
    assert new.tokens == truth[:8], "the new owner never noticed"


async def test_a_huge_epoch_does_not_lock_an_id(
    verifier: str, truth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with verifying(verifier) as locking:
        await locking.send_open(PROMPT, session_id="locked", epoch=2**64 - 1)
        status, _, typed = await failure(locking.call)
        assert (status, typed.field) == (grpc.StatusCode.INVALID_ARGUMENT, "open.epoch")
    async with verifying(verifier) as locking:
        await locking.open(PROMPT, session_id="locked", epoch=MAX_EPOCH, max_tokens=8)
        await locking.rest()
    async with verifying(verifier) as soon:
        await soon.send_open(PROMPT, session_id="locked", epoch=1)
        assert (await failure(soon.call))[2].code == "fenced"
    monkeypatch.setattr("verifier.admission.EPOCH_KEPT_S", 0.0)  # later
    async with verifying(verifier) as later:
        await later.open(PROMPT, session_id="locked", epoch=1, max_tokens=8)
        await later.rest()
        assert later.tokens == truth[:8]


async def test_equal_epoch_takes_over_too(verifier: str, truth: list[int]) -> None:
    """A coordinator that lost its connection comes back with the same epoch."""
    async with verifying(verifier) as old, verifying(verifier) as new:
        await old.open(PROMPT, session_id="again", epoch=5, gamma=1, draft_wait_us=LONG_PATIENCE_US)
        await new.open(PROMPT, session_id="again", epoch=5, max_tokens=8)
        await new.rest()
        status, _, typed = await failure(old.call)
        assert (status, typed.code) == (grpc.StatusCode.UNAVAILABLE, "peer_lost"), "its owner has it still"
    assert new.tokens == truth[:8]


async def test_an_error_ends_a_stream_at_once_and_what_was_not_read_is_made_again(
    verifier: str, truth: list[int]
) -> None:
    """The peer does not hang up, for it cannot know: a verifier that waited for it would keep the reason to itself."""
    async with verifying(verifier) as old, verifying(verifier) as new:
        await old.open(PROMPT, session_id="broken", epoch=1, max_tokens=12, gamma=2, draft_wait_us=LONG_PATIENCE_US)
        await old.verdict()
        await old.guess(len(PROMPT) + 1, truth[1:3])
        await new.open([*PROMPT, *old.tokens], session_id="broken", epoch=2, max_tokens=12, prompt_length=len(PROMPT))
        async with asyncio.timeout(PEER_CLOSE_TIMEOUT_S / 6):
            assert (await failure(old.call))[0] is grpc.StatusCode.ABORTED
        await new.rest()
    assert old.tokens == truth[:1]
    assert old.tokens + new.tokens == truth[:12]


async def test_a_full_cache_queues_and_then_refuses(loaded: LoadedModel, tmp_path: Path, truth: list[int]) -> None:
    """Room for two of 40 + 60 tokens and 32 guesses in pages of 32, one may wait, the next is told to come back."""
    waiting = {"max_tokens": 60, "gamma": 2, "draft_wait_us": LONG_PATIENCE_US}
    async with (
        verifier_serving(loaded, tmp_path, kv_tokens=350, max_waiting=1) as address,
        verifying(address) as first,
        verifying(address) as second,
        verifying(address) as third,
        verifying(address) as fourth,
        verifying(address) as huge,
    ):
        await first.open(PROMPT, session_id="1", **waiting)
        await second.open(PROMPT, session_id="2", **waiting)
        await third.open(PROMPT, session_id="3", max_tokens=60)
        load = (await probe(address)).load
        assert (load.sessions, load.waiting, load.kv_tokens_total) == (2, 1, 350)
        assert load.kv_tokens_used == 2 * 160
        await fourth.send_open(PROMPT, session_id="4", max_tokens=60)
        code, _, typed = await failure(fourth.call)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert typed.code == "overloaded"
        assert typed.retry_after_ms > 0
        await huge.send_open(PROMPT, session_id="5", max_tokens=400)
        code, _, typed = await failure(huge.call)
        assert (code, typed.field) == (grpc.StatusCode.INVALID_ARGUMENT, "params.max_tokens")
        first.call.cancel()
        third_tokens = await asyncio.wait_for(third.verdict(), 5)
        assert list(third_tokens.tokens) == truth[:1], "the one that waited got the room"
        second.call.cancel()
        third.call.cancel()
        await until_async(lambda: _empty(address), 10, "all room given back")


async def test_sessions_beyond_the_limit_wait(loaded: LoadedModel, tmp_path: Path) -> None:
    async with (
        verifier_serving(loaded, tmp_path, max_sessions=1, max_waiting=4) as address,
        verifying(address) as first,
        verifying(address) as second,
    ):
        await first.open(PROMPT, session_id="1", gamma=2, draft_wait_us=LONG_PATIENCE_US)
        await second.open(PROMPT, session_id="2")
        assert (await probe(address)).load.waiting == 1
        await first.call.done_writing()
        await asyncio.wait_for(second.rest(), 5)


def check_features(verdicts: list[verify.Verdict], target: LlamaForCausalLM, tokens: list[int], first: int) -> None:
    """From position `first` on, without a gap, up to what the last token was drawn after."""
    with torch.inference_mode():
        hidden = target.model(torch.tensor([tokens])).last_hidden_state[0]
    at = first
    for verdict in verdicts:
        features = verdict.hidden_states
        assert (features.position, features.width) == (at, hidden.shape[1])
        rows = np.frombuffer(features.rows, dtype="<f2").reshape(-1, features.width)
        at += len(rows)
        assert at == verdict.position + len(verdict.tokens) - 1, (
            "of the tokens that the committed ones were drawn after"
        )
        np.testing.assert_allclose(rows, hidden[features.position : at].numpy(), rtol=2e-3, atol=2e-3)


async def test_features_are_the_models_hidden_states(
    verifier: str, plain_target: LlamaForCausalLM, truth: list[int]
) -> None:
    async with verifying(verifier) as stream:
        await stream.open(
            PROMPT, max_tokens=20, gamma=1, draft_wait_us=LONG_PATIENCE_US, hidden_states=True, cache_salt="features"
        )
        verdicts = [await stream.verdict()]
        await stream.guess(len(PROMPT) + 1, [*truth[1:4], wrong(truth[4])])
        verdicts.append(await stream.verdict())
    assert [len(verdict.tokens) for verdict in verdicts] == [1, 4]
    check_features(verdicts, plain_target, PROMPT + truth, first=0)


async def test_features_of_a_branch_that_is_not_the_first(
    loaded: LoadedModel, tmp_path: Path, plain_target: LlamaForCausalLM, greedy: Greedy
) -> None:
    """A prompt in small pieces: of its last 256 positions, and then of the accepted path through the tree."""
    prompt = [(7 * i) % 251 for i in range(500)]
    truth = greedy(prompt, 6)
    at = len(prompt)
    async with verifier_serving(loaded, tmp_path, prefill_rows=3) as address, verifying(address) as stream:
        await stream.send_open(
            prompt, max_tokens=6, gamma=4, draft_wait_us=1_000_000, hidden_states=True, cache_salt="tree"
        )
        await stream.guess(at, [truth[0], wrong(truth[1]), 7, 8])
        await stream.guess(at + 1, truth[1:4], first_id=5, parent=1)
        assert (await stream.call.read()).HasField("opened")
        verdicts = [await stream.verdict(), await stream.verdict()]
    assert [verdict.accepted for verdict in verdicts] == [0, 3]
    check_features(verdicts, plain_target, prompt + truth, first=at - 256)


async def test_features_of_what_the_cache_had_are_kept(
    verifier: str, plain_target: LlamaForCausalLM, truth: list[int]
) -> None:
    asked = {"max_tokens": 3, "hidden_states": True, "cache_salt": "begun"}
    async with verifying(verifier) as first, verifying(verifier) as second:
        await first.open(PROMPT, session_id="1", **asked)
        await first.rest()
        await second.open(PROMPT, session_id="2", **asked)
        verdicts = await second.rest()
    assert verdicts[0].timings.cached_tokens > 0
    check_features(verdicts, plain_target, PROMPT + truth, first=0)


async def test_features_end_with_the_output(verifier: str, plain_target: LlamaForCausalLM, truth: list[int]) -> None:
    """max_tokens cuts an accepted path short: no hidden states of what was not committed."""
    stop = next(i for i in range(2, 6) if truth[i] not in truth[:i])
    async with verifying(verifier) as stream:
        await stream.open(
            PROMPT,
            max_tokens=20,
            gamma=8,
            draft_wait_us=LONG_PATIENCE_US,
            stop_token_ids=[truth[stop]],
            hidden_states=True,
            cache_salt="end",
        )
        await stream.verdict()
        await stream.guess(len(PROMPT) + 1, truth[1:9])
        verdicts = await stream.rest()
    assert stream.tokens == truth[: stop + 1]
    check_features(verdicts, plain_target, PROMPT + truth, first=0)


async def test_features_are_steered_on_and_off(verifier: str, plain_target: LlamaForCausalLM, truth: list[int]) -> None:
    async with verifying(verifier) as stream:
        await stream.open(PROMPT, max_tokens=20, gamma=1, draft_wait_us=LONG_PATIENCE_US)
        first = await stream.verdict()
        await stream.steer(hidden_states=True)
        await stream.guess(len(PROMPT) + 1, truth[1:4])
        second = await stream.verdict()
        await stream.steer(hidden_states=False)
        await stream.guess(len(PROMPT) + 5, truth[5:7], first_id=4)
        third = await stream.verdict()
    assert not first.HasField("hidden_states")
    assert not third.HasField("hidden_states")
    check_features([second], plain_target, PROMPT + truth, first=len(PROMPT))


async def test_no_features_unless_asked_for(verifier: str) -> None:
    async with verifying(verifier) as stream:
        await stream.open(PROMPT, max_tokens=2)
        assert not any(verdict.HasField("hidden_states") or verdict.logprobs for verdict in await stream.rest())


async def test_logprobs(verifier: str, plain_target: LlamaForCausalLM, truth: list[int]) -> None:
    """Of the raw distribution, for guessed and own tokens alike, whatever the sampling parameters."""
    async with verifying(verifier) as stream:
        await stream.open(PROMPT, max_tokens=20, gamma=1, draft_wait_us=LONG_PATIENCE_US, logprobs=3)
        await stream.verdict()
        await stream.guess(len(PROMPT) + 1, truth[1:4])
        await stream.verdict()
    with torch.inference_mode():
        logs = torch.log_softmax(plain_target(torch.tensor([PROMPT + truth])).logits[0].double(), dim=-1)
    entries = [entry for verdict in stream.verdicts for entry in verdict.logprobs]
    assert len(entries) == len(stream.tokens) == 5
    for offset, (token, entry) in enumerate(zip(stream.tokens, entries, strict=True)):
        row = logs[len(PROMPT) - 1 + offset]
        best = row.topk(3)
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert list(entry.top_ids) == best.indices.tolist()
        assert list(entry.top_logprobs) == pytest.approx(best.values.tolist(), abs=1e-4)


async def test_coupled_draws_do_not_depend_on_guesses(verifier: str) -> None:
    drawing = {"temperature": 0.9, "seed": 11, "max_tokens": 16}
    async with verifying(verifier) as plain:
        await plain.open(PROMPT, session_id="plain", **drawing)
        await plain.rest()
    async with verifying(verifier) as guessed:
        await guessed.open(PROMPT, session_id="guessed", gamma=4, draft_wait_us=LONG_PATIENCE_US, **drawing)
        await guessed.verdict()
        await guessed.guess(len(PROMPT) + 1, [*plain.tokens[1:4], wrong(plain.tokens[4])])
        await guessed.verdict()
        await guessed.steer(gamma=0)
        await guessed.rest()
    assert guessed.tokens == plain.tokens
    assert sum(verdict.accepted for verdict in guessed.verdicts) == 3


async def test_tokenizer_model_info_and_probe(verifier: str, loaded: LoadedModel, tmp_path: Path) -> None:
    async with grpc.aio.insecure_channel(verifier, options=channel_options()) as channel:
        stub = verifier_rpc.VerifierStub(channel)
        async for chunk in stub.GetTokenizer(verify.GetTokenizerRequest(), timeout=10):
            assert "/" not in chunk.name
            with (tmp_path / chunk.name).open("ab") as file:
                file.write(chunk.data)
    async with verifying(verifier) as stream:
        info = (await stream.open(PROMPT)).model
        await stream.rest()
    text = "Grüße, 世界! \t x"
    assert AutoTokenizer.from_pretrained(tmp_path).encode(text) == loaded.tokenizer.encode(text)
    assert info.fingerprint == loaded.engine.info.fingerprint
    assert (info.vocab_size, info.context_length, info.dtype, info.device) == (257, 2048, "float32", "cpu")
    assert list(info.eos_token_ids) == [256]
    assert info.parameters > 0
    reply = await probe(verifier)
    assert (reply.load.sessions, reply.draining, reply.load.kv_tokens_used) == (0, False, 0)
    assert reply.load.kv_tokens_total > 0


async def test_draining_refuses_new_sessions_and_finishes_old_ones(
    loaded: LoadedModel, tmp_path: Path, truth: list[int]
) -> None:
    settings = VerifierSettings()
    service = VerifierService(
        EngineTarget(loaded.engine), loaded.vocabulary, save_tokenizer(loaded.tokenizer, tmp_path), settings
    )
    async with in_process(service, settings) as address, verifying(address) as old, verifying(address) as new:
        await old.open(PROMPT, max_tokens=8, gamma=2, draft_wait_us=100_000)
        service.drain()
        await new.send_open(PROMPT, session_id="new")
        assert (await failure(new.call))[0] is grpc.StatusCode.UNAVAILABLE
        assert (await probe(address)).draining
        await old.rest()
    assert old.tokens == truth[:8]


async def test_a_verifier_that_was_paused_for_hours_goes_on_with_its_sessions(
    loaded: LoadedModel, tmp_path: Path, truth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by `docker pause`: every session failed, as the time of its step has no room in a verdict."""
    clock = SimpleNamespace(perf_counter=itertools.count(0.0, 5000.0).__next__)
    monkeypatch.setattr("verifier.engine_target.time", clock)
    files = save_tokenizer(loaded.tokenizer, tmp_path)
    service = VerifierService(EngineTarget(loaded.engine), loaded.vocabulary, files, settings := VerifierSettings())
    async with in_process(service, settings) as address, verifying(address) as stream:
        await stream.open(PROMPT, max_tokens=8)
        await stream.rest()
    assert stream.tokens == truth[:8]
    assert {verdict.timings.step_us for verdict in stream.verdicts} == {2**32 - 1}


async def probe(address: str) -> common.ProbeReply:
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        return await verifier_rpc.VerifierStub(channel).Probe(common.ProbeRequest(), timeout=5)


async def _empty(address: str) -> bool:
    load = (await probe(address)).load
    return load.sessions == load.waiting == load.kv_tokens_used == 0
