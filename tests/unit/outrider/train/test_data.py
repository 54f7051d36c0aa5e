"""Training data: the texts of a target, written together and in shards."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.workers.chat_template import Chat
from coordinator.workers.target import Target
from outrider.engine import SessionTokens
from outrider.engine.loading.loader import LoadedModel, load_model
from outrider.engine.loading.options import EngineOptions
from outrider.protocol.errors import InvalidRequest
from outrider.testing.toy_models import TEMPLATE, make_model
from outrider.train import data
from outrider.train.data import DataRecipe, Dataset, Example, TrainingPrompt

PROMPTS = [TrainingPrompt("chat", f"Say {i} things" + " and more" * (i % 5)) for i in range(9)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = make_model(tmp_path_factory.mktemp("target"), seed=7)
    return load_model(str(folder), EngineOptions(device="cpu", kv_tokens=4096, prefix_tokens=0))


@pytest.fixture
def recipe(target: LoadedModel) -> DataRecipe:
    return data.recipe(target, PROMPTS, 20, 10, seed=3)


def _written(target: LoadedModel, folder: Path, recipe: DataRecipe) -> list[Example]:
    dataset = Dataset(folder, recipe, PROMPTS)
    dataset.write(target)
    return list(dataset.examples())


def test_no_bundled_prompt_comes_twice_and_none_of_the_held_out_ones_is_learned() -> None:
    words = [" ".join(prompt.text.lower().split()) for name in ("train", "heldout") for prompt in data.shipped(name)]
    assert len(words) > 8_000
    assert [prompt for prompt, count in Counter(words).items() if count > 1] == []


PARTS = (
    "{% for m in messages %}{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
)


@pytest.mark.parametrize("template", [TEMPLATE, PARTS])
def test_prompts_are_rendered_as_a_coordinator_does(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, template: str
) -> None:
    """The target was given `:` alone, where its template reads parts, as those of many models that see images."""
    monkeypatch.setattr(target.tokenizer, "chat_template", template)
    served: Any = Target(target.engine.info, target.tokenizer, None, None)  # type: ignore[arg-type]
    (example,) = _written(target, tmp_path, data.recipe(target, PROMPTS, 1, 4, seed=3))
    wanted = served.encode_chat(Chat([{"role": "user", "content": PROMPTS[0].text}]))
    assert example.tokens[: example.prompt_length].tolist() == [*wanted]
    assert PROMPTS[0].text in target.tokenizer.decode(wanted)


def test_texts_after_prompts_that_were_lost_are_written_again(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target.tokenizer, "chat_template", PARTS)
    assert data.recipe(target, PROMPTS, 1, 4, seed=3).template != data.digest(PARTS)
    monkeypatch.setattr(target.tokenizer, "chat_template", TEMPLATE)
    assert data.recipe(target, PROMPTS, 1, 4, seed=3).template == data.digest(TEMPLATE)


def test_a_text_does_not_depend_on_those_beside_it(
    target: LoadedModel, recipe: DataRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "SHARD_EXAMPLES", 6)
    together = _written(target, tmp_path / "together", recipe)
    monkeypatch.setattr(data, "_SESSIONS", 1)
    alone = _written(target, tmp_path / "alone", recipe)
    assert len(together) == len(alone) == recipe.num_examples
    for one, other in zip(together, alone, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert torch.equal(one.hidden_states, other.hidden_states)
    assert target.engine.blocks.pool.num_used == 0


def test_a_killed_run_writes_the_missing_shards_only(
    target: LoadedModel, recipe: DataRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "SHARD_EXAMPLES", 6)
    whole = _written(target, tmp_path, recipe)
    dataset = Dataset(tmp_path, recipe, PROMPTS)
    shards = sorted(dataset.folder.glob("*.safetensors"))
    shards[1].unlink()
    shards[3].write_bytes(b"cut")
    seen: list[data.DataProgress] = []
    dataset.write(target, seen.append)
    assert (seen[0].done, seen[-1].done, len(seen)) == (12, 20, 3)
    assert seen[-1].tokens == sum(len(example.tokens) for example in whole[6:12] + whole[18:])
    assert [each.tokens.tolist() for each in dataset.examples()] == [each.tokens.tolist() for each in whole]


def test_what_a_killed_run_had_begun_to_write_is_removed(
    target: LoadedModel, recipe: DataRecipe, tmp_path: Path
) -> None:
    """After an hour: until then another run may be writing it."""
    _written(target, tmp_path, recipe)
    folder = Dataset(tmp_path, recipe, PROMPTS).folder
    for name, age_s in ((".shard-00000-a.safetensors.77", 4000), (".shard-00001-b.safetensors.78", 60)):
        (folder / name).write_bytes(b"begun")
        os.utime(folder / name, (time.time() - age_s,) * 2)
    _written(target, tmp_path, recipe)
    assert [path.name for path in folder.glob(".*")] == [".shard-00001-b.safetensors.78"]


def test_a_corrected_prompt_is_answered_again_and_the_others_are_not(
    target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are they when prompts are added at the end, or fewer texts are wanted."""
    monkeypatch.setattr(data, "SHARD_EXAMPLES", 3)

    def counted(prompts: list[TrainingPrompt], count: int) -> int:
        dataset, seen = (
            Dataset(tmp_path, data.recipe(target, prompts, count, 10, 3), prompts),
            list[data.DataProgress](),
        )
        dataset.write(target, seen.append)
        starts = [data.encode(target.tokenizer, prompts[i % len(prompts)].text) for i in range(count)]
        assert [each.tokens[: each.prompt_length].tolist() for each in dataset.examples()] == starts
        return count - seen[0].done

    corrected = [*PROMPTS[:4], TrainingPrompt("chat", "Say four things"), *PROMPTS[5:]]
    assert counted(PROMPTS, 9) == 9
    assert counted(corrected, 9) == 3
    assert counted([*corrected, TrainingPrompt("chat", "One more")], 10) == 1
    assert counted([TrainingPrompt("other kind", prompt.text) for prompt in PROMPTS], 6) == 0


