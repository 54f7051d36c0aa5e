"""Training data: texts that the target generates, with its hidden states.

They are generated once and stored in shards, each written atomically: a killed run continues with the next shard. Each
example has a seed of its own, so the data do not depend on interruptions. A shard depends on its own prompts only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from outrider.base.atomic_files import atomic_write
from outrider.base.config import KV_TOKENS
from outrider.engine import SessionTokens
from outrider.engine.loading.loader import LoadedModel
from outrider.engine.paged.block_manager import blocks_for
from outrider.models.tokenizer import in_parts, wants_parts
from outrider.protocol.errors import InvalidRequest, StartupError
from outrider.protocol.sampling_params import SamplingParams
from outrider.speculation.exponential_race import coupled_draws

SHARD_EXAMPLES = 64
_SESSIONS = 64  # generated together
_PREFILL_TOKENS = 512
_RECIPE = "recipe.json"
_ABANDONED_S = 3600.0


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """A prompt and its kind, such as chat or edit."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class DataRecipe:
    """Everything that decides the data."""

    target: str  # weights digest
    prompts: str  # digest
    template: str  # digest of the target's chat template
    num_examples: int
    max_tokens: int  # generated per example
    seed: int
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.0, 0.6, 0.8, 1.0)  # equally frequent
    layers: tuple[int, ...] = ()  # whose hidden states are kept too

    def params(self, index: int) -> SamplingParams:
        """Return the sampling parameters of an example."""
        place = (index * 0.6180339887 + 0.5) % 1.0
        temperature = self.temperatures[int(place * len(self.temperatures))]
        return SamplingParams(temperature=temperature, seed=self.seed * 1_000_003 + index)


