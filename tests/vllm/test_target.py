"""Texts on vLLM: the same with any guesses, and those of Outrider's own engine."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.vllm import compatibility
from outrider.engine.vllm.loading import self_test
from outrider.protocol.errors import StartupError
from outrider.protocol.sampling_params import Grammar, SamplingParams, Verification
from outrider.protocol.speculation import FinishReason
from outrider.speculation.grammar import GrammarCompiler
from tests.vllm.conftest import (
    MAX_GUESSES,
    NOTHING,
    RUNNER,
    VOCAB,
    Drafter,
    Request,
    loop_over,
    options,
    run,
)
from verifier.engine_target import EngineTarget
from verifier.vllm_target import VllmTarget

pytestmark = pytest.mark.timeout(300)

LENGTH = 24
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.7, "frequency_penalty": 0.5, "logit_bias": {5: 4.0, 9: -50.0}},
    {"temperature": 1.0, "logprobs": 3},
]


def requests(number: int = 16, gamma: int = 0, **more: Any) -> list[Request]:
    rng = random.Random(number)
    made = []
    for index in range(number):
        prompt = [rng.randrange(VOCAB - 1) for _ in range(rng.choice((3, 20, 70, 150)))]
        params = SamplingParams(seed=index, max_tokens=LENGTH, ignore_eos=True, **(KINDS[index % len(KINDS)] | more))
        made.append(Request(f"request {index}", prompt, params, gamma, draft_wait_s=0.002 * (index % 3)))
    return made


def from_truth(truth: Sequence[Sequence[int]], style: str) -> Drafter:
    """Return a drafter that knows the texts."""
    rng = random.Random(style)

    def draft(request: Request) -> Sequence[int]:
        index = int(request.name.split()[1])
        done = len(request.tokens)
        right = truth[index][done : done + MAX_GUESSES]
        if style == "right":
            return right
        if style == "wrong":
            return [(token + 1) % VOCAB for token in right]
        fails_at = rng.randrange(MAX_GUESSES + 1)
        return [token if i < fails_at else (token + 7) % VOCAB for i, token in enumerate(right)]

    return draft


def test_processes_of_vllm_run_no_modules_of_the_folder_that_they_start_in(vllm: VllmTarget, tmp_path: Path) -> None:
    """The first start of a model runs one of vLLM's modules by its name."""
    (tmp_path / "found.py").touch()
    done = subprocess.run([sys.executable, "-m", "found"], cwd=tmp_path, capture_output=True, check=False)
    assert b"No module named found" in done.stderr


async def test_any_guesses_give_the_text_of_none_and_of_our_own_engine(vllm: VllmTarget, own: EngineTarget) -> None:
    truth = await run(loop_over(own), requests())
    plain = await run(loop_over(vllm), requests())
    assert plain == truth
    for style in ("right", "wrong", "mixed"):
        guessed = requests(gamma=4)
        for request in guessed:
            request.draft_wait_s = 0.5 if style == "right" else request.draft_wait_s
        assert await run(loop_over(vllm), guessed, from_truth(truth, style)) == truth, style
        accepted = sum(request.accepted for request in guessed)
        assert (accepted > 0) is (style != "wrong")
        if style == "right":
            assert all(len(request.verdicts) < LENGTH / 3 for request in guessed), "a few steps each"


async def test_logprobs_are_those_of_our_own_engine(vllm: VllmTarget, own: EngineTarget) -> None:
    asked = [request for request in requests() if request.params.logprobs is not None]
    again = [request for request in requests() if request.params.logprobs is not None]
    await run(loop_over(own), asked)
    await run(loop_over(vllm), again)
    for ours, theirs in zip(asked, again, strict=True):
        mine = [each for verdict in ours.verdicts for each in verdict.logprobs]
        other = [each for verdict in theirs.verdicts for each in verdict.logprobs]
        assert [each.top_ids for each in mine] == [each.top_ids for each in other]
        assert [each.logprob for each in mine] == pytest.approx([each.logprob for each in other], abs=1e-4)


@pytest.mark.parametrize("mode", [Verification.REJECTION, Verification.BLOCK])
async def test_sessions_that_draw_their_guesses_are_verified_alike(
    vllm: VllmTarget, own: EngineTarget, mode: Verification
) -> None:
    """With certain guesses that arrive before each step, both engines see the same blocks."""
    plain = await run(loop_over(own), requests(4, temperature=1.0, verification=mode))
    found = []
    for target in (own, vllm):
        guessed = requests(4, gamma=1, temperature=1.0, verification=mode)
        for request in guessed:
            request.draft_wait_s = 5.0
        texts = await run(loop_over(target), guessed, from_truth(plain, "right"))
        found.append((texts, [request.accepted for request in guessed]))
    assert found[0] == found[1]
    assert sum(found[1][1]) > 0


