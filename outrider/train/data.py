"""Training data: texts that the target generates, with its hidden states.

They are generated once per recipe and stored in shards, each written atomically: a killed run continues with the next
shard. Each example has a seed of its own, so the data do not depend on interruptions.
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

from outrider.base.atomic_files import atomic_write
from outrider.engine import SessionTokens
from outrider.engine.loading.loader import LoadedModel
from outrider.protocol.errors import InvalidRequest, StartupError

SHARD_EXAMPLES = 64  # generated in one batch
_PREFILL_TOKENS = 512
_RECIPE = "recipe.json"


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """A prompt and its kind, such as chat or edit."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class DataRecipe:
    """Everything that decides the data."""

    target: str  # fingerprint
    prompts: str  # digest
    num_examples: int
    max_tokens: int  # generated per example
    seed: int
    warm_share: float = 0.4  # of the examples, drawn at temperature 1; the others are greedy

    def temperature(self, index: int) -> float:
        """Return the temperature of an example."""
        return 1.0 if (index * 0.6180339887 + 0.5) % 1.0 < self.warm_share else 0.0


@dataclass(frozen=True, slots=True)
class Example:
    """One text. `hidden_states[i]` is the target's final hidden state after token i; the last token has none."""

    tokens: torch.Tensor  # [tokens]
    prompt_length: int
    hidden_states: torch.Tensor  # [tokens − 1, width], float16


@dataclass(frozen=True, slots=True)
class DataProgress:
    """The number of examples so far, and of generated tokens."""

    done: int
    total: int
    tokens: int


def shipped(name: str) -> list[TrainingPrompt]:
    """Return the bundled prompts: `train` or `heldout`."""
    return _parse(files("outrider.train").joinpath("prompts", f"{name}.jsonl").read_text(), f"{name}.jsonl")


def read_prompts(file: Path) -> list[TrainingPrompt]:
    """Read the user's prompts: one JSON object per line, with `prompt` and an optional `kind`."""
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
    """Return a digest of prompts and kinds."""
    return hashlib.sha256(json.dumps([[p.kind, p.text] for p in prompts]).encode()).hexdigest()[:16]


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a prompt, as the first turn of a chat if the model has a chat template."""
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": text}]
        return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"])
    return list(tokenizer.encode(text))


class Dataset:
    """A folder of shards, for one recipe."""

    def __init__(self, folder: Path, recipe: DataRecipe) -> None:
        self.folder = folder
        self.recipe = recipe

    @classmethod
    def at(cls, home: Path, recipe: DataRecipe) -> Dataset:
        """Return the dataset of a recipe below a folder."""
        name = hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode()).hexdigest()[:16]
        return cls(home / name, recipe)

    @property
    def num_shards(self) -> int:
        """Return the number of shards."""
        return -(-self.recipe.num_examples // SHARD_EXAMPLES)

    def write(
        self,
        target: LoadedModel,
        prompts: Sequence[TrainingPrompt],
        progress: Callable[[DataProgress], None] = lambda _: None,
    ) -> None:
        """Generate the missing shards with the target."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.folder / _RECIPE) as file:
            file.write_text(json.dumps(asdict(self.recipe), indent=2))
        tokens = 0
        for shard in range(self.num_shards):
            path = self._path(shard)
            first = shard * SHARD_EXAMPLES
            last = min(first + SHARD_EXAMPLES, self.recipe.num_examples)
            if not _is_complete(path):
                examples = _Generator(target, self.recipe, prompts).generate(range(first, last))
                tokens += sum(len(example.tokens) for example in examples)
                _save(path, examples)
            progress(DataProgress(last, self.recipe.num_examples, tokens))

    def examples(self) -> Iterator[Example]:
        """Yield all examples, in order."""
        for shard in range(self.num_shards):
            yield from _load(self._path(shard))

    def _path(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:05}.safetensors"