@dataclass(frozen=True, slots=True)
class Example:
    """One text. `hidden_states[i]` is the target's final hidden state after token i; the last token has none."""

    tokens: torch.Tensor  # [tokens]
    prompt_length: int
    hidden_states: torch.Tensor  # [tokens − 1, width], float16
    layer_states: torch.Tensor  # after the recipe's layers  # [tokens − 1, layers · width], bfloat16


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
        return _parse(file.read_text("utf-8-sig"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read {file}: {error}", field="prompts", value=str(file)) from error


def _parse(text: str, name: str) -> list[TrainingPrompt]:
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:  # such as a number of thousands of digits
            raise InvalidRequest.of(f"{name}:{number}", line[:40], f"a JSON object: {error}") from error
        prompt = entry.get("prompt") if isinstance(entry, dict) else None
        if not isinstance(prompt, str) or not prompt.strip() or any("\ud800" <= char <= "\udfff" for char in prompt):
            raise InvalidRequest.of(f"{name}:{number}", line[:40], "an object with a `prompt` that is some text")
        prompts.append(TrainingPrompt(str(entry.get("kind", "chat")), prompt))
    if not prompts:
        raise InvalidRequest.of(name, "0 prompts", "at least one")
    return prompts


def digest(of: Any) -> str:
    """Return a digest of texts, or of another value that JSON can hold."""
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:16]


def recipe(
    target: LoadedModel, prompts: Sequence[TrainingPrompt], count: int, max_tokens: int, seed: int
) -> DataRecipe:
    """Return the recipe of `count` texts that a target generates after these prompts."""
    texts, chats = digest([prompt.text for prompt in prompts]), target.tokenizer.chat_template
    template = digest([chats, "in parts"] if wants_parts(target.tokenizer) else chats)
    return DataRecipe(target.engine.info.weights_digest, texts, template, count, max_tokens, seed)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a prompt, as the first turn of a chat if the model has a chat template."""
    if tokenizer.chat_template:
        turn = {"role": "user", "content": text}
        turns = [in_parts(turn) if wants_parts(tokenizer) else turn]
        return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"])
    return list(tokenizer.encode(text))


class Dataset:
    """The shards of a recipe, in a folder that it shares with recipes of other prompts."""

    def __init__(self, home: Path, recipe: DataRecipe, prompts: Sequence[TrainingPrompt]) -> None:
        self._described = asdict(recipe)
        del self._described["prompts"], self._described["num_examples"]
        self.folder = home / digest(self._described)
        self.recipe = recipe
        self._prompts = prompts
        self._shards = range(-(-recipe.num_examples // SHARD_EXAMPLES))

    def write(self, target: LoadedModel, progress: Callable[[DataProgress], None] = lambda _: None) -> None:
        """Generate the missing shards with the target."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for unfinished in self.folder.glob(".shard-*"):
            with contextlib.suppress(FileNotFoundError):  # another run may write here, but no shard takes so long
                if time.time() - unfinished.stat().st_mtime > _ABANDONED_S:
                    unfinished.unlink()
        with atomic_write(self.folder / _RECIPE) as file:
            file.write_text(json.dumps(self._described, indent=2))
        missing = [shard for shard in self._shards if not _is_complete(self._path(shard))]
        left = sum(len(self._indices(shard)) for shard in missing)
        tokens, done = 0, dict[int, Example]()
        progress(DataProgress(self.recipe.num_examples - left, self.recipe.num_examples, tokens))
        indices = (index for shard in missing for index in self._indices(shard))
        for index, example in _Generator(target, self.recipe, self._prompts).generate(indices):
            done[index] = example
            tokens += len(example.tokens)
            shard = self._indices(index // SHARD_EXAMPLES)
            if all(other in done for other in shard):
                _save(self._path(index // SHARD_EXAMPLES), [done.pop(other) for other in shard])
                left -= len(shard)
                progress(DataProgress(self.recipe.num_examples - left, self.recipe.num_examples, tokens))

    def examples(self) -> Iterator[Example]:
        """Yield all examples, in order."""
        for shard in self._shards:
            yield from _load(self._path(shard))

    def _indices(self, shard: int) -> range:
        return range(self.recipe.num_examples)[shard * SHARD_EXAMPLES : (shard + 1) * SHARD_EXAMPLES]

    def _path(self, shard: int) -> Path:
        texts = [self._prompts[index % len(self._prompts)].text for index in self._indices(shard)]
        return self.folder / f"shard-{shard:05}-{digest(texts)}.safetensors"


@dataclass(slots=True)
class _RunningText:
    """A text that is being generated."""

    index: int
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    hidden_states: list[torch.Tensor]
    cached: int = 0


class _Generator:
    """Generates texts with the target, some dozens in one batch. A complete text makes room for the next one."""

    def __init__(self, target: LoadedModel, recipe: DataRecipe, prompts: Sequence[TrainingPrompt]) -> None:
        self._engine = target.engine
        self._tokenizer = target.tokenizer
        self._recipe = recipe
        self._prompts = prompts

    def generate(self, indices: Iterable[int]) -> Iterator[tuple[int, Example]]:
        """Yield the index and the example of each text when it is complete."""
        waiting, running = deque(map(self._begin, indices)), list[_RunningText]()
        while waiting or running:
            while waiting and self._fit([*running, waiting[0]]):
                running.append(waiting.popleft())
            self._step(running)
            for text in filter(self._is_complete, running):
                self._engine.free(str(text.index))
                rows = torch.cat(text.hidden_states)
                final, layers = rows.tensor_split([rows.shape[1] // (1 + len(self._recipe.layers))], dim=1)
                states = final.to(torch.float16), layers.to(torch.bfloat16)
                yield text.index, Example(torch.tensor(text.tokens), text.prompt_length, *states)
            running = [text for text in running if not self._is_complete(text)]

    def _begin(self, index: int) -> _RunningText:
        text = self._prompts[index % len(self._prompts)].text
        tokens, most = encode(self._tokenizer, text), self._engine.info.context_length - self._recipe.max_tokens
        if len(tokens) > most:
            limit = f"at most {max(0, most)} tokens in a prompt, with answers of {self._recipe.max_tokens}"
            raise InvalidRequest.of("prompts", f"{len(tokens)} tokens in {text[:40]!r}", limit)
        return _RunningText(index, tokens, len(tokens), self._recipe.params(index), [])

    def _fit(self, texts: Sequence[_RunningText]) -> bool:
        """Return whether the cache holds these texts at once; one alone is tried."""
        needed = sum(blocks_for(text.prompt_length + self._recipe.max_tokens) for text in texts)
        return len(texts) == 1 or (len(texts) <= _SESSIONS and needed <= blocks_for(KV_TOKENS))

    def _step(self, running: Sequence[_RunningText]) -> None:
        batch = []
        for text in running:
            new = text.tokens[text.cached : text.cached + _PREFILL_TOKENS]
            is_last = text.cached + len(new) == len(text.tokens)
            step = SessionTokens(str(text.index), new, logits_from=len(new) - is_last, hidden_from=0)
            batch.append(step._replace(layers=self._recipe.layers))
        result = self._engine.extend(batch)
        for text, new_tokens, hidden_states in zip(running, batch, result.hidden_states, strict=True):
            text.cached += len(new_tokens.tokens)
            text.hidden_states.append(hidden_states.to("cpu", copy=True))
        ready = [text for text in running if text.cached == len(text.tokens)]
        if ready:
            for text, token in zip(ready, _next_tokens(result.all_logits, ready), strict=True):
                text.tokens.append(token)

    def _is_complete(self, text: _RunningText) -> bool:
        written = len(text.tokens) - text.prompt_length
        ended = written > 0 and text.tokens[-1] in self._engine.info.eos_token_ids
        return ended or written >= self._recipe.max_tokens


def _next_tokens(logits: torch.Tensor, texts: Sequence[_RunningText]) -> list[int]:
    """Return the next token of each text; a drawn one depends on the text's seed and length alone."""
    tokens = logits.max(dim=-1).indices  # faster than argmax
    drawn = [row for row, text in enumerate(texts) if not text.params.greedy]
    if drawn:
        params, lengths = zip(*((texts[row].params, len(texts[row].tokens)) for row in drawn), strict=True)
        tokens[drawn] = coupled_draws(logits[drawn], params, lengths)
    return tokens.tolist()


def _save(path: Path, examples: Sequence[Example]) -> None:
    with atomic_write(path) as file:
        save_file(
            {
                "tokens": torch.cat([example.tokens for example in examples]).to(torch.int32),
                "lengths": torch.tensor([len(example.tokens) for example in examples], dtype=torch.int32),
                "prompt_lengths": torch.tensor([example.prompt_length for example in examples], dtype=torch.int32),
                "features": torch.cat([example.hidden_states for example in examples]),
                "states": torch.cat([example.layer_states for example in examples]),
            },
            file,
        )


def _load(path: Path) -> Iterator[Example]:
    try:
        with safe_open(path, "pt") as shard:
            names = ("tokens", "lengths", "prompt_lengths", "features", "states")
            tokens, lengths, prompts, final, states = map(shard.get_tensor, names)
    except (OSError, SafetensorError) as error:
        raise StartupError(f"cannot read {path}: {error}; delete it to generate it again") from error
    at = row = 0
    for length, prompt_length in zip(lengths.tolist(), prompts.tolist(), strict=True):
        last = row + length - 1
        yield Example(tokens[at : at + length].long(), prompt_length, final[row:last], states[row:last])
        at += length
        row += length - 1


def _is_complete(path: Path) -> bool:
    try:
        with safe_open(path, "pt") as shard:
            return "features" in shard.keys()  # noqa: SIM118
    except (OSError, SafetensorError):
        return False
