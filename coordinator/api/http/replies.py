"""Replies in OpenAI's format, whole and in chunks, with speculation metrics in vLLM's format."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from coordinator.api.http.answer import HttpAnswer, Progress
from coordinator.api.http.bodies import ChatBody, CompletionBody
from coordinator.sessions.output import Token
from coordinator.sessions.session import Session
from coordinator.sessions.stats import RequestStats
from coordinator.workers.target import Target
from outrider.protocol.speculation import FinishReason, TokenLogprobs

Json = dict[str, Any]
_REASONS = {FinishReason.LENGTH: "length"}  # all others are "stop"


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """Fields that all parts of one reply share."""

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
    """Return the token usage; choices of the same prompt count it once."""
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
    """Return speculation metrics, for replies with a single choice."""
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
    """Return the acceptance of a request as vLLM reports it.

    γ changes from step to step, so `num_spec_tokens` is the longest guess that
    a step has checked, and the histogram ends there.
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


class Replies(Protocol):
    """Formatter of the replies to one kind of request. Each answer has its own, since streams keep state."""

    kind: str
    prefix: str

    def choice(self, number: int, session: Session, tokens: Sequence[Token]) -> Json:
        """Return a complete choice."""
        ...

    def parts(self, update: Progress, session: Session) -> list[Json]:
        """Return the chunks for new tokens of a choice; the last chunk of a choice has its finish reason."""
        ...


class ChatReplies:
    """Formatter of chat completions."""

    kind = "chat.completion"
    prefix = "chatcmpl"

    def __init__(self, body: ChatBody, target: Target) -> None:
        self._body = body
        self._target = target
        self._role_sent: set[int] = set()

    def choice(self, number: int, session: Session, tokens: Sequence[Token]) -> Json:
        return {
            "index": number,
            "message": {"role": "assistant", "content": _text(tokens) + session.output.rest.text, "refusal": None},
            "logprobs": self._logprobs(tokens),
            "finish_reason": _reason(session),
        }

    def parts(self, update: Progress, session: Session) -> list[Json]:
        parts = []
        if update.choice not in self._role_sent:
            self._role_sent.add(update.choice)
            parts.append(_delta(update.choice, {"role": "assistant", "content": "", "refusal": None}))
        written = _text(update.tokens) if update.tokens else session.output.rest.text
        logprobs = self._logprobs(update.tokens)
        if written or logprobs or (self._body.show and update.tokens):
            part = _delta(update.choice, {"content": written}, logprobs)
            parts.append(part | _speculation(self._body, session, update.tokens))
        if not update.tokens:
            parts.append(_delta(update.choice, {}, finish_reason=_reason(session)))
        return parts

    def _logprobs(self, tokens: Sequence[Token]) -> Json | None:
        known = [(token.token, token.logprobs) for token in tokens if token.logprobs is not None]
        return {"content": [_logprob(self._target, *each) for each in known], "refusal": None} if known else None


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
    """Formatter of text completions."""

    kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, body: CompletionBody, target: Target) -> None:
        self._body = body
        self._target = target
        self._echoed: set[int] = set()
        self._written: Counter[int] = Counter()  # characters

    def choice(self, number: int, session: Session, tokens: Sequence[Token]) -> Json:
        text = self._echo(session) + _text(tokens) + session.output.rest.text
        return self._choice(number, text, _reason(session), self._logprobs(tokens, 0))

    def parts(self, update: Progress, session: Session) -> list[Json]:
        parts = []
        if self._body.echo and update.choice not in self._echoed:
            self._echoed.add(update.choice)
            parts.append(self._choice(update.choice, self._echo(session), None))
        text = _text(update.tokens) if update.tokens else session.output.rest.text
        logprobs = self._logprobs(update.tokens, self._written[update.choice])
        self._written[update.choice] += len(text)
        reason = None if update.tokens else _reason(session)
        if text or logprobs or reason or self._body.show:
            part = self._choice(update.choice, text, reason, logprobs)
            parts.append(part | _speculation(self._body, session, update.tokens))
        return parts

    def _choice(self, number: int, text: str, finish_reason: str | None, logprobs: Json | None = None) -> Json:
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _echo(self, session: Session) -> str:
        return self._target.decode(session.record.request.prompt) if self._body.echo else ""

    def _logprobs(self, tokens: Sequence[Token], offset: int) -> Json | None:
        """Return the log probabilities; `offset` is the number of characters before these tokens."""
        known = [(token, token.logprobs) for token in tokens if token.logprobs is not None]
        if not known:
            return None
        reply: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, logprobs in known:
            best = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
            reply["tokens"].append(_readable(self._target, token.token))
            reply["token_logprobs"].append(_finite(logprobs.logprob))
            reply["top_logprobs"].append({_readable(self._target, other): _finite(logprob) for other, logprob in best})
            reply["text_offset"].append(offset)
            offset += len(token.text)
        return reply


def _readable(target: Target, token: int) -> str:
    """Return a token as text, with a prefix for bytes that are not valid text by themselves."""
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
    """Return the log probability, at least −9999: JSON has no infinity, and OpenAI uses this value."""
    return max(logprob, -9999.0)


def _speculation(body: ChatBody | CompletionBody, session: Session, tokens: Sequence[Token]) -> Json:
    """Return the kinds of the tokens and the present plan, if the request asks for them."""
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