def test_texts_of_another_chat_template_are_not_used(
    target: LoadedModel, recipe: DataRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _written(target, tmp_path, recipe)
    monkeypatch.setattr(target.tokenizer, "chat_template", "{{ messages[0]['content'] }}!")
    changed = data.recipe(target, PROMPTS, 20, 10, seed=3)
    after = _written(target, tmp_path, changed)
    assert changed != recipe
    assert [each.prompt_length for each in after] == [len(PROMPTS[i % 9].text) + 1 for i in range(20)]
    assert [each.tokens.tolist() for each in before] == [
        each.tokens.tolist() for each in _written(target, tmp_path, recipe)
    ]


def test_texts_are_drawn_at_several_temperatures(target: LoadedModel, recipe: DataRecipe, tmp_path: Path) -> None:
    counts = [recipe.params(index).temperature for index in range(600)]
    assert {temperature: counts.count(temperature) for temperature in recipe.temperatures} == {
        0.0: pytest.approx(300, abs=6),
        **{temperature: pytest.approx(100, abs=6) for temperature in (0.6, 0.8, 1.0)},
    }
    texts = _written(target, tmp_path, recipe)
    others = _written(target, tmp_path, replace(recipe, seed=4))
    for index, (text, other) in enumerate(zip(texts, others, strict=True)):
        same = text.tokens.tolist() == other.tokens.tolist()
        assert same == recipe.params(index).greedy


def test_greedy_texts_follow_the_best_token(target: LoadedModel, recipe: DataRecipe, tmp_path: Path) -> None:
    for example in _written(target, tmp_path, replace(recipe, temperatures=(0.0,))):
        first = example.prompt_length - 1
        tokens = example.tokens.tolist()
        logits = target.engine.extend([SessionTokens("again", tokens[:-1], logits_from=first)]).logits[0]
        target.engine.free("again")
        assert tokens[first + 1 :] == logits.argmax(dim=-1).tolist()


def test_texts_go_together_as_far_as_the_cache_holds_them(
    recipe: DataRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that it cannot hold alone is tried, and the engine tells."""
    folder = make_model(tmp_path / "target", seed=7)
    small = load_model(str(folder), EngineOptions(device="cpu", kv_tokens=256, prefix_tokens=0))
    monkeypatch.setattr(data, "KV_TOKENS", 256)
    assert sum(len(data.encode(small.tokenizer, prompt.text)) + recipe.max_tokens for prompt in PROMPTS) > 256
    texts = _written(small, tmp_path, recipe)
    assert len(texts) == recipe.num_examples
    assert small.engine.blocks.pool.num_used == 0


def test_a_prompt_that_is_too_long_is_told_before_any_text_is_written(target: LoadedModel, recipe: DataRecipe) -> None:
    prompts = [*PROMPTS, TrainingPrompt("chat", "Far too long " * 2000)]
    with pytest.raises(InvalidRequest, match="'Far too long"):
        next(data._Generator(target, recipe, prompts).generate(range(len(prompts))))


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "a \\ud800"}',
        '{"prompt": " "}',
        '{"prompt": 5}',
        '["prompt"]',
        "{",
        f'{{"prompt": "a", "id": {"9" * 5000}}}',
        "[" * 100_000,
    ],
    ids=lambda line: line[:20],
)
def test_a_line_that_is_no_prompt_is_told(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "Say something."}}\n{line}\n')
    with pytest.raises(InvalidRequest, match=r"prompts\.jsonl:2"):
        data.read_prompts(file)


def test_a_mark_of_the_byte_order_is_no_part_of_the_first_prompt(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "Say something."}\r\n{"prompt": "caf\xc3\xa9"}\r\n')
    assert [prompt.text for prompt in data.read_prompts(file)] == ["Say something.", "café"]
