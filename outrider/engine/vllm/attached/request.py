"""One request of `vllm serve` that a coordinator knows: how it is drawn, its guesses and verdicts."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from outrider.protocol import convert, message_limits
from outrider.protocol.checks import check_tokens
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import NO_GUESS, TokenKind, Verdict, VerifyTimings
from outrider.speculation.tree import GuessTree, tallies
from outrider.v1 import verifier_pb2 as verify

_MAX_UNREAD = 256  # messages from the coordinator
_SILENCE_S = 1.0  # of a coordinator, after which no step waits for it
# Sampling parameters of vLLM with which it draws alike at guessed positions; others must have their defaults.
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_DRAWN_ALIKE = {
    *("temperature", "top_p", "top_k", "seed", *_PENALTIES),
    # Not of the draw: ends and form of the text, which vLLM decides.
    *("n", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "detokenize", "skip_special_tokens"),
    *("spaces_between_special_tokens", "include_stop_str_in_output", "output_kind", "stream_interval", "skip_clone"),
    *("output_text_buffer_length", "flat_logprobs", "_eos_token_id", "_all_stop_token_ids", "_watermarking_skipped"),
}


def drawn_alike(request: Any) -> bool:
    """Return whether a draw at a guessed position is the draw of a plain step there."""
    params = request.sampling_params
    if params is None or request.mm_features or request.prompt_embeds is not None or request.resumable:
        return False
    default = type(params)()
    others = set(params.__struct_fields__) - _DRAWN_ALIKE
    values = [getattr(params, name) for name in others if getattr(params, name) != getattr(default, name)]
    return all(value is None or value is False or value == [] for value in values)


def guessed_with(request: Any) -> SamplingParams:
    """Return the parameters that drafters guess with: the likeliest token, for vLLM's noise is its own."""
    params = request.sampling_params
    penalties = {name: getattr(params, name) for name in _PENALTIES}
    return SamplingParams(temperature=0.0, seed=0, max_tokens=request.max_tokens, ignore_eos=True, **penalties)


class AttachedRequest:
    """The state of a request in the scheduler's thread. The client's thread only appends to `inbox`.

    `stream` numbers the streams to coordinators, one after another: guesses of an earlier one count for none.
    """

    def __init__(self, name: str, tokens: Sequence[int], prompt_length: int, params: SamplingParams, vocab_size: int):
        self.name = name
        self.params = params
        self.prompt_length = prompt_length
        self.inbox: deque[int | verify.VerifyRequest] = deque()  # a number: a new stream; 0: none
        self.stream = 0
        self.refusals: list[verify.VerifyReply] = []
        self._tokens = tokens  # vLLM's list, which grows
        self._vocab_size = vocab_size
        self._begin(0)

    def receive(self, message: int | verify.VerifyRequest, arrived: threading.Event) -> None:
        """Take a message in the client's thread; unread guesses beyond a limit are dropped."""
        if isinstance(message, int) or len(self.inbox) < _MAX_UNREAD:
            self.inbox.append(message)
            arrived.set()

    def read(self) -> None:
        """Apply what has arrived; a coordinator that never stops sending does not hold a step up."""
        for _ in range(len(self.inbox)):
            message = self.inbox.popleft()
            self._heard_at = time.monotonic()
            if isinstance(message, int):
                self._begin(message)
                continue
            try:
                self._apply(message)
            except InvalidRequest as error:
                refused = verify.VerifyReply(refused=convert.error_to_proto(error), source=message.guess.source)
                self.refusals.append(refused)

    def ready_at(self, now: float) -> float:
        """Return when a step need not wait for guesses any more."""
        wanted = min(self._gamma, self._remaining - 1)
        passed = self._tree.passed_at >= len(self._tokens)
        silent = now > self._heard_at + _SILENCE_S
        if not self.stream or silent or self._verdict_at == 0.0 or passed or self._tree.depth >= wanted:
            return now
        return self._verdict_at + self._wait_s

    def guesses(self, most: int) -> list[int]:
        """Return the guesses for the next step."""
        self._block = self._tree.block(min(most, self._max_guesses or most), self._remaining - 1, chain=True)
        return list(self._block.tokens)

    def verdict(self, tokens: Sequence[int], num_guesses: int, timings: VerifyTimings) -> Verdict:
        """Return what came of a step that checked so many of the guesses, after vLLM has appended its tokens."""
        accepted = len(tokens) - 1
        nodes = self._tree.nodes(self._block)[:num_guesses]
        sources = tallies(nodes, range(1, 1 + num_guesses), range(1, 1 + accepted))
        self._tree.commit(tuple(tokens))
        self._block = NO_GUESS
        self._verdict_at = time.monotonic()
        missed = TokenKind.RECOVERED if accepted < num_guesses else TokenKind.BONUS
        return Verdict(
            position=len(self._tokens) - len(tokens),
            tokens=tuple(tokens),
            accepted=accepted,
            last=missed if num_guesses else TokenKind.PLAIN,
            proposed=num_guesses,
            timings=timings,
            sources=sources,
            nodes=num_guesses,
            remaining_depth=self._tree.depth,
        )

    def _begin(self, stream: int) -> None:
        self.stream = stream
        self.speculates = False  # the coordinator awaits each verdict
        self._tree = GuessTree(self._tokens, single=False)
        self._block = NO_GUESS
        self._max_guesses: int = 0
        self._gamma, self._wait_s, self._verdict_at, self._heard_at = 0, 0.0, 0.0, 0.0

    def _apply(self, message: verify.VerifyRequest) -> None:
        if message.WhichOneof("message") == "guess":
            message_limits.check_guess(message.guess)
            check_tokens("guess.tokens", message.guess.tokens, self._vocab_size)
            self._tree.add(convert.guess_from_proto(message.guess))
        elif message.WhichOneof("message") == "steer":
            steering = convert.verify_steering_from_proto(message.steer)
            steering.check()
            self.speculates = message.steer.plain_steps <= 1
            self._gamma = self._gamma if steering.gamma is None else steering.gamma
            self._wait_s = self._wait_s if steering.draft_wait_us is None else steering.draft_wait_us / 1e6
            self._max_guesses = self._max_guesses if steering.nodes is None else steering.nodes

    @property
    def _remaining(self) -> int:
        return self.prompt_length + self.params.max_tokens - len(self._tokens)


def as_plain(verdict: Verdict) -> list[Verdict]:
    """Return a verdict for a stream that did not send its guesses: each token stands for itself."""
    return [
        Verdict(verdict.position + i, (token,), 0, TokenKind.PLAIN, timings=verdict.timings)
        for i, token in enumerate(verdict.tokens)
    ]
