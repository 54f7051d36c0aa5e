"""Replies to chats without tools, whole and in chunks; formatters of other chats build on this one."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.api.http import responses
from coordinator.api.http.bodies import ChatOptions
from coordinator.api.http.replies import Replies, reason_of, speculation_of, text_of
from coordinator.sessions.output import Token
from coordinator.sessions.session import Session


class ChatReplies(Replies[ChatOptions]):
    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def _choice(self, number: int, session: Session, tokens: Sequence[Token]) -> responses.ChatChoice:
        return {
            "index": number,
            "message": self._message(number, session, tokens),
            "logprobs": self._logprobs(tokens),
            "finish_reason": self._reason(number, session),
        }

    def _parts(self, number: int, session: Session, tokens: Sequence[Token]) -> list[responses.ChatChunkChoice]:
        parts = []
        if not self._written:  # all choices, in their order: OpenAI's client appends each at its first chunk
            begun: responses.Delta = {"role": "assistant", "content": "", "refusal": None}
            parts = [_delta(each, begun) for each in range(self._body.choices)]
        self._written[number] += 1
        deltas = self._deltas(number, session, tokens)
        logprobs = self._logprobs(tokens)
        if not deltas and (logprobs or (self._body.show and tokens)):
            deltas = [{"content": ""}]
        said = [_delta(number, delta) for delta in deltas]
        if said:
            said[0]["logprobs"] = logprobs
            if self._body.show:
                said[0]["speculation"] = speculation_of(session, tokens)
        parts += said
        if not tokens:
            parts.append(_delta(number, {}, self._reason(number, session)))
        return parts

    def _message(self, number: int, session: Session, tokens: Sequence[Token]) -> responses.AnswerMessage:
        return {"role": "assistant", "content": text_of(tokens) + session.output.rest.text, "refusal": None}

    def _deltas(self, number: int, session: Session, tokens: Sequence[Token]) -> Sequence[responses.Delta]:
        """Return what new tokens add to a message; without tokens what its end adds."""
        text = text_of(tokens) if tokens else session.output.rest.text
        return [{"content": text}] if text else []

    def _reason(self, number: int, session: Session) -> responses.FinishName:
        return reason_of(session)

    def _logprobs(self, tokens: Sequence[Token]) -> responses.ChatLogprobs | None:
        content: list[responses.ContentLogprob] = [
            {
                **self._logprob(token.token, known.logprob),
                "top_logprobs": [self._logprob(*each) for each in zip(known.top_ids, known.top_logprobs, strict=True)],
            }
            for token in tokens
            if (known := token.logprobs) is not None
        ]
        return {"content": content, "refusal": None} if content else None

    def _logprob(self, token: int, logprob: float) -> responses.TopLogprob:
        data = self._target.token_bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


def _delta(number: int, it: responses.Delta, reason: responses.FinishName | None = None) -> responses.ChatChunkChoice:
    return {"index": number, "delta": it, "logprobs": None, "finish_reason": reason}
