"""What the parts say to each other: what cannot be is refused by name, the rest survives the wire and stays small."""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.protocol import convert, errors
from outrider.protocol.checks import check_tokens
from outrider.protocol.errors import MAX_SHOWN, InvalidRequest, OutriderError
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo, WorkerLoad
from outrider.protocol.hidden_states.messages import HiddenStates
from outrider.protocol.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_SEED,
    MAX_STOP_CHARACTERS,
    MAX_STOP_IDS,
    MAX_STOP_STRINGS,
    SamplingParams,
    Verification,
)
from outrider.protocol.speculation import (
    MAX_BRANCHES,
    MAX_DRAFT_WAIT_US,
    MAX_GAMMA,
    MAX_NODES,
    WHOLE,
    Distribution,
    DraftSteering,
    FinishReason,
    Guess,
    SourceTally,
    TokenKind,
    TokenLogprobs,
    Verdict,
    VerifySteering,
    VerifyTimings,
)
from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2 as coordinator
from outrider.v1 import drafter_pb2 as drafter
from outrider.v1 import verifier_pb2 as verifier

VOCAB = 49_152
NAN, INF = math.nan, math.inf


def refused(thing: Any, *arguments: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        thing.check(*arguments)
    return caught.value


# --- what cannot be --------------------------------------------------------------------------------------------------

BAD_NUMBERS: dict[str, list[tuple[Any, str]]] = {
    "temperature": [
        *((v, "in [0, 10]") for v in (NAN, INF, -INF, -1, -1e-9, 10.5)),
        *((v, "0 or at least 1e-06") for v in (5e-324, 1e-40, 9e-7)),
    ],
    "top_k": [(v, "2147483647") for v in (-1, 2**31, NAN, INF)],
    "top_p": [(v, "in (0, 1]") for v in (NAN, INF, 0, 0.0, -0.1, 1.5)],
    "min_p": [(v, "in [0, 1]") for v in (NAN, INF, -0.1, 1.5)],
    "repetition_penalty": [(v, "in [0.01, 10]") for v in (NAN, INF, 0, 5e-324, -1, 10.5)],
    "presence_penalty": [(v, "in [-2, 2]") for v in (NAN, INF, -INF, -2.1, 2.1)],
    "frequency_penalty": [(v, "in [-2, 2]") for v in (NAN, INF, -INF, -2.1, 2.1)],
    "max_tokens": [(v, "in [1, 2147483647]") for v in (0, -1, 2**31, NAN)],
    "seed": [(v, "in [0, 18446744073709551615]") for v in (-1, 2**64, 10**100)],
    "logprobs": [(v, "in [0, 20]") for v in (-1, 21, NAN)],
}


@pytest.mark.parametrize(
    ("name", "value", "limit"), [(name, *case) for name, cases in BAD_NUMBERS.items() for case in cases]
)
def test_a_bad_number_names_field_value_and_limit(name: str, value: Any, limit: str) -> None:
    error = refused(SamplingParams(**{name: value}), VOCAB)
    assert error.field == f"params.{name}"
    assert error.value == str(value)
    assert limit in error.limit, "people must be able to read the limit as a whole number"
    assert all(part in error.message for part in (error.field, error.value, error.limit))


@pytest.mark.parametrize("name", ["top_k", "max_tokens", "seed", "logprobs"])
def test_an_endless_number_is_refused_like_any_other(name: str) -> None:
    """JSON has no largest number."""
    assert refused(SamplingParams(**{name: 10**400}), VOCAB).field == f"params.{name}"


@pytest.mark.parametrize("name", ["top_k", "max_tokens", "seed", "logprobs"])
def test_a_whole_number_is_whole(name: str) -> None:
    """JSON edges and Python callers can say 1.5; protobuf cannot. A later crash would be the engine's."""
    assert refused(SamplingParams(**{name: 1.5}), VOCAB).field == f"params.{name}"


def test_more_log_probabilities_than_tokens_are_refused() -> None:
    """At the verifier they would end the sessions of a whole step."""
    assert refused(SamplingParams(logprobs=5), 4).limit == "in [0, 4]"
    SamplingParams(logprobs=4).check(4)


@pytest.mark.parametrize(
    ("change", "name", "value"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, f"params.logit_bias[{VOCAB}]", str(VOCAB)),
        ({"logit_bias": {-1: 1.0}}, "params.logit_bias[-1]", "-1"),
        ({"logit_bias": {3: 100.5}}, "params.logit_bias[3]", "100.5"),
        ({"logit_bias": {3: NAN}}, "params.logit_bias[3]", "nan"),
        ({"logit_bias": {3: -INF}}, "params.logit_bias[3]", "-inf"),
        ({"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)}, "params.logit_bias", "1025 entries"),
        ({"stop_token_ids": (1, VOCAB)}, "params.stop_token_ids[1]", str(VOCAB)),
        ({"stop_token_ids": (-1,)}, "params.stop_token_ids[0]", "-1"),
        ({"stop_token_ids": tuple(range(MAX_STOP_IDS + 1))}, "params.stop_token_ids", "257 entries"),
        ({"stop": ("a",) * (MAX_STOP_STRINGS + 1)}, "params.stop", "17 entries"),
        ({"stop": ("a", "")}, "params.stop[1]", "0 characters"),
        ({"stop": ("a" * (MAX_STOP_CHARACTERS + 1),)}, "params.stop[0]", "513 characters"),
        ({"verification": Verification.GREEDY}, "params.temperature", "1.0"),
        ({"verification": Verification.COUPLED, "temperature": 0}, "params.verification", "coupled"),
        ({"verification": Verification.BLOCK, "temperature": 0.0}, "params.verification", "block"),
        ({"verification": Verification.REJECTION, "temperature": 0.0}, "params.verification", "rejection"),
    ],
)
def test_a_bad_list_or_combination_names_its_entry(change: dict[str, Any], name: str, value: str) -> None:
    error = refused(SamplingParams(**change), VOCAB)
    assert (error.field, error.value) == (name, value)
    assert error.limit


EXTREMES = [
    SamplingParams(),
    SamplingParams(temperature=0.0, top_k=2**31 - 1, top_p=1.0, min_p=1.0, seed=MAX_SEED, max_tokens=1, logprobs=20),
    SamplingParams(temperature=10, top_p=5e-324, repetition_penalty=10, presence_penalty=-2, frequency_penalty=2),
    SamplingParams(logit_bias={0: -100.0, VOCAB - 1: 100.0}, stop_token_ids=(0, VOCAB - 1), seed=0, logprobs=0),
    SamplingParams(stop=("a" * MAX_STOP_CHARACTERS,) * MAX_STOP_STRINGS),
    SamplingParams(temperature=0, verification=Verification.GREEDY),
    SamplingParams(verification=Verification.BLOCK),
]


@pytest.mark.parametrize("params", EXTREMES)
def test_the_limits_themselves_are_allowed(params: SamplingParams) -> None:
    params.check(VOCAB)
    params.check()


def test_without_a_vocabulary_ids_are_left_to_the_verifier() -> None:
    SamplingParams(logit_bias={10**6: 1.0}, stop_token_ids=(10**6,)).check()


def test_the_mode_follows_the_temperature_unless_it_is_said() -> None:
    assert SamplingParams().mode is Verification.COUPLED
    assert SamplingParams(temperature=0).mode is Verification.GREEDY
    assert SamplingParams(verification=Verification.BLOCK).mode is Verification.BLOCK
    assert [mode for mode in Verification if mode.needs_draft_probs] == [Verification.REJECTION, Verification.BLOCK]


@pytest.mark.parametrize(
    ("steering", "name"),
    [
        (DraftSteering(gamma=-1), "steer.gamma"),
        (DraftSteering(gamma=MAX_GAMMA + 1), "steer.gamma"),
        (DraftSteering(branches=-1), "steer.branches"),
        (DraftSteering(branches=MAX_BRANCHES + 1), "steer.branches"),
        (DraftSteering(nodes=MAX_NODES + 1), "steer.nodes"),
        (VerifySteering(gamma=-1), "steer.gamma"),
        (VerifySteering(gamma=MAX_GAMMA + 1), "steer.gamma"),
        (VerifySteering(draft_wait_us=-1), "steer.draft_wait_us"),
        (VerifySteering(draft_wait_us=MAX_DRAFT_WAIT_US + 1), "steer.draft_wait_us"),
        (VerifySteering(nodes=MAX_NODES + 1), "steer.nodes"),
        (VerifySteering(paying_nodes=MAX_NODES + 1), "steer.paying_nodes"),
    ],
)
def test_bad_steering_names_its_field(steering: DraftSteering | VerifySteering, name: str) -> None:
    error = refused(steering)
    assert (error.field, error.value) == (name, str(next(value for value in asdict(steering).values() if value)))


@pytest.mark.parametrize(
    "steering",
    [
        DraftSteering(),
        DraftSteering(MAX_GAMMA, MAX_BRANCHES, MAX_NODES),
        VerifySteering(),
        VerifySteering(MAX_GAMMA, MAX_DRAFT_WAIT_US, MAX_NODES),
    ],
)
def test_steering_at_its_limits_is_allowed(steering: DraftSteering | VerifySteering) -> None:
    steering.check()


@pytest.mark.parametrize(
    ("ids", "weights", "where"),
    [
        ((), (), ""),
        ((1, 2), (WHOLE,), ""),
        ((1,), (1, WHOLE - 1), ""),
        ((2, 1), (1, WHOLE - 1), ".id_deltas"),
        ((1, 1), (1, WHOLE - 1), ".id_deltas"),
        ((1, VOCAB), (1, WHOLE - 1), ".id_deltas"),
        ((-1, 5), (1, WHOLE - 1), ".id_deltas"),
        ((1, 2), (0, WHOLE), ".weights"),
        ((1, 2), (-1, WHOLE + 1), ".weights"),
        ((1, 2), (1, WHOLE), ".weights"),
        ((1, 2), (1, 2), ".weights"),
    ],
)
def test_a_bad_distribution_names_what_is_wrong(ids: tuple, weights: tuple, where: str) -> None:
    assert refused(Distribution(ids, weights), "guess.draft_probs[3]", VOCAB).field == f"guess.draft_probs[3]{where}"


def test_tokens_outside_the_vocabulary_are_named_by_index() -> None:
    check_tokens("open.tokens", (0, VOCAB - 1), VOCAB)
    check_tokens("open.tokens", (), VOCAB)
    with pytest.raises(InvalidRequest) as caught:
        check_tokens("open.tokens", [0, 5, VOCAB, VOCAB + 1], VOCAB)
    assert (caught.value.field, caught.value.value) == ("open.tokens[2]", str(VOCAB))


def test_megabytes_are_not_echoed() -> None:
    error = InvalidRequest.of("x", "y" * 10**6, "short")
    assert len(error.message) < 300
    assert len(error.value) <= MAX_SHOWN


def test_every_error_has_a_code_and_a_status() -> None:
    declared = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)}
    assert set(errors.KINDS.values()) == declared - {errors.ProtocolViolation}, "which is sent as its parent"
    for kind in errors.KINDS.values():
        assert {"code", "grpc_status", "http_status"} <= vars(kind).keys(), f"{kind.__name__} has its parent's"
        assert grpc.StatusCode[kind("x").grpc_status] is not grpc.StatusCode.OK


