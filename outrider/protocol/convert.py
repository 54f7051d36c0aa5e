"""Conversion of messages between protobuf and dataclasses. Nothing else converts them.

Fields have the same names in both: most messages are converted field by field. Functions name pairs and exceptions.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import cache, partial
from itertools import accumulate, pairwise
from types import NoneType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from outrider.protocol import message_limits
from outrider.protocol.checks import check_count
from outrider.protocol.cost_curve import UNKNOWN_COST, CostCurve
from outrider.protocol.errors import KINDS, InvalidRequest, OutriderError
from outrider.protocol.fieldwise import from_plain
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo, WorkerLoad
from outrider.protocol.hidden_states.messages import MAX_STATE_LAYERS, HiddenStates, StateSpec
from outrider.protocol.sampling_params import GRAMMAR_FORMS, SamplingParams
from outrider.protocol.speculation import Distribution, DraftSteering, Guess, TokenLogprobs, Verdict, VerifySteering
from outrider.protocol.statistics import GenerationStats, ServerInfo
from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2 as coordinator
from outrider.v1 import drafter_pb2 as drafter
from outrider.v1 import verifier_pb2 as verifier

T = TypeVar("T")
M = TypeVar("M", bound=Message)

ERROR_KEY = "outrider-error-bin"
# HTTP/2 adds a frame header of 9 bytes to a message, gRPC a prefix of 5.
FRAMING_BYTES = 14
_MAX_POINTS = 64  # of a cost curve
_MIN_STEP_MS, _MAX_STEP_MS = 1e-6, 600_000.0  # quotients of shorter times overflow
_in_32_bits = partial(min, (1 << 32) - 1)  # times of a process that was paused for hours do not fit


def params_to_proto(params: SamplingParams) -> common.SamplingParams:
    given = {entry.name: getattr(params, entry.name) for entry in fields(params)}
    if params.grammar is not None:
        forms = {form: value for form in GRAMMAR_FORMS if (value := getattr(params.grammar, form))}
        given["grammar"] = common.Grammar(**forms)
    return common.SamplingParams(**given | {"verification": params.mode.value})


def params_from_proto(proto: common.SamplingParams) -> SamplingParams:
    """Return the parameters; absent fields take the defaults. SamplingParams.check validates the values."""
    if proto.verification not in common.Verification.values():
        raise InvalidRequest.of("params.verification", proto.verification, "one of the enum's values")
    return from_plain(SamplingParams, present_fields(proto))


def present_fields(proto: Message) -> dict[str, Any]:
    """Return the fields that a message has, those of its messages likewise."""
    return {field.name: _present(value) for field, value in proto.ListFields()}


def _present(value: Any) -> Any:
    if isinstance(value, MutableSequence) and isinstance(value[0], Message):
        return [present_fields(one) for one in value]
    return present_fields(value) if isinstance(value, Message) else value


def opening_from_proto(kind: type[T], request: Any) -> T:
    """Return the first message of a stream to a worker, as that worker's dataclass."""
    if (found := request.WhichOneof("message")) != "open":
        raise InvalidRequest.of("first message", found or "empty", "open")
    check_count("open.tokens", len(request.open.tokens), message_limits.MAX_OPEN_TOKENS, "tokens")
    if not request.open.params.HasField("max_tokens"):
        raise InvalidRequest.of("params.max_tokens", "absent", "given: only the coordinator has a default")
    return incoming(kind, request.open)


def _pair(kind: type[T], message: Callable[..., M]) -> tuple[Callable[[T], M], Callable[[M], T]]:
    """Return the conversions of a dataclass to its message and back, field by field."""
    return lambda value: message(**_outgoing(value)), lambda proto: incoming(kind, proto)


draft_steering_to_proto, draft_steering_from_proto = _pair(DraftSteering, drafter.DraftSteering)
verify_steering_to_proto, verify_steering_from_proto = _pair(VerifySteering, verifier.VerifySteering)
verdict_to_proto, verdict_from_proto = _pair(Verdict, verifier.Verdict)  # raises ValueError for an unknown enum value
logprobs_to_proto, logprobs_from_proto = _pair(TokenLogprobs, verifier.TokenLogprobs)
hidden_states_to_proto, hidden_states_from_proto = _pair(HiddenStates, common.HiddenStates)
model_to_proto, model_from_proto = _pair(ModelInfo, common.ModelInfo)
stats_to_proto, stats_from_proto = _pair(GenerationStats, coordinator.Stats)
server_info_to_proto, server_info_from_proto = _pair(ServerInfo, coordinator.ServerInfo)
load_to_proto = _pair(WorkerLoad, common.WorkerLoad)[0]
worker_to_proto = _pair(WorkerInfo, coordinator.Worker)[0]
state_spec_to_proto = _pair(StateSpec, common.StateSpec)[0]  # the way back checks them


def distribution_to_proto(distribution: Distribution) -> common.Distribution:
    deltas = [distribution.ids[0], *(b - a for a, b in pairwise(distribution.ids))]
    return common.Distribution(id_deltas=deltas, weights=distribution.weights)


def distribution_from_proto(proto: common.Distribution) -> Distribution:
    return Distribution(tuple(accumulate(proto.id_deltas)), tuple(proto.weights))