@dataclass(slots=True)
class _RunningText:
    """A text that is being generated."""

    index: int
    tokens: list[int]
    prompt_length: int
    temperature: float
    generator: torch.Generator
    hidden_states: list[torch.Tensor]
    cached: int = 0

    @property
    def key(self) -> str:
        return str(self.index)


class _Generator:
    """Generates texts with the target, all in one batch."""

    def __init__(self, target: LoadedModel, recipe: DataRecipe, prompts: Sequence[TrainingPrompt]) -> None:
        self._engine = target.engine
        self._tokenizer = target.tokenizer
        self._recipe = recipe
        self._prompts = prompts
        self._target_weights = set(target.engine.info.eos_token_ids)

    def generate(self, indices: range) -> list[Example]:
        running = [self._begin(index) for index in indices]
        done: dict[int, Example] = {}
        while running:
            self._step(running)
            for text in [text for text in running if self._is_complete(text)]:
                running.remove(text)
                self._engine.free(text.key)
                done[text.index] = Example(torch.tensor(text.tokens), text.prompt_length, torch.cat(text.hidden_states))
        return [done[index] for index in indices]

    def _begin(self, index: int) -> _RunningText:
        tokens = encode(self._tokenizer, self._prompts[index % len(self._prompts)].text)
        most = self._engine.info.context_length - self._recipe.max_tokens
        if len(tokens) > most:
            raise InvalidRequest.of("prompts", f"{len(tokens)} tokens", f"at most {most} tokens in a prompt")
        generator = torch.Generator().manual_seed(self._recipe.seed * 1_000_003 + index)
        return _RunningText(index, tokens, len(tokens), self._recipe.temperature(index), generator, [])

    def _step(self, running: Sequence[_RunningText]) -> None:
        batch = []
        for text in running:
            new = text.tokens[text.cached : text.cached + _PREFILL_TOKENS]
            is_last = text.cached + len(new) == len(text.tokens)
            batch.append(SessionTokens(text.key, new, logits_from=len(new) - is_last, hidden_from=0))
        result = self._engine.extend(batch)
        greedy = iter(result.all_logits.argmax(dim=-1).tolist() if len(result.all_logits) else ())
        for text, new_tokens, logits, hidden_states in zip(
            running, batch, result.logits, result.hidden_states, strict=True
        ):
            text.cached += len(new_tokens.tokens)
            text.hidden_states.append(hidden_states.to(torch.float16).cpu().clone())
            if len(logits):
                best = next(greedy)
                text.tokens.append(_draw(logits[-1], text) if text.temperature else best)

    def _is_complete(self, text: _RunningText) -> bool:
        written = len(text.tokens) - text.prompt_length
        return written >= self._recipe.max_tokens or (written > 0 and text.tokens[-1] in self._target_weights)


def _draw(logits: torch.Tensor, text: _RunningText) -> int:
    below = torch.softmax(logits.double().cpu() / text.temperature, dim=-1).cumsum(dim=-1)
    drawn = torch.rand(1, generator=text.generator, dtype=torch.float64) * below[-1]
    return int(torch.searchsorted(below, drawn, right=True).clamp_(max=len(below) - 1))


def _save(path: Path, examples: Sequence[Example]) -> None:
    with atomic_write(path) as file:
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
        with safe_open(path, "pt") as shard:
            tokens, lengths, prompts, hidden_states = (
                shard.get_tensor(name) for name in ("tokens", "lengths", "prompt_lengths", "features")
            )
    except (OSError, SafetensorError) as error:
        raise StartupError(f"cannot read {path}: {error}; delete it to generate it again") from error
    at = row = 0
    for length, prompt_length in zip(lengths.tolist(), prompts.tolist(), strict=True):
        yield Example(tokens[at : at + length].long(), prompt_length, hidden_states[row : row + length - 1])
        at += length
        row += length - 1


def _is_complete(path: Path) -> bool:
    try:
        with safe_open(path, "pt") as shard:
            return "features" in shard.keys()  # noqa: SIM118
    except (OSError, SafetensorError):
        return False