# --- over the wire ---------------------------------------------------------------------------------------------------

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
tokens = st.lists(uint32, max_size=6).map(tuple)
finite = st.floats(allow_nan=False, allow_infinity=False)
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@st.composite
def distributions(draw: st.DrawFn, vocab: int = VOCAB) -> Distribution:
    ids = sorted(draw(st.sets(st.integers(0, vocab - 1), min_size=1, max_size=32)))
    cuts = draw(st.sets(st.integers(1, WHOLE - 1), min_size=len(ids) - 1, max_size=len(ids) - 1))
    edges = [0, *sorted(cuts), WHOLE]
    return Distribution(tuple(ids), tuple(b - a for a, b in pairwise(edges)))


params_strategy = st.builds(
    SamplingParams,
    temperature=st.floats(0.1, 10.0),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
    repetition_penalty=st.floats(0.1, 10.0),
    presence_penalty=st.floats(-2.0, 2.0),
    frequency_penalty=st.floats(-2.0, 2.0),
    logit_bias=st.dictionaries(uint32, st.floats(-100.0, 100.0), max_size=4),
    seed=st.none() | uint64,
    stop_token_ids=tokens,
    stop=st.lists(words, max_size=3).map(tuple),
    max_tokens=st.integers(1, 2**31 - 1),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    verification=st.sampled_from([Verification.COUPLED, Verification.BLOCK, Verification.REJECTION]),
)
draft_steerings = st.builds(
    DraftSteering,
    gamma=st.none() | uint32,
    branches=st.none() | uint32,
    nodes=st.none() | uint32,
    eager=st.none() | st.booleans(),
)
verify_steerings = st.builds(
    VerifySteering,
    gamma=st.none() | uint32,
    draft_wait_us=st.none() | uint32,
    nodes=st.none() | uint32,
    hidden_states=st.none() | st.booleans(),
)


