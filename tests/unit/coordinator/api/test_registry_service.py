"""Which target's vocabulary a drafter's continues to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest

from coordinator.api.registry_service import _continued
from outrider.protocol.errors import InvalidRequest, ModelMismatch, OutriderError
from outrider.protocol.vocabulary import Vocabulary
from outrider.v1 import coordinator_pb2 as pb

WORDS = Vocabulary(("a", "b", "c"))
CHATS = Vocabulary(("x", "y", "z", "<|user|>"))
TARGETS = [WORDS, CHATS]


async def shown(tokens: Sequence[str], at: int) -> AsyncIterator[pb.RegisterRequest]:
    yield pb.RegisterRequest(worker=pb.Worker(worker_id="w"))
    for first, part in ((0, tokens[:at]), (at, tokens[at:])):
        vocabulary = pb.Vocabulary(first_id=first, tokens=[token.encode() for token in part], last=first == at)
        yield pb.RegisterRequest(vocabulary=vocabulary)


@pytest.mark.parametrize(
    ("tokens", "at", "target"), [("xyz", 1, CHATS), ("xy", 2, CHATS), ("abc", 2, WORDS), ("a", 1, WORDS)]
)
async def test_a_drafter_continues_to_the_target_that_has_its_tokens(tokens: str, at: int, target: Vocabulary) -> None:
    found, read = await _continued(TARGETS, shown(tokens, at))
    assert found is target
    assert read == tuple(tokens)


@pytest.mark.parametrize(
    ("tokens", "at", "first"), [("abz", 1, 2), ("abcd", 2, 3), ("q", 1, 0), ("xyzq", 4, 3), ("xbc", 2, 1)]
)
async def test_one_that_continues_to_none_is_told_where_it_differs_from_the_nearest(
    tokens: str, at: int, first: int
) -> None:
    with pytest.raises(ModelMismatch) as refused:
        await _continued(TARGETS, shown(tokens, at))
    assert refused.value.field == f"vocabulary[{first}]"


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ([], ModelMismatch),
        ([pb.Vocabulary(last=True)], ModelMismatch),
        ([pb.Vocabulary(first_id=7, last=True)], InvalidRequest),
        ([pb.Vocabulary(first_id=2, tokens=[b"c"], last=True)], InvalidRequest),
        ([pb.Vocabulary(tokens=[b"a"]), pb.Vocabulary(first_id=2, tokens=[b"c"], last=True)], InvalidRequest),
    ],
)
async def test_one_that_leaves_tokens_out_continues_to_none(
    parts: Sequence[pb.Vocabulary], error: type[OutriderError]
) -> None:
    """It was taken for any target's: the comparison is all that speaks for it."""

    async def sent() -> AsyncIterator[pb.RegisterRequest]:
        for part in parts:
            yield pb.RegisterRequest(vocabulary=part)

    with pytest.raises(error):
        await _continued([WORDS], sent())
