"""Answers in OpenAI's shapes, whole and in chunks; what speculation did for them in vLLM's."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from coordinator.api.http.answer import HttpAnswer, News
from coordinator.api.http.bodies import ChatBody, CompletionBody
from coordinator.sessions.session import Session, Token
from coordinator.sessions.stats import RequestStats
from coordinator.workers.target import Target
from outrider.protocol.speculation import FinishReason, TokenLogprobs

Json = dict[str, Any]
_REASONS = {FinishReason.LENGTH: "length"}  # all others have stopped


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What every part of one answer begins with."""

    kind: str  # chat.completion or text_completion
    answer_id: str
    created: int
    model: str
    fingerprint: str

    @classmethod
    def of(cls, replies: Replies, session: Session, model: str) -> ReplyHead:
        answer_id = f"{replies.prefix}-{session.record.session_id}"
        return cls(replies.kind, answer_id, int(time.time()), model, session.target.info.fingerprint)

    def whole(self, choices: list[Json], answer: HttpAnswer, per_prompt: int) -> Json:
        reply = self._reply(self.kind, choices)
        return reply | {"usage": usage(answer.sessions, per_prompt)} | metrics(answer.sessions)

    def chunk(self, choices: list[Json], **more: Any) -> Json:
        kind = f"{self.kind}.chunk" if self.kind == "chat.completion" else self.kind
        return self._reply(kind, choices) | more

    def _reply(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


def usage(sessions: Sequence[Session], per_prompt: int) -> Json:
    """Choices of the same prompt count it once."""
    first = sessions[::per_prompt]
    prompted = sum(len(session.record.request.prompt) for session in first)
    cached = sum(session.stats.cached_tokens for session in first)
    completed = sum(len(session.record.tokens) for session in sessions)
    return {
        "prompt_tokens": prompted,
        "completion_tokens": completed,
        "total_tokens": prompted + completed,
        "prompt_tokens_details": {"cached_tokens": min(prompted, cached)},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def metrics(sessions: Sequence[Session]) -> Json:
    """Of a single choice."""
    if len(sessions) != 1:
        return {}
    stats = sessions[0].stats
    return {
        "metrics": {
            "speculative_decoding": speculative_decoding(stats),
            "outrider": {
                "tokens_per_second": stats.tokens_per_second,
                "time_to_first_token_ms": stats.time_to_first_token_ms,
                "steps": stats.steps,
                "mean_gamma": stats.mean_gamma,
                "drafter": stats.drafter_kind,
                "plans": [{"plan": plan.label, "steps": tally.steps} for plan, tally in stats.taken],
                "bytes_per_accepted_token": stats.bytes_per_accepted_token,
                "failovers": stats.failovers,
                "drafter_losses": stats.drafter_losses,
                "seed": sessions[0].record.request.params.seed,
                "session_id": sessions[0].record.session_id,
            },
        }
    }


def speculative_decoding(stats: RequestStats) -> Json:
    """Acceptance as vLLM reports it per request.

    Our γ changes from step to step: `num_spec_tokens` is the longest guess
    that a step has checked, and the histogram ends there.
    """
    reached = [stats.drafts, *stats.accepted_per_position, 0]  # steps that accepted so many guesses or more
    return {
        "mean_acceptance_length": 1.0 + stats.accepted_tokens / stats.drafts if stats.drafts else 1.0,
        "draft_acceptance_rate": stats.acceptance_rate,
        "acceptance_histogram": [more - fewer for more, fewer in pairwise(reached)],
        "num_spec_steps": stats.drafts,
        "num_accepted_draft_tokens": stats.accepted_tokens,
        "num_draft_tokens": stats.draft_tokens,
        "num_spec_tokens": len(stats.accepted_per_position),
    }


class Replies(Protocol):
    """How the answers to one kind of request are told. Made for each answer: streams remember what they have said."""

    kind: str
    prefix: str

    def choice(self, number: int, session: Session, tokens: Sequence[Token]) -> Json:
        """A whole one."""
        ...

    def parts(self, news: News, session: Session) -> list[Json]:
        """What a stream says of this choice now; after its last tokens, the last of them gives the reason."""
        ...


class ChatReplies:
    kind = "chat.completion"
    prefix = "chatcmpl"

    def __init__(self, body: ChatBody, target: Target) -> None:
        self._body = body
        self._target = target
        self._greeted: set[int] = set()

    def choice(self, number: int, session: Session, tokens: Sequence[Token]) -> Json:
        return {
            "index": number,
            "message": {"role": "assistant", "content": _text(tokens) + session.rest.text, "refusal": None},
            "logprobs": self._logprobs(tokens),
            "finish_reason": _reason(session),
        }

    def parts(self, news: News, session: Session) -> list[Json]:
        parts = []
        if news.choice not in self._greeted:
            self._greeted.add(news.choice)
            parts.append(_delta(news.choice, {"role": "assistant", "content": "", "refusal": None}))
        written = _text(news.tokens) if news.tokens else session.rest.text
        logprobs = self._logprobs(news.tokens)
        if written or logprobs or (self._body.show and news.tokens):
            part = _delta(news.choice, {"content": written}, logprobs)
            parts.append(part | _shown(self._body, session, news.tokens))
        if not news.tokens:
            parts.append(_delta(news.choice, {}, finish_reason=_reason(session)))
        return parts

    def _logprobs(self, tokens: Sequence[Token]) -> Json | None:
        found = [(token.token, token.logprobs) for token in tokens if token.logprobs is not None]
        return {"content": [_logprob(self._target, *each) for each in found], "refusal": None} if found else None


def _delta(number: int, delta: Json, logprobs: Json | None = None, finish_reason: str | None = None) -> Json:
    return {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprob(target: Target, token: int, known: TokenLogprobs) -> Json:
    best = zip(known.top_ids, known.top_logprobs, strict=True)
    return {
        **_named(target, token, known.logprob),
        "top_logprobs": [_named(target, other, logprob) for other, logprob in best],
    }


def _named(target: Target, token: int, logprob: float) -> Json:
    data = target.token_bytes(token)
    return {"token": data.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}


class CompletionReplies:
    kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, body: CompletionBody, target: Target) -> None:
        self._body = body
        self._target = target
        self._echoed: set[int] = set()
        self._written: Counter[int] = Counter()  # characters

    def choice(self, number: int, session: Session, tokens: Sequence[Token]) -> Json:
        text = self._echo(session) + _text(tokens) + session.rest.text
        return self._choice(number, text, _reason(session), self._logprobs(tokens, 0))

    def parts(self, news: News, session: Session) -> list[Json]:
        parts = []
        if self._body.echo and news.choice not in self._echoed:
            self._echoed.add(news.choice)
            parts.append(self._choice(news.choice, self._echo(session), None))
        text = _text(news.tokens) if news.tokens else session.rest.text
        logprobs = self._logprobs(news.tokens, self._written[news.choice])
        self._written[news.choice] += len(text)
        reason = None if news.tokens else _reason(session)
        if text or logprobs or reason or self._body.show:
            part = self._choice(news.choice, text, reason, logprobs)
            parts.append(part | _shown(self._body, session, news.tokens))
        return parts

    def _choice(self, number: int, text: str, finish_reason: str | None, logprobs: Json | None = None) -> Json:
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _echo(self, session: Session) -> str:
        return self._target.decode(session.record.request.prompt) if self._body.echo else ""

    def _logprobs(self, tokens: Sequence[Token], offset: int) -> Json | None:
        """`offset`: characters of the answer before these tokens."""
        found = [(token, token.logprobs) for token in tokens if token.logprobs is not None]
        if not found:
            return None
        reply: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, known in found:
            best = zip(known.top_ids, known.top_logprobs, strict=True)
            reply["tokens"].append(_readable(self._target, token.token))
            reply["token_logprobs"].append(_finite(known.logprob))
            reply["top_logprobs"].append({_readable(self._target, other): _finite(logprob) for other, logprob in best})
            reply["text_offset"].append(offset)
            offset += len(token.text)
        return reply


def _readable(target: Target, token: int) -> str:
    """Bytes that are no text by themselves are told apart."""
    data = target.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _reason(session: Session) -> str:
    return _REASONS.get(session.record.finish_reason, "stop")


def _text(tokens: Sequence[Token]) -> str:
    return "".join(token.text for token in tokens)


def _finite(logprob: float) -> float:
    """JSON has no infinity; this is what OpenAI writes for what is all but impossible."""
    return max(logprob, -9999.0)


def _shown(body: ChatBody | CompletionBody, session: Session, tokens: Sequence[Token]) -> Json:
    """Which tokens were guessed, and how the session is drafted now."""
    if not body.show:
        return {}
    return {
        "speculation": {
            "kinds": [token.kind.name.lower() for token in tokens],
            "characters": [len(token.text) for token in tokens],
            "token_ids": [token.token for token in tokens],
            "plan": session.plan.label,
            "gamma": session.plan.gamma,
        }
    }