def guess_to_proto(guess: Guess) -> common.Guess:
    return common.Guess(
        position=guess.position,
        first_id=guess.first_id,
        parent=guess.parent,
        tokens=guess.tokens,
        draft_probs=[distribution_to_proto(d) for d in guess.draft_probs],
        draft_us=_in_32_bits(guess.draft_us),
        source=guess.source,
        parents=[parent + 1 for parent in guess.parents],  # unsigned on the wire: 0 is the root
    )


def guess_from_proto(proto: common.Guess) -> Guess:
    message_limits.check_guess(proto)
    return Guess(
        position=proto.position,
        first_id=proto.first_id,
        parent=proto.parent,
        tokens=tuple(proto.tokens),
        draft_probs=tuple(map(distribution_from_proto, proto.draft_probs)),
        draft_us=proto.draft_us,
        source=proto.source,
        parents=tuple([parent - 1 for parent in proto.parents]),
    )


def guess_bytes(proto: common.Guess) -> tuple[int, int]:
    """Return a guess's bytes on a stream: its tokens and probabilities alone, and everything with framing."""
    payload = sum(map(varint_bytes, proto.tokens)) + len(proto.parents)
    payload += sum(map(common.Distribution.ByteSize, proto.draft_probs))
    return payload, proto.ByteSize() + FRAMING_BYTES


def varint_bytes(value: int) -> int:
    return max(1, (value.bit_length() + 6) // 7)


def state_spec_from_proto(proto: common.StateSpec) -> StateSpec:
    """Return the spec; raise InvalidRequest for one that no drafter can have."""
    check_count("state_spec.layers", len(proto.layers), MAX_STATE_LAYERS, "layers")
    spec: StateSpec = incoming(StateSpec, proto)
    spec.check("state_spec")
    return spec


def load_from_proto(proto: common.WorkerLoad) -> WorkerLoad:
    load = incoming(WorkerLoad, proto)
    return load if 0.0 <= load.step_ms <= _MAX_STEP_MS else replace(load, step_ms=0.0)


def _cost_from_proto(proto: common.CostCurve) -> CostCurve:
    """Return the curve, or UNKNOWN_COST if it is malformed."""
    if not len(proto.rows) == len(proto.ms) <= _MAX_POINTS:
        return UNKNOWN_COST
    rows, ms = tuple(proto.rows), tuple(proto.ms)
    ascending = all(a < b for a, b in pairwise((0, *rows)))
    rising = all(a <= b for a, b in pairwise(ms))
    if not (ascending and rising and all(_MIN_STEP_MS <= value <= _MAX_STEP_MS for value in ms)):
        return UNKNOWN_COST
    return CostCurve(rows, ms)


def worker_from_proto(proto: coordinator.Worker) -> WorkerInfo:
    if int(proto.role) not in set(Role):
        raise InvalidRequest.of("worker.role", proto.role, "ROLE_VERIFIER or ROLE_DRAFTER")
    from_plain(SamplingParams, present_fields(proto.model.sampling)).check()  # requests get what they leave out
    return incoming(WorkerInfo, proto)


def error_to_proto(error: OutriderError) -> common.Error:
    named = {name: getattr(error, name) for name in ("code", "message", "field", "value", "limit")}
    return common.Error(**named, retry_after_ms=error.retry_after_ms and _in_32_bits(error.retry_after_ms))


def error_from_proto(proto: common.Error) -> OutriderError:
    given = {"code": "", "message": ""} | present_fields(proto)
    return KINDS.get(given.pop("code"), OutriderError)(given.pop("message"), **given)


def _outgoing(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as arguments of its message, without those that equal the message's defaults."""
    given: dict[str, Any] = {}
    kind: Any = type(value)
    for name, optional, repeated, _, write in _fields(kind):
        content = getattr(value, name)
        if content is not None and write is not None:
            content = [write(one) for one in content] if repeated else write(content)
        if content or (content is not None and optional):
            given[name] = content
    return given


def incoming(kind: type[T], message: Any) -> T:
    """Return a message as a dataclass. A field that may be absent is None then."""
    given: list[Any] = []
    known: Any = kind
    for name, optional, repeated, read, _ in _fields(known):
        content = getattr(message, name)
        if optional and not message.HasField(name):
            content = None
        elif repeated:
            content = tuple(map(read, content) if read and content else content)
        elif read is not None:
            content = read(content)
        given.append(content)
    return kind(*given)


class _Conversion(NamedTuple):
    """The conversion of a field."""

    name: str
    optional: bool
    repeated: bool
    read: Callable[[Any], Any] | None  # None: the value is the same in both
    write: Callable[[Any], Any] | None


_READERS: dict[Any, Callable[[Any], Any]] = {
    CostCurve: _cost_from_proto,
    SamplingParams: params_from_proto,
    StateSpec: state_spec_from_proto,
    WorkerInfo: worker_from_proto,
    WorkerLoad: load_from_proto,
}


@cache
def _fields(kind: Any) -> tuple[_Conversion, ...]:
    return tuple(_field(name, hint) for name, hint in get_type_hints(kind).items())


def _field(name: str, hint: Any) -> _Conversion:
    optional = NoneType in get_args(hint)
    if optional:
        hint = get_args(hint)[0]
    repeated = get_origin(hint) is tuple
    kind: Any = get_args(hint)[0] if repeated else hint
    if is_dataclass(kind):
        inside: Any = kind
        read = _READERS.get(inside) or partial(incoming, inside)
        return _Conversion(name, optional, repeated, read, _outgoing)
    write = _in_32_bits if name.endswith("_us") else None
    return _Conversion(name, optional, repeated, kind if issubclass(kind, Enum) else None, write)
