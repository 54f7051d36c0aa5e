"""Resumption of a session from its record: what its client has is appended, and its end is found.

A running session ends by its verifier's verdict or a stop string. Records are checked here: their coordinator may have
failed before it stored the end, or the client sent tokens with Resume. An output that has ended is not continued.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.persistence.session_record import SessionRecord
from coordinator.sessions.detokenizer import TextStream
from coordinator.workers.target import Target
from outrider.base.aio import LARGE_BYTES, beside
from outrider.protocol.checks import check_tokens
from outrider.protocol.errors import Conflict, InvalidRequest
from outrider.protocol.speculation import FinishReason, TokenKind

TOKEN_BYTES = 8  # of a request that takes as long as the text of a token


async def finish_ended(record: SessionRecord, target: Target) -> None:
    """Finish a record whose output has ended and drop tokens after the end; raise for tokens against its grammar."""
    if record.finished or not record.tokens:
        return
    size = TOKEN_BYTES * len(record.tokens) if record.request.params.grammar is None else LARGE_BYTES
    if (end := await beside(size, _end, record, target)) is not None:
        length, record.finish_reason = end
        record.cut(length)


def _end(record: SessionRecord, target: Target) -> tuple[int, FinishReason] | None:
    """Return the length and the reason of the first end, checked in the order of a verifier's step."""
    params = record.request.params
    complete = None if params.grammar is None else target.grammars.compile(params).advance(record.tokens)
    stops = params.ending_tokens(target.info.eos_token_ids)
    text = TextStream(target.decode, record.request.prompt, params.stop)
    for count, token in enumerate(record.tokens, start=1):
        stopped = bool(params.stop) and bool(text.add(token).stop)
        if token in stops or count == complete or stopped:
            return count, FinishReason.STOP
        if count == params.max_tokens:
            return count, FinishReason.LENGTH
    return None


def append_tail(record: SessionRecord, position: int, tail: Sequence[int], target: Target, *, closed: bool) -> None:
    """Append tokens that the client has and the record lacks, in rejection and block mode; raise if it is `closed`.

    There they cannot be generated again. In the other modes they are, and the client's tokens are ignored.
    """
    mode = record.request.params.mode
    if not mode.needs_draft_probs or record.finish_reason is FinishReason.CANCELLED:
        return
    if len(tail) > position:
        raise InvalidRequest.of("tail", f"{len(tail)} tokens", f"at most {position}, those before from_position")
    check_tokens("tail", tail, target.info.vocab_size)
    known = len(record.tokens)
    start = position - len(tail)
    if list(tail[: max(0, known - start)]) != record.tokens[start : min(known, position)]:
        raise Conflict(f"tail differs from what session {record.session_id} has", field="tail", limit="as streamed")
    if closed and position > known:
        raise Conflict.of("from_position", position, f"at most {known}: another client continued the session")
    if start > known:
        message = f"{position - known} tokens before from_position were lost with a coordinator and cannot be drawn"
        message += f" again in {mode.name.lower()} mode; send them as tail"
        raise Conflict(message, field="tail", value=len(tail), limit=f"at least {position - known} tokens")
    lost = tail[known - start :]
    unknown = len(lost) if record.request.params.logprobs is not None else 0
    record.append(lost, [TokenKind.PLAIN] * len(lost), [None] * unknown)


def check_position(position: int, record: SessionRecord) -> None:
    cancelled = record.finish_reason is FinishReason.CANCELLED  # with what Redis had, a moment behind its client
    limit = len(record.tokens) if record.finished and not cancelled else record.request.params.max_tokens
    if position > limit:
        raise InvalidRequest.of("from_position", position, f"at most {limit}")
