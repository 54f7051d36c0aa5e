"""States of positions before those that verdicts carry, read from the kept blocks when a coordinator asks for them.

A session holds none of them: each piece is read when it is sent, so kept blocks that were dropped are simply not there.
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from outrider.engine.paged.block_manager import BLOCK_TOKENS, blocks_for
from outrider.protocol import convert
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.hidden_states.earlier_states import EarlierStates
from outrider.protocol.hidden_states.messages import MAX_HIDDEN_POSITIONS, HiddenStates
from outrider.v1 import common_pb2 as common
from verifier.hidden_states.buffer import HiddenStateBuffer, message_of

PIECE_BYTES = 192 << 10  # less than a stream's window: a verdict behind a piece need not wait for room
MAX_QUEUED = 128  # replies before a request: more than those with which a session stalls


def queue_request(outbox: asyncio.Queue[Any], asked: EarlierStates) -> None:
    """Queue a request behind the replies that its peer has yet to read. Raise InvalidRequest if these are too many."""
    if outbox.qsize() > MAX_QUEUED:
        raise InvalidRequest.of("steer.earlier_states", f"behind {outbox.qsize()} replies", f"behind {MAX_QUEUED}")
    outbox.put_nowait(asked)


def earlier_states(buffer: HiddenStateBuffer, asked: EarlierStates) -> common.HiddenStates:
    """Return the first rows of the longest kept run that reaches the asked end, as many as a piece has."""
    end = blocks_for(asked.end) * BLOCK_TOKENS
    spec = next((spec for spec in buffer.specs if spec.number == asked.number and end <= len(buffer.tokens)), None)
    found = [] if spec is None or buffer.blocks is None else buffer.blocks.find(spec, asked.position, end)
    if spec is None or not found:
        return convert.hidden_states_to_proto(HiddenStates(asked.end, 1, b"", asked.number))
    first = end - sum(map(len, found))
    start = max(first, asked.position)
    count = max(1, min(PIECE_BYTES // found[0][0].nbytes, MAX_HIDDEN_POSITIONS, asked.end - start))
    needed = found[(start - first) // BLOCK_TOKENS : blocks_for(start - first + count)]
    rows = torch.cat(needed)[(start - first) % BLOCK_TOKENS :][:count]
    return convert.hidden_states_to_proto(message_of(spec, start + len(rows), rows, PIECE_BYTES))
