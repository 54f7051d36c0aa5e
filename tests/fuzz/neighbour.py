"""Well-behaved client that repeats the same requests and prints a line of JSON for each answer.

`python -m tests.fuzz.neighbour ADDRESS` runs in its own process, so that only the services can slow it down.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from itertools import pairwise

import grpc

from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc
from tests.cluster import ask

LENGTH = 40
PAUSE_S = 0.6  # between answers, to leave CPU time to others
PROMPT = "The neighbours heard nothing of it, and "
_SCHEMA = '{"type": "object", "properties": {"a": {"type": "string", "maxLength": 20}}, "required": ["a"]}'


def requests() -> list[pb.GenerateRequest]:
    """Return plain requests, whose speed depends on no drafter, then one with speculation."""
    few = {"max_tokens": LENGTH, "ignore_eos": True}
    return [
        ask(PROMPT, temperature=0.0, gamma=0, **few),
        ask(PROMPT, seed=5, gamma=0, **few),
        ask(PROMPT, seed=6, gamma=0, repetition_penalty=1.1, frequency_penalty=0.2, **few),
        ask(PROMPT, seed=8, gamma=0, max_tokens=LENGTH, grammar=common.Grammar(json_schema=_SCHEMA)),
        ask(PROMPT, seed=7, **few),
    ]


def answer(stub: rpc.OutriderStub, request: pb.GenerateRequest) -> tuple[list[int], list[float]]:
    """Return the tokens and their arrival times."""
    tokens: list[int] = []
    times: list[float] = []
    for reply in stub.Generate(request, timeout=60):
        if reply.HasField("error"):
            raise RuntimeError(reply.error.message)
        if reply.HasField("chunk"):
            tokens.extend(reply.chunk.token_ids)
            times.append(time.monotonic())
    return tokens, times


def main(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = rpc.OutriderStub(channel)
        asked = requests()
        for request in asked:
            answer(stub, request)  # warm-up
        expected = [answer(stub, request)[0] for request in asked]
        print("ready", flush=True)
        turn = 0
        while True:
            number = turn % len(asked)
            turn += 1
            began = time.monotonic()
            line: dict[str, object] = {"at": began, "plain": number < len(asked) - 1}
            try:
                tokens, times = answer(stub, asked[number])
                line["equal"] = tokens == expected[number]
                if times:
                    line["first_ms"] = 1000 * (times[0] - began)
                if len(times) > 1:  # a coordinator that is late sends several tokens in one chunk
                    line["gap_ms"] = 1000 * statistics.median(b - a for a, b in pairwise(times))
            except (grpc.RpcError, RuntimeError) as error:
                line["error"] = str(error)[:500]
            print(json.dumps(line), flush=True)
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main(sys.argv[1])
