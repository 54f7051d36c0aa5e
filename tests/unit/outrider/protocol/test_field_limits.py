"""Every text of every request has a limit, and what errors repeat of it is little."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from outrider.protocol import convert
from outrider.protocol.errors import MAX_SHOWN, InvalidRequest, NotFound
from outrider.protocol.field_limits import LONGEST, check_fields
from outrider.v1 import common_pb2, coordinator_pb2, drafter_pb2, multiplex_pb2, verifier_pb2

HUGE = 100_000
REQUESTS = [
    method.input_type
    for module in (coordinator_pb2, verifier_pb2, drafter_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def default(field: FieldDescriptor) -> Any:
    return b"" if field.type == FieldDescriptor.TYPE_BYTES else ""


def texts(kind: Descriptor, path: tuple[FieldDescriptor, ...] = ()) -> Iterator[tuple[FieldDescriptor, ...]]:
    for field in kind.fields:
        if field.message_type is not None and not is_map(field):
            yield from texts(field.message_type, (*path, field))
        elif field.type in TEXTS:
            yield (*path, field)


def filled(kind: Descriptor, path: tuple[FieldDescriptor, ...]) -> Any:
    """A message with a huge text at the end of a path."""
    message = made = message_factory.GetMessageClass(kind)()
    for field in path[:-1]:
        inner = getattr(made, field.name)
        made = inner.add() if field.is_repeated else inner
        if not field.is_repeated:
            made.SetInParent()
    last = path[-1]
    value: Any = b"x" * HUGE if last.type == FieldDescriptor.TYPE_BYTES else "x" * HUGE
    if last.is_repeated:
        getattr(made, last.name).append(value)
    else:
        setattr(made, last.name, value)
    return message


CASES = [(kind, path) for kind in REQUESTS for path in texts(kind)]


@pytest.mark.parametrize(("kind", "path"), CASES, ids=[f"{k.name}.{'.'.join(f.name for f in p)}" for k, p in CASES])
def test_every_text_of_every_request_is_bounded(kind: Descriptor, path: tuple[FieldDescriptor, ...]) -> None:
    if path[-1].name in LONGEST and LONGEST[path[-1].name] is None:
        check_fields(filled(kind, path))  # whoever reads it counts its bytes
        return
    with pytest.raises(InvalidRequest) as caught:
        check_fields(filled(kind, path))
    assert path[-1].name in caught.value.field
    assert str(HUGE) in caught.value.value


def lists(kind: Descriptor, path: tuple[FieldDescriptor, ...] = ()) -> Iterator[tuple[FieldDescriptor, ...]]:
    """Yield the lists of a request that are looped over: those of texts, of messages with texts, and maps."""
    for field in kind.fields:
        nested = field.message_type
        bounded = nested is not None and any(LONGEST.get(path[-1].name, 0) is not None for path in texts(nested))
        if field.is_repeated and (field.type in TEXTS or is_map(field) or bounded):
            yield (*path, field)
        if nested is not None and not is_map(field):
            yield from lists(nested, (*path, field))


LISTS = [(kind, path) for kind in REQUESTS for path in lists(kind)]


@pytest.mark.parametrize(("kind", "path"), LISTS, ids=[f"{k.name}.{'.'.join(f.name for f in p)}" for k, p in LISTS])
def test_every_list_of_every_request_is_bounded(kind: Descriptor, path: tuple[FieldDescriptor, ...]) -> None:
    """A megabyte has a million empty messages: loops over them held up a coordinator for half a minute."""
    message = made = message_factory.GetMessageClass(kind)()
    for field in path[:-1]:
        made = getattr(made, field.name)
        made = made.add() if field.is_repeated else made
    entries = getattr(made, path[-1].name)
    if is_map(path[-1]):
        entries.update(dict.fromkeys(range(HUGE), 0.0))
    else:
        entries.extend([entries.add() if path[-1].message_type else default(path[-1])] * HUGE)
    with pytest.raises(InvalidRequest) as caught:
        check_fields(message)
    assert caught.value.field.endswith(path[-1].name)
    assert "entries" in caught.value.limit


@pytest.mark.parametrize("name", ["stop_token_ids", "tail"])
def test_tokens_of_requests_are_bounded(name: str) -> None:
    stops = coordinator_pb2.GenerateRequest()
    stops.params.stop_token_ids.extend(range(HUGE))
    tail = coordinator_pb2.ResumeRequest(tail=range(5_000_000))
    with pytest.raises(InvalidRequest, match=name):
        check_fields(stops if name == "stop_token_ids" else tail)


def test_lists_of_messages_are_bounded() -> None:
    headers = [multiplex_pb2.StreamHeader(key="x")] * 17
    with pytest.raises(InvalidRequest, match="headers"):
        check_fields(multiplex_pb2.OpenStream(headers=headers))
    check_fields(multiplex_pb2.OpenStream(headers=headers[1:]))


def test_lists_of_workers_are_bounded() -> None:
    worker = coordinator_pb2.Worker()
    worker.model.eos_token_ids.extend(range(HUGE))
    with pytest.raises(InvalidRequest, match="eos_token_ids"):
        check_fields(coordinator_pb2.RegisterRequest(worker=worker))


@pytest.mark.parametrize(
    ("name", "entries", "most"),
    [
        ("stop", ["x"] * 17, 16),
        ("stop_token_ids", range(257), 256),
        ("logit_bias", dict.fromkeys(range(1025), 1.0), 1024),
        ("messages", [coordinator_pb2.ChatMessage()] * 1001, 1000),
    ],
)
def test_lists_of_clients_are_counted_before_python_reads_them(name: str, entries: Any, most: int) -> None:
    """A million empty messages kept the coordinator for five seconds, in which no token moved."""
    parts: dict[str, Any] = {"params": common_pb2.SamplingParams, "chat": coordinator_pb2.Chat}
    holder = "chat" if name == "messages" else "params"
    request = coordinator_pb2.GenerateRequest(**{holder: parts[holder](**{name: entries})})
    with pytest.raises(InvalidRequest, match=rf"{holder}\.{name} is {len(entries)} entries, must be at most {most} "):
        check_fields(request)


@pytest.mark.parametrize("value", ["x" * HUGE, "\x1b[31m" * HUGE, "🙂" * HUGE, "\ud800" * HUGE, "'\"\\" * HUGE])
def test_errors_repeat_little(value: str) -> None:
    for error in (
        NotFound(f"there is no session {value!r}", field=value, value=value, limit=value),
        InvalidRequest.of("session_id", value, f"something else than {value}"),
        InvalidRequest(value),
    ):
        assert error.value.count(value[0]) <= MAX_SHOWN
        sent = convert.error_to_proto(error).SerializeToString()
        assert len(sent) * 4 / 3 + len(error.message) < 8_000, "gRPC's headers hold 8 KiB"
        assert convert.error_from_proto(convert.common.Error.FromString(sent)).message == error.message
        assert "\x1b" not in str(error)
