"""Drafters made by `outrider train`, for the tiny target and in seconds: made, resumed, served, refused."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file

from drafter.methods import published_blocks
from drafter.methods.registry import make
from outrider.engine.loading.loader import LoadedModel
from outrider.models.drafter_choice import choose_drafter
from outrider.protocol.errors import InvalidRequest, StartupError
from outrider.settings.drafter import DrafterSettings
from outrider.testing.toy_models import make_model
from outrider.train import data, loop, run
from outrider.train.artifacts import card as cards
from outrider.train.artifacts.card import Card
from outrider.train.run import METHODS, TrainingOrder
from outrider.train.tune import tune
from outrider.v1 import common_pb2 as common
from tests.cluster import Output
from tests.conftest import Models
from tests.contract.conftest import HEARTBEAT_MS, HOME_LENGTH, HOME_PROMPT, Greedy, Home, after_joining, drafter_serving

pytestmark = pytest.mark.timeout(120)

TOKENS = 40_000
LEARNT = {"distill": 10 * TOKENS}  # a whole model: after as few tokens as the others it may be worse than at first
OWN = tuple(method for method in METHODS if method != "eagle3")  # formats of our own; the other's tests are quicker


@dataclass
class Watched:
    reports: list[loop.Report] = field(default_factory=list)
    written: list[data.DataProgress] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    die_at: int = 0

    def on_status(self, text: str) -> None:
        self.said.append(text if not self.reports else f"late: {text}")

    def on_data(self, what: str, progress: data.DataProgress) -> None:
        self.written.append(progress)

    def on_step(self, report: loop.Report) -> None:
        self.reports.append(report)
        if self.die_at and report.step >= self.die_at:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def order(models: Models, tmp_path_factory: pytest.TempPathFactory) -> TrainingOrder:
    folder = tmp_path_factory.mktemp("training")
    prompts = folder / "prompts.jsonl"
    kinds = ("chat", "code")
    words = [{"kind": kinds[i % 2], "prompt": f"Say {i} things about {i * 7} and {i + 3}."} for i in range(180)]
    prompts.write_text("".join(json.dumps(each) + "\n" for each in words))
    return TrainingOrder(
        method="eagle",
        target=str(models.target),
        out=folder / "eagle",
        prompts=prompts,
        max_tokens=24,
        learn_tokens=TOKENS,
        learning_rate=5e-3,
        num_ids=128,
        exit_layers=1,
        hidden=64,
        device="cpu",
        data_home=folder / "data",
        command="outrider train eagle",
    )


@dataclass(frozen=True)
class Made:
    folder: Path
    card: Card
    watched: Watched


@pytest.fixture(scope="module")
def made(order: TrainingOrder) -> dict[str, Made]:
    found = {}
    for method in OWN:
        mine = replace(order, method=method, out=order.out.with_name(method), learn_tokens=LEARNT.get(method, TOKENS))
        watched = Watched()
        found[method] = Made(mine.out, run.train(mine, watched), watched)
    return found


def test_what_takes_long_before_the_first_step_is_told(made: dict[str, Made], models: Models) -> None:
    """Large weights are read for minutes, and held-out texts are measured once before anything is learnt."""
    loading, measuring = f"loading the weights of {models.target}", "measuring the drafter on held-out texts"
    assert made["eagle"].watched.said[-3:] == ["preparing the drafter", loading, measuring]


@pytest.mark.parametrize("method", OWN)
def test_a_card_says_for_whom_and_how_good(made: dict[str, Made], loaded: LoadedModel, method: str) -> None:
    card = cards.read_card(made[method].folder)
    assert card == made[method].card
    assert (card.method, card.target_lineage) == (method, loaded.engine.info.weights_digest)
    assert card.data["num_examples"] == 171, "of 180 prompts every twentieth is held out"
    assert card.training["tokens"] >= TOKENS
    assert set(card.metrics) == {"all", "chat"}, "the held-out ones are of even numbers"
    assert not (made[method].folder / loop.CHECKPOINT).exists()


@pytest.mark.parametrize("method", OWN)
def test_acceptance_rises(made: dict[str, Made], method: str) -> None:
    first = made[method].watched.reports[0].held_out["all"]["acceptance_length"]
    last = made[method].card.metrics["all"]["acceptance_length"]
    if method == "early-exit":
        assert last > 3, "half of this target is nearly all of it: there is nothing to gain, much to lose"
    else:
        assert last > first, f"{last} after {first}"


def test_the_target_writes_once(made: dict[str, Made]) -> None:
    """All four learnt from the same texts: only the first had any written."""
    assert max(progress.tokens for progress in made["eagle"].watched.written) > 0
    assert all(progress.tokens == 0 for progress in made["medusa"].watched.written)


def test_killed_and_resumed_ends_as_if_it_had_not_been(
    order: TrainingOrder, made: dict[str, Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_CHECKPOINT_S", 0.0)
    mine = replace(order, out=order.out.with_name("resumed"))
    for step in (2, 5):
        with pytest.raises(KeyboardInterrupt):
            run.train(mine, Watched(die_at=step))
    begun = mine.out / f".{loop.CHECKPOINT}.77"  # by a process that was killed
    begun.write_bytes(b"begun")
    watched = Watched()
    card = run.train(mine, watched)
    assert watched.reports[0].step > 5, "it went on from where it was"
    whole = made["eagle"].card
    assert card.data == whole.data
    assert {**card.training, "minutes": 0} == {**whole.training, "minutes": 0}
    assert card.metrics == whole.metrics, "the same steps in the same order"
    assert not begun.exists()


def test_a_trained_drafter_is_continued(order: TrainingOrder, made: dict[str, Made]) -> None:
    """With more ids, as the order says: the head is the target's own."""
    watched = Watched()
    mine = replace(order, out=order.out.with_name("continued"), start=str(made["eagle"].folder), learn_tokens=1_000)
    card = run.train(replace(mine, num_ids=160), watched)
    assert card.training["start"] == str(made["eagle"].folder)
    before, after = (cards.load(out, "eagle")[1] for out in (made["eagle"].folder, mine.out))
    few, more = (set(weights["ids"].tolist()) for weights in (before, after))
    assert (len(few), len(more)) == (128, 160)
    assert few < more, "those of the drafter that is continued come first where texts have too few"
    assert watched.reports[0].loss < made["eagle"].watched.reports[0].loss
    assert len(watched.reports) == 1
    for name in ("body.0.self_attn.o_proj.weight", "body.0.mlp.down_proj.weight"):
        moved = (after[name].float() - before[name].float()).norm() / before[name].float().norm()
        assert moved < 0.1, "from the linear map, where these are zeros, it would be further in one step"
    with pytest.raises(StartupError, match="kind is eagle, must be medusa"):
        run.train(replace(mine, out=order.out.with_name("wrong"), start=str(made["medusa"].folder)), Watched())