@st.composite
def trees(draw: st.DrawFn) -> dict[str, tuple[Any, ...]]:
    """Tokens, and parents that precede their children, or none, and a distribution for each token, or none."""
    drawn = draw(tokens)
    each = {"min_size": len(drawn), "max_size": len(drawn)}
    numbers = draw(st.none() | st.lists(st.integers(0, 64), **each))
    parents = () if numbers is None else tuple(number % (i + 1) - 1 for i, number in enumerate(numbers))
    return {
        "tokens": drawn,
        "parents": parents,
        "draft_probs": draw(st.just(()) | st.tuples(*[distributions()] * len(drawn))),
    }


guesses = st.builds(
    lambda tree, **rest: Guess(**tree, **rest),
    tree=trees(),
    position=uint32,
    first_id=uint32,
    parent=uint32,
    draft_us=uint32,
    source=uint32,
)
logprob_entries = st.builds(
    TokenLogprobs, logprob=finite, top_ids=tokens, top_logprobs=st.lists(finite, max_size=4).map(tuple)
)
feature_blocks = st.builds(HiddenStates, position=uint32, width=uint32, rows=st.binary(max_size=20))
verdicts = st.builds(
    Verdict,
    position=uint32,
    tokens=tokens,
    accepted=uint32,
    last=st.sampled_from(TokenKind),
    proposed=uint32,
    finish_reason=st.sampled_from(FinishReason),
    timings=st.builds(VerifyTimings, *[uint32] * 6),
    logprobs=st.lists(logprob_entries, max_size=2).map(tuple),
    hidden_states=st.none() | feature_blocks,
    sources=st.lists(st.builds(SourceTally, uint32, uint32, uint32), max_size=3).map(tuple),
    nodes=uint32,
)
models = st.builds(
    ModelInfo,
    name=words,
    fingerprint=words,
    architecture=words,
    vocab_size=uint32,
    vocabulary_digest=words,
    context_length=uint32,
    eos_token_ids=tokens,
    dtype=words,
    device=words,
    parameters=uint64,
    weights_digest=words,
    target_digest=words,
)
loads = st.builds(WorkerLoad, uint32, uint32, uint64, uint64, st.floats(0.0, 600_000.0))
workers = st.builds(
    WorkerInfo,
    worker_id=words,
    role=st.sampled_from(Role),
    address=words,
    model=models,
    kind=words,
    capacity=uint32,
    load=loads,
    draining=st.booleans(),
    round_trip_ms=finite,
    hidden_states=st.booleans(),
)

