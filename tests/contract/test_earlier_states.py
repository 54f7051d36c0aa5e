"""States of the whole prompt over real sockets: in pieces behind the first token, and of a cached prefix too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from drafter.interface import DraftRequest
from outrider.base.aio import until
from outrider.engine.loading.loader import LoadedModel
from outrider.hidden_states.projection import Projection
from outrider.hidden_states.rows import decode
from outrider.protocol import convert
from outrider.protocol.hidden_states.messages import HiddenStates
from outrider.protocol.speculation import Guess
from outrider.v1 import common_pb2 as common
from tests.cluster import Redis
from tests.contract.conftest import Greedy, Verify, after_joining, verifier_serving, verifying
from tests.contract.test_hidden_states import states_of
from tests.contract.test_layer_drafters import LAYERS, OUT, Reader, fed, fleet, packed
from verifier.hidden_states.buffer import PROMPT_WINDOW
from verifier.hidden_states.earlier_states import PIECE_BYTES

pytestmark = pytest.mark.timeout(60)

LONG = [(5 * i + 2) % 251 for i in range(700)]
TOKENS = 60
ATTEMPTS = 10
WAIT_US = 10_000_000


@dataclass(slots=True)
class ContextReader(Reader):
    """A drafter that reads the whole context, and keeps what each session got."""

    reads_context: bool = True
    sessions: dict[str, list[list[HiddenStates]]] = field(default_factory=dict)  # requests with states

    def draft(self, requests: Sequence[DraftRequest]) -> list[Guess]:
        for request in requests:
            if request.hidden_states:
                self.sessions.setdefault(request.session, []).append(list(request.hidden_states))
        return Reader.draft(self, requests)

    def whole(self, session: str) -> list[HiddenStates]:
        """Return what a session got from the point on where it began with position 0."""
        got = self.sessions[session]
        begun = [index for index, parts in enumerate(got) if parts[0].position == 0]
        assert len(begun) == 1, [parts[0].position for parts in got]
        return [part for parts in got[begun[0] :] for part in parts]


def rows(parts: list[HiddenStates]) -> torch.Tensor:
    """Return the rows of parts without a gap.  # [positions, width]"""
    for part, following in pairwise(parts):
        assert following.position == part.position + part.count
    return torch.cat([decode(part) for part in parts])