def test_a_drafter_of_another_target_is_not_continued_and_no_text_is_written(
    order: TrainingOrder, made: dict[str, Made], models: Models, tmp_path: Path
) -> None:
    mine = replace(order, target=str(models.other_target), start=str(made["eagle"].folder))
    watched = Watched()
    with pytest.raises(StartupError, match="was trained for target, not for"):
        run.train(replace(mine, out=tmp_path / "out", data_home=tmp_path / "data"), watched)
    assert not watched.written, "of an hour, for a large target"


def test_a_damaged_checkpoint_is_told(order: TrainingOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_CHECKPOINT_S", 0.0)
    mine = replace(order, out=order.out.with_name("damaged"))
    with pytest.raises(KeyboardInterrupt):
        run.train(mine, Watched(die_at=2))
    checkpoint = mine.out / loop.CHECKPOINT
    checkpoint.write_bytes(checkpoint.read_bytes()[:5000])
    with pytest.raises(StartupError, match=r"damaged.*--restart"):
        run.train(mine, Watched())
    assert run.train(replace(mine, restart=True), Watched()).method == "eagle"


@pytest.mark.parametrize("changed", [{"learning_rate": 0.5}, {"num_ids": 64}, {"layers": 2}, {"unroll": 1}])
def test_a_checkpoint_of_another_run_is_told(
    order: TrainingOrder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changed: dict[str, Any]
) -> None:
    monkeypatch.setattr(loop, "_CHECKPOINT_S", 0.0)
    mine = replace(order, out=tmp_path / "other-settings")
    with pytest.raises(KeyboardInterrupt):
        run.train(mine, Watched(die_at=2))
    with pytest.raises(StartupError, match="other data or settings"):
        run.train(replace(mine, **changed), Watched())


def test_a_damaged_drafter_is_told(made: dict[str, Made], tmp_path: Path) -> None:
    folder = made["medusa"].folder
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / cards.CARD).write_text((folder / cards.CARD).read_text())
    (broken / cards.WEIGHTS).write_bytes((folder / cards.WEIGHTS).read_bytes()[:300])
    with pytest.raises(StartupError, match="damaged"):
        cards.load(broken, "medusa")
    with pytest.raises(StartupError, match="kind is eagle, must be medusa"):
        cards.load(folder, "eagle")
    (broken / cards.CARD).write_text("{")
    with pytest.raises(StartupError, match="damaged"):
        cards.read_card(broken)
    with pytest.raises(StartupError, match=r"no card\.json"):
        cards.read_card(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"method": "magic"}, "method is magic, must be one of"),
        ({"method": "medusa", "start": "/nowhere"}, "from is /nowhere, must be given with eagle only"),
        ({"method": "dspark", "markov": "foo"}, "markov is foo, must be one of"),
        ({"start": "/nowhere"}, "no trained drafter"),
        ({"method": "distill", "hidden": 200}, "hidden is 200, must be a multiple of 64"),
        ({"method": "early-exit", "exit_layers": 2}, "exit_layers is 2, must be at most 1 beside 1"),
        ({"prompts": Path("/nowhere.jsonl")}, "cannot read"),
        ({"target": "/nowhere"}, "no model at"),
        ({"device": "cuda:77"}, "CUDA|cuda"),
    ],
)
def test_orders_that_cannot_be(order: TrainingOrder, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(StartupError, match=said):
        run.train(replace(order, out=tmp_path / "out", **change), Watched())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"method": "early-exit", "exit_layers": 2}, "exit_layers is 2, must be at most 1 beside 1"),
        ({"method": "early-exit", "exit_layers": 1, "layers": 2}, "exit_layers is 1, must be at most 0 beside 2"),
        ({"layers": 2}, "layers is 2, must be 1, as .* has, or absent"),
    ],
)
def test_layers_that_cannot_be_are_refused_before_texts_are_written(
    order: TrainingOrder, made: dict[str, Made], tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    changed = replace(order, out=tmp_path / "out", data_home=tmp_path / "data", **change)
    if changed.method == "eagle":
        changed = replace(changed, start=str(made["eagle"].folder))
    with pytest.raises(StartupError, match=said):
        run.train(changed, Watched())
    assert not (tmp_path / "data").exists()


def test_a_full_disk_is_told(order: TrainingOrder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(data, "save_file", full)
    with pytest.raises(StartupError, match=r"no room for .*continues from there"):
        run.train(replace(order, out=tmp_path / "out", data_home=tmp_path / "data"), Watched())
    assert not list((tmp_path / "data").rglob("*.safetensors*"))


def test_tune_says_what_an_early_exit_would_gain(order: TrainingOrder, models: Models) -> None:
    """Of two layers the first alone. One whose last layer adds nothing would always be right, this one now and then."""
    assert order.prompts is not None
    prompts = data.read_prompts(order.prompts)[:6]
    said: list[str] = []
    exits = tune(
        str(models.target), prompts, order.data_home, gamma_max=3, max_tokens=24, device="cpu", status=said.append
    )
    assert [each.layers for each in exits] == [1]
    assert 0 < exits[0].acceptance[0] < 0.9
    assert len(exits[0].acceptance) == 3
    assert 1 <= exits[0].gamma <= 3
    assert 0.2 < exits[0].speed_up < 3
    assert said


def test_tune_says_that_one_layer_has_no_early_exit(tmp_path: Path) -> None:
    target = make_model(tmp_path / "single", seed=3, layers=1)
    prompts = data.shipped("heldout")[:2]
    with pytest.raises(StartupError, match="must be a model of several layers"):
        tune(str(target), prompts, tmp_path, gamma_max=1, max_tokens=8, device="cpu", status=lambda _: None)


# Served.

FORM = common.Grammar(regex="[a-z ]*")
BLOCK = common.VERIFICATION_BLOCK


def flags(models: Models, made: Made) -> dict[str, Any]:
    kind, model = choose_drafter(str(made.folder), str(models.target))
    return {"kind": kind, "model": model, "target": str(models.target), "device": "cpu", "kv_tokens": 4096}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def undrafted(home: Home) -> list[Output]:
    """The answers without a drafter, free and in a form, which must be those with any."""
    return await asyncio.gather(*(home.answer(gamma=0, seed=5, grammar=form) for form in (None, FORM)))


@pytest.mark.parametrize("method", OWN)
async def test_text_is_the_targets_whoever_drafts(
    home: Home,
    models: Models,
    made: dict[str, Made],
    loaded: LoadedModel,
    greedy: Greedy,
    undrafted: list[Output],
    method: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A confidence head may hold no guess likely, least of all in a form that no learnt text has: guesses are made."""
    monkeypatch.setattr(published_blocks, "_MIN_CONFIDENCE", 0.0)
    plain, wanted = undrafted
    async with drafter_serving(**flags(models, made[method]), coordinators=home.coordinator):
        await home.knows(1)
        with after_joining(loaded, home.service):
            outputs, trees, drawn, formed, (block, formed_block) = await asyncio.gather(
                asyncio.gather(*(home.answer(temperature=0.0, gamma=gamma) for gamma in (1, 4, None))),
                asyncio.gather(*(home.answer(temperature=0.0, gamma=4, branches=3) for _ in range(2))),
                asyncio.gather(*(home.answer(seed=5, gamma=4, branches=branches) for branches in (1, 2))),
                asyncio.gather(*(home.answer(seed=5, gamma=4, branches=each, grammar=FORM) for each in (1, 3))),
                asyncio.gather(
                    *(home.answer(seed=5, gamma=4, verification=BLOCK, grammar=each) for each in (None, FORM))
                ),
            )
    await home.knows(0)
    truth = greedy(loaded.tokenizer.encode(HOME_PROMPT), HOME_LENGTH)
    for output in (*outputs, *trees):
        assert output.token_ids == truth
    for output in drawn:
        assert output.token_ids == plain.token_ids
    assert len(block.token_ids) == HOME_LENGTH
    for output in formed:
        assert output.token_ids == wanted.token_ids
    assert re.fullmatch("[a-z ]*", formed_block.text)
    assert all(output.stats.draft_tokens for output in (*formed, formed_block))
    guessed = [output.stats.draft_tokens for output in (*outputs[:2], *trees, *drawn, block)]
    assert min(guessed) > 0
    assert sum(output.stats.accepted_tokens for output in (*outputs, *trees)) > 0
    assert all(output.stats.drafter_losses == 0 for output in (*outputs, *trees, *drawn, block))


async def test_a_drafter_for_another_target_is_refused(
    home: Home, models: Models, made: dict[str, Made], tmp_path: Path
) -> None:
    """Where its embeddings are read, at the start; where they look alike, by the coordinator."""
    wrong = flags(models, made["eagle"]) | {"target": str(models.other_target)}
    with pytest.raises(StartupError, match="trained for target, not for"):
        async with drafter_serving(**wrong, coordinators=home.coordinator):
            pass
    stranger = tmp_path / "stranger"
    card, weights = cards.load(made["eagle"].folder, "eagle")
    cards.save(stranger, replace(card, target_lineage="another"), weights)
    mine = replace(made["eagle"], folder=stranger)
    async with drafter_serving(**flags(models, mine), coordinators=home.coordinator):
        await asyncio.sleep(5 * HEARTBEAT_MS / 1000)
        assert len(home.service.sessions.worker_pool.connections()) == 1, "the verifier alone"
        output = await home.answer(temperature=0.0)
    assert output.stats.draft_tokens == 0


def test_weights_are_small(made: dict[str, Made]) -> None:
    """What the target has is not stored again."""
    for method in ("eagle", "medusa", "early-exit"):
        weights = cards.load(made[method].folder, method)[1]
        assert not any(weight.shape[0] == 257 for weight in weights.values())
        assert all(weight.dtype in (torch.bfloat16, torch.int32) for weight in weights.values())


@pytest.mark.parametrize("restart", [False, True])
def test_a_folder_with_another_model_is_left_alone(order: TrainingOrder, models: Models, restart: bool) -> None:
    """Such as the target's own, whose weights would be gone."""
    weights = models.target / "model.safetensors"
    before = weights.stat().st_mtime_ns
    with pytest.raises(StartupError, match="holds a model"):
        run.train(replace(order, out=models.target, method="distill", restart=restart), Watched())
    assert weights.stat().st_mtime_ns == before


class FillsTheDisk(Watched):
    """Makes the tokenizer a file on a full disk, once the training has begun."""

    tokenizer: Path

    def on_step(self, report: loop.Report) -> None:
        if not self.reports:
            self.tokenizer.symlink_to("/dev/full")
        super().on_step(report)


def test_a_full_disk_at_the_end_is_told_and_the_run_continues(order: TrainingOrder, tmp_path: Path) -> None:
    mine = replace(order, method="distill", out=tmp_path / "distill", learn_tokens=2000)
    watched = FillsTheDisk()
    watched.tokenizer = mine.out / "tokenizer.json"
    with pytest.raises(StartupError, match=r"no room for .*/distill: .*No space left"):
        run.train(mine, watched)
    watched.tokenizer.unlink()
    assert run.train(mine, Watched()).method == "distill"


def test_no_prompt_is_learnt_and_held_out(tmp_path: Path) -> None:
    prompts = [{"kind": "chat", "prompt": f"Say {i % 50}."} for i in range(4000)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in prompts))
    others, held_out = run._prompts(file)
    assert {each.text for each in others}.isdisjoint(each.text for each in held_out)
    assert others
    assert len(held_out) == run._MOST_HELD_OUT


def test_one_prompt_that_is_repeated_is_not_enough(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Say one thing."}\n' * 3)
    with pytest.raises(InvalidRequest, match="prompts is 1 different prompts, must be at least 2"):
        run._prompts(file)


def test_a_held_out_prompt_that_is_too_long_is_told_before_the_others_are_answered(
    order: TrainingOrder, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "x" * 5000}) + '\n{"prompt": "Say one thing."}\n')
    with pytest.raises(InvalidRequest, match="tokens in a prompt"):
        run.train(replace(order, out=tmp_path / "out", prompts=file, data_home=tmp_path / "data"), Watched())
    assert not list((tmp_path / "data").rglob("*.safetensors"))


def test_a_target_that_answers_no_held_out_prompt_is_told_before_the_others_are_answered(
    order: TrainingOrder, tmp_path: Path
) -> None:
    target = Path(shutil.copytree(order.target, tmp_path / "target"))
    for name in ("config.json", "generation_config.json"):
        config = json.loads((target / name).read_text())
        (target / name).write_text(json.dumps(config | {"eos_token_id": list(range(config.get("vocab_size", 257)))}))
    with pytest.raises(InvalidRequest, match="held-out ones, must be one whose answer has two tokens or more"):
        run.train(replace(order, target=str(target), out=tmp_path / "out", data_home=tmp_path / "data"), Watched())
    assert len(list((tmp_path / "data").rglob("*.safetensors"))) == 1


def test_a_distilled_drafter_learns_every_id_that_it_is_served_with(made: dict[str, Made]) -> None:
    ids = load_file(made["distill"].folder / cards.WEIGHTS)["ids"]
    config = json.loads((made["distill"].folder / "config.json").read_text())
    assert len(ids) == config["vocab_size"]


@pytest.mark.parametrize("method", OWN)
def test_services_of_other_users_may_read_a_drafter(made: dict[str, Made], method: str) -> None:
    """Transformers and safetensors let their own user alone read the weights."""
    modes = {file.name: file.stat().st_mode & 0o044 for file in made[method].folder.glob("*.safetensors")}
    assert modes
    assert set(modes.values()) == {0o044}, modes


def test_a_distilled_drafter_may_be_named_from_home(
    made: dict[str, Made], models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell leaves the ~ of `--drafter model:~/distill` as it is."""
    monkeypatch.setenv("HOME", str(made["distill"].folder.parent))
    kind, model = choose_drafter("model:~/distill", str(models.target))
    settings = DrafterSettings(kind=kind, model=model, target=str(models.target), device="cpu", kv_tokens=4096)
    assert make(settings, lambda _: None).info.target_digest == made["distill"].card.target_lineage


def test_a_kind_may_be_called_all(order: TrainingOrder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_by_kind", lambda prompts, examples: {"all": examples[:1], "chat": examples[1:]})
    card = run.train(replace(order, out=tmp_path / "out", learn_tokens=400), Watched())
    assert card.training["tokens"] >= 400
    assert list(card.metrics) == ["all", "chat"]