MESSAGES = {
    "params": (params_strategy, convert.params_to_proto, convert.params_from_proto, common.SamplingParams),
    "draft steering": (
        draft_steerings,
        convert.draft_steering_to_proto,
        convert.draft_steering_from_proto,
        drafter.DraftSteering,
    ),
    "verify steering": (
        verify_steerings,
        convert.verify_steering_to_proto,
        convert.verify_steering_from_proto,
        verifier.VerifySteering,
    ),
    "distribution": (
        distributions(),
        convert.distribution_to_proto,
        convert.distribution_from_proto,
        common.Distribution,
    ),
    "guess": (guesses, convert.guess_to_proto, convert.guess_from_proto, common.Guess),
    "logprobs": (logprob_entries, convert.logprobs_to_proto, convert.logprobs_from_proto, verifier.TokenLogprobs),
    "hidden states": (
        feature_blocks,
        convert.hidden_states_to_proto,
        convert.hidden_states_from_proto,
        common.HiddenStates,
    ),
    "verdict": (verdicts, convert.verdict_to_proto, convert.verdict_from_proto, verifier.Verdict),
    "model": (models, convert.model_to_proto, convert.model_from_proto, common.ModelInfo),
    "load": (loads, convert.load_to_proto, convert.load_from_proto, common.WorkerLoad),
    "worker": (workers, convert.worker_to_proto, convert.worker_from_proto, coordinator.Worker),
}


