"""`outrider train eagle3`: what it writes is read back by the loader of published drafters, with equal logits."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from drafter.published.loading import PublishedCheckpoint, TargetSize
from drafter.published.module import PublishedModule
from drafter.published.rows import DraftKvCache, RowBatch, SessionRows
from outrider.cli.app import app
from outrider.models.drafter_choice import choose_drafter
from outrider.testing.toy_models import make_model
from outrider.train import loop, run
from outrider.train.artifacts import card as cards
from outrider.train.artifacts.embeddings_and_head import EmbeddingsAndHead, read_embeddings_and_head
from outrider.train.data import DataProgress, Example
from outrider.train.loop import Report
from outrider.train.methods.interface import Batch, TrainingInputs
from outrider.train.published.checkpoint import MODEL, published_weights, save_config, state_layers
from outrider.train.published.eagle3 import Eagle3, Eagle3Shape, frozen_head_loss
from outrider.train.published.method import Eagle3Method
from outrider.train.run import TrainingOrder

STEPS, PLACES = 4, 17
LEARN_TOKENS = 3_000


@dataclass(frozen=True)
class Trained:
    folder: Path
    target: Path
    data: Path
    said: str
    order: TrainingOrder  # of the same settings


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Train for a toy target with the command that an operator types."""
    folder = tmp_path_factory.mktemp("eagle3")
    target = make_model(folder / "target", seed=7, focus=0.2)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Say {i}."}) + "\n" for i in range(24)))
    order = TrainingOrder(
        method="eagle3",
        target=str(target),
        out=folder / "out",
        prompts=folder / "prompts.jsonl",
        max_tokens=12,
        learn_tokens=LEARN_TOKENS,
        num_ids=64,
        learning_rate=2e-3,
        device="cpu",
        data_home=folder / "data",
    )
    text = f"train eagle3 --target {target} --out {order.out} --prompts {order.prompts} --data {order.data_home}"
    text += f" --max-tokens 12 --tokens {LEARN_TOKENS} --vocabulary 64 --device cpu --learning-rate 0.002"
    result = CliRunner().invoke(app, text.split())
    assert result.exit_code == 0, result.output
    return Trained(folder / "out", target, folder / "data", result.output, order)