@pytest.mark.skipif(RUNNER == "v2", reason="one runner is enough: masks do not pass through vLLM")
async def test_a_grammar_restricts_as_with_our_own_engine(
    vllm: VllmTarget, own: EngineTarget, grammars: GrammarCompiler
) -> None:
    grammar = Grammar(regex="[a-f]{3,8}(-[0-9]{2}){4}")
    truth = await run(loop_over(own), requests(4, grammar=grammar), NOTHING, grammars)
    assert all(truth)
    assert await run(loop_over(vllm), requests(4, grammar=grammar), NOTHING, grammars) == truth
    drafter = from_truth(truth, "mixed")
    assert await run(loop_over(vllm), requests(4, gamma=3, grammar=grammar), drafter, grammars) == truth


async def test_hidden_states_are_those_of_our_own_engine_without_a_gap(vllm: VllmTarget, own: EngineTarget) -> None:
    def states(found: Sequence[Request]) -> list[torch.Tensor]:
        joined = []
        for request in found:
            parts = [verdict.hidden_states for verdict in request.verdicts]
            end = None
            rows = []
            for part in parts:
                assert part is not None
                assert end is None or part.position == end
                values = torch.frombuffer(bytearray(part.rows), dtype=torch.float16).reshape(-1, part.width)
                end = part.position + len(values)
                rows.append(values)
            joined.append(torch.cat(rows).float())
        return joined

    def asked() -> list[Request]:
        made = requests(4, gamma=3)
        for request in made:
            request.hidden_states, request.salt = True, "no prefix of others"
        return made

    ours = asked()
    truth = await run(loop_over(own), ours)
    theirs = asked()
    assert await run(loop_over(vllm), theirs, from_truth(truth, "mixed")) == truth
    for mine, other in zip(states(ours), states(theirs), strict=True):
        assert mine.shape == other.shape
        assert torch.allclose(mine, other, atol=2e-2)


async def test_a_prompt_that_was_there_before_is_found_under_its_own_salt_only(vllm: VllmTarget) -> None:
    prompt = [(11 * i) % 251 for i in range(150)]

    async def cached(salt: str) -> int:
        request = Request("request 0", prompt, SamplingParams(seed=1, max_tokens=4, temperature=0.0), salt=salt)
        await run(loop_over(vllm), [request])
        return request.verdicts[0].timings.cached_tokens

    assert [await cached(salt) for salt in ("a", "a", "b", "a")] == [0, 128, 0, 128]


async def test_stops_and_lengths_cut_inside_a_block(vllm: VllmTarget) -> None:
    [truth] = await run(loop_over(vllm), requests(1))
    stop = next(token for i, token in enumerate(truth) if i >= 4 and token not in truth[:i])
    ends_at = truth.index(stop) + 1
    stopped = requests(1, gamma=4, stop_token_ids=(stop,))
    assert await run(loop_over(vllm), stopped, from_truth([truth], "right")) == [truth[:ends_at]]
    assert stopped[0].verdicts[-1].finish_reason is FinishReason.STOP
    short = requests(1, gamma=4)
    short[0].params = SamplingParams(seed=0, max_tokens=7, temperature=0.0, ignore_eos=True)
    assert await run(loop_over(vllm), short, from_truth([truth], "right")) == [truth[:7]]
    assert short[0].verdicts[-1].finish_reason is FinishReason.LENGTH


async def test_an_aborted_session_gives_its_blocks_back(vllm: VllmTarget) -> None:
    free = vllm._core.free_tokens
    loop = loop_over(vllm)
    request = requests(1)[0]

    class Left(Exception):
        pass

    def leave(request: Request) -> Sequence[int]:
        if len(request.tokens) > 3:
            raise Left
        return ()

    with pytest.raises(Left):
        await run(loop, [request], leave)
    loop._admission.close(next(iter(loop._admission.running.values())))
    loop._admission.free_closed()
    assert vllm._core.free_tokens == free


def test_the_self_test_finds_guesses_that_are_ignored(vllm: VllmTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    self_test(vllm._core, options())
    scheduler = vllm._core.scheduler
    monkeypatch.setattr(type(scheduler), "schedule", _without_guesses(type(scheduler).schedule))
    with pytest.raises(StartupError, match="does not verify guesses"):
        self_test(vllm._core, options())


def _without_guesses(schedule: Any) -> Any:
    def schedule_plain(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        scheduler.plan = {
            name: replace(planned, num_tokens=planned.num_tokens - len(planned.guesses), guesses=())
            for name, planned in scheduler.plan.items()
        }
        return schedule(scheduler, *args, **kwargs)

    return schedule_plain


def test_every_fragile_point_is_where_it_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compatibility.missing_points() == []
    moved = ("v1/engine/core.py", "def a_step_of_another_name(", "a step")
    monkeypatch.setattr(compatibility, "FRAGILE_POINTS", (*compatibility.FRAGILE_POINTS, moved))
    with pytest.raises(StartupError, match="a_step_of_another_name"):
        compatibility.check_installed()


def test_a_version_that_is_not_tested_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "installed_version", lambda: "0.99.1")
    with pytest.raises(StartupError, match=r"vLLM 0\.99\.1 is not tested"):
        compatibility.check_installed()