@pytest.mark.parametrize("name", MESSAGES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_messages_survive_the_wire(name: str, data: st.DataObject) -> None:
    strategy, to_proto, from_proto, kind = MESSAGES[name]
    message = data.draw(strategy)
    sent = to_proto(message)
    assert isinstance(sent, kind)
    assert from_proto(kind.FromString(sent.SerializeToString())) == message


def test_absent_parameters_take_the_defaults() -> None:
    assert convert.params_from_proto(common.SamplingParams()) == SamplingParams()


def test_zero_is_not_absent() -> None:
    """proto3's zeros are values here."""
    zeros = common.SamplingParams(temperature=0.0, top_k=0, top_p=0.0, seed=0, max_tokens=0, logprobs=0)
    params = convert.params_from_proto(common.SamplingParams.FromString(zeros.SerializeToString()))
    assert (params.temperature, params.top_p, params.seed, params.max_tokens, params.logprobs) == (0.0, 0.0, 0, 0, 0)
    assert convert.draft_steering_from_proto(drafter.DraftSteering(gamma=0)) == DraftSteering(gamma=0)
    assert convert.draft_steering_from_proto(drafter.DraftSteering()) == DraftSteering()


def test_absent_verification_says_nothing_and_the_mode_in_force_is_sent() -> None:
    assert convert.params_from_proto(common.SamplingParams()).verification is None
    assert convert.params_to_proto(SamplingParams(temperature=0)).verification == Verification.GREEDY.value


def test_unknown_enum_values_are_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        convert.params_from_proto(common.SamplingParams(verification=99))
    assert caught.value.field == "params.verification"
    with pytest.raises(InvalidRequest) as caught:
        convert.worker_from_proto(coordinator.Worker())
    assert caught.value.field == "worker.role"


@pytest.mark.parametrize("kind", errors.KINDS.values())
def test_errors_survive_the_wire(kind: type[OutriderError]) -> None:
    error = kind("a sentence", field="f", value=3, limit="at most 2", retry_after_ms=500)
    back = convert.error_from_proto(common.Error.FromString(convert.error_to_proto(error).SerializeToString()))
    assert type(back) is kind
    assert vars(back) == vars(error)
    assert convert.error_from_proto(convert.error_to_proto(kind("x"))).retry_after_ms is None


def test_a_time_of_hours_is_the_longest_that_its_field_holds() -> None:
    """Of a process that was paused, such as by `docker pause`: its clock runs on."""
    hours = 2 * 3600 * 10**6
    timings = VerifyTimings(wait_us=hours, step_us=hours, draft_us=hours)
    sent = convert.verdict_to_proto(Verdict(0, (1,), 0, TokenKind.PLAIN, timings=timings)).timings
    assert {sent.wait_us, sent.step_us, sent.draft_us} == {2**32 - 1}
    assert convert.guess_to_proto(Guess(0, 1, 0, (1,), draft_us=hours)).draft_us == 2**32 - 1
    assert convert.error_to_proto(errors.Overloaded("x", retry_after_ms=hours)).retry_after_ms == 2**32 - 1


def test_an_error_of_a_newer_peer_is_still_an_error() -> None:
    assert type(convert.error_from_proto(common.Error(code="from the future", message="m"))) is OutriderError


def test_the_kinds_of_committed_tokens() -> None:
    verdict = Verdict(5, (1, 2, 3), 2, TokenKind.RECOVERED)
    assert verdict.kinds == (TokenKind.ACCEPTED, TokenKind.ACCEPTED, TokenKind.RECOVERED)
    assert Verdict(5, (1,), 1, TokenKind.NONE).kinds == (TokenKind.ACCEPTED,)


# --- bytes -----------------------------------------------------------------------------------------------------------


@given(distributions())
def test_ids_are_sent_as_ascending_differences(distribution: Distribution) -> None:
    proto = convert.distribution_to_proto(distribution)
    assert list(proto.id_deltas[:1]) == list(distribution.ids[:1])
    assert sum(proto.id_deltas) == distribution.ids[-1]
    assert all(delta >= 1 for delta in proto.id_deltas[1:])


def test_hostile_differences_do_not_escape_the_check() -> None:
    """A delta of zero repeats an id, huge ones run past the vocabulary."""
    for deltas in ([5, 0], [5, 2**32 - 1], [2**32 - 1] * 32):
        weights = [WHOLE - len(deltas) + 1] + [1] * (len(deltas) - 1)
        made = convert.distribution_from_proto(common.Distribution(id_deltas=deltas, weights=weights))
        assert refused(made, "d", VOCAB).field == "d.id_deltas"


@given(st.integers(0, 2**21 - 1))
def test_a_guessed_token_costs_at_most_four_bytes(token: int) -> None:
    with_it, without = (common.Guess(position=9, first_id=3, tokens=t).ByteSize() for t in ([7, token], [7]))
    assert with_it - without <= 4
    assert convert.varint_bytes(token) == with_it - without


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_the_byte_count_is_what_protobuf_takes(ids: list[int]) -> None:
    payload, whole = convert.guess_bytes(common.Guess(position=1, tokens=ids))
    packed = common.Guess(tokens=ids).ByteSize()
    assert payload == packed - 1 - convert.varint_bytes(payload), "tag and length aside"
    assert whole == common.Guess(position=1, tokens=ids).ByteSize() + convert.FRAMING_BYTES


def test_the_varint_size_at_its_edges() -> None:
    assert [convert.varint_bytes(v) for v in (0, 1, 127, 128, 2**14 - 1, 2**14, 2**21 - 1, 2**21)] == [
        1, 1, 1, 2, 2, 3, 3, 4,
    ]  # fmt: skip


def costliest(entries: int, vocab: int) -> Distribution:
    """Evenly spread ids and weights: differences and weights all as large as they can be at once."""
    step = vocab // entries
    ids = tuple(step * (i + 1) - 1 for i in range(entries))
    return Distribution(ids, (WHOLE // entries,) * entries)


@pytest.mark.parametrize("entries", [24, 32])
def test_a_distribution_costs_at_most_two_hundred_bytes(entries: int) -> None:
    made = costliest(entries, VOCAB)
    worst = dataclasses.replace(made, weights=(WHOLE - sum(made.weights[1:]), *made.weights[1:]))
    worst.check("d", VOCAB)
    assert convert.distribution_to_proto(worst).ByteSize() <= 200


def test_random_distributions_over_the_whole_vocabulary_stay_in_the_budget() -> None:
    source = random.Random(0)
    largest = 0
    for _ in range(2000):
        ids = tuple(sorted(source.sample(range(VOCAB), 32)))
        raw = [source.expovariate(1.0) for _ in ids]
        weights = [max(1, int(w / sum(raw) * (WHOLE - 32))) for w in raw]
        weights[0] += WHOLE - sum(weights)
        made = Distribution(ids, tuple(weights))
        made.check("d", VOCAB)
        largest = max(largest, convert.distribution_to_proto(made).ByteSize())
    assert largest <= 200
