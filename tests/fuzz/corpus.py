"""Well-formed messages as seeds of mutations: every mode, grammar, option and kind of worker.

They are created once; `pick` returns a copy.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from outrider.protocol.speculation import WHOLE
from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import drafter_pb2 as draft
from outrider.v1 import verifier_pb2 as verify
from tests.cluster import ask
from tests.fuzz.values import SESSION

MessageT = TypeVar("MessageT")

PROMPT = [*range(40, 80)]
LURE = [*range(41, 81)]  # prompt of sessions for fake verifiers, as long as PROMPT
TEXT = "Two heads are better than one, and two heads are "
FEW = 4  # tokens of a well-formed request
SCHEMA = json.dumps(
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a"]}
)
LARK = 'start: item ("," item)*\nitem: /[a-z]+/\n'


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """Facts about the system under test that messages are built on."""

    target: common.ModelInfo
    greedy: tuple[int, ...]  # the target's output for PROMPT

    def to_json(self) -> str:
        return json.dumps({"target": self.target.SerializeToString().hex(), "greedy": self.greedy})


def pick(rng: random.Random, messages: Sequence[MessageT]) -> MessageT:
    return copy.deepcopy(rng.choice(messages))


@cache
def generate_requests() -> list[pb.GenerateRequest]:
    def few(prompt: Any, **more: Any) -> pb.GenerateRequest:
        return ask(prompt, **({"max_tokens": FEW, "ignore_eos": True} | more))

    chat = [("system", "Be brief."), ("user", "Name a river."), ("assistant", "Rhine."), ("user", "Another.")]
    requests = [
        few(TEXT, temperature=0.0),
        few(TEXT, seed=7),
        few(PROMPT, temperature=0.0, gamma=4),
        few(TEXT, chat=chat, seed=1),
        few(TEXT, seed=3, verification=common.VERIFICATION_REJECTION, gamma=3),
        few(TEXT, seed=3, verification=common.VERIFICATION_BLOCK, gamma=3),
        few(TEXT, seed=3, verification=common.VERIFICATION_COUPLED, gamma=5, patience_us=2_000),
        few(TEXT, temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, seed=11),
        few(TEXT, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, seed=5),
        few(TEXT, logit_bias={65: 5.0, 66: -100.0}, seed=5),
        few(TEXT, logprobs=3, temperature=0.0),
        few(TEXT, stop=["\n", "and"], stop_token_ids=[10, 11], seed=9),
        few(TEXT, key="the-same-again", seed=2),
        few(TEXT, grammar=common.Grammar(json_schema=SCHEMA), seed=4),
        few(TEXT, grammar=common.Grammar(json_object=True), seed=4),
        few(TEXT, grammar=common.Grammar(regex="[a-z]+( [0-9]{2,4})?"), temperature=0.0),
        few(TEXT, grammar=common.Grammar(lark=LARK), temperature=0.0, logprobs=1),
        few([0], max_tokens=1),
    ]
    requests[1].cache_salt = "a tenant's"
    requests[2].speculation.branches = 2
    requests[3].speculation.ahead = True
    requests[6].speculation.drafter = "suffix"
    return requests


@cache
def public() -> list[tuple[str, Any]]:
    """Return the other calls of clients; `SESSION` stands for an existing session."""
    return [
        ("Resume", pb.ResumeRequest(session_id=SESSION, from_position=0)),
        ("Resume", pb.ResumeRequest(session_id=SESSION, from_position=FEW, tail=[1, 2, 3, 4])),
        ("Resume", pb.ResumeRequest(session_id=SESSION, from_position=3, tail=[65, 66])),
        ("Cancel", pb.CancelRequest(session_id=SESSION)),
        ("GetModelInfo", common.GetModelInfoRequest()),
        ("GetServerInfo", pb.GetServerInfoRequest()),
    ]


def _params() -> list[common.SamplingParams]:
    filled = []
    for request in generate_requests():
        params = copy.deepcopy(request.params)
        if not params.HasField("seed"):
            params.seed = 1
        filled.append(params)
    return filled


def _steer(**fields: Any) -> verify.VerifySteering:
    return verify.VerifySteering(**({"gamma": 4, "draft_wait_us": 500} | fields))


@cache
def verify_openings() -> list[verify.OpenVerify]:
    openings = [
        verify.OpenVerify(
            session_id=SESSION, epoch=1, tokens=PROMPT, prompt_length=len(PROMPT), params=params, steer=_steer()
        )
        for params in _params()
    ]
    openings.append(verify.OpenVerify(**_opening(tokens=[*PROMPT, 65, 66], epoch=7)))
    openings.append(verify.OpenVerify(**_opening(), hidden_states=True, cache_salt="a tenant's"))
    return openings


def _opening(**fields: Any) -> dict[str, Any]:
    params = common.SamplingParams(temperature=0.0, seed=1, max_tokens=16, ignore_eos=True)
    given = {"session_id": SESSION, "epoch": 1, "tokens": PROMPT, "prompt_length": len(PROMPT), "params": params}
    return given | {"steer": _steer()} | fields


@cache
def guesses(known: Known, position: int) -> list[common.Guess]:
    """Return guesses at a position and after it: chains, trees, a pass, some with probabilities, some right."""
    at = position - len(PROMPT)
    right = [*known.greedy[at : at + 4]] or [65]
    whole = [common.Distribution(id_deltas=[5, 60, 1], weights=[WHOLE - 300, 200, 100]) for _ in range(3)]
    return [
        common.Guess(position=position, first_id=1, tokens=right, draft_us=900, source=1),
        common.Guess(position=position + len(right), first_id=9, parent=len(right), tokens=[7, 8], source=1),
        common.Guess(position=position, first_id=20, tokens=[right[0], 7, 8, 9], parents=[0, 1, 1, 2], source=2),
        common.Guess(position=position, first_id=40),
        common.Guess(position=position, first_id=50, tokens=[5, 65, 66], draft_probs=whole),
    ]


@cache
def verify_steers() -> list[verify.VerifySteering]:
    return [
        _steer(),
        _steer(gamma=0),
        _steer(gamma=8, nodes=12),
        verify.VerifySteering(hidden_states=True),
        verify.VerifySteering(draft_wait_us=0),
    ]


@cache
def draft_steers() -> list[draft.DraftSteering]:
    return [
        draft.DraftSteering(gamma=4),
        draft.DraftSteering(gamma=0),
        draft.DraftSteering(gamma=8, branches=3, nodes=12, eager=True),
        draft.DraftSteering(nodes=0),
    ]


@cache
def draft_openings(known: Known) -> list[draft.OpenDraft]:
    more = {"vocab_size": known.target.vocab_size, "vocabulary_digest": known.target.vocabulary_digest}
    ends = {"eos_token_ids": known.target.eos_token_ids}
    openings = [
        draft.OpenDraft(**_opening(params=params, steer=draft.DraftSteering(gamma=4)), **more, **ends)
        for params in _params()
    ]
    openings.append(
        draft.OpenDraft(
            **_opening(steer=draft.DraftSteering(gamma=8, branches=3, nodes=20, eager=True)), **more, **ends
        )
    )
    return openings


@cache
def commits(known: Known, position: int) -> list[draft.Committed]:
    at = position - len(PROMPT)
    tokens = [*known.greedy[at : at + 3]]
    states = common.HiddenStates(position=position, width=4, rows=bytes(8 * len(tokens)))
    return [
        draft.Committed(position=position, tokens=tokens),
        draft.Committed(position=position, tokens=[9]),
        draft.Committed(position=position, tokens=tokens, hidden_states=states),
        draft.Committed(position=position, hidden_states=states),
    ]


@cache
def workers(known: Known, role: Any, address: str = "127.0.0.1:1") -> list[pb.Worker]:
    """Return registrations: a matching drafter and verifier, one of another model, one that drains."""
    load = common.WorkerLoad(
        sessions=1, kv_tokens_total=4096, step_ms=2.0, cost=common.CostCurve(rows=[1, 8, 64], ms=[2.0, 2.5, 9.0])
    )
    model = common.ModelInfo()
    model.CopyFrom(known.target)
    common_fields: dict[str, Any] = {"address": address, "capacity": 64, "load": load, "machine": "0123456789abcdef"}
    if role == pb.ROLE_DRAFTER:
        model.fingerprint, model.name = "fuzz", "fuzz"
    else:
        load.kv_tokens_idle = 100
    return [
        pb.Worker(worker_id="fuzz", role=role, kind="fuzz", model=model, **common_fields),
        pb.Worker(worker_id="fuzz", role=role, kind="fuzz", model=model, hidden_states=True, **common_fields),
        pb.Worker(worker_id="fuzz", role=role, kind="fuzz", model=model, draining=True, **common_fields),
    ]


@cache
def vocabularies() -> list[pb.Vocabulary]:
    return [
        pb.Vocabulary(first_id=0, tokens=[b"a", b"b", "\u0120".encode()]),
        pb.Vocabulary(first_id=3, tokens=[b"c", b"\xff\xfe", "\u00e9".encode()], last=True),
        pb.Vocabulary(first_id=0, last=True),
    ]


@cache
def verdicts(known: Known) -> list[verify.Verdict]:
    """Return a complete answer to PROMPT with FEW tokens in three steps."""
    timings = verify.VerifyTimings(wait_us=10, step_us=1000, sessions=1, batch_tokens=3, session_tokens=3)
    tokens, at, said = list(known.greedy[:FEW]), len(PROMPT), []
    for size in (1, 2, 1):
        part, tokens = tokens[:size], tokens[size:]
        said.append(
            verify.Verdict(
                position=at,
                tokens=part,
                accepted=size - 1,
                last=verify.TOKEN_KIND_BONUS if size > 1 else verify.TOKEN_KIND_PLAIN,
                proposed=size - 1,
                timings=timings,
                nodes=size - 1,
                logprobs=[verify.TokenLogprobs(logprob=-0.5, top_ids=[1, 2], top_logprobs=[-0.5, -2.0])] * size,
                sources=[verify.SourceTally(source=1, proposed=size - 1, accepted=size - 1)] if size > 1 else [],
                hidden_states=common.HiddenStates(position=at, width=4, rows=bytes(8 * size)) if size == 2 else None,
            )
        )
        at += size
    said[-1].finish_reason = verify.FINISH_REASON_LENGTH
    return said
