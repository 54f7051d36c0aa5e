"""The noise under rejection and block is a stream's own: a drafter that remembers answers learns nothing of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coordinator.control.estimator import PairEstimate
from coordinator.control.throughput_model import PLAIN
from coordinator.persistence.session_record import SessionRecord, SessionRequest
from coordinator.sessions import seeds
from coordinator.sessions.drafter_stream import DrafterStream
from coordinator.sessions.streams import VerifierStream
from outrider.observability.tracing import NO_SPAN
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo
from outrider.protocol.sampling_params import SamplingParams, Verification
from outrider.protocol.speculation import WHOLE, Distribution, VerifySteering
from outrider.speculation.acceptance import SeededNoise
from tests.unit.outrider.speculation import rules
from tests.unit.outrider.speculation.test_exactness import LOWEST_P, chi_square

TARGET = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
LENGTH = 2
LIKELIEST = (0, 0)
REQUESTS = 600
RULES = {Verification.REJECTION: rules.rejection, Verification.BLOCK: rules.block}

Path = tuple[int, ...]
Seeded = Callable[[SamplingParams], SamplingParams]


def begun(seed: int, mode: Verification) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=LENGTH, verification=mode)


def answer(begun: SamplingParams, guessed: Path, seeded: Seeded) -> Path:
    """What one stream commits when a drafter guesses this path, surely and honestly, for as long as it holds."""
    params = seeded(begun)
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
    """Explicit seeds, each in two streams: the drafter guesses what is likeliest, then what it saw in the first.

    They are of two requests, or of one session whose verdicts were lost: a drafter in the verifier's process has them.
    """
    found: Counter[Path] = Counter()
    for seed in range(REQUESTS):
        request = begun(seed, mode)
        first = answer(request, LIKELIEST, seeded)
        found[answer(request, first, seeded)] += 1
    return found


def likelihood(found: Counter[Path]) -> float:
    wanted = {(a, b): float(TARGET[a] * TARGET[b]) for a in range(3) for b in range(3)}
    return chi_square(found, wanted, REQUESTS)


@pytest.mark.parametrize("mode", RULES)
def test_a_request_that_comes_again_to_a_drafter_that_remembers_has_the_targets_distribution(
    mode: Verification, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.randbits", Random(7).getrandbits)
    assert likelihood(second_answers(mode, seeds.worker_params)) > LOWEST_P


@pytest.mark.parametrize("mode", RULES)
def test_with_the_requests_own_seed_it_has_another(mode: Verification) -> None:
    assert likelihood(second_answers(mode, lambda params: params)) < 1e-12


@pytest.mark.parametrize("mode", RULES)
def test_streams_have_noise_of_their_own(mode: Verification) -> None:
    """Also those of one session: to the next verifier after a loss, or to another drafter."""
    record = SessionRecord("s", SessionRequest((0,), begun(7, mode)))
    target = ModelInfo("m", "f", vocab_size=3)
    verifier = WorkerInfo("v", Role.VERIFIER, "127.0.0.1:1", ModelInfo("m", "f"))
    connection: Any = SimpleNamespace(info=verifier, streams=set())
    seen = {7}
    for _ in range(2):
        opened = VerifierStream(connection, record, target, NO_SPAN, VerifySteering())._opening.open
        joined = DrafterStream(connection, record, target, NO_SPAN, 1, PairEstimate(4), PLAIN)._opening.open
        seen |= {opened.params.seed, joined.params.seed}
    assert len(seen) == 5


@pytest.mark.parametrize("mode", [Verification.GREEDY, Verification.COUPLED])
def test_a_text_that_is_a_function_of_the_seed_stays_one(mode: Verification) -> None:
    params = replace(begun(7, mode), temperature=float(mode is Verification.COUPLED))
    assert seeds.worker_params(params) == params
