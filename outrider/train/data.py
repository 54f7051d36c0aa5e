"""What drafters learn from: texts that the target writes itself, with the hidden states it had while writing.

Written once per recipe and kept on disk in shards, each whole or not there:
a run that is killed goes on with the next shard. An example is drawn from a
seed of its own, so that the data do not depend on where a run was cut.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from outrider.base.atomic_files import replacing
from outrider.engine import SessionTokens
from outrider.engine.loading.loader import LoadedModel
from outrider.protocol.errors import InvalidRequest, StartupError

SHARD_EXAMPLES = 64  # written at the same time
_PROMPT_ROWS = 512
_RECIPE = "recipe.json"


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class DataRecipe:
    """All that the data depend on."""

    target: str  # fingerprint
    prompts: str  # digest
    num_examples: int
    max_tokens: int  # written per example
    seed: int
    warm_share: float = 0.4  # of the examples, drawn at temperature 1; the others are greedy

    def temperature(self, index: int) -> float:
        return 1.0 if (index * 0.6180339887 + 0.5) % 1.0 < self.warm_share else 0.0


@dataclass(frozen=True, slots=True)
class Example:
    """`hidden_states[i]` is the target's final hidden state after token i; the last token has none."""

    tokens: torch.Tensor  # [tokens]
    prompt_length: int
    hidden_states: torch.Tensor  # [tokens − 1, width], float16


@dataclass(frozen=True, slots=True)
class DataProgress:
    done: int
    total: int
    tokens: int


def shipped(name: str) -> list[TrainingPrompt]:
    """`train` or `heldout`: the lists that come with Outrider."""
    return _parse(files("outrider.train").joinpath("prompts", f"{name}.jsonl").read_text(), f"{name}.jsonl")


def read_prompts(file: Path) -> list[TrainingPrompt]:
    """One's own: a JSON object a line, with `prompt` and perhaps `kind`."""
    try:
        return _parse(file.read_text(), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read {file}: {error}", field="prompts", value=str(file)) from error


def _parse(text: str, name: str) -> list[TrainingPrompt]:
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise InvalidRequest.of(f"{name}:{number}", line[:40], f"a JSON object: {error}") from error
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str) or not entry["prompt"].strip():
            raise InvalidRequest.of(f"{name}:{number}", line[:40], "an object with a `prompt` that is some text")
        prompts.append(TrainingPrompt(str(entry.get("kind", "chat")), entry["prompt"]))
    if not prompts:
        raise InvalidRequest.of(name, "0 prompts", "at least one")
    return prompts


def digest(prompts: Sequence[TrainingPrompt]) -> str:
    return hashlib.sha256(json.dumps([[p.kind, p.text] for p in prompts]).encode()).hexdigest()[:16]


def encode(tokenizer: Any, text: str) -> list[int]:
    """As the first turn of a chat where the model has a template for one."""
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": text}]
        return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"])
    return list(tokenizer.encode(text))


