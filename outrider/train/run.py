"""One training run: data, held-out data, method, loop, output folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoConfig

from outrider.base.atomic_files import room_for
from outrider.base.config import home
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions, pick_device
from outrider.engine.loading.selection import startup_errors
from outrider.models.hub import locate, locate_safetensors
from outrider.models.pretrained import empty_model, load_whole
from outrider.models.tokenizer import read_tokenizer
from outrider.protocol.errors import InvalidRequest, StartupError
from outrider.protocol.fleet import ModelInfo
from outrider.train import data, loop
from outrider.train.artifacts import card as cards
from outrider.train.artifacts.card import Card
from outrider.train.artifacts.eagle import Eagle
from outrider.train.artifacts.embeddings_and_head import EmbeddingsAndHead, read_embeddings_and_head
from outrider.train.data import DataRecipe, Dataset, Example, TrainingPrompt
from outrider.train.fit import frequent_ids
from outrider.train.methods.eagle import EagleMethod
from outrider.train.methods.interface import Method, TrainingInputs
from outrider.train.methods.language_model import LanguageMethod, distilled, early_exit, shortened
from outrider.train.methods.medusa import MedusaMethod
from outrider.train.methods.published_markov import MARKOV_HEADS
from outrider.train.published.method import FORMATS, MODEL, DsparkMethod, Eagle3Method, TrainedCheckpoint, state_layers

_HELD_OUT_SHARE, _MOST_HELD_OUT = 20, 120  # one in 20 of the user's prompts is held out
_Begun = tuple[Card, dict[str, torch.Tensor]]  # a trained eagle to continue from
METHODS = ("eagle", *FORMATS, "medusa", "early-exit", "distill")


@dataclass(frozen=True, slots=True)
class TrainingOrder:
    """The options of a training run."""

    method: str
    target: str
    out: Path
    prompts: Path | None = None
    num_examples: int = 0  # 0: one per prompt
    max_tokens: int = 160
    learn_tokens: int = 5_000_000
    num_ids: int = 8_192
    layers: int = 0  # trained layers; 0: one, or those of `start`
    heads: int = 4  # tokens ahead: of Medusa, of a block of DSpark
    markov: str = "vanilla"  # kind of DSpark's Markov head
    exit_layers: int = 4  # layers of the target that an early exit uses
    hidden: int = 192  # width of a distilled model
    unroll: int = 3
    start: str = ""  # a trained eagle to continue from
    learning_rate: float = 1e-3
    seed: int = 0
    device: str = "auto"
    data_home: Path = field(default_factory=lambda: home() / "training" / "data")
    restart: bool = False
    command: str = ""

    def check(self) -> None:
        """Raise StartupError for an unknown method, or a folder that holds a result."""
        if self.method not in METHODS:
            raise StartupError.of("method", self.method, f"one of {', '.join(METHODS)}")
        if self.start and self.method != "eagle":
            raise StartupError.of("from", self.start, "given with eagle only")
        if self.method == "distill" and self.hidden % (2 * max(1, self.hidden // 64)):
            raise StartupError.of("hidden", self.hidden, "a multiple of 64, or an even number below 128")
        if self.method == "dspark" and self.heads < 2:
            raise StartupError.of("heads", self.heads, "at least 2 for dspark")
        if self.markov not in MARKOV_HEADS:
            raise StartupError.of("markov", self.markov, f"one of {', '.join(MARKOV_HEADS)}")
        trained, begun = cards.is_trained(str(self.out)), (self.out / loop.CHECKPOINT).is_file()
        if not (trained or begun) and any((*self.out.glob("*.safetensors"), *self.out.glob("*.gguf"))):
            raise StartupError(f"{self.out} holds a model: name another folder", field="out", value=str(self.out))
        if trained and not self.restart and not begun:
            problem = f"{self.out} holds a trained drafter already"
            message = f"{problem}; name another folder, or train it again with --restart"
            raise StartupError(message, field="out", value=str(self.out))


class Watcher(Protocol):
    """The display of a run's progress."""

    def on_status(self, text: str) -> None: ...

    def on_data(self, what: str, progress: data.DataProgress) -> None: ...

    def on_step(self, report: loop.Report) -> None: ...


