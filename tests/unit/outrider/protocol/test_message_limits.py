"""Messages of any size are judged in no time."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from outrider.protocol import convert, message_limits
from outrider.protocol.cost_curve import UNKNOWN_COST
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.speculation import MAX_CANDIDATES, MAX_GAMMA, WHOLE, Distribution, Guess
from outrider.v1 import common_pb2 as common
from outrider.v1 import drafter_pb2 as draft
from outrider.v1 import verifier_pb2 as verify

MILLION = 1_000_000


def guess(**fields: object) -> common.Guess:
    return common.Guess(position=3, first_id=1, **fields)  # type: ignore[arg-type]


def unknown_fields(size: int) -> common.Guess:
    """A field that no version has, of so many bytes."""
    length = size
    varint = bytearray()
    while length > 0x7F:
        varint.append(0x80 | (length & 0x7F))
        length >>= 7
    varint.append(length)
    return common.Guess.FromString(b"\xfa\x07" + bytes(varint) + b"x" * size)


LARGE: dict[str, Callable[[], common.Guess]] = {
    "tokens": lambda: guess(tokens=[1] * MILLION),
    "parents": lambda: guess(tokens=[1], parents=[0] * MILLION),
    "distributions": lambda: guess(tokens=[1], draft_probs=[common.Distribution()] * 100_000),
    "ids": lambda: guess(tokens=[1], draft_probs=[common.Distribution(id_deltas=[1] * MILLION, weights=[WHOLE])]),
    "weights": lambda: guess(tokens=[1], draft_probs=[common.Distribution(id_deltas=[1], weights=[1] * MILLION)]),
    "unknown fields": lambda: unknown_fields(4 * MILLION),
}


@pytest.mark.parametrize("kind", LARGE)
def test_a_guess_of_megabytes_is_refused_before_anything_loops_over_it(kind: str) -> None:
    large = LARGE[kind]()
    times = []
    for _ in range(3):
        started = time.perf_counter()
        with pytest.raises(InvalidRequest):
            convert.guess_from_proto(large)
        times.append(time.perf_counter() - started)
    assert min(times) < 0.01, "tuple() of a million numbers takes longer"


def test_the_largest_guess_that_may_be_fits() -> None:
    """Probabilities included, over any vocabulary."""
    most = 2**32 - 1
    weights = (WHOLE - MAX_CANDIDATES + 1, *[1] * (MAX_CANDIDATES - 1))
    ids = tuple(most // MAX_CANDIDATES * (i + 1) for i in range(MAX_CANDIDATES))
    full = Guess(most, most, most, (most,) * MAX_GAMMA, (Distribution(ids, weights),) * MAX_GAMMA, most, most)
    sent = convert.guess_to_proto(full)
    message_limits.check_guess(sent)
    assert convert.guess_from_proto(sent) == full


def test_what_follows_an_opening_is_bounded_at_both_workers() -> None:
    with pytest.raises(InvalidRequest, match="message is"):
        message_limits.check_verify_request(verify.VerifyRequest(open=verify.OpenVerify(tokens=[1] * MILLION)))
    with pytest.raises(InvalidRequest, match=r"committed\.tokens"):
        message_limits.check_draft_request(draft.DraftRequest(committed=draft.Committed(tokens=[1] * MILLION)))
    for width, rows in ((0, 8), (3, 8), (1, 2 * MILLION), (2**31, 0), (4, 0)):
        features = common.HiddenStates(width=width, rows=b"x" * rows)
        with pytest.raises(InvalidRequest, match=r"committed\.hidden_states"):
            message_limits.check_draft_request(draft.DraftRequest(committed=draft.Committed(hidden_states=features)))
        with pytest.raises(InvalidRequest, match="earlier_states"):
            message_limits.check_draft_request(draft.DraftRequest(earlier_states=features))
    message_limits.check_draft_request(
        draft.DraftRequest(
            committed=draft.Committed(tokens=[1] * 65, hidden_states=common.HiddenStates(width=4, rows=b"x" * 8))
        )
    )


@pytest.mark.parametrize(
    "load",
    [
        common.WorkerLoad(cost=common.CostCurve(rows=range(1, 200_001), ms=[1.0] * 200_000)),
        common.WorkerLoad(cost=common.CostCurve(rows=[1, 2], ms=[float("inf"), float("inf")])),
        common.WorkerLoad(cost=common.CostCurve(rows=[1, 2], ms=[2.0, 1.0])),
        common.WorkerLoad(cost=common.CostCurve(rows=[1, 2], ms=[1.0, 1e300])),
        common.WorkerLoad(cost=common.CostCurve(rows=[1, 2], ms=[1e-310, 1.0])),
        common.WorkerLoad(step_ms=float("nan")),
        common.WorkerLoad(step_ms=float("inf")),
        common.WorkerLoad(step_ms=-1.0),
    ],
)
def test_a_load_that_cannot_be_counts_as_none(load: common.WorkerLoad) -> None:
    read = convert.load_from_proto(load)
    assert (read.cost, read.step_ms) == (UNKNOWN_COST, 0.0)


@pytest.mark.parametrize(
    ("parents", "value"), [([0], "1 parents"), ([0, 2], "2"), ([1, 0], "1"), ([0, 0, 0], "3 parents")]
)
def test_parents_that_form_no_tree_are_rejected(parents: list[int], value: str) -> None:
    with pytest.raises(InvalidRequest) as rejected:
        message_limits.check_guess(common.Guess(position=1, first_id=1, tokens=[7, 8], parents=parents))
    assert rejected.value.value == value


@pytest.mark.parametrize("count", [1, 3])
def test_distributions_are_none_or_one_for_each_token(count: int) -> None:
    one = common.Distribution(id_deltas=[7], weights=[WHOLE])
    with pytest.raises(InvalidRequest) as rejected:
        convert.guess_from_proto(guess(tokens=[7, 8], draft_probs=[one] * count))
    assert rejected.value.value == f"{count} distributions"