def continued(target: LlamaForCausalLM) -> list[int]:
    """Return the long prompt with the target's greedy text."""
    with torch.inference_mode():
        text = target.generate(torch.tensor([LONG]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
    return [int(token) for token in text[0]]


async def test_a_cached_prefix_has_the_same_states_as_a_computed_one(
    loaded: LoadedModel, redis_server: Redis, tmp_path: Path, plain_target: LlamaForCausalLM
) -> None:
    truth, projection = continued(plain_target), packed(plain_target)
    reader = ContextReader(projection, truth)
    cached: list[int] = []
    async with fleet(loaded, redis_server, tmp_path, reader) as running:
        assert await until(lambda: fed(running.service, projection), 20)
        with after_joining(running.loaded, running.service):
            for _ in range(ATTEMPTS):  # the earlier states may come after the end of a short answer
                output = await running.generate(LONG, max_tokens=TOKENS)
                assert output.token_ids == truth[len(LONG) :]
                assert output.stats.drafter_losses == 0
                cached.append(output.stats.cached_tokens)
                whole = [each for each, got in reader.sessions.items() if any(parts[0].position == 0 for parts in got)]
                if len(whole) > 1:
                    break
    assert cached[-1] > len(LONG) // 2, "the prefix cache spared the prompt"
    first, second = (rows(reader.whole(session)) for session in whole)
    assert min(len(first), len(second)) > len(LONG)
    assert torch.equal(first[: cached[-1]], second[: cached[-1]])
    _, one, two, _ = states_of(plain_target, truth)
    wanted = Projection(projection.data, len(LAYERS), one.shape[1], torch.device("cpu"))(torch.cat([one, two], dim=1))
    for found in (first, second):
        assert float((found - wanted[: len(found)]).abs().max()) <= 2e-3 * float(wanted.abs().max())
    for session in whole:
        before = [part.count for parts in reader.sessions[session] for part in parts]
        assert max(before) <= max(PROMPT_WINDOW + TOKENS, PIECE_BYTES // (2 * OUT)), "in pieces"
        assert reader.sessions[session][0][0].position == len(LONG) - PROMPT_WINDOW, "the first verdict has the newest"


async def test_a_drafter_that_reads_one_state_gets_the_newest_ones_only(
    loaded: LoadedModel, redis_server: Redis, tmp_path: Path, plain_target: LlamaForCausalLM
) -> None:
    projection = packed(plain_target)
    reader = ContextReader(projection, continued(plain_target), reads_context=False)
    async with fleet(loaded, redis_server, tmp_path, reader) as running:
        assert await until(lambda: fed(running.service, projection), 20)
        with after_joining(running.loaded, running.service):
            await running.generate(LONG, max_tokens=TOKENS)
    (session,) = reader.sessions.values()
    got = [parts[0].position for parts in session]
    assert min(got) >= len(LONG) - PROMPT_WINDOW


async def earlier(stream: Verify, position: int, end: int, number: int = 0) -> HiddenStates:
    await stream.steer(earlier_states=common.EarlierStates(number=number, position=position, end=end))
    reply = await stream.call.read()
    assert reply.WhichOneof("message") == "earlier_states", reply
    return convert.hidden_states_from_proto(reply.earlier_states)


async def test_a_request_gets_what_is_kept_of_its_own_text(
    loaded: LoadedModel, tmp_path: Path, plain_target: LlamaForCausalLM
) -> None:
    """The first session computes them, and one on the cached prefix has them too.

    Where none asked, none are kept: those that the first verdict carries are computed then, and no others.
    """
    _, _, _, final = states_of(plain_target, LONG)
    waiting = {"gamma": 1, "draft_wait_us": WAIT_US, "hidden_states": True}
    pieces: dict[str, list[HiddenStates]] = {}
    async with verifier_serving(loaded, tmp_path, prefill_rows=100) as address:
        for name, salt in (("computed", "e"), ("cached", "e")):
            async with verifying(address) as stream:
                await stream.open(LONG, max_tokens=4, cache_salt=salt, session_id=name, **waiting)
                verdict = await stream.verdict()
                assert (verdict.timings.cached_tokens > 0) == (name == "cached")
                at, pieces[name] = 0, []
                while at < verdict.hidden_states.position:
                    pieces[name].append(await earlier(stream, at, verdict.hidden_states.position))
                    at = pieces[name][-1].position + pieces[name][-1].count
        assert pieces["cached"] == pieces["computed"]
        assert pieces["cached"][0].position == 0
        assert all(len(part.rows) <= PIECE_BYTES for part in pieces["cached"])
        found = rows(pieces["cached"])
        assert len(found) == len(LONG) - PROMPT_WINDOW
        assert float((found - final[: len(found)]).abs().max()) <= 2e-3 * float(final.abs().max())
        other = [LONG[0] + 1, *LONG[1:]]
        async with verifying(address) as stream:
            await stream.open(other, max_tokens=4, cache_salt="e", session_id="other", hidden_states=False, gamma=0)
            await stream.rest()
        window, carried = (len(LONG) - PROMPT_WINDOW) // 32 * 32, []
        for cached in (window, len(LONG) // 32 * 32):  # computed again for the states of the window, and then kept
            async with verifying(address) as stream:
                await stream.open(other, max_tokens=4, cache_salt="e", session_id=f"after {cached}", **waiting)
                verdict = await stream.verdict()
                assert verdict.timings.cached_tokens == cached
                carried.append(convert.hidden_states_from_proto(verdict.hidden_states))
                before = await earlier(stream, 0, len(LONG) - PROMPT_WINDOW)
                assert (before.position, before.count) == (window, len(LONG) - PROMPT_WINDOW - window)
        assert carried[0].position == len(LONG) - PROMPT_WINDOW
        assert carried[0] == carried[1]


async def test_requests_beyond_the_limits_cost_nobody_anything(verifier: str, greedy: Greedy) -> None:
    prompt = LONG[:100]
    async with verifying(verifier) as stream:
        await stream.open(prompt, max_tokens=4, cache_salt="limits", gamma=1, draft_wait_us=WAIT_US, hidden_states=True)
        await stream.verdict()
        assert (await earlier(stream, 0, 16_000)).count == 0
        assert (await earlier(stream, 0, 64, number=7)).count == 0
        for wrong in ((0, 2**31), (5, 5), (9, 3)):
            await stream.steer(earlier_states=common.EarlierStates(position=wrong[0], end=wrong[1]))
            assert (await stream.refused()).field == "steer.earlier_states.end"
        assert (await earlier(stream, 0, 64)).count == 64
        await stream.steer(draft_wait_us=0)
        await stream.rest()
    assert stream.tokens == greedy(prompt, 4)
