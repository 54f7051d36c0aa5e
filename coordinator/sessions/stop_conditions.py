"""End of an output, computed from its tokens alone.

A running session ends by its verifier's verdict or a stop string. Records are
checked here: their coordinator may have failed before it stored the end, or
the client sent tokens with Resume. An output that has ended is not continued.
"""

from __future__ import annotations

import asyncio

from coordinator.persistence.session_record import SessionRecord
from coordinator.sessions.detokenizer import TextStream
from coordinator.workers.target import Target
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import FinishReason


async def finish_ended(record: SessionRecord, target: Target) -> None:
    """Finish a record whose output has ended and drop tokens after the end; raise for tokens against its grammar."""
    if record.finished or not record.tokens:
        return
    complete = None
    if record.request.params.grammar is not None:
        complete = await asyncio.to_thread(_complete, record, target)
    if (end := _end(record, target, complete)) is not None:
        length, record.finish_reason = end
        record.cut(length)


def _end(record: SessionRecord, target: Target, complete: int | None) -> tuple[int, FinishReason] | None:
    """Return the length and the reason of the first end, checked in the order of a verifier's step."""
    params = record.request.params
    stops = stop_ids(params, target)
    text = TextStream(target.decode, record.request.prompt, params.stop)
    for count, token in enumerate(record.tokens, start=1):
        stopped = bool(params.stop) and bool(text.add(token).stop)
        if token in stops or count == complete or stopped:
            return count, FinishReason.STOP
        if count == params.max_tokens:
            return count, FinishReason.LENGTH
    return None


def stop_ids(params: SamplingParams, target: Target) -> frozenset[int]:
    """Return the tokens on which a verifier ends the output."""
    ends = () if params.ignore_eos and params.grammar is None else target.info.eos_token_ids
    return frozenset((*params.stop_token_ids, *ends))


def _complete(record: SessionRecord, target: Target) -> int | None:
    """Return the number of tokens after which the grammar is complete."""
    return target.grammars.compile(record.request.params).advance(record.tokens)
