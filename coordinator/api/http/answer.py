"""One HTTP request's sessions: prepared, begun, and followed together."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, replace

from coordinator.api.http.bodies import ChatBody, CompletionBody, GenerationBody, ResponseFormat
from coordinator.api.preprocess import prepare
from coordinator.persistence.session_record import SessionRequest
from coordinator.sessions.session import Session, Token
from coordinator.sessions.session_manager import SessionManager
from coordinator.settings import CoordinatorSettings
from coordinator.workers.target import Target
from outrider.protocol.errors import InvalidRequest, NotFound
from outrider.protocol.sampling_params import MAX_SEED
from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2 as pb

CHAT_TOKENS = 1_024  # of an answer, where nothing is said and the context leaves as many
_SEED_BITS = 53  # of a drawn one: what every reader of JSON can say again
_ROLES = {"developer": "system"}


@dataclass(frozen=True, slots=True)
class News:
    """What one choice has to say; with no tokens: it is complete."""

    choice: int
    tokens: Sequence[Token]


class HttpAnswer:
    """All choices of a request while they are made."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        self.sessions = sessions

    async def news(self) -> AsyncGenerator[News, None]:
        """Until all choices are complete. Raises the error that ends one of them."""
        at = dict.fromkeys(range(len(self.sessions)), 0)  # tokens told, of the choices that are not complete
        stirred = asyncio.Event()
        with contextlib.ExitStack() as stack:
            for session in self.sessions:
                stack.enter_context(session.watched(stirred))
            while at:
                stirred.clear()
                for choice in list(at):
                    session = self.sessions[choice]
                    if tokens := session.read(at[choice]):
                        at[choice] += len(tokens)
                        stirred.set()
                        yield News(choice, tokens)
                    elif session.ended:
                        del at[choice]
                        if session.error is not None:
                            raise session.error
                        yield News(choice, ())
                if at:
                    await stirred.wait()


@contextlib.asynccontextmanager
async def begun(
    sessions: SessionManager, requests: Sequence[SessionRequest], target: Target, key: str
) -> AsyncIterator[HttpAnswer]:
    """Sessions for all requests; left off when nobody follows them any more."""
    with contextlib.ExitStack() as stack:
        running: list[Session] = []
        for number, request in enumerate(requests):
            with sessions.admission():
                session = await sessions.begin(request, target, f"{key}/{number}" if key and number else key)
            stack.enter_context(sessions.followed(session))
            running.append(session)
        await asyncio.gather(*(session.opened() for session in running))
        yield HttpAnswer(running)


async def requests_of(
    body: ChatBody | CompletionBody, target: Target, settings: CoordinatorSettings
) -> list[SessionRequest]:
    """One per choice, those of a prompt together; through the same checks as a request over gRPC."""
    name = served_name(target, settings)
    if body.model not in (None, "", name):
        raise NotFound(f"there is no model {body.model!r} here", field="model", value=body.model, limit=name)
    count = body.choices * (len(body.prompts) if isinstance(body, CompletionBody) else 1)
    if count > settings.max_request_sessions:
        raise InvalidRequest.of("n", f"{count} answers in all", f"at most {settings.max_request_sessions} a request")
    default = CHAT_TOKENS if isinstance(body, ChatBody) else None
    found: list[SessionRequest] = []
    for request in _inputs(body):
        request.params.CopyFrom(_params(body))
        request.speculation.CopyFrom(_speculation(body))
        request.cache_salt = body.cache_salt or ""
        prepared = await prepare(request, target, settings, default_tokens=default)
        prepared = replace(prepared, drawn_seed=body.seed is None)
        found += _choices(prepared, body.choices)
    return found


def served_name(target: Target, settings: CoordinatorSettings) -> str:
    return settings.served_model_name or target.info.name


def _choices(request: SessionRequest, count: int) -> list[SessionRequest]:
    seed = request.params.seed
    assert seed is not None
    return [
        replace(request, params=request.params.with_seed((seed + number) % (MAX_SEED + 1))) for number in range(count)
    ]


def _inputs(body: ChatBody | CompletionBody) -> list[pb.GenerateRequest]:
    if isinstance(body, CompletionBody):
        return [
            pb.GenerateRequest(prompt=prompt)
            if isinstance(prompt, str)
            else pb.GenerateRequest(tokens=pb.TokenIds(ids=prompt))
            for prompt in body.prompts
        ]
    messages = [
        pb.ChatMessage(role=_ROLES.get(message.role, message.role), content=message.text) for message in body.messages
    ]
    return [pb.GenerateRequest(chat=pb.Chat(messages=messages))]


def _params(body: ChatBody | CompletionBody) -> common.SamplingParams:
    params = common.SamplingParams(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=None if body.top_k is None else max(0, body.top_k),
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
        seed=(secrets.randbits(_SEED_BITS) if body.seed is None else body.seed) % (MAX_SEED + 1),
        stop=body.stops,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        max_tokens=body.limit,
        logprobs=body.num_logprobs,
    )
    if body.speculation is not None and body.speculation.verification is not None:
        params.verification = common.Verification.Value(f"VERIFICATION_{body.speculation.verification.upper()}")
    _constrain(params, body.response_format)
    return params


def _constrain(params: common.SamplingParams, wanted: ResponseFormat | None) -> None:
    if wanted is None or wanted.type == "text":
        return
    if wanted.regex is not None:
        params.grammar.regex = wanted.regex
    elif wanted.json_schema is not None and wanted.json_schema.schema_ is not None:
        params.grammar.json_schema = json.dumps(wanted.json_schema.schema_)
    else:
        params.grammar.json_object = True


def _speculation(body: GenerationBody) -> pb.Speculation:
    wish = body.speculation
    if wish is None:
        return pb.Speculation()
    return pb.Speculation(
        gamma=wish.gamma,
        branches=wish.branches,
        ahead=wish.ahead,
        patience_us=wish.patience_us,
        drafter=wish.drafter or "",
    )
