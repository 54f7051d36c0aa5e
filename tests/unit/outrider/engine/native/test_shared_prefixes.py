"""Sessions that begin with the same pages: attention reads these once, and nobody's bits change."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from outrider.engine import SessionTokens
from outrider.engine.native import NativeEngine
from tests.unit.outrider.engine.native.test_native import SHAPE, SHAPES, TILES, TOKENS, engine, seeded

PREFIX, LONG = TOKENS[:128], TOKENS[:200]  # 4 pages; 6 of them whole
MODELS = SHAPES | {
    "windows": seeded(MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=150)),
    "windows that leave the prefix": seeded(MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=20)),
    "capped scores": seeded(Gemma2ForCausalLM, Gemma2Config(**SHAPE, sliding_window=140)),
}


def ends() -> list[tuple[list[int], SessionTokens]]:
    """Return cached texts, of which most begin alike, and what a step adds to each."""
    texts = [PREFIX + TOKENS[i : i + 7 * i + 1] for i in range(7)] + [LONG, LONG + TOKENS[:40], TOKENS[60:160], []]
    tree = SessionTokens("", TOKENS[300:305], (-1, -1, 0, 1, 1))
    added = [SessionTokens("", TOKENS[250 + i : 251 + i + i % 4 // 3]) for i in range(len(texts))]
    added[2] = tree
    return list(zip(texts, added, strict=True))


def cached(runs: NativeEngine, name: str, text: Sequence[int]) -> None:
    runs.match_prefix(name, text)
    left = text[runs.length(name) :]
    if left:
        runs.extend([SessionTokens(name, left)])


def step(runs: NativeEngine, which: Sequence[int]) -> list[SessionTokens]:
    return [SessionTokens(f"s{i}", ends()[i][1].tokens, ends()[i][1].parents) for i in which]


def alone(model: Any, cache: str) -> list[torch.Tensor]:
    found = []
    for i, (text, _) in enumerate(ends()):
        runs = engine(model, cache=cache)
        cached(runs, f"s{i}", text)
        found.append(runs.extend(step(runs, [i])).logits[0].clone())
    return found


def sharing(model: Any, cache: str) -> NativeEngine:
    """Return an engine in which all texts are cached, and pages that they share are one."""
    runs = engine(model, cache=cache)
    cached(runs, "before", LONG)
    runs.free("before")
    for i, (text, _) in enumerate(ends()):
        cached(runs, f"s{i}", text)
    tables = [runs.blocks.tables[f"s{i}"].blocks for i in (0, 1, 7)]
    assert len({tuple(table[:4]) for table in tables}) == 1, "nothing is shared"
    return runs


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("cache", ["float32", "bfloat16", TILES])
def test_sessions_with_a_prefix_in_common_have_the_bits_that_each_has_alone(model: Any, cache: str) -> None:
    wanted, runs = alone(model, cache), sharing(model, cache)
    everyone = range(len(wanted))
    for which in (everyone, list(reversed(everyone)), [0, 9, 1], [8, 7, 2, 0]):
        runs_now = sharing(model, cache) if which is not everyone else runs
        for i, logits in zip(which, runs_now.extend(step(runs_now, which)).logits, strict=True):
            assert torch.equal(logits, wanted[i]), i


@pytest.mark.parametrize("cache", ["float32", TILES])
def test_a_row_that_is_no_number_stays_its_sessions_own(cache: str) -> None:
    model = SHAPES["grouped heads"]
    wanted, runs = alone(model, cache), sharing(model, cache)
    rows = step(runs, range(len(wanted)))
    broken = torch.full((1, SHAPE["hidden_size"]), torch.nan)
    inputs = [model.model.embed_tokens(torch.tensor(list(each.tokens))).detach() for each in rows]
    inputs[1] = broken
    rows = [
        SessionTokens(each.session, each.tokens, each.parents, input_embeddings=given)
        for each, given in zip(rows, inputs, strict=True)
    ]
    for i, logits in enumerate(runs.extend(rows).logits):
        assert logits.isnan().all() if i == 1 else torch.equal(logits, wanted[i])


def num_tasks(runs: NativeEngine, rows: Sequence[SessionTokens]) -> int:
    scheduled = runs._schedule(rows)
    placed = runs._place(scheduled)
    runs._step.rows = len(scheduled.ids)
    library, found = runs._library, ctypes.c_int()
    library.list_tasks.restype = ctypes.c_void_p
    tasks = library.list_tasks(ctypes.byref(runs._model), ctypes.byref(runs._step), ctypes.byref(found))
    assert tasks
    assert placed
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    free(tasks)
    return found.value


@pytest.mark.parametrize(("cache", "together"), [(TILES, 5), ("float32", 4)])
def test_sessions_with_a_prefix_in_common_share_tasks_as_far_as_there_are_rows(cache: str, together: int) -> None:
    """Each session has three queries for a key head. A tile has 16 rows, the registers of AVX-512 12."""
    model, heads = SHAPES["grouped heads"], 2
    runs = sharing(model, cache)
    if cache == "float32" and runs._library.outrider_lanes() < 16:
        together = 2
    sharers = (0, 1, 3, 4, 5, 6, 7, 8)[: together + 1]
    one = [SessionTokens(f"s{i}", TOKENS[:1]) for i in (9, *sharers)]
    assert num_tasks(runs, one) == heads * (1 + 1 + 1), "as many as fit, the one more, and one with another beginning"
    assert num_tasks(runs, [SessionTokens("s9", TOKENS[:1]), SessionTokens("s0", TOKENS[:1])]) == 2 * heads
