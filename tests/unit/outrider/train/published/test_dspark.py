"""`outrider train dspark`: the loss falls, and the loader of published drafters reads the same guesses back."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from drafter.published.dflash import PublishedDspark
from drafter.published.loading import PublishedCheckpoint, TargetSize
from drafter.published.rows import RowBatch, SessionRows
from outrider.cli.app import app
from outrider.models.drafter_choice import choose_drafter
from outrider.protocol.errors import StartupError
from outrider.testing.toy_models import make_model
from outrider.train import loop, run
from outrider.train.artifacts.embeddings_and_head import EmbeddingsAndHead
from outrider.train.data import DataProgress, Example
from outrider.train.loop import Report
from outrider.train.methods.interface import TrainingInputs, collate
from outrider.train.methods.published_markov import MARKOV_HEADS
from outrider.train.published.checkpoint import MODEL, published_weights, save_config
from outrider.train.published.dspark import Dspark, DsparkShape
from outrider.train.published.method import DsparkMethod
from outrider.train.run import TrainingOrder

PLACES, VOCAB, BLOCK = 17, 257, 4
SHAPE = DsparkShape(
    hidden=64, inner=96, heads=4, kv_heads=2, head_dim=16, states=(1, 2), layers=2, rope_theta=5e3, rank=8, mask=5
)


@dataclass
class Watching:
    """A watcher that keeps the losses. It kills the run after a step."""

    kill_after: int = -1
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def on_status(self, text: str) -> None: ...

    def on_data(self, what: str, progress: DataProgress) -> None: ...

    def on_step(self, report: Report) -> None:
        self.steps.append(report.step)
        self.losses.append(report.loss)
        if report.step == self.kill_after:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> TrainingOrder:
    folder = tmp_path_factory.mktemp("dspark")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Say {i}."}) + "\n" for i in range(24)))
    return TrainingOrder(
        method="dspark",
        target=str(make_model(folder / "target", seed=7, focus=0.2)),
        out=folder / "out",
        prompts=folder / "prompts.jsonl",
        max_tokens=12,
        learn_tokens=3_000,
        num_ids=64,
        learning_rate=1e-2,
        device="cpu",
        data_home=folder / "data",
    )


def random_module(shape: DsparkShape, num_ids: int) -> tuple[Dspark, EmbeddingsAndHead]:
    torch.manual_seed(0)
    weights = torch.randn(VOCAB, shape.hidden).bfloat16().float()
    target = EmbeddingsAndHead(weights, weights, None, 0.0)
    ids = torch.linspace(0, VOCAB - 1, num_ids).long()
    module = Dspark(shape, ids, target).to(torch.bfloat16).float()  # as it is written
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "norm" in name:
                weight.copy_((torch.rand_like(weight) + 0.5).bfloat16())
    return module, target


@torch.no_grad()
@pytest.mark.parametrize("markov", MARKOV_HEADS)
@pytest.mark.parametrize("num_ids", [64, VOCAB], ids=["some ids", "all ids"])
def test_our_loader_reads_the_same_guesses_back(num_ids: int, markov: str, tmp_path: Path) -> None:
    """At every position: hidden states, logits with the Markov head's, and confidence."""
    module, target = random_module(replace(SHAPE, markov=markov), num_ids)
    save_config(tmp_path, module, "toys/target", LlamaConfig())
    save_file(published_weights(module, target.head), tmp_path / MODEL)
    checkpoint = PublishedCheckpoint.open(tmp_path)
    checkpoint.check_target(TargetSize("toys/target", 64, VOCAB, 2))
    loaded = checkpoint.load()
    assert isinstance(loaded, PublishedDspark)
    assert loaded.ids.tolist() == module.ids.tolist()
    assert loaded.places == BLOCK
    states, tokens = torch.randn(1, PLACES, 2 * 64), torch.randint(SHAPE.mask + 1, VOCAB, (1, PLACES + BLOCK))
    hidden = module(states, tokens[:, :PLACES], torch.arange(PLACES)[None], torch.tensor([0]))[0]
    cache = loaded.new_cache()
    for anchor in range(PLACES):
        row = RowBatch([SessionRows(cache, 1)], torch.device("cpu"))
        loaded.commit(row, loaded.project(states[0, anchor : anchor + 1]))
        (found,) = loaded.block([cache], [int(tokens[0, anchor])])
        torch.testing.assert_close(found, hidden[anchor], rtol=1e-4, atol=1e-4)
        previous = tokens[0, anchor : anchor + BLOCK]
        bias, confidence = module.beside(hidden[anchor], previous)
        state = torch.zeros(1, loaded.markov_head.state_width)
        for place, wanted in enumerate(bias):
            state, read = loaded.markov(state, previous[place, None], found[place, None])
            torch.testing.assert_close(read[0], wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(loaded.confidence(found, previous), confidence.sigmoid(), rtol=1e-4, atol=1e-4)
        logits = hidden[anchor] @ target.head[module.ids].T
        torch.testing.assert_close(loaded.logits(found), logits, rtol=1e-4, atol=1e-4)


def test_the_loss_falls_and_a_killed_run_ends_as_one_that_was_not(
    order: TrainingOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_CHECKPOINT_S", 0.0)
    whole, killed, resumed = Watching(), Watching(kill_after=2), Watching()
    longer = replace(order, learn_tokens=3 * order.learn_tokens)  # the told loss is a mean over earlier steps
    card = run.train(longer, whole)
    other = replace(longer, out=order.out.with_name("resumed"))
    with pytest.raises(KeyboardInterrupt):
        run.train(other, killed)
    assert run.train(other, resumed).metrics == card.metrics
    assert resumed.steps[0] == 3
    one, two = (load_file(folder / MODEL) for folder in (longer.out, other.out))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert whole.losses[-1] < 0.95 * whole.losses[0]


@pytest.mark.parametrize("markov", MARKOV_HEADS)
def test_the_command_writes_what_is_served(markov: str, order: TrainingOrder) -> None:
    out = order.out.with_name(f"commanded-{markov}")
    text = f"train dspark --target {order.target} --out {out} --prompts {order.prompts} --data {order.data_home}"
    text += f" --max-tokens 12 --tokens 1 --vocabulary 64 --heads 6 --device cpu --markov {markov}"
    result = CliRunner().invoke(app, text.split())
    assert result.exit_code == 0, result.output
    assert choose_drafter(str(out), order.target) == ("published", str(out))
    config = json.loads((out / "config.json").read_text())
    assert (config["speculators_model_type"], config["markov_head_type"]) == ("dspark", markov)
    checkpoint = PublishedCheckpoint.open(out)
    checkpoint.check_target(TargetSize.read(order.target, lambda _: None))
    assert checkpoint.lacks == ()
    loaded = checkpoint.load()
    assert isinstance(loaded, PublishedDspark)
    assert loaded.places == 6


def test_a_block_of_one_is_refused(order: TrainingOrder) -> None:
    data = order.data_home.with_name("never")
    with pytest.raises(StartupError, match="heads"):
        run.train(replace(order, out=order.out.with_name("one"), data_home=data, heads=1), Watching())
    assert not data.exists(), "it is told before texts are generated"


def test_an_unknown_markov_head_is_refused(order: TrainingOrder) -> None:
    with pytest.raises(StartupError, match="vanilla, gated, rnn"):
        run.train(replace(order, out=order.out.with_name("markov"), markov="gru"), Watching())


class Knowing(Dspark):
    """A module whose guesses are the target's own: it is told the state after each token of one text."""

    states_after: torch.Tensor

    def forward(
        self, states: torch.Tensor, tokens: torch.Tensor, anchors: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        after = anchors[..., None] + 1 + torch.arange(self.shape.block)  # the anchor of position i is token i + 1
        return self.states_after[after.clamp(max=len(self.states_after) - 1)]


@torch.no_grad()
@torch.autocast("cpu", torch.bfloat16)  # as in the loop
def test_each_place_is_held_to_the_distribution_after_the_token_before_it(order: TrainingOrder) -> None:
    target = LlamaForCausalLM.from_pretrained(order.target)
    weights = EmbeddingsAndHead.of(target)
    torch.manual_seed(1)
    tokens, final = torch.randint(VOCAB, (PLACES,)), torch.randn(PLACES - 1, 64).half()
    example = Example(tokens, 4, final, torch.randn(PLACES - 1, 128).bfloat16())
    method = DsparkMethod(TrainingInputs(target, weights, torch.arange(VOCAB), [example]), layers=1, block=BLOCK)
    batch = collate([example], PLACES, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    unlearned = float(method.loss(batch, generator, 0.0))
    knowing = Knowing(method.module.shape, method.module.ids, weights)
    knowing.load_state_dict(method.module.state_dict())
    knowing.states_after = final.float()
    method.module = knowing
    knowing.confidence_head["proj"].weight.zero_()
    knowing.confidence_head["proj"].bias.fill_(20.0)
    entropy = -(probs := weights.probs(final.float())).mul(probs.log()).sum(dim=-1)
    known = float(method.loss(batch, generator, 0.0))
    assert 0.1 * float(entropy.min()) < known < 0.1 * float(entropy.max()) + 0.05 < unlearned
    lengths = method.evaluate(batch)[0]
    assert lengths.tolist() == [-1, -1, *[BLOCK] * (PLACES - 7), 3, 2, 1]


@torch.no_grad()
@torch.autocast("cpu", torch.bfloat16)  # as in the loop
@pytest.mark.parametrize("places", [2, 5, 64 + 4, 64 + 7])
def test_a_held_out_text_may_end_within_a_block(order: TrainingOrder, places: int) -> None:
    target = LlamaForCausalLM.from_pretrained(order.target)
    weights = EmbeddingsAndHead.of(target)
    torch.manual_seed(1)
    tokens, final = torch.randint(VOCAB, (places + 2,)), torch.randn(places + 1, 64).half()
    example = Example(tokens, 1, final, torch.randn(places + 1, 128).bfloat16())
    method = DsparkMethod(TrainingInputs(target, weights, torch.arange(VOCAB), [example]), layers=1, block=7)
    knowing = Knowing(method.module.shape, method.module.ids, weights)
    knowing.load_state_dict(method.module.state_dict())
    knowing.states_after = final.float()
    method.module = knowing
    lengths = method.evaluate(collate([example], places, torch.device("cpu")))[0]
    assert lengths.tolist() == [min(7, room) for room in range(places, 0, -1)]


@pytest.mark.parametrize("markov", MARKOV_HEADS)
def test_every_weight_learns_and_unknown_positions_change_nothing(markov: str) -> None:
    module, _ = random_module(replace(SHAPE, markov=markov), 64)
    states, tokens = torch.randn(1, PLACES, 2 * 64), torch.randint(VOCAB, (1, 2))
    anchors, starts = torch.tensor([[6, 9]]), torch.tensor([3])
    hidden = module(states, tokens, anchors, starts)
    bias, confidence = module.beside(hidden, torch.randint(VOCAB, hidden.shape[:-1]))
    (hidden.square().sum() + bias.square().sum() + confidence.sum()).backward()
    assert [name for name, weight in module.named_parameters() if weight.grad is None or not weight.grad.any()] == []
    states[:, :3] += 1.0
    states[:, 10:] += 1.0
    assert torch.equal(module(states, tokens, anchors, starts), hidden)
    states[:, 7] += 1.0
    changed = (module(states, tokens, anchors, starts) != hidden).flatten(2).any(dim=2)
    assert changed.tolist() == [[False, True]], "a block sees the states up to its anchor"