def train(order: TrainingOrder, watcher: Watcher) -> Card:
    """Train a drafter, save it, and return its card."""
    order.check()
    with _locked(order.out):
        return _train(order, watcher)


def _train(order: TrainingOrder, watcher: Watcher) -> Card:
    device = pick_device(order.device)
    prompts, held_out = _prompts(order.prompts)
    begun = _begun(order, watcher) if order.start else None
    order = replace(order, layers=order.layers or 1)
    if order.method == "early-exit":
        _check_exit(order, watcher)
    info, recipe, examples, held_out_examples = _data(order, prompts, held_out, watcher)
    target_weights, method = _method(order, device, examples, begun, watcher)
    if order.restart:
        (order.out / loop.CHECKPOINT).unlink(missing_ok=True)
    identity = {"method": order.method, "shape": method.shape, "recipe": asdict(recipe), "unroll": order.unroll}
    identity |= {"start": order.start, "vocabulary": order.num_ids}
    plan = loop.TrainingPlan(tokens=order.learn_tokens, learning_rate=order.learning_rate, seed=order.seed)
    training = loop.Training(method, examples, held_out_examples, plan, order.out, identity, device)
    watcher.on_status("measuring the drafter on held-out texts")
    metrics = training.run(watcher.on_step)
    learnt = {"tokens": training.tokens, "steps": training.step, "minutes": round(training.seconds / 60, 1)}
    card = Card(
        method=order.method,
        target=info.name,
        target_lineage=info.weights_digest,
        vocabulary_digest=info.vocabulary_digest,
        ends_digest=target_weights.digest,
        shape=dict(method.shape),
        data=json.loads(json.dumps(asdict(recipe))) | {"tokens": sum(len(example.tokens) for example in examples)},
        training=asdict(plan) | learnt | {"unroll": order.unroll, "start": order.start, "device": str(device)},
        metrics=metrics,
        command=order.command,
    )
    if order.method == "distill":
        assert isinstance(method, LanguageMethod)
        with room_for(order.out):
            method.module.to(torch.bfloat16).save_pretrained(order.out)  # an ordinary model, for kind model
            read_tokenizer(locate(order.target, watcher.on_status)).save_pretrained(order.out)
    if isinstance(method, TrainedCheckpoint):
        method.save_config(order.out, order.target)
    cards.save(order.out, card, method.weights(), MODEL if order.method in FORMATS else cards.WEIGHTS)
    (order.out / loop.CHECKPOINT).unlink(missing_ok=True)
    return card


def _prompts(file: Path | None) -> tuple[list[TrainingPrompt], list[TrainingPrompt]]:
    """Return the prompts for training, and those that are held out."""
    if file is None:
        return data.shipped("train"), data.shipped("heldout")
    prompts = data.read_prompts(file)
    held_out = prompts[::_HELD_OUT_SHARE][:_MOST_HELD_OUT]
    texts = {prompt.text for prompt in held_out}
    others = [prompt for prompt in prompts if prompt.text not in texts]
    if not others:
        raise InvalidRequest.of("prompts", f"{len(texts)} different prompts", "at least 2: one is held out")
    return others, held_out


def _begun(order: TrainingOrder, watcher: Watcher) -> _Begun:
    """Return the drafter to continue from. Raise StartupError unless it is whole and for this target and shape."""
    folder = cards.locate(order.start, order.method)
    card, weights = cards.load(folder, order.method)
    target_weights = read_embeddings_and_head(order.target, watcher.on_status)
    card.check_target(folder, order.target, target_weights.digest)
    with cards.reading(folder):
        layers = Eagle.from_weights(card.shape, weights, target_weights).shape.layers
    if order.layers not in (0, layers):
        raise StartupError.of("layers", order.layers, f"{layers}, as {order.start} has, or absent")
    return card, weights


def _check_exit(order: TrainingOrder, watcher: Watcher) -> None:
    """Raise StartupError for a target that has no such early exit, before texts are written."""
    with startup_errors(order.target), torch.device("meta"):
        config = AutoConfig.from_pretrained(locate(order.target, watcher.on_status), trust_remote_code=False)
        shortened(empty_model(config), exit_layers=order.exit_layers, layers=order.layers)


