"""Whatever Redis says is one of two things: a record that is right in every field, or Unreadable."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from coordinator.control.estimator import PairEstimate, PairHistory
from coordinator.persistence import stored_records
from coordinator.persistence.session_record import SessionRequest, SpeculationOptions, pack, pack_logprobs
from coordinator.persistence.stored_records import Unreadable
from outrider.protocol import convert
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo
from outrider.protocol.sampling_params import Grammar, SamplingParams, Verification
from outrider.protocol.speculation import TokenKind as Kind
from outrider.protocol.speculation import TokenLogprobs
from outrider.security.api_keys import ApiKeys
from outrider.v1 import coordinator_pb2 as pb

KEYS = ApiKeys(["fleet", "older"])
NOW = time.time()
INFO = WorkerInfo("bigbox-1", Role.VERIFIER, "bigbox:50051", ModelInfo("target", "f1"), kind="target", capacity=8)
REQUEST = SessionRequest(
    (1, 2, 3),
    SamplingParams(seed=7, stop=("x",), logit_bias={5: 1.0}, grammar=Grammar(regex="a+"), logprobs=2),
    SpeculationOptions(gamma=3, drafter="ngram"),
    "salt",
)
TARGET = ModelInfo("target", "f1", vocab_size=100)
HISTORY = PairHistory([0.5, 0.4], 0.9, 1.5, 0.3, 0.2, 3.0, 2.0, {"plain": 1.0})
FUZZED = 2000


def sealed(
    info: WorkerInfo = INFO, keys: ApiKeys = KEYS, at: float = NOW, **changed: bytes | None
) -> list[bytes | None]:
    data = convert.worker_to_proto(info).SerializeToString()
    made = stored_records.seal_worker(data, info.worker_id, "coordinator-1", at, keys) | changed
    fields = [made.get(name) for name in ("data", "coordinator", "at", "mac")]
    return [field.encode() if isinstance(field, str) else field for field in fields]


def read_worker(given: list[bytes | None], worker_id: str = INFO.worker_id, keys: ApiKeys = KEYS) -> WorkerInfo:
    return stored_records.read_worker(worker_id, given, keys, NOW, 5.0)


def reason(call: Callable[[], Any]) -> str:
    with pytest.raises(Unreadable) as caught:
        call()
    assert len(caught.value.message) < 400
    return caught.value.reason


def test_a_worker_that_somebody_with_the_key_wrote_is_believed() -> None:
    assert read_worker(sealed()) == INFO
    assert read_worker(sealed(keys=ApiKeys(["older", "fleet"]))) == INFO, "while the key is changed"
    assert read_worker(sealed(keys=ApiKeys()), keys=ApiKeys()) == INFO, (
        "without keys nobody vouches, and nothing is shown"
    )


def test_what_nobody_with_the_key_wrote_is_not_believed() -> None:
    evil = convert.worker_to_proto(INFO)
    evil.address = "evil:1"
    data = evil.SerializeToString()
    for given in (
        sealed(keys=ApiKeys()),
        sealed(keys=ApiKeys(["another"])),
        sealed(data=data),
        sealed(coordinator=b"coordinator-2"),
        sealed(at=NOW, mac=b"\xff"),
        [data, b"x", str(int(NOW * 1000)).encode(), None],
        [None, None, None, None],
    ):
        assert reason(lambda given=given: read_worker(given)) in ("unauthenticated", "unreadable")
    assert reason(lambda: read_worker(sealed(data=data))) == "unauthenticated"
    moved = sealed()
    assert reason(lambda: read_worker(moved, worker_id="bigbox-2")) == "unauthenticated", "under another name"


@pytest.mark.parametrize("ago", [3600, -3600])
def test_an_old_record_is_not_believed_for_ever(ago: float) -> None:
    assert reason(lambda: read_worker(sealed(at=NOW - ago))) == "stale"
    assert read_worker(sealed(at=NOW - 30)) == INFO, "clocks differ"


@pytest.mark.parametrize("changed", [{"role": 7}, {"role": 0}, {"address": ""}, {"address": "no port"}])
def test_a_sealed_worker_may_still_be_of_no_use(changed: dict[str, Any]) -> None:
    """As a newer version may write it."""
    worker = convert.worker_to_proto(INFO)
    worker.MergeFrom(pb.Worker(**changed))
    for name, value in changed.items():
        setattr(worker, name, value)
    fields = stored_records.seal_worker(worker.SerializeToString(), INFO.worker_id, "c", NOW, KEYS)
    given = [value.encode() if isinstance(value, str) else value for value in fields.values()]
    assert reason(lambda: read_worker(given)) == "unreadable"


def read_session(request: bytes | None, epoch: bytes = b"1", tokens: bytes = b"", **more: bytes) -> Any:
    given = [request, epoch, more.get("finish"), more.get("model"), more.get("verifier"), more.get("tenant")]
    record = stored_records.read_session("s", given, tokens, more.get("logprobs", b""), "")
    stored_records.check_session(record, TARGET)
    return record


def test_a_session_is_read_as_it_was_written() -> None:
    record = read_session(REQUEST.to_json().encode(), b"3", pack([4, 5], [Kind.PLAIN, Kind.BONUS]), finish=b"2")
    assert record.request == SessionRequest.from_json(REQUEST.to_json())
    assert (record.epoch, record.tokens, record.kinds, record.finish_reason.name) == (
        *(3, [4, 5], [Kind.PLAIN, Kind.BONUS]),
        "LENGTH",
    )


@pytest.mark.parametrize("kept", [0, 1, 2, 3, 5])
def test_log_probabilities_are_those_of_the_tokens_that_redis_has(kept: int) -> None:
    """It may evict the one or the other."""
    known = [TokenLogprobs(-float(number), (number, 9), (-1.0, -2.0)) for number in range(kept)]
    tokens = pack([4] * 3, [Kind.PLAIN] * 3)
    record = read_session(REQUEST.to_json().encode(), tokens=tokens, logprobs=pack_logprobs(known, 2))
    assert record.logprobs == [*known, None, None, None][:3]


def changed_request(*path: str | int, to: Any) -> bytes:
    data = json.loads(REQUEST.to_json())
    at = data
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = to
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    "request_bytes",
    [
        None,
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"1" * 5000,
        b"[" * 100_000,
        changed_request("prompt", to=[]),
        changed_request("prompt", to=[100]),
        changed_request("prompt", to=[-1]),
        changed_request("prompt", to=[True]),
        changed_request("prompt", to=[1.5]),
        changed_request("prompt", to="text"),
        changed_request("prompt", 0, to=2**70),
        changed_request("params", to=None),
        changed_request("params", "temperature", to="hot"),
        changed_request("params", "temperature", to=float("nan")),
        changed_request("params", "max_tokens", to=-1),
        changed_request("params", "max_tokens", to=[1]),
        changed_request("params", "max_tokens", to=True),
        changed_request("params", "seed", to=True),
        changed_request("params", "logprobs", to=False),
        changed_request("params", "seed", to=None),
        changed_request("params", "seed", to=2**64),
        changed_request("params", "stop", to=[["a"]]),
        changed_request("params", "stop", to=5),
        changed_request("params", "stop", to=["\ud800"]),
        changed_request("params", "grammar", to={"regex": "\udc00"}),
        changed_request("params", "stop_token_ids", to=[100]),
        changed_request("params", "stop_token_ids", to=[-5]),
        changed_request("params", "logit_bias", to=[[1]]),
        changed_request("params", "logit_bias", to=[[1, float("inf")]]),
        changed_request("params", "logprobs", to=10**18),
        changed_request("params", "verification", to="TELEPATHY"),
        changed_request("params", "grammar", to={"regex": 5}),
        changed_request("params", "grammar", to="x"),
        changed_request("params", "grammar", to={"json_object": "yes"}),
        changed_request("params", "ignore_eos", to="yes"),
        changed_request("wish", "gamma", to=10**9),
        changed_request("wish", "drafter", to=[]),
        changed_request("wish", "ahead", to="x"),
        changed_request("cache_salt", to=7),
        changed_request("cache_salt", to="a\ud800"),
        changed_request("priority", to=101),
        changed_request("priority", to=float("-inf")),
        changed_request("priority", to=["first"]),
    ],
)
def test_a_request_that_no_edge_lets_in_is_unreadable(request_bytes: bytes | None) -> None:
    assert reason(lambda: read_session(request_bytes)) == "unreadable"


def test_fields_of_a_session_are_bounded() -> None:
    request = REQUEST.to_json().encode()
    for given in (
        {"epoch": b"x"},
        {"epoch": b""},
        {"tokens": pack([100], [Kind.PLAIN])},
        {"tokens": pack([1] * 300, [Kind.PLAIN] * 300)},
        {"finish": b"soon"},
        {"model": b"\xff"},
        {"tenant": b"\xff"},
        {"tokens": pack([1], [Kind.PLAIN]), "logprobs": b"\x02" + b"\xff" * 40},
        {"tokens": pack([1], [Kind.PLAIN]), "logprobs": pack_logprobs([TokenLogprobs(-math.inf, (1,), (-1.0,))], 2)},
        {"tokens": pack([1], [Kind.PLAIN]), "logprobs": pack_logprobs([TokenLogprobs(-1.0, (1,), (math.inf,))], 2)},
    ):
        assert reason(lambda given=given: read_session(request, **given)) == "unreadable", given


def test_what_a_newer_version_adds_is_left_out() -> None:
    data = json.loads(REQUEST.to_json())
    for part in (data, data["params"], data["wish"], data["params"]["grammar"]):
        part["since_2030"] = {"a": 1}
    newer_kind = (4 | 9 << 28).to_bytes(4, "little")
    record = read_session(json.dumps(data).encode(), tokens=newer_kind, finish=b"9")
    assert record.request == SessionRequest.from_json(REQUEST.to_json())
    assert record.kinds == [Kind.PLAIN]
    assert record.finished
    history = asdict(HISTORY) | {"since_2030": 1, "paces": {"plain": 1.0, "telepathy": 2.0}}
    assert stored_records.read_pair(json.dumps(history).encode()) == HISTORY


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "3", '"x"', "null", "[" * 100_000),
        '{"acceptance": [NaN]}',
        '{"acceptance": 3}',
        '{"acceptance": [2.0]}',
        '{"acceptance": ["1"]}',
        '{"offer_rate": -1}',
        '{"draft_ms": Infinity}',
        '{"draft_ms": 1e300}',
        '{"tree_rows": 0}',
        '{"tree_gain": true}',
        '{"level_ms": null}',
        '{"paces": [1]}',
        '{"paces": {"plain": NaN}}',
        '{"paces": {"turns": 0}}',
        '{"draft_ms": ' + "9" * 5000 + "}",
    ],
)
def test_a_pair_history_of_no_use(text: str) -> None:
    assert reason(lambda: stored_records.read_pair(text.encode())) == "unreadable"


def test_a_pair_history_with_fields_missing_has_the_defaults() -> None:
    assert stored_records.read_pair(b"{}") == PairHistory()
    assert stored_records.read_pair(b'{"offer_rate": 1}') == PairHistory()
    assert stored_records.read_pair(json.dumps(asdict(HISTORY)).encode()) == HISTORY


@pytest.mark.parametrize("held", [b"", b"one", b"a b c", b"\xff \xff", b"a \x1b[2J", b"x" * 1000 + b" y"])
def test_an_idempotency_key_of_no_use(held: bytes) -> None:
    assert reason(lambda: stored_records.read_reserved(held)) == "unreadable"


def mutations(data: bytes, rng: random.Random) -> bytes:
    mutated = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(mutated) + 1)
        match rng.randrange(4):
            case 0 if at < len(mutated):
                mutated[at] ^= 1 << rng.randrange(8)
            case 1:
                mutated[at:at] = rng.randbytes(rng.randint(1, 8))
            case 2:
                del mutated[at : at + rng.randint(1, 8)]
            case _:
                mutated[at:at] = rng.choice((b"NaN", b"-1", b"1e999", b"null", b"[]", b"{}", b'"', b"9" * 30))
    return bytes(mutated)


def test_no_reader_raises_anything_else() -> None:
    rng = random.Random(12)
    worker = convert.worker_to_proto(INFO).SerializeToString()
    request, history = REQUEST.to_json().encode(), json.dumps(asdict(HISTORY)).encode()
    right = wrong = 0

    def pair(text: bytes) -> None:
        PairEstimate(8).start_from(stored_records.read_pair(text))

    for _ in range(FUZZED):
        for read in (
            lambda: read_worker([mutations(worker, rng), b"c", b"1", b""], keys=ApiKeys()),
            lambda: read_session(mutations(request, rng), tokens=rng.randbytes(rng.randrange(40))),
            lambda: pair(mutations(history, rng)),
            lambda: stored_records.read_reserved(mutations(b"session digest", rng)),
        ):
            try:
                read()
                right += 1
            except Unreadable:
                wrong += 1
    assert min(right, wrong) > FUZZED / 20, (right, wrong)


def test_modes_are_read_by_name() -> None:
    for mode in Verification:
        params = SamplingParams(temperature=0.0 if mode is Verification.GREEDY else 1.0, verification=mode, seed=1)
        assert SessionRequest.from_json(SessionRequest((1,), params).to_json()).params == params
