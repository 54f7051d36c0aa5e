"""Replies to one request in OpenAI's format, whole and in chunks, with speculation metrics in vLLM's format."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import accumulate, count, pairwise
from typing import Any, Generic, TypeVar

from coordinator.api.http import responses
from coordinator.api.http.answer import SILENCE_S, input_of, progress
from coordinator.api.http.bodies import ChatOptions, CompletionBody
from coordinator.api.preprocess import ClientRequest
from coordinator.sessions.output import MAX_READ, Token
from coordinator.sessions.session import Session
from coordinator.workers.target import Target
from outrider.base.aio import beside
from outrider.protocol.speculation import FinishReason, TokenLogprobs
from outrider.protocol.statistics import GenerationStats
from outrider.settings.coordinator import CoordinatorSettings

BodyT = TypeVar("BodyT", ChatOptions, CompletionBody)
Answering = AbstractAsyncContextManager[Sequence[Session]]


class Replies(ABC, Generic[BodyT]):
    """Formatter of the replies to one request. It has state: what a stream has sent of each choice."""

    prefix: str  # of ids
    kind: str
    chunk_kind: str
    prompts: Mapping[int, list[Token]] = {}  # by their numbers, if the answer tells of them

    def __init__(self, body: BodyT, target: Target) -> None:
        self._body: BodyT = body
        self._target = target
        self._written: Counter[int] = Counter()  # characters of each choice

    async def whole(self, answering: Answering, made: Callable[[dict[str, Any]], Any] = dict) -> Any:
        """Return the whole answer, as it is `made`. A large one is made beside the event loop."""
        async with answering as sessions:
            tokens: list[list[Token]] = [[] for _ in sessions]
            async with contextlib.aclosing(progress(sessions)) as updates:
                async for number, new in updates:
                    tokens[number] += new
            known = 1 + max(-1 if it is None else it for it in (self._body.num_logprobs, self._body.prompt_logprobs))
            size = (8 + 55 * known) * sum(map(len, (*tokens, *self.prompts.values())))  # of the JSON
            return await beside(size, self._whole, made, sessions, tokens)

    def _whole(self, made: Callable[[dict[str, Any]], Any], sessions: Sequence[Session], tokens: list[Any]) -> Any:
        told = self._head(self.kind, sessions[0]) | {"choices": [*map(self._choice, count(), sessions, tokens)]}
        return made(told | {"usage": usage(sessions, self._body.choices)} | metrics(sessions))

    async def chunks(self, answering: Answering) -> AsyncGenerator[dict[str, Any], None]:
        async with answering as sessions:
            head = self._head(self.chunk_kind, sessions[0])
            options = self._body.stream_options
            more: dict[str, Any] = {"usage": None} if options and options.include_usage else {}
            async with contextlib.aclosing(progress(sessions, SILENCE_S)) as updates:
                async for number, tokens in updates:
                    if number < 0:
                        yield {}
                        continue
                    if more and options and options.continuous_usage_stats:
                        more = {"usage": usage(sessions, self._body.choices)}
                    for part in self._echoed(number, sessions[number]):
                        yield head | {"choices": [part]} | more
                        await asyncio.sleep(0)  # others write, too
                    parts = self._parts(number, sessions[number], tokens)
                    for part in parts:
                        last = part is parts[-1] and not tokens and not more
                        yield head | {"choices": [part]} | (metrics(sessions) if last else more)
                        head.pop("prompt_token_ids", None)  # of chats
            if more:
                yield head | {"choices": [], "usage": usage(sessions, self._body.choices)} | metrics(sessions)

    def _head(self, kind: str, session: Session) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{session.record.session_id}",
            "object": kind,
            "created": int(time.time()),
            "model": self._target.served_name,
            "system_fingerprint": session.target.info.fingerprint,
        }

    def _details(self, session: Session, tokens: Sequence[Token], *, chunk: bool = True) -> responses.TokenDetails:
        """Return what is told of new tokens where it is asked for; with the first one, the ids of the prompt."""
        told: responses.TokenDetails = {"token_ids": [it.token for it in tokens]} if self._body.return_token_ids else {}
        begins = self._body.max_tokens == 0 or (tokens and tokens[0] is session.output.tokens[0])
        if told and begins and isinstance(self._body, CompletionBody):
            told["prompt_token_ids"] = [*session.record.request.prompt]
        if chunk and self._body.speculation and self._body.speculation.show:
            plan = session.drafting.control.plan
            told["speculation"] = {
                "kinds": [token.kind.name.lower() for token in tokens],
                "characters": [len(token.text) for token in tokens],
                "token_ids": [token.token for token in tokens],
                "plan": plan.label,
                "gamma": plan.gamma,
            }
        return told

    def _scored(self, number: int) -> responses.TokenDetails:
        """Return the log probabilities of a prompt's tokens by their ids, where they are asked for."""
        most = self._body.prompt_logprobs
        return {} if most is None else {"prompt_logprobs": [self._scores(it, most) for it in self.prompts[number]]}

    def _scores(self, token: Token, most: int) -> dict[str, responses.PromptLogprob] | None:
        if (known := token.logprobs) is None:
            return None
        ranks = {each: rank for rank, each in enumerate(known.top_ids, 1)}
        told = {token.token: known.logprob} | dict(zip(known.top_ids[:most], known.top_logprobs, strict=False))
        text = {each: self._target.token_bytes(each).decode(errors="replace") for each in told}
        return {str(it): {"logprob": told[it], "rank": ranks.get(it), "decoded_token": text[it]} for it in told}

    @abstractmethod
    def _choice(self, number: int, session: Session, tokens: Sequence[Token]) -> Any:
        """Return a complete choice."""

    def _echoed(self, number: int, session: Session) -> Iterable[Any]:
        """Yield the chunks that come before all others of a choice."""
        return ()

    @abstractmethod
    def _parts(self, number: int, session: Session, tokens: Sequence[Token]) -> Sequence[Any]:
        """Return the chunks for new tokens of a choice; without tokens the end, with the finish reason."""


