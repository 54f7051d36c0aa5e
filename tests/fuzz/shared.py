"""Cases on the shared stream: the messages of a session's stream as frames, some of them mutated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from outrider.multiplex.frames import PART_BYTES, WINDOW_BYTES
from outrider.v1 import multiplex_pb2 as pb
from tests.fuzz import protobuf
from tests.fuzz.case import Case

SESSIONS = "Sessions"
_SHARE = 0.25  # of the streams of sessions
_MUTATED = 0.5  # of these
_TWO = 0.3  # of these: two sessions


def on_shared_stream(rng: random.Random, case: Case) -> Case:
    """Return the case, or for some the same messages on the shared stream."""
    service, _, method = case.method.rpartition("/")
    if method not in ("Verify", "Draft") or rng.random() >= _SHARE:
        return case
    if case.method in case.answers:
        frames = _frames(rng, case.answers[case.method], opened=False)
        return replace(case, name=f"{case.name}, shared", answers={**case.answers, SESSIONS: frames})
    messages = _frames(rng, case.messages, opened=True)
    return replace(case, name=SESSIONS, method=f"{service}/{SESSIONS}", messages=messages)


def _frames(rng: random.Random, messages: Sequence[bytes], *, opened: bool) -> tuple[bytes, ...]:
    """Return batches with the messages of stream 1, or of two streams."""
    batches = [pb.SessionFrames(window=WINDOW_BYTES)]
    for stream in (1, 2) if opened and rng.random() < _TWO else (1,):
        if opened:
            header = pb.StreamHeader(key="x-request-id", header="fuzz")
            batches.append(pb.SessionFrames(frames=[_frame(stream, open=pb.OpenStream(headers=[header]))]))
        for message in messages:
            if rng.random() < 0.5 or not batches[-1].frames:
                batches.append(pb.SessionFrames())
            parts = [message[at : at + PART_BYTES] for at in range(0, len(message), PART_BYTES)] or [b""]
            batches[-1].frames.extend(_frame(stream, payload=part, more=part is not parts[-1]) for part in parts)
    if opened and rng.random() < 0.5:
        batches.append(pb.SessionFrames(frames=[_frame(1, end=pb.StreamEnd(status=1))]))
    if rng.random() < _MUTATED:
        changed = rng.randrange(len(batches))
        protobuf.mutate(rng, batches[changed], rng.choice((1, 1, 2, 4)))
        data = [protobuf.encoded(batch) for batch in batches]
        if rng.random() < 0.3:
            data[changed] = protobuf.spoil(rng, data[changed])
        return tuple(protobuf.reorder(rng, data) if rng.random() < 0.15 else data)
    return tuple(protobuf.encoded(batch) for batch in batches)


def _frame(stream: int, **content: object) -> pb.SessionFrame:
    return pb.SessionFrame(stream=stream, **content)  # type: ignore[arg-type]
