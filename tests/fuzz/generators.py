"""Inputs by number: the same seed, edge and number make the same case."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import drafter_pb2 as draft
from outrider.v1 import verifier_pb2 as verify
from tests.fuzz import corpus, http1, protobuf
from tests.fuzz.case import ABANDON, CANCEL, HALF_CLOSE, Case
from tests.fuzz.corpus import Known
from tests.fuzz.h2 import connections
from tests.fuzz.shared import on_shared_stream
from tests.fuzz.values import SESSION

EDGES = ("http", "grpc", "verify", "draft", "workers")
PUBLIC = "/outrider.v1.Outrider/"
VERIFY = "/outrider.v1.Verifier/Verify"
DRAFT = "/outrider.v1.Drafter/Draft"
REGISTER = "/outrider.v1.Registry/Register"
_RAW = 0.06  # of the inputs of a gRPC edge: bytes on a raw connection
_OTHER = 0.04  # calls of methods of other services, or of none
_MANY_TOKENS = 64


def make(edge: str, seed: int, number: int, known: Known) -> Case:
    rng = random.Random(f"{seed}/{edge}/{number}")
    return on_shared_stream(random.Random(f"{seed}/{edge}/{number}/shared"), _MAKERS[edge](rng, known))


def _times(rng: random.Random) -> int:
    return rng.choices((0, 1, 2, 3, 8), (0.06, 0.5, 0.25, 0.14, 0.05))[0]


def _written(rng: random.Random, message: Any, times: int | None = None) -> bytes:
    """Return a message with mutated structure, one in six with mutated bytes as well."""
    protobuf.mutate(rng, message, _times(rng) if times is None else times)
    data = protobuf.encoded(message)
    return protobuf.spoil(rng, data) if rng.random() < 0.17 else data


def _ends(rng: random.Random) -> str:
    return rng.choices((HALF_CLOSE, CANCEL, ABANDON), (0.85, 0.1, 0.05))[0]


# Edges.


def _grpc(rng: random.Random, known: Known) -> Case:
    kind = rng.random()
    if kind < _RAW:
        return _connection(
            rng, "grpc", PUBLIC + "Generate", protobuf.encoded(corpus.pick(rng, corpus.generate_requests()))
        )
    if kind < _RAW + _OTHER:
        return _strange_call(rng, "grpc", PUBLIC)
    requests = corpus.generate_requests()
    if kind < 0.7:
        request = corpus.pick(rng, requests)
        data = _written(rng, request)
        return Case("grpc", "Generate", PUBLIC + "Generate", (data,), CANCEL if rng.random() < 0.9 else ABANDON)
    method, message = corpus.pick(rng, corpus.public())
    prelude = b""
    if message.DESCRIPTOR.fields_by_name.get("session_id") is not None and rng.random() < 0.6:
        prelude = protobuf.encoded(corpus.pick(rng, requests[:12]))
    return Case("grpc", method, PUBLIC + method, (_written(rng, message),), CANCEL, prelude=prelude)


def _verify(rng: random.Random, known: Known) -> Case:
    opening = corpus.pick(rng, corpus.verify_openings())
    if rng.random() < _RAW:
        first = verify.VerifyRequest(open=opening)
        return _connection(rng, "verify", VERIFY, protobuf.encoded(first))
    if rng.random() < _OTHER:
        return _strange_call(rng, "verify", "/outrider.v1.Verifier/")
    position = opening.prompt_length + rng.randrange(3)
    said: list[Any] = [verify.VerifyRequest(open=opening)]
    for _ in range(rng.randrange(7)):
        if rng.random() < 0.7:
            said.append(verify.VerifyRequest(guess=corpus.pick(rng, corpus.guesses(known, position))))
        else:
            said.append(verify.VerifyRequest(steer=corpus.pick(rng, corpus.verify_steers())))
    return Case("verify", "Verify", VERIFY, _stream(rng, said), _ends(rng))


def _draft(rng: random.Random, known: Known) -> Case:
    opening = corpus.pick(rng, corpus.draft_openings(known))
    if rng.random() < _RAW:
        return _connection(rng, "draft", DRAFT, protobuf.encoded(draft.DraftRequest(open=opening)))
    if rng.random() < _OTHER:
        return _strange_call(rng, "draft", "/outrider.v1.Drafter/")
    said: list[Any] = [draft.DraftRequest(open=opening)]
    position = len(opening.tokens)
    for _ in range(rng.randrange(7)):
        if rng.random() < 0.75:
            commit = corpus.pick(rng, corpus.commits(known, position))
            said.append(draft.DraftRequest(committed=commit))
            position += len(commit.tokens)
        else:
            said.append(draft.DraftRequest(steer=corpus.pick(rng, corpus.draft_steers())))
    return Case("draft", "Draft", DRAFT, _stream(rng, said), _ends(rng))


def _stream(rng: random.Random, messages: list[Any]) -> tuple[bytes, ...]:
    """Mutate one or two messages, the opening one in a third of cases: after an invalid one nothing is read."""
    changed = rng.sample(range(len(messages)), min(len(messages), rng.choice((1, 1, 2))))
    if len(messages) > 1 and rng.random() < 0.66:
        changed = [number for number in changed if number] or [rng.randrange(1, len(messages))]
    data = [
        _written(rng, message) if number in changed else protobuf.encoded(message)
        for number, message in enumerate(messages)
    ]
    return tuple(protobuf.reorder(rng, data) if rng.random() < 0.15 else data)


def _workers(rng: random.Random, known: Known) -> Case:
    return rng.choices((_registration, _false_verifier, _false_drafter), (0.5, 0.3, 0.2))[0](rng, known)


def _registration(rng: random.Random, known: Known) -> Case:
    """Return the registration of a worker, maybe of another model, that leaves after the first answer."""
    if rng.random() < 2 * _RAW:
        worker = corpus.pick(rng, corpus.workers(known, pb.ROLE_DRAFTER))
        return _connection(rng, "workers", REGISTER, protobuf.encoded(pb.RegisterRequest(worker=worker)))
    role = rng.choice((pb.ROLE_VERIFIER, pb.ROLE_DRAFTER, pb.ROLE_DRAFTER))
    worker = corpus.pick(rng, corpus.workers(known, role))
    worker.worker_id, worker.address = SESSION, f"127.0.0.1:{rng.randrange(1, 1_000)}"
    if rng.random() < 0.5:
        worker.model.vocabulary_digest = "another"
    said: list[Any] = [pb.RegisterRequest(worker=worker)]
    for _ in range(rng.randrange(4)):
        if rng.random() < 0.5:
            said.append(pb.RegisterRequest(vocabulary=corpus.pick(rng, corpus.vocabularies())))
        else:
            said.append(pb.RegisterRequest(worker=worker))
    return Case("workers", "Register", REGISTER, _stream(rng, said), _ends(rng))


def _false_verifier(rng: random.Random, known: Known) -> Case:
    """Return a verifier that registers properly, accepts a session and sends invalid answers."""
    model = common.ModelInfo()
    model.CopyFrom(known.target)
    said: list[Any] = [verify.VerifyReply(opened=verify.Opened(position=len(corpus.PROMPT), model=model))]
    said += [verify.VerifyReply(verdict=verdict) for verdict in corpus.verdicts(known)]
    if rng.random() < 0.2:
        refusal = common.Error(code="invalid_request", message="no", field="guess.position", value="1", limit="2")
        said.insert(rng.randrange(len(said)), verify.VerifyReply(refused=refusal, source=rng.randrange(3)))
    request = copy.deepcopy(corpus.generate_requests()[2])
    request.tokens.ids[:] = corpus.LURE
    request.speculation.ClearField("gamma")
    answers = {VERIFY: _stream(rng, said), "Probe": (_probe(rng),)}
    return Case("workers", "false verifier", VERIFY, (protobuf.encoded(request),), CANCEL, answers=answers)


def _false_drafter(rng: random.Random, known: Known) -> Case:
    said: list[Any] = [draft.DraftReply(opened=draft.DraftOpened(hidden_states=rng.random() < 0.3))]
    for _ in range(rng.randrange(1, 6)):
        position = len(corpus.PROMPT) + rng.randrange(3)
        said.append(draft.DraftReply(guess=corpus.pick(rng, corpus.guesses(known, position))))
    request = corpus.pick(rng, corpus.generate_requests()[:13])
    request.speculation.gamma = 4
    request.speculation.drafter = "fuzz"
    answers = {DRAFT: _stream(rng, said), "Probe": (_probe(rng),)}
    return Case("workers", "false drafter", DRAFT, (protobuf.encoded(request),), CANCEL, answers=answers)


def _probe(rng: random.Random) -> bytes:
    load = common.WorkerLoad(step_ms=1.0, cost=common.CostCurve(rows=[1, 8], ms=[1.0, 2.0]))
    return _written(rng, common.ProbeReply(load=load)) if rng.random() < 0.3 else b""


# Other calls.


def _strange_call(rng: random.Random, edge: str, service: str) -> Case:
    """Return a call of a missing method, or with messages of another type."""
    name = rng.choice(("GetModelInfo", "Probe", "GetTokenizer", "Nothing", "", "a/b", "\u00e9".encode().hex()))
    message = rng.choice((b"", rng.randbytes(9), protobuf.spoil(rng, b"\x0a\x03abc")))
    where = rng.choice((service, service, "/grpc.health.v1.Health/Check?", "/outrider.v1.Nobody/", "/"))
    if where.endswith("?"):
        return Case(edge, "health", where[:-1], (message,), HALF_CLOSE)
    return Case(edge, f"call {name!r}", where + name, (message,), HALF_CLOSE)


def _connection(rng: random.Random, edge: str, path: str, message: bytes) -> Case:
    name, pieces, complete = connections(rng, path, message.replace(SESSION.encode(), b"s" * len(SESSION)))
    return Case(edge, f"HTTP/2: {name}", "h2", pieces, HALF_CLOSE, complete)


def _http(rng: random.Random, known: Known) -> Case:
    name, method, pieces, complete = http1.make(rng)
    return Case("http", name, method, pieces, HALF_CLOSE, complete)


_MAKERS: dict[str, Callable[[random.Random, Known], Case]] = {
    "http": _http,
    "grpc": _grpc,
    "verify": _verify,
    "draft": _draft,
    "workers": _workers,
}


def asked_tokens(request: pb.GenerateRequest) -> int:
    """Return the requested length of the answer."""
    return request.params.max_tokens if request.params.HasField("max_tokens") else 256


def quick(messages: Sequence[bytes]) -> bool:
    """Return whether the answer is short enough to wait for its end."""
    try:
        return 0 < asked_tokens(pb.GenerateRequest.FromString(messages[0])) <= _MANY_TOKENS
    except Exception:
        return True  # rejected