def plan_completion(
    body: CompletionBody, target: Target, settings: CoordinatorSettings
) -> tuple[list[ClientRequest], Replies[CompletionBody]]:
    """Return one input per prompt, each with its own seed if the body has none, and the formatter of replies."""
    return [input_of(body, it, target, settings) for it in body.prompts], CompletionReplies(body, target)


class CompletionReplies(Replies[CompletionBody]):
    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def _choice(self, number: int, session: Session, tokens: Sequence[Token]) -> responses.CompletionChoice:
        said, text = self._said(session, tokens, ended=True)
        prompt = self.prompts.get(number // self._body.choices, []) if self._body.echo else []
        return {
            "index": number,
            "text": text_of(prompt) + text,
            "logprobs": self._logprobs([*prompt, *said], 0),
            "finish_reason": reason_of(session),
            **self._scored(number // self._body.choices),
            **self._details(session, said, chunk=False),
        }

    def _echoed(self, number: int, session: Session) -> Iterator[responses.CompletionChunkChoice]:
        prompt = self.prompts.get(number // self._body.choices, []) if number not in self._written else []
        for start in range(0, len(prompt), MAX_READ):
            read, at = prompt[start : start + MAX_READ], self._written[number]
            yield {"index": number, "text": text_of(read), "logprobs": self._logprobs(read, at), "finish_reason": None}
            self._written[number] += len(text_of(read))

    def _parts(self, number: int, session: Session, tokens: Sequence[Token]) -> list[responses.CompletionChunkChoice]:
        said, text = self._said(session, tokens, ended=not tokens)
        if tokens and not said:
            return []
        details, logprobs = self._details(session, said), self._logprobs(said, self._written[number])
        self._written[number] += len(text)
        if tokens and not (text or logprobs or details):
            return []
        reason = None if tokens else reason_of(session)
        return [{"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason, **details}]

    def _said(self, session: Session, tokens: Sequence[Token], *, ended: bool) -> tuple[Sequence[Token], str]:
        """Return new tokens and their text: none where the request is for its prompts alone."""
        if self._body.max_tokens == 0:
            return (), ""
        return tokens, text_of(tokens) + session.output.rest.text * ended

    def _logprobs(self, tokens: Sequence[Token], offset: int) -> responses.CompletionLogprobs | None:
        """Return the log probabilities; `offset` is the number of characters before these tokens."""
        if self._body.logprobs is None or not tokens:
            return None
        starts = accumulate((len(token.text) for token in tokens[:-1]), initial=offset)
        return {
            "tokens": [self._readable(token.token) for token in tokens],
            "token_logprobs": [None if it.logprobs is None else it.logprobs.logprob for it in tokens],
            "top_logprobs": [None if it.logprobs is None else self._best(it.token, it.logprobs) for it in tokens],
            "text_offset": [start + token.held for start, token in zip(starts, tokens, strict=True)],
        }

    def _best(self, token: int, known: TokenLogprobs) -> dict[str, float]:
        """Return the likeliest tokens by text, and the token itself; of equal texts it or else the likeliest counts."""
        best = {self._readable(token): known.logprob}
        for each, logprob in zip(known.top_ids[: self._body.logprobs], known.top_logprobs, strict=False):
            best.setdefault(self._readable(each), logprob)
        return best

    def _readable(self, token: int) -> str:
        """Return a token as text, with a prefix for bytes that are not valid text by themselves."""
        data = self._target.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def reason_of(session: Session) -> responses.FinishName:
    return "length" if session.record.finish_reason is FinishReason.LENGTH else "stop"


def call_id(session: Session, index: int) -> str:
    """Return the id of a call, the same whenever the answer is repeated. Templates of Mistral want 9 characters."""
    return hashlib.sha256(f"{session.record.session_id}/{index}".encode()).hexdigest()[:9]


def text_of(tokens: Sequence[Token]) -> str:
    return "".join(token.text for token in tokens)


def usage(sessions: Sequence[Session], per_prompt: int) -> responses.Usage:
    """Return the token usage; choices of the same prompt count it once."""
    first = sessions[::per_prompt]
    prompted = sum(len(session.record.request.prompt) for session in first)
    cached = sum(session.stats.cached_tokens for session in first)
    completed = sum(len(session.record.tokens) for session in sessions)
    return {
        "prompt_tokens": prompted,
        "completion_tokens": completed,
        "total_tokens": prompted + completed,
        "prompt_tokens_details": {"cached_tokens": min(prompted, cached), "cache_write_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": sum(session.output.thought for session in sessions)},
    }


def metrics(sessions: Sequence[Session]) -> dict[str, responses.AnswerMetrics]:
    """Return speculation metrics, for replies with a single choice."""
    if len(sessions) != 1:
        return {}
    stats, record = sessions[0].stats.values(), sessions[0].record
    own: Any = {name: getattr(stats, name) for name in responses.SessionMetrics.__annotations__ if hasattr(stats, name)}
    own |= {"plans": [{"plan": plan.plan, "steps": plan.steps} for plan in stats.plans]}
    own |= {"seed": record.request.params.seed, "session_id": record.session_id}
    return {"metrics": {"speculative_decoding": speculative_decoding(stats), "outrider": own}}


def speculative_decoding(stats: GenerationStats) -> responses.SpeculativeDecoding:
    """Return the acceptance of a request as vLLM reports it.

    γ changes from step to step: `num_spec_tokens` is the longest guess that a step checked, where the histogram ends.
    """
    reached = [stats.drafts, *stats.accepted_per_position, 0]  # steps that accepted at least i guesses
    return {
        "mean_acceptance_length": 1.0 + stats.accepted_tokens / stats.drafts if stats.drafts else 1.0,
        "draft_acceptance_rate": stats.acceptance_rate,
        "acceptance_histogram": [more - fewer for more, fewer in pairwise(reached)],
        "num_spec_steps": stats.drafts,
        "num_accepted_draft_tokens": stats.accepted_tokens,
        "num_draft_tokens": stats.draft_tokens,
        "num_spec_tokens": len(stats.accepted_per_position),
    }
