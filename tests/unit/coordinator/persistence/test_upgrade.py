"""Two releases side by side: what the one before the keys were split wrote is read, and it reads what is written now.

The fixtures were written by that release's own code (commit a5354cb). Its readers took no field of sampling parameters,
wishes and pair histories that they did not know.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from coordinator.control.estimator import PairHistory
from coordinator.persistence import stored_records
from coordinator.persistence.session_record import SessionRequest
from outrider.protocol import convert
from outrider.protocol.fleet import ModelInfo, Role
from outrider.protocol.speculation import DraftSteering, FinishReason, VerifySteering
from outrider.protocol.speculation import TokenKind as Kind
from outrider.security.api_keys import ApiKeys
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import drafter_pb2, verifier_pb2

BEFORE = Path(__file__).parents[3] / "fixtures" / "before_split_keys"
REDIS = json.loads((BEFORE / "redis.json").read_text())
MESSAGES = json.loads((BEFORE / "messages.json").read_text())
TARGET = ModelInfo("target", "f1", vocab_size=100)


@pytest.mark.parametrize("name", REDIS["sessions"])
def test_its_sessions_are_read(name: str) -> None:
    mode, _, finish = name.split("-")
    held = REDIS["sessions"][name]
    fields = held["session"]
    given = [fields[key].encode() if key in fields else None for key in ("request", "epoch", "finish", "model")]
    tokens = bytes.fromhex(held["tokens"])
    record = stored_records.read_session("s", [*given, fields["verifier"].encode(), None], tokens, b"", "tenant")
    stored_records.check_session(record, TARGET)
    assert (record.epoch, record.tokens) == (2, [4, 5, 6, 7])
    assert record.kinds == [Kind.ACCEPTED, Kind.RECOVERED, Kind.BONUS, Kind.PLAIN]
    assert record.finish_reason is FinishReason[finish]
    assert record.request.params.mode.name == mode
    assert record.tenant == "tenant", "there were none: it is of whoever asks"


def test_it_reads_our_sessions() -> None:
    for held in REDIS["sessions"].values():
        before = json.loads(held["session"]["request"])
        now = json.loads(SessionRequest.from_json(held["session"]["request"]).to_json())
        assert set(before) <= set(now)
        for part in ("params", "wish"):
            assert set(now[part]) == set(before[part]), f"it takes no other {part} than it knows"
        assert {key: now[key] for key in before} == before


def test_workers_of_a_fleet_without_keys_are_read_both_ways() -> None:
    """With a fleet key it signed nothing, so that its records are skipped: see docs/operating.md."""
    for name, data in REDIS["workers"].items():
        given = [bytes.fromhex(data), b"coordinator-1", None, None]
        info = stored_records.read_worker(name, given, ApiKeys(), 0.0, 5.0)
        assert info.role in set(Role)
        with pytest.raises(stored_records.Unreadable):
            stored_records.read_worker(name, given, ApiKeys(["fleet"]), 0.0, 5.0)
        sealed = stored_records.seal_worker(
            convert.worker_to_proto(info).SerializeToString(), name, "c", 0.0, ApiKeys(["fleet"])
        )
        assert pb.Worker.FromString(bytes(sealed["data"])) == pb.Worker.FromString(bytes.fromhex(data))  # type: ignore[arg-type]


def test_pair_histories_are_read_both_ways() -> None:
    for text in REDIS["pairs"].values():
        history = stored_records.read_pair(text.encode())
        assert asdict(history) == asdict(PairHistory()) | json.loads(text)
    assert set(asdict(PairHistory())) - set(json.loads(REDIS["pairs"]["fresh"])) == {"gained"}, "fields added since"


READERS: dict[str, tuple[type[Message], Callable[[Any], Any]]] = {
    "RegisterRequest": (pb.RegisterRequest, lambda m: convert.worker_from_proto(m.worker)),
    "RegisterReply": (pb.RegisterReply, lambda m: m.heartbeat_ms == 1000),
    "GenerateRequest": (pb.GenerateRequest, lambda m: convert.params_from_proto(m.params).check()),
    "GenerateReply": (pb.GenerateReply, lambda m: m.chunk.token_ids == [4]),
    "VerifyRequest": (verifier_pb2.VerifyRequest, lambda m: convert.params_from_proto(m.open.params)),
    "VerifyReply": (verifier_pb2.VerifyReply, lambda m: convert.verdict_from_proto(m.verdict)),
    "DraftRequest": (drafter_pb2.DraftRequest, lambda m: convert.draft_steering_from_proto(m.open.steer)),
    "DraftReply": (drafter_pb2.DraftReply, lambda m: convert.guess_from_proto(m.guess)),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_are_read_and_mean_the_same(name: str) -> None:
    kind, read = READERS[name]
    data = bytes.fromhex(MESSAGES[name])
    message = kind.FromString(data)
    read(message)
    assert _unknown(message) == [], "every field of that release is still there"
    # What a newer one adds is carried along and harms nobody.
    newer = kind.FromString(data + bytes([0xFA, 0xFF, 0x01, 3]) + b"new")
    read(newer)


def test_its_steering_is_read_by_both_ends() -> None:
    """It had one message for both: gamma 4, branches 3, 500 us of patience, features, nodes 12, eager."""
    data = bytes.fromhex("0804100318f4032001280c3001")
    draft = convert.draft_steering_from_proto(drafter_pb2.DraftSteering.FromString(data))
    assert draft == DraftSteering(gamma=4, branches=3, nodes=12, eager=True)
    verify = convert.verify_steering_from_proto(verifier_pb2.VerifySteering.FromString(data))
    assert verify == VerifySteering(gamma=4, draft_wait_us=500, nodes=12, hidden_states=True)


def _unknown(message: Message) -> list[int]:
    from google.protobuf.unknown_fields import UnknownFieldSet

    found = [field.field_number for field in UnknownFieldSet(message)]
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None:
            for part in value if isinstance(value, list) or not isinstance(value, Message) else [value]:
                found += _unknown(part)
    return found
