"""Cases of the load test, and the comparison of outputs.

A case is a prompt with parameters that determine the output: greedy, or coupled with a seed. Reference outputs are
generated without load; `difference` compares outputs under load with them. Independent of locust and of protocols.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.prompts import KINDS, PROMPTS, LoadPrompt
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling_params import SamplingParams

GRPC, HTTP = "grpc", "http"
PROTOCOLS = (GRPC, HTTP)
TEXT_DIFFERS = "text differs"  # the failure of a request whose output is not the reference
_SHOWN = 60
_MAX_WEIGHT = 1000.0


@dataclass(frozen=True, slots=True)
class Case:
    """Prompt with its sampling parameters."""

    prompt: LoadPrompt
    params: SamplingParams
    weight: float = 1.0  # relative frequency

    @property
    def name(self) -> str:
        return f"{self.prompt.name} {self.params.mode.name.lower()}"


@dataclass(frozen=True, slots=True)
class Output:
    """Generated text and tokens."""

    text: str
    token_ids: tuple[int, ...] | None  # None: the protocol sends only their number
    num_tokens: int


def cases(kinds: str, max_tokens: int) -> list[Case]:
    """Return one case per prompt of the given kinds, alternately greedy and coupled.

    `kinds` is a comma-separated list with optional weights; empty means all.
    `chat:3,code` means three chat requests per code request.
    """
    wanted = _weights(kinds)
    sizes = {kind: sum(prompt.kind == kind for prompt in PROMPTS) for kind in wanted}
    return [
        Case(prompt, _params(index, max_tokens), wanted[prompt.kind] / sizes[prompt.kind])
        for index, prompt in enumerate(PROMPTS)
        if prompt.kind in wanted
    ]


def pick(asked: Sequence[Case]) -> Case:
    return random.choices(asked, [case.weight for case in asked])[0]


def difference(expected: Output, got: Output) -> str:
    """Return a message that describes the first difference; empty if the outputs are equal."""
    if expected.text != got.text:
        at = _first_difference(expected.text, got.text)
        return f"from character {at} on {got.text[at : at + _SHOWN]!r} instead of {expected.text[at : at + _SHOWN]!r}"
    if expected.token_ids is not None and got.token_ids is not None and expected.token_ids != got.token_ids:
        at = _first_difference(expected.token_ids, got.token_ids)
        return f"same text, different tokens from token {at} on"
    if expected.num_tokens != got.num_tokens:
        return f"same text from {got.num_tokens} tokens instead of {expected.num_tokens}"
    return ""


def _weights(kinds: str) -> dict[str, float]:
    given = [part.strip() for part in kinds.split(",") if part.strip()] or list(KINDS)
    weights: dict[str, float] = {}
    for part in given:
        kind, _, weight = part.partition(":")
        if kind not in KINDS:
            raise InvalidRequest.of("kinds", kind, f"of {', '.join(KINDS)}")
        weights[kind] = _weight(kind, weight) if weight else 1.0
    return weights


def _weight(kind: str, given: str) -> float:
    try:
        weight = float(given)
    except ValueError:
        weight = math.nan
    if not 0 < weight <= _MAX_WEIGHT:
        raise InvalidRequest.of("kinds", f"{kind}:{given}", f"a weight above 0, at most {_MAX_WEIGHT:g}")
    return weight


def _params(index: int, max_tokens: int) -> SamplingParams:
    if index % 2 == 0:
        return SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return SamplingParams(temperature=0.8, top_p=0.95, seed=1000 + index, max_tokens=max_tokens)


def _first_difference(left: str | tuple[int, ...], right: str | tuple[int, ...]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))
