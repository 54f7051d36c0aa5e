"""A verifier's whole step on an emulated CUDA device: engine, sampler and hidden states, for 32 sessions."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import Guess
from tests.emulated_cuda import Counts, emulated_cuda
from tests.gpu.test_cuda import graphs_of
from tests.unit.outrider.engine.cuda.test_engine import MODELS, TOKENS, seeded
from verifier.batching import ScheduledSession
from verifier.engine_target import EngineTarget
from verifier.session import VerifyOpening, VerifySession

SESSIONS, GUESSES, STEPS = 32, 1, 3
Told = tuple[tuple[int, ...], bytes]  # a session's tokens in a step, its hidden states


@dataclass
class Fleet:
    """Sessions that decode, each with guesses of which some are right."""

    target: EngineTarget
    sessions: list[VerifySession]

    @classmethod
    def of(cls, model: torch.nn.Module, hidden_states: bool, temperature: float) -> Fleet:
        target = EngineTarget(graphs_of(model, 4096))
        openings = [
            VerifyOpening(
                str(i),
                1,
                tuple(TOKENS[i : i + 3]),
                3,
                SamplingParams(seed=i, temperature=temperature),
                hidden_states=hidden_states,
            )
            for i in range(SESSIONS)
        ]
        return cls(target, [VerifySession(each, target.info, target.device) for each in openings])

    def step(self, tree: bool = False) -> list[Told]:
        batch = []
        for session in self.sessions:
            pending = session.committed[session.cache_length :]
            parents = (-1, -1) if tree else ()
            guessed = tuple((session.committed[-1] + 1 + i) % 128 for i in range(2 if tree else GUESSES))
            block = Guess(len(session.committed), 0, 0, guessed, parents=parents)
            batch.append(ScheduledSession.of(session, pending, block, verifies=True))
        told = []
        for session, result in zip(self.sessions, self.target.step(batch).results, strict=True):
            session.committed += result.verified.tokens
            session.cache_length = result.cache_length
            states = b"".join(rows.numpy().tobytes() for rows in result.hidden_states.values())
            told.append((result.verified.tokens, states))
        return told


@pytest.mark.parametrize(
    ("hidden_states", "temperature", "launches", "syncs"), [(False, 1.0, 8, 1), (True, 1.0, 10, 2), (True, 0.0, 6, 2)]
)
def test_a_step_takes_few_launches_and_waits_once_for_tokens_once_for_states(
    hidden_states: bool, temperature: float, launches: int, syncs: int
) -> None:
    here = Fleet.of(seeded(MODELS["llama"]), hidden_states, temperature)
    wanted = [here.step() for _ in range(STEPS)]
    with emulated_cuda() as device:
        there = Fleet.of(seeded(MODELS["llama"]).cuda(), hidden_states, temperature)
        assert [there.step() for _ in range(STEPS)] == wanted
        there.step()
        device.counts = Counts()
        there.step()
    assert device.counts.all_launches <= launches, device.counts
    assert device.counts.syncs.total() <= syncs, device.counts


def test_branches_are_kept_without_a_wait() -> None:
    here = Fleet.of(seeded(MODELS["llama"]), True, 1.0)
    wanted = [here.step(tree=True) for _ in range(STEPS)]
    with emulated_cuda() as device:
        there = Fleet.of(seeded(MODELS["llama"]).cuda(), True, 1.0)
        assert [there.step(tree=True) for _ in range(STEPS)] == wanted
        device.counts = Counts()
        there.step(tree=True)
    assert device.counts.syncs.total() <= 2, device.counts


def test_opening_a_session_with_penalties_leaves_the_device_alone() -> None:
    """The event loop opens sessions and commits their tokens; only the thread of the steps waits for the device."""
    with emulated_cuda() as device:
        target = EngineTarget(graphs_of(seeded(MODELS["llama"]).cuda(), 1024))
        device.counts = Counts()
        params = SamplingParams(seed=1, repetition_penalty=1.3, presence_penalty=0.2)
        session = VerifySession(VerifyOpening("s", 1, tuple(TOKENS[:9]), 4, params), target.info, target.device)
        assert session.history is not None
        session.history.append(TOKENS[9:90])
        assert (device.counts.all_launches, device.counts.syncs.total()) == (0, 0)
        session.history.counts()
    assert device.counts.all_launches > 0
