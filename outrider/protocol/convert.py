"""Conversion of messages between protobuf and dataclasses. Nothing else converts them."""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import asdict, fields
from itertools import accumulate, pairwise
from typing import Any

from google.protobuf.message import Message

from outrider.protocol import message_limits
from outrider.protocol.cost_curve import UNKNOWN_COST, CostCurve
from outrider.protocol.errors import KINDS, InvalidRequest, OutriderError
from outrider.protocol.fieldwise import by_key, from_plain
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo, WorkerLoad
from outrider.protocol.sampling_params import GRAMMAR_FORMS, SamplingParams
from outrider.protocol.speculation import (
    Distribution,
    DraftSteering,
    FinishReason,
    Guess,
    HiddenStates,
    SourceTally,
    TokenKind,
    TokenLogprobs,
    Verdict,
    VerifySteering,
    VerifyTimings,
)
from outrider.protocol.statistics import GenerationStats, ServerInfo
from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2 as coordinator
from outrider.v1 import drafter_pb2 as drafter
from outrider.v1 import verifier_pb2 as verifier

ERROR_KEY = "outrider-error-bin"
# HTTP/2 adds a frame header of 9 bytes to a message, gRPC a prefix of 5.
FRAMING_BYTES = 14
_MAX_POINTS = 64  # of a cost curve
_MAX_STEP_MS = 600_000.0


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


def draft_steering_to_proto(steering: DraftSteering) -> drafter.DraftSteering:
    return drafter.DraftSteering(**by_key(steering))


def draft_steering_from_proto(proto: drafter.DraftSteering) -> DraftSteering:
    return from_plain(DraftSteering, present_fields(proto))


def verify_steering_to_proto(steering: VerifySteering) -> verifier.VerifySteering:
    return verifier.VerifySteering(**by_key(steering))


def verify_steering_from_proto(proto: verifier.VerifySteering) -> VerifySteering:
    return from_plain(VerifySteering, present_fields(proto))


def distribution_to_proto(distribution: Distribution) -> common.Distribution:
    ids = distribution.ids
    deltas = [ids[0], *(b - a for a, b in pairwise(ids))]
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
        draft_us=guess.draft_us,
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
        draft_probs=tuple(distribution_from_proto(d) for d in proto.draft_probs),
        draft_us=proto.draft_us,
        source=proto.source,
        parents=tuple(parent - 1 for parent in proto.parents),
    )


def guess_bytes(proto: common.Guess) -> tuple[int, int]:
    """Return a guess's bytes on a stream: its tokens and probabilities alone, and everything with framing."""
    payload = sum(varint_bytes(token) for token in proto.tokens) + len(proto.parents)
    payload += sum(distribution.ByteSize() for distribution in proto.draft_probs)
    return payload, proto.ByteSize() + FRAMING_BYTES