def _data(
    order: TrainingOrder, prompts: Sequence[TrainingPrompt], held_out: Sequence[TrainingPrompt], watcher: Watcher
) -> tuple[ModelInfo, DataRecipe, list[Example], dict[str, list[Example]]]:
    """Return the target's description, the recipe, the examples, and the held-out ones by kind. Only this loads it."""
    target = load_model(order.target, EngineOptions(device=order.device, prefix_tokens=0), watcher.on_status)
    info = target.engine.info
    layers = state_layers(target.engine.state_shape[0]) if order.method in FORMATS else ()

    def written(name: str, prompts: Sequence[TrainingPrompt], count: int, **changes: Any) -> Dataset:
        recipe = data.recipe(target, prompts, count, order.max_tokens, order.seed)
        dataset = Dataset(order.data_home, replace(recipe, layers=layers, **changes), prompts)
        dataset.write(target, partial(watcher.on_data, name))
        return dataset

    tests = written("held out", held_out, len(held_out), temperatures=(0.0,))  # first: few texts show a wrong prompt
    kinds = _by_kind(held_out, list(tests.examples()))
    learnt = written("for training", prompts, order.num_examples or len(prompts))
    return info, learnt.recipe, list(learnt.examples()), kinds


def _method(
    order: TrainingOrder, device: torch.device, examples: Sequence[Example], begun: _Begun | None, watcher: Watcher
) -> tuple[EmbeddingsAndHead, Method]:
    watcher.on_status("preparing the drafter")
    torch.manual_seed(order.seed)
    folder = locate_safetensors(order.target, watcher.on_status)
    watcher.on_status(f"loading the weights of {order.target}")
    model = load_whole(order.target, folder)
    target_weights = EmbeddingsAndHead.of(model).on(device)
    vocab_size = len(target_weights.head)
    num_ids = vocab_size if order.method == "distill" else order.num_ids  # it is served as an ordinary model
    known = () if begun is None else begun[1]["ids"].tolist()
    ids = frequent_ids(examples, num_ids, vocab_size, known).to(device)
    method = _make(order, TrainingInputs(model, target_weights, ids, examples), begun)
    method.module.to(device)
    return target_weights, method


def _make(order: TrainingOrder, inputs: TrainingInputs, begun: _Begun | None) -> Method:
    if order.method == "eagle":
        start = None
        if begun is not None:
            card, weights = begun
            start = Eagle.from_weights(card.shape, weights | {"ids": inputs.ids}, inputs.target_weights)
        return EagleMethod(inputs, layers=order.layers, steps=order.unroll, start=start)
    if order.method == "eagle3":
        return Eagle3Method(inputs, layers=order.layers, steps=order.unroll)
    if order.method == "dspark":
        return DsparkMethod(inputs, layers=order.layers, block=order.heads, markov=order.markov)
    if order.method == "medusa":
        return MedusaMethod(inputs, heads=order.heads)
    if order.method == "distill":
        return distilled(inputs, hidden=order.hidden, layers=order.layers)
    return early_exit(inputs, exit_layers=order.exit_layers, layers=order.layers)


def _by_kind(prompts: Sequence[TrainingPrompt], examples: Sequence[Example]) -> dict[str, list[Example]]:
    kinds: dict[str, list[Example]] = {}
    for prompt, example in zip(prompts, examples, strict=True):
        if len(example.tokens) - example.prompt_length > 1:
            kinds.setdefault(prompt.kind, []).append(example)
    if not kinds:
        raise InvalidRequest.of("prompts", f"{len(prompts)} held-out ones", "one whose answer has two tokens or more")
    return kinds


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder for one training run, and remove what runs that were killed left unfinished."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StartupError(f"another training run uses {folder}", field="out", value=str(folder)) from error
        for unfinished in {*folder.glob(f".{loop.CHECKPOINT}.*"), *folder.glob(f".*.{'[0-9a-f]' * 16}")}:
            unfinished.unlink()
        yield
