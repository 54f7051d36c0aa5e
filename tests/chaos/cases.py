"""What clients ask for, and what the answers must be: made by one engine that nobody disturbs, before anything breaks.

`python -m tests.chaos.cases FOLDER SEED` writes the models and the cases with their answers; the campaign reads them
back and needs no torch of its own.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from outrider.protocol.sampling_params import Grammar, SamplingParams, Verification

CASES = 60
LONGEST = 400
_SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "ages": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["name", "ages"],
    }
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice, undisturbed."""

    token_ids: list[int]
    text: str
    finish: int
    stop: str = ""


@dataclass(slots=True)
class Case:
    """One request. Without answers only its form can be checked: rejection and block draw anew each time."""

    name: str
    prompt: str
    params: dict[str, Any]
    choices: int = 1
    chat: bool = False
    answers: list[Answer] = field(default_factory=list)

    def sampling(self, choice: int = 0) -> SamplingParams:
        params = dict(self.params)
        if grammar := params.get("grammar"):
            params["grammar"] = Grammar(**grammar)
        if mode := params.get("verification"):
            params["verification"] = Verification[mode]
        params["logit_bias"] = {int(token): bias for token, bias in params.get("logit_bias", {}).items()}
        for name in ("stop", "stop_token_ids"):
            params[name] = tuple(params.get(name, ()))
        return SamplingParams(**params).with_seed(params["seed"] + choice)

    @property
    def longest(self) -> int:
        return int(self.params["max_tokens"])


def load(folder: Path) -> list[Case]:
    found = json.loads((folder / "cases.json").read_text())
    return [Case(**case | {"answers": [Answer(**answer) for answer in case["answers"]]}) for case in found]


def _wanted(seed: int) -> Iterator[Case]:
    """Every kind in turn."""
    rng = random.Random(seed)
    kinds: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("greedy", {"temperature": 0.0}, {}),
        ("coupled", {"temperature": 0.9}, {}),
        ("top-k, top-p, min-p", {"temperature": 1.1, "top_k": 40, "top_p": 0.95, "min_p": 0.01}, {}),
        ("penalties", {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.3}, {}),
        ("greedy penalties", {"temperature": 0.0, "frequency_penalty": 0.4, "logit_bias": {"65": 2.0, "66": -3.0}}, {}),
        ("regex", {"temperature": 0.9, "grammar": {"regex": "([a-z]{2,8} ){10,60}end"}}, {}),
        ("schema", {"temperature": 0.8, "grammar": {"json_schema": _SCHEMA}}, {}),
        ("n = 3", {"temperature": 1.0}, {"choices": 3}),
        ("stop string", {"temperature": 0.8, "stop": ["?"]}, {}),
        ("stop id", {"temperature": 0.0, "stop_token_ids": [0]}, {}),
        ("chat", {"temperature": 0.7}, {"chat": True}),
        ("greedy, long", {"temperature": 0.0}, {}),
        ("rejection", {"temperature": 0.9, "verification": "REJECTION"}, {}),
        ("coupled, logprobs", {"temperature": 0.9, "logprobs": 2}, {}),
        ("block", {"temperature": 0.9, "verification": "BLOCK"}, {}),
    ]
    for number in range(CASES):
        name, params, more = kinds[number % len(kinds)]
        prompt = f"Case {number}: {name}. " * rng.choice((1, 1, 2, 8))
        limits = {"max_tokens": LONGEST if "long" in name else rng.randrange(60, LONGEST), "seed": rng.getrandbits(40)}
        limits["ignore_eos"] = "grammar" not in params
        yield Case(name, prompt, params | limits, **more)


async def _answer(client: Any, case: Case) -> list[Answer]:
    answers = []
    for choice in range(case.choices):
        asked: dict[str, Any] = {"params": case.sampling(choice), "gamma": 0}
        if case.chat:
            made = await client.complete(chat=[("user", case.prompt)], **asked)
        else:
            made = await client.complete(case.prompt, **asked)
        answers.append(Answer(list(made.token_ids), made.text, int(made.finished.finish_reason), made.finished.stop))
    return answers


async def _complete(client: Any, case: Case) -> Case:
    if "verification" in case.params:
        return case
    case.answers = await _answer(client, case)
    # A stop that this very text runs into, somewhere past its middle.
    text, tokens = case.answers[0].text, case.answers[0].token_ids
    if "stop" in case.params:
        middle = len(text) // 2
        case.params["stop"] = [
            next((text[i : i + 3] for i in range(middle, len(text) - 3) if "\ufffd" not in text[i : i + 3]), "?")
        ]
        case.answers = await _answer(client, case)
    elif "stop_token_ids" in case.params:
        case.params["stop_token_ids"] = [tokens[len(tokens) // 2]]
        case.answers = await _answer(client, case)
    return case


async def _make(folder: Path, seed: int) -> None:
    """All services in this process: nothing to fail, nobody to draft."""
    from coordinator.api.service import CoordinatorService
    from coordinator.settings import CoordinatorSettings
    from outrider.client.aio import AsyncClient
    from outrider.testing.toy_models import make_model
    from tests.cluster import in_process
    from verifier.__main__ import build
    from verifier.settings import VerifierSettings

    target = make_model(folder / "target", seed=7, sharpness=4.0, focus=0.1)
    make_model(folder / "draft", seed=99, like=target, blur=0.05)
    front = CoordinatorSettings(http_port=-1, redis_url="redis://127.0.0.1:1")
    async with in_process(CoordinatorService(front, front.redis_url), front) as address:
        back = VerifierSettings(target=str(target), threads=1, device="cpu", coordinators=address)
        verifier = build(back, folder, lambda _: None, None)
        async with in_process(verifier, back), AsyncClient([address]) as client:
            await _known(client)
            cases = await asyncio.gather(*(_complete(client, case) for case in _wanted(seed)))
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))


async def _known(client: Any) -> None:
    """The coordinator has heard of the verifier."""
    from tests.cluster import until_async

    async def known() -> bool:
        return bool((await client.server()).workers)

    await until_async(known, 60, "a verifier")


if __name__ == "__main__":
    asyncio.run(_make(Path(sys.argv[1]), int(sys.argv[2])))