class Dataset:
    """A folder of shards."""

    def __init__(self, folder: Path, recipe: DataRecipe) -> None:
        self.folder = folder
        self.recipe = recipe

    @classmethod
    def at(cls, home: Path, recipe: DataRecipe) -> Dataset:
        """The place for this recipe's data."""
        name = hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode()).hexdigest()[:16]
        return cls(home / name, recipe)

    @property
    def num_shards(self) -> int:
        return -(-self.recipe.num_examples // SHARD_EXAMPLES)

    def write(
        self,
        target: LoadedModel,
        prompts: Sequence[TrainingPrompt],
        progress: Callable[[DataProgress], None] = lambda _: None,
    ) -> None:
        """Have the target write what is missing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with replacing(self.folder / _RECIPE) as file:
            file.write_text(json.dumps(asdict(self.recipe), indent=2))
        tokens = 0
        for shard in range(self.num_shards):
            path = self._path(shard)
            first = shard * SHARD_EXAMPLES
            last = min(first + SHARD_EXAMPLES, self.recipe.num_examples)
            if not _whole(path):
                examples = _Writer(target, self.recipe, prompts).write(range(first, last))
                tokens += sum(len(example.tokens) for example in examples)
                _save(path, examples)
            progress(DataProgress(last, self.recipe.num_examples, tokens))

    def examples(self) -> Iterator[Example]:
        for shard in range(self.num_shards):
            yield from _load(self._path(shard))

    def _path(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:05}.safetensors"


@dataclass(slots=True)
class _WrittenText:
    """One that is being written."""

    index: int
    tokens: list[int]
    prompt_length: int
    temperature: float
    chance: torch.Generator
    hidden_states: list[torch.Tensor]
    cached: int = 0

    @property
    def key(self) -> str:
        return str(self.index)


class _Writer:
    def __init__(self, target: LoadedModel, recipe: DataRecipe, prompts: Sequence[TrainingPrompt]) -> None:
        self._engine = target.engine
        self._tokenizer = target.tokenizer
        self._recipe = recipe
        self._prompts = prompts
        self._target_weights = set(target.engine.info.eos_token_ids)

    def write(self, indices: range) -> list[Example]:
        running = [self._begin(index) for index in indices]
        done: dict[int, Example] = {}
        while running:
            self._step(running)
            for text in [text for text in running if self._over(text)]:
                running.remove(text)
                self._engine.free(text.key)
                done[text.index] = Example(torch.tensor(text.tokens), text.prompt_length, torch.cat(text.hidden_states))
        return [done[index] for index in indices]

    def _begin(self, index: int) -> _WrittenText:
        tokens = encode(self._tokenizer, self._prompts[index % len(self._prompts)].text)
        most = self._engine.info.context_length - self._recipe.max_tokens
        if len(tokens) > most:
            raise InvalidRequest.of("prompts", f"{len(tokens)} tokens", f"at most {most} tokens in a prompt")
        chance = torch.Generator().manual_seed(self._recipe.seed * 1_000_003 + index)
        return _WrittenText(index, tokens, len(tokens), self._recipe.temperature(index), chance, [])

    def _step(self, running: Sequence[_WrittenText]) -> None:
        batch = []
        for text in running:
            new = text.tokens[text.cached : text.cached + _PROMPT_ROWS]
            whole = text.cached + len(new) == len(text.tokens)
            batch.append(SessionTokens(text.key, new, logits_from=len(new) - whole, hidden_from=0))
        result = self._engine.extend(batch)
        likeliest = iter(result.all_logits.argmax(dim=-1).tolist() if len(result.all_logits) else ())
        for text, rows, logits, hidden_states in zip(running, batch, result.logits, result.hidden_states, strict=True):
            text.cached += len(rows.tokens)
            text.hidden_states.append(hidden_states.to(torch.float16).cpu().clone())
            if len(logits):
                best = next(likeliest)
                text.tokens.append(_draw(logits[-1], text) if text.temperature else best)

    def _over(self, text: _WrittenText) -> bool:
        written = len(text.tokens) - text.prompt_length
        return written >= self._recipe.max_tokens or (written > 0 and text.tokens[-1] in self._target_weights)


def _draw(logits: torch.Tensor, text: _WrittenText) -> int:
    below = torch.softmax(logits.double().cpu() / text.temperature, dim=-1).cumsum(dim=-1)
    drawn = torch.rand(1, generator=text.chance, dtype=torch.float64) * below[-1]
    return int(torch.searchsorted(below, drawn, right=True).clamp_(max=len(below) - 1))


def _save(path: Path, examples: Sequence[Example]) -> None:
    with replacing(path) as file:
        save_file(
            {
                "tokens": torch.cat([example.tokens for example in examples]).to(torch.int32),
                "lengths": torch.tensor([len(example.tokens) for example in examples], dtype=torch.int32),
                "prompt_lengths": torch.tensor([example.prompt_length for example in examples], dtype=torch.int32),
                "features": torch.cat([example.hidden_states for example in examples]),
            },
            file,
        )


def _load(path: Path) -> Iterator[Example]:
    try:
        with safe_open(path, "pt") as held:
            tokens, lengths, prompts, hidden_states = (
                held.get_tensor(name) for name in ("tokens", "lengths", "prompt_lengths", "features")
            )
    except (OSError, SafetensorError) as error:
        raise StartupError(f"cannot read {path}: {error}; delete it, and it is written again") from error
    at = row = 0
    for length, prompt_length in zip(lengths.tolist(), prompts.tolist(), strict=True):
        yield Example(tokens[at : at + length].long(), prompt_length, hidden_states[row : row + length - 1])
        at += length
        row += length - 1


def _whole(path: Path) -> bool:
    try:
        with safe_open(path, "pt") as held:
            return "features" in held.keys()  # noqa: SIM118
    except (OSError, SafetensorError):
        return False
