"""What is asked and what the answer must be.

A case is a prompt with parameters that leave one right answer: greedy, or
coupled with a seed. `fetch` asks for it plainly (γ = 0) while nothing else
runs; under load `difference` compares. Knows nothing of locust.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from loadtest.prompts import KINDS, PROMPTS, Prompt
from outrider.client import Client, Reply
from outrider.errors import InvalidRequest, PeerLost, Unavailable
from outrider.messages import SamplingParams

_SHOWN = 60
_RETRIES = 2
_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Case:
    prompt: Prompt
    params: SamplingParams

    @property
    def name(self) -> str:
        return f"{self.prompt.name} {self.params.mode.name.lower()}"


@dataclass(frozen=True, slots=True)
class Output:
    text: str
    token_ids: tuple[int, ...]


def cases(kinds: str, max_tokens: int) -> list[Case]:
    """One per prompt of the kinds in a comma-separated list (empty: all), greedy and coupled in turns."""
    wanted = [kind.strip() for kind in kinds.split(",") if kind.strip()] or list(KINDS)
    for kind in wanted:
        if kind not in KINDS:
            raise InvalidRequest.of("kinds", kind, f"of {', '.join(KINDS)}")
    return [Case(prompt, _params(index, max_tokens)) for index, prompt in enumerate(PROMPTS) if prompt.kind in wanted]


def ask(client: Client, case: Case, *, gamma: int | None = None) -> Iterator[Reply]:
    prompt = case.prompt
    return client.generate(prompt.text or None, chat=prompt.chat, params=case.params, gamma=gamma)


def fetch(client: Client, case: Case) -> Output:
    """The answer without guessing. A connection that breaks is no answer yet."""
    for _ in range(_RETRIES):
        with contextlib.suppress(PeerLost, Unavailable):
            return _answer(client, case)
        time.sleep(_PAUSE_S)
    return _answer(client, case)


def difference(expected: Output, got: Output) -> str:
    """Where two outputs part, for people; empty when they do not."""
    if expected == got:
        return ""
    if expected.text == got.text:
        at = _first_difference(expected.token_ids, got.token_ids)
        return f"the same text from other tokens, from token {at} on"
    at = _first_difference(expected.text, got.text)
    return f"from character {at} on {got.text[at : at + _SHOWN]!r} instead of {expected.text[at : at + _SHOWN]!r}"


def _answer(client: Client, case: Case) -> Output:
    whole = client.complete(case.prompt.text or None, chat=case.prompt.chat, params=case.params, gamma=0)
    return Output(whole.text, whole.token_ids)


def _params(index: int, max_tokens: int) -> SamplingParams:
    if index % 2 == 0:
        return SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return SamplingParams(temperature=0.8, top_p=0.95, seed=1000 + index, max_tokens=max_tokens)


def _first_difference(left: str | tuple[int, ...], right: str | tuple[int, ...]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))
