"""Whether an output is over, told from its tokens alone.

While a session runs, its verifier and its stop strings say so. A record whose
coordinator died before it noted the end, and tokens that a client sends along
with Resume, are read again here: what has ended is finished, never run on.
"""

from __future__ import annotations

import asyncio

from coordinator.persistence.session_record import SessionRecord
from coordinator.sessions.detokenizer import TextStream
from coordinator.workers.target import Target
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import FinishReason


async def settle(record: SessionRecord, target: Target) -> None:
    """Finish a record that has ended, without whatever follows its end. Raises what its grammar has against it."""
    if record.finished or not record.tokens:
        return
    complete = None
    if record.request.params.grammar is not None:
        complete = await asyncio.to_thread(_complete, record, target)
    if (end := _end(record, target, complete)) is not None:
        length, record.finish_reason = end
        record.cut(length)


def _end(record: SessionRecord, target: Target, complete: int | None) -> tuple[int, FinishReason] | None:
    """Where the output ends for the first time, if it does, and why: the same order as in a verifier's step."""
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
    """Return the tokens that end an output, as a verifier sees it."""
    ends = () if params.ignore_eos and params.grammar is None else target.info.eos_token_ids
    return frozenset((*params.stop_token_ids, *ends))


def _complete(record: SessionRecord, target: Target) -> int | None:
    """After how many tokens the grammar's end is reached."""
    return target.grammars.compile(record.request.params).advance(record.tokens)
