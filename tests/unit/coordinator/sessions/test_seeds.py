"""The noise under rejection and block is a session's own: a drafter that remembers answers learns nothing of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from coordinator.persistence.session_record import SessionRecord, SessionRequest
from coordinator.sessions import seeds
from outrider.protocol.sampling_params import SamplingParams, Verification
from outrider.protocol.speculation import WHOLE, Distribution
from outrider.speculation.acceptance import SeededNoise
from tests.unit.outrider.speculation import rules
from tests.unit.outrider.speculation.test_exactness import LOWEST_P, chi_square

TARGET = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
LENGTH = 2
LIKELIEST = (0, 0)
REQUESTS = 600
RULES = {Verification.REJECTION: rules.rejection, Verification.BLOCK: rules.block}

Path = tuple[int, ...]
Seeded = Callable[[SessionRecord], SamplingParams]


def begun(seed: int, mode: Verification, nonce: str) -> SessionRecord:
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=LENGTH, verification=mode)
    return SessionRecord("s", SessionRequest((0,), params, nonce=nonce))


def answer(record: SessionRecord, guessed: Path, seeded: Seeded) -> Path:
    """What is committed when a drafter guesses this path, surely and honestly, for as long as it holds."""
    params = seeded(record)
    assert params.seed is not None
    chance = SeededNoise(params.seed)
    text: Path = ()
    while len(text) < LENGTH:
        left = guessed[len(text) :] if text == guessed[: len(text)] else ()
        sure = [Distribution((token,), (WHOLE,)) for token in left]
        rows = TARGET.repeat(len(left) + 1, 1)
        outcome = RULES[params.mode](left, rows, sure, 1 + len(text), chance)
        text = (*text, *(left[row - 1] for row in outcome.path), outcome.final)
    return text[:LENGTH]


def second_answers(mode: Verification, seeded: Seeded) -> Counter[Path]:
    """Requests with explicit seeds, each made twice: the drafter guesses what is likeliest, then the first answer."""
    found: Counter[Path] = Counter()
    for seed in range(REQUESTS):
        first = answer(begun(seed, mode, f"first {seed}"), LIKELIEST, seeded)
        found[answer(begun(seed, mode, f"second {seed}"), first, seeded)] += 1
    return found


def likelihood(found: Counter[Path]) -> float:
    wanted = {(a, b): float(TARGET[a] * TARGET[b]) for a in range(3) for b in range(3)}
    return chi_square(found, wanted, REQUESTS)


def nonce_left_out(record: SessionRecord) -> SamplingParams:
    return seeds.verifier_params(replace(record, request=replace(record.request, nonce="")))


@pytest.mark.parametrize("mode", RULES)
def test_a_request_that_comes_again_to_a_drafter_that_remembers_has_the_targets_distribution(
    mode: Verification,
) -> None:
    assert likelihood(second_answers(mode, seeds.verifier_params)) > LOWEST_P


@pytest.mark.parametrize("mode", RULES)
def test_without_the_nonce_it_has_another(mode: Verification) -> None:
    assert likelihood(second_answers(mode, nonce_left_out)) < 1e-12


def test_workers_sessions_and_epochs_have_noise_of_their_own() -> None:
    record = begun(7, Verification.REJECTION, seeds.draw_nonce())
    again = begun(7, Verification.REJECTION, seeds.draw_nonce())
    told = [seeds.verifier_params(each).seed for each in (record, again, replace(record, epoch=2))]
    told += [seeds.drafter_params(each, source).seed for each in (record, again) for source in (1, 2)]
    assert len({7, *told}) == 8
    assert seeds.verifier_params(record) == seeds.verifier_params(replace(record))


@pytest.mark.parametrize("mode", [Verification.GREEDY, Verification.COUPLED])
def test_a_text_that_is_a_function_of_the_seed_stays_one(mode: Verification) -> None:
    record = begun(7, mode, seeds.draw_nonce())
    params = replace(record.request.params, temperature=float(mode is Verification.COUPLED))
    record = replace(record, request=replace(record.request, params=params))
    assert seeds.verifier_params(record) == seeds.drafter_params(record, 3) == params


def test_the_nonce_is_kept_with_the_request() -> None:
    request = begun(7, Verification.BLOCK, seeds.draw_nonce()).request
    assert SessionRequest.from_json(request.to_json()).nonce == request.nonce
    before = json.dumps({key: value for key, value in json.loads(request.to_json()).items() if key != "nonce"})
    assert SessionRequest.from_json(before).nonce == "", "written by an older release"