def _step(
    module: PublishedModule, cache: DraftKvCache, tokens: torch.Tensor, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    output, hidden = module.step(RowBatch([SessionRows(cache, len(tokens))], torch.device("cpu")), tokens, hidden)
    return module.logits(output), hidden


@torch.no_grad()
def test_our_loader_reads_it_back_with_equal_logits(trained: Trained, tmp_path: Path) -> None:
    """At every position: the target's states up to it, then four steps on the own outputs."""
    torch.manual_seed(0)
    target = read_embeddings_and_head(str(trained.target), lambda _: None)
    target = replace(target, embeddings=target.embeddings.bfloat16().float())
    shape = Eagle3Shape(hidden=64, inner=96, heads=4, kv_heads=2, head_dim=16, states=(1, 2), layers=2, rope_theta=5e3)
    module = Eagle3(shape, torch.arange(3, 257, 4), target).to(torch.bfloat16).float()  # as it is written
    for name, weight in module.named_parameters():
        if "norm" in name:
            weight.copy_((torch.rand_like(weight) + 0.5).bfloat16())
    save_config(tmp_path, module, str(trained.target), LlamaConfig())
    save_file(published_weights(module, target.head), tmp_path / MODEL)
    checkpoint = PublishedCheckpoint.open(tmp_path)
    checkpoint.check_target(TargetSize.read(str(trained.target), lambda _: None))
    loaded = checkpoint.load()
    states, tokens = torch.randn(1, PLACES, 2 * 64), torch.randint(257, (1, PLACES))
    outputs = module.unroll(states, tokens, torch.tensor([0]), torch.tensor([PLACES]))
    head = target.head[module.ids].bfloat16().float()
    unrolled = [(output @ head.T)[0] for output in islice(outputs, STEPS)]
    assert loaded.ids.tolist() == module.ids.tolist()
    for known in range(1, PLACES - STEPS):
        cache = loaded.new_cache()
        logits, hidden = _step(loaded, cache, tokens[0, :known], loaded.project(states[0, :known]))
        for step in range(STEPS):
            torch.testing.assert_close(unrolled[step][known - 1 + step], logits[-1], rtol=1e-4, atol=1e-4)
            logits, hidden = _step(loaded, cache, tokens[0, known + step : known + step + 1], hidden[-1:])


def test_a_trained_one_is_loaded(trained: Trained) -> None:
    checkpoint = PublishedCheckpoint.open(trained.folder)
    checkpoint.check_target(TargetSize.read(str(trained.target), lambda _: None))
    assert checkpoint.lacks == ()
    assert checkpoint.load().layers[0].self_attn.o_proj.weight.any(), "nothing was learned"


class Dying:
    """A watcher of a run that is killed after some steps."""

    def __init__(self, after: int) -> None:
        self._after = after
        self.steps: list[int] = []

    def on_status(self, text: str) -> None:
        """Nobody looks."""

    def on_data(self, what: str, progress: DataProgress) -> None:
        """Nobody looks."""

    def on_step(self, report: Report) -> None:
        self.steps.append(report.step)
        if report.step == self._after:
            raise KeyboardInterrupt


def test_killed_and_resumed_it_ends_as_if_it_had_not_been(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_CHECKPOINT_S", 0.0)
    order = replace(trained.order, out=trained.folder.with_name("resumed"))
    killed, watcher = Dying(after=2), Dying(after=-1)
    with pytest.raises(KeyboardInterrupt):
        run.train(order, killed)
    card = run.train(order, watcher)
    assert watcher.steps[0] == 3
    assert card.metrics == cards.read_card(trained.folder).metrics
    one, other = (load_file(folder / MODEL) for folder in (trained.folder, order.out))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_files_are_those_of_speculators(trained: Trained) -> None:
    config = json.loads((trained.folder / "config.json").read_text())
    assert (config["speculators_model_type"], config["fc_norm"], config["norm_output"]) == ("eagle3", True, True)
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(trained.target)
    weights = load_file(trained.folder / "model.safetensors")
    drafted = torch.arange(64) + weights["d2t"]
    assert weights["t2d"].nonzero().flatten().tolist() == drafted.tolist()
    assert weights["embed_tokens.weight"].shape == (257, 64)
    assert weights["lm_head.weight"].shape == (64, 64)
    assert choose_drafter(str(trained.folder), str(trained.target)) == ("published", str(trained.folder))
    assert f"--drafter published:{trained.folder}" in trained.said.replace("\n", "")


def test_states_are_an_early_a_middle_and_a_late_one(trained: Trained) -> None:
    recipe = json.loads(next(trained.data.glob("*/recipe.json")).read_text())
    assert recipe["layers"] == [1, 2], "the toy target has two layers"
    assert [state_layers(count) for count in (1, 4, 30, 36)] == [(1,), (2, 4), (2, 15, 27), (2, 18, 33)]


def test_unknown_positions_change_nothing() -> None:
    torch.manual_seed(0)
    weights = torch.randn(40, 32)
    shape = Eagle3Shape(hidden=32, inner=48, heads=4, kv_heads=2, head_dim=8, states=(1, 2, 3), layers=2)
    module = Eagle3(shape, torch.arange(8), EmbeddingsAndHead(weights, weights, None, 0.0))
    states, tokens = torch.randn(1, 9, 96), torch.randint(40, (1, 9))
    other = states.clone()
    other[:, :2] += 1.0
    other[:, 7:] += 1.0
    bounds = torch.tensor([2]), torch.tensor([7])
    for one, two in zip(
        islice(module.unroll(states, tokens, *bounds), STEPS),
        islice(module.unroll(other, tokens, *bounds), STEPS),
        strict=True,
    ):
        assert torch.equal(one[:, 2 + STEPS - 1 : 7], two[:, 2 + STEPS - 1 : 7])


def test_every_weight_learns_from_an_unrolled_pass() -> None:
    torch.manual_seed(0)
    weights = torch.randn(40, 32)
    shape = Eagle3Shape(hidden=32, inner=48, heads=4, kv_heads=2, head_dim=8, states=(1, 2, 3), layers=2)
    module = Eagle3(shape, torch.arange(8), EmbeddingsAndHead(weights, weights, None, 0.0))
    states, tokens = torch.randn(1, 9, 96), torch.randint(40, (1, 9))
    outputs = islice(module.unroll(states, tokens, torch.tensor([0]), torch.tensor([9])), 3)
    probs = torch.randn(9, 8).softmax(dim=-1)
    last = list(outputs)[-1]
    frozen_head_loss(last[0], weights[:8], probs).backward()
    assert [name for name, weight in module.named_parameters() if weight.grad is None or not weight.grad.any()] == []


def test_the_loss_behind_a_constant_head_is_torchs() -> None:
    torch.manual_seed(1)
    found, head = torch.randn(5, 16, requires_grad=True), torch.randn(30, 16)
    probs = torch.randn(5, 30).softmax(dim=-1)
    wanted = torch.nn.functional.cross_entropy(found @ head.T, probs)
    (wanted_grad,) = torch.autograd.grad(wanted, found)
    loss = frozen_head_loss(found, head, probs)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(torch.autograd.grad(loss, found)[0], wanted_grad)


def test_a_batch_without_a_chosen_position_has_a_loss_of_zero(trained: Trained) -> None:
    target = AutoModelForCausalLM.from_pretrained(trained.target)
    weights = read_embeddings_and_head(str(trained.target), lambda _: None)
    wide, drawn = target.config.hidden_size, torch.Generator().manual_seed(0)
    final, tokens, at = torch.randn(9, wide, generator=drawn), torch.arange(10), torch.tensor([9])
    layers = torch.randn(9, len(state_layers(target.config.num_hidden_layers)) * wide, generator=drawn).bfloat16()
    examples = [Example(tokens, 2, final, layers)]
    method = Eagle3Method(TrainingInputs(target, weights, torch.arange(64), examples), layers=1, steps=2)
    batch = Batch(tokens[:1], final[None], layers[None], tokens[None, 1:], final[None], at * 0, at, at)
    loss = method.loss(batch, drawn, 1.0)
    loss.backward()
    assert loss == 0
