"""Decode with a verifier alone and guesses from any source; here, the text is assumed to repeat itself.

Start one first: `outrider serve verifier --port 50051 --target path-or-hub-id`.
"""

from __future__ import annotations

import queue
import sys
from collections.abc import Iterator

import grpc

from outrider.v1 import common_pb2 as common
from outrider.v1 import verifier_pb2 as pb
from outrider.v1 import verifier_pb2_grpc as rpc

GAMMA = 4
PROMPT = [*(40, 41, 42, 43) * 3, 40, 41]  # a pattern that most models continue


def decode(address: str, prompt: list[int], max_tokens: int) -> list[int]:
    """Return the target's greedy continuation of `prompt`."""
    outgoing: queue.Queue[pb.VerifyRequest | None] = queue.Queue()
    outgoing.put(
        pb.VerifyRequest(
            open=pb.OpenVerify(
                session_id="example",
                epoch=1,
                tokens=prompt,
                prompt_length=len(prompt),
                params=common.SamplingParams(temperature=0, seed=0, max_tokens=max_tokens),
                steer=pb.VerifySteering(gamma=GAMMA, draft_wait_us=20_000),
            )
        )
    )
    committed = list(prompt)
    next_id = 1
    # gRPC would ask the proxy of the environment also for this machine.
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        for reply in rpc.VerifierStub(channel).Verify(_until_none(outgoing)):
            if reply.HasField("refused"):
                raise SystemExit(f"refused: {reply.refused.message}")
            if not reply.HasField("verdict"):
                continue
            verdict = reply.verdict
            committed.extend(verdict.tokens)
            print(f"position {verdict.position}: {list(verdict.tokens)}, {verdict.accepted} of them guessed")
            if verdict.finish_reason:
                break
            guess = _repeat(committed)
            outgoing.put(pb.VerifyRequest(guess=common.Guess(position=len(committed), first_id=next_id, tokens=guess)))
            next_id += len(guess)
        outgoing.put(None)
    return committed[len(prompt) :]


def _repeat(tokens: list[int]) -> list[int]:
    """Return what followed the last token before; an empty guess means that the verifier need not wait."""
    for i in range(len(tokens) - 2, -1, -1):
        if tokens[i] == tokens[-1]:
            return tokens[i + 1 : i + 1 + GAMMA]
    return []


def _until_none(outgoing: queue.Queue[pb.VerifyRequest | None]) -> Iterator[pb.VerifyRequest]:
    while (message := outgoing.get()) is not None:
        yield message


if __name__ == "__main__":
    print(decode(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051", PROMPT, 32))
