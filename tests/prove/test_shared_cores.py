"""Where drafter and verifier share the cores of this machine, concurrent chats are as fast as with plain decoding.

`python -m tests.prove.shared_cores` measures other numbers of sessions, one at a time by kind of prompt, and a busy
machine.
"""

from __future__ import annotations

import pytest

from outrider import SamplingParams
from outrider.train.data import shipped
from tests.prove.shared_cores import answer, default_pair, line, measure, summary

pytestmark = [pytest.mark.prove, pytest.mark.timeout(900)]

PARAMS = SamplingParams(temperature=0.0, seed=1, max_tokens=64, ignore_eos=True)


# Of fewer rounds single ones decide: they differ by a tenth.
@pytest.mark.parametrize(("sessions", "rounds"), [(8, 30), (32, 12)])
async def test_concurrent_chats_are_not_slower_than_plain_ones(sessions: int, rounds: int) -> None:
    texts = [prompt.text for prompt in shipped("heldout")]
    with default_pair() as running:
        await answer(running, texts[-8:], "adaptive", PARAMS)
        found = summary(await measure(running, texts, sessions, rounds, PARAMS))
    print(line(sessions, found))
    assert found["median"] >= 0.98
