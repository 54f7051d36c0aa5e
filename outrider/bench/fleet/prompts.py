"""Requests of a fleet's measurement: prompts of several kinds behind system prompts that sessions share."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from outrider.bench.common.report import import_on_use
from outrider.client.events import Options
from outrider.protocol.sampling_params import SamplingParams

_GOLDEN, _ROOT = (math.sqrt(5) - 1) / 2, math.sqrt(2)  # their multiples spread evenly between 0 and 1
_RULES = """\
You answer for department {number}. Be polite and brief, and stay with the question that was asked. When a text is
given, keep to what it says, and say so if it does not hold the answer. Never invent names, dates, prices or links.
Write in the language of the question. Use plain words and short sentences; explain a technical word where it first
occurs. Give numbers with their units. Put code into a block of its own, complete enough to run, without a comment on
each line. In a list, put the most important point first. If a question has several readings, choose the likeliest and
say which. Do not repeat the question, do not apologise, and end when the answer is complete."""


@dataclass(frozen=True, slots=True)
class PromptMix:
    """Requests by number: equal numbers give equal requests."""

    texts: Sequence[str]
    system_prompts: int
    tokens: int  # mean length of an answer
    gamma: int | None = None
    model: str = ""
    share: float = 1.0  # of each text that is sent: tokens of toy models are bytes

    def request(self, number: int, salt: str) -> Options:
        """Return a request whose prefix is cached only for requests with this salt and system prompt."""
        question = f"{number}: {self._cut(self.texts[int(number * _GOLDEN % 1 * len(self.texts))])}"
        chat = [("user", question)]
        if self.system_prompts:
            chat.insert(0, ("system", self._cut(_RULES.format(number=number % self.system_prompts + 1))))
        tokens = max(2, round(self.tokens * (0.5 + number * _ROOT % 1)))
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=tokens, ignore_eos=True)
        return Options(chat=chat, params=params, gamma=self.gamma, model=self.model, cache_salt=salt)

    def _cut(self, text: str) -> str:
        return text[: math.ceil(self.share * len(text))]


def read_texts(file: Path | None) -> list[str]:
    """Return the prompts of the user's file, or the bundled ones that no drafter was trained on."""
    if file is None:
        lines = files("outrider.train").joinpath("prompts", "heldout.jsonl").read_text().splitlines()
        return [json.loads(line)["prompt"] for line in lines]
    return [prompt.text for prompt in import_on_use("torch", "models", "outrider.train.data").read_prompts(file)]