def varint_bytes(value: int) -> int:
    return max(1, (value.bit_length() + 6) // 7)


def verdict_to_proto(verdict: Verdict) -> verifier.Verdict:
    timings = verdict.timings
    proto = verifier.Verdict(
        position=verdict.position,
        tokens=verdict.tokens,
        accepted=verdict.accepted,
        last=verifier.TokenKind.ValueType(verdict.last),
        offered=verdict.proposed,
        finish_reason=verifier.FinishReason.ValueType(verdict.finish_reason),
        timings=verifier.VerifyTimings(
            wait_us=timings.wait_us,
            step_us=timings.step_us,
            sessions=timings.sessions,
            rows=timings.batch_tokens,
            session_rows=timings.session_tokens,
            cached_tokens=timings.cached_tokens,
            step_tokens=timings.step_tokens,
        ),
        logprobs=[logprobs_to_proto(entry) for entry in verdict.logprobs],
        sources=[tally_to_proto(tally) for tally in verdict.sources],
        nodes=verdict.nodes,
        left=verdict.remaining_depth,
        beside=verdict.accepted_from_branch,
    )
    if verdict.hidden_states is not None:
        proto.features.CopyFrom(hidden_states_to_proto(verdict.hidden_states))
    return proto


def verdict_from_proto(proto: verifier.Verdict) -> Verdict:
    timings = proto.timings
    return Verdict(
        position=proto.position,
        tokens=tuple(proto.tokens),
        accepted=proto.accepted,
        last=TokenKind(proto.last),
        proposed=proto.offered,
        finish_reason=FinishReason(proto.finish_reason),
        timings=VerifyTimings(
            wait_us=timings.wait_us,
            step_us=timings.step_us,
            sessions=timings.sessions,
            batch_tokens=timings.rows,
            session_tokens=timings.session_rows,
            cached_tokens=timings.cached_tokens,
            step_tokens=timings.step_tokens,
        ),
        logprobs=tuple(logprobs_from_proto(entry) for entry in proto.logprobs),
        hidden_states=hidden_states_from_proto(proto.features) if proto.HasField("features") else None,
        sources=tuple(tally_from_proto(tally) for tally in proto.sources),
        nodes=proto.nodes,
        remaining_depth=proto.left,
        accepted_from_branch=proto.beside,
    )


def tally_to_proto(tally: SourceTally) -> verifier.SourceTally:
    return verifier.SourceTally(source=tally.source, offered=tally.proposed, accepted=tally.accepted)


def tally_from_proto(proto: verifier.SourceTally) -> SourceTally:
    return SourceTally(proto.source, proto.offered, proto.accepted)


def logprobs_to_proto(entry: TokenLogprobs) -> verifier.TokenLogprobs:
    return verifier.TokenLogprobs(logprob=entry.logprob, top_ids=entry.top_ids, top_logprobs=entry.top_logprobs)


def logprobs_from_proto(proto: verifier.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(proto.logprob, tuple(proto.top_ids), tuple(proto.top_logprobs))


def hidden_states_to_proto(states: HiddenStates) -> common.Features:
    return common.Features(position=states.position, width=states.width, rows=states.rows)


def hidden_states_from_proto(proto: common.Features) -> HiddenStates:
    return HiddenStates(proto.position, proto.width, proto.rows)


def model_to_proto(info: ModelInfo) -> common.ModelInfo:
    return common.ModelInfo(
        name=info.name,
        fingerprint=info.fingerprint,
        architecture=info.architecture,
        vocab_size=info.vocab_size,
        vocabulary_digest=info.vocabulary_digest,
        context_length=info.context_length,
        eos_token_ids=info.eos_token_ids,
        dtype=info.dtype,
        device=info.device,
        parameters=info.parameters,
        lineage=info.weights_digest,
        made_for=info.target_digest,
        text=info.text_digest,
    )


def model_from_proto(proto: common.ModelInfo) -> ModelInfo:
    return ModelInfo(
        name=proto.name,
        fingerprint=proto.fingerprint,
        architecture=proto.architecture,
        vocab_size=proto.vocab_size,
        vocabulary_digest=proto.vocabulary_digest,
        context_length=proto.context_length,
        eos_token_ids=tuple(proto.eos_token_ids),
        dtype=proto.dtype,
        device=proto.device,
        parameters=proto.parameters,
        weights_digest=proto.lineage,
        target_digest=proto.made_for,
        text_digest=proto.text,
    )


def load_to_proto(load: WorkerLoad) -> common.WorkerLoad:
    return common.WorkerLoad(
        sessions=load.sessions,
        waiting=load.waiting,
        kv_tokens_used=load.kv_tokens_used,
        kv_tokens_total=load.kv_tokens_total,
        step_ms=load.step_ms,
        cost=common.CostCurve(rows=load.cost.rows, ms=load.cost.ms),
        kv_tokens_idle=load.kv_tokens_idle,
    )


def load_from_proto(proto: common.WorkerLoad) -> WorkerLoad:
    return WorkerLoad(
        sessions=proto.sessions,
        waiting=proto.waiting,
        kv_tokens_used=proto.kv_tokens_used,
        kv_tokens_total=proto.kv_tokens_total,
        step_ms=proto.step_ms if 0.0 <= proto.step_ms <= _MAX_STEP_MS else 0.0,
        cost=_cost_from_proto(proto.cost),
        kv_tokens_idle=proto.kv_tokens_idle,
    )


def _cost_from_proto(proto: common.CostCurve) -> CostCurve:
    """Return the curve, or UNKNOWN_COST if it is malformed."""
    if not len(proto.rows) == len(proto.ms) <= _MAX_POINTS:
        return UNKNOWN_COST
    rows, ms = tuple(proto.rows), tuple(proto.ms)
    ascending = all(a < b for a, b in pairwise((0, *rows)))
    rising = all(a <= b for a, b in pairwise(ms))
    if not (ascending and rising and all(0 < value <= _MAX_STEP_MS for value in ms)):
        return UNKNOWN_COST
    return CostCurve(rows, ms)


def worker_to_proto(worker: WorkerInfo) -> coordinator.Worker:
    return coordinator.Worker(
        worker_id=worker.worker_id,
        role=coordinator.Role.ValueType(worker.role),
        address=worker.address,
        kind=worker.kind,
        capacity=worker.capacity,
        model=model_to_proto(worker.model),
        load=load_to_proto(worker.load),
        draining=worker.draining,
        round_trip_ms=worker.round_trip_ms,
        features=worker.features,
        machine=worker.machine,
    )


def worker_from_proto(proto: coordinator.Worker) -> WorkerInfo:
    if int(proto.role) not in set(Role):
        raise InvalidRequest.of("worker.role", proto.role, "ROLE_VERIFIER or ROLE_DRAFTER")
    return WorkerInfo(
        worker_id=proto.worker_id,
        role=Role(proto.role),
        address=proto.address,
        model=model_from_proto(proto.model),
        kind=proto.kind,
        capacity=proto.capacity,
        load=load_from_proto(proto.load),
        draining=proto.draining,
        round_trip_ms=proto.round_trip_ms,
        features=proto.features,
        machine=proto.machine,
    )


def stats_to_proto(stats: GenerationStats) -> coordinator.Stats:
    return coordinator.Stats(**asdict(stats))


def stats_from_proto(proto: coordinator.Stats) -> GenerationStats:
    return from_plain(GenerationStats, present_fields(proto))


def server_info_from_proto(proto: coordinator.ServerInfo) -> ServerInfo:
    workers = tuple(worker_from_proto(worker) for worker in proto.workers)
    return ServerInfo(proto.version, proto.coordinator_id, proto.sessions, proto.durable, workers)


def error_to_proto(error: OutriderError) -> common.Error:
    return common.Error(
        code=error.code,
        message=error.message,
        field=error.field,
        value=error.value,
        limit=error.limit,
        retry_after_ms=error.retry_after_ms,
    )


def error_from_proto(proto: common.Error) -> OutriderError:
    return KINDS.get(proto.code, OutriderError)(
        proto.message,
        field=proto.field,
        value=proto.value,
        limit=proto.limit,
        retry_after_ms=proto.retry_after_ms if proto.HasField("retry_after_ms") else None,
    )
