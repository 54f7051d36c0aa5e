"""The drafter's grammar cursor masks as many guesses as there is time for; the others are free."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from drafter.grammar import GrammarCursor, TargetGrammars
from outrider.models.tokenizer import tokenizer_json
from outrider.protocol.sampling_params import Grammar, SamplingParams
from outrider.protocol.vocabulary import Vocabulary
from outrider.settings.drafter import DrafterSettings
from outrider.speculation.grammar import GrammarCompiler, GrammarMatcher
from outrider.testing.toy_models import byte_tokenizer

BYTES = byte_tokenizer()
END = 256
VOCAB = 257
MASKS_S = 0.02
SLOW = "(b|((((a{100}){100}){100}){100}))*"
A, B = BYTES.encode("ab")
PROMPT = [B, A]


@pytest.fixture
def masked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The paths that a mask was computed for."""
    paths: list[tuple[int, ...]] = []
    compute = GrammarMatcher._mask_after

    def mask_after(guide: GrammarMatcher, path: tuple[int, ...]) -> object:
        paths.append(path)
        return compute(guide, path)

    monkeypatch.setattr(GrammarMatcher, "_mask_after", mask_after)
    return paths


def opened(regex: str) -> tuple[GrammarMatcher, GrammarCursor]:
    grammars = GrammarCompiler(partial(tokenizer_json, BYTES), [END])
    guide = grammars.compile(SamplingParams(grammar=Grammar(regex=regex)))
    return guide, GrammarCursor(guide, len(PROMPT))


def test_a_slow_grammar_masks_few_paths_and_leaves_the_others_free(masked: list[tuple[int, ...]]) -> None:
    guide, cursor = opened(SLOW)
    paths = [[B] * n + [A] * (n % 3) for n in range(32)]
    for _ in range(12):
        most = max(1, guide.affordable_masks(MASKS_S))
        masked.clear()
        allowed = cursor.allowed(PROMPT, len(PROMPT), paths, VOCAB)
        assert allowed is not None
        assert allowed.shape == (32, VOCAB)
        assert masked
        assert set(masked) <= {tuple(path) for path in paths[:most]}
        assert not allowed[:most].all(axis=1).any()
        assert allowed[most:].all()
        assert set(np.flatnonzero(allowed[0])) == {A, B, END}


def test_the_first_draft_of_a_grammar_masks_at_most_ten_paths(masked: list[tuple[int, ...]]) -> None:
    _, cursor = opened(SLOW)
    cursor.allowed(PROMPT, len(PROMPT), [[B] * n for n in range(32)], VOCAB)
    assert 1 <= len(masked) <= 10


def test_one_path_is_masked_however_slow_its_mask(masked: list[tuple[int, ...]]) -> None:
    guide, cursor = opened(SLOW)
    guide._mask_s = 1.0
    allowed = cursor.allowed(PROMPT, len(PROMPT), [[B], [B, B]], VOCAB)
    assert allowed is not None
    assert masked == [(B,)]
    assert allowed.sum(axis=1).tolist() == [3, VOCAB]


def test_a_cheap_grammar_masks_every_path_after_a_few_drafts(masked: list[tuple[int, ...]]) -> None:
    _, cursor = opened("(a|b)*")
    paths = [[A] * n for n in range(32)]
    drafts = 0
    while len(masked) < len(paths):
        masked.clear()
        allowed = cursor.allowed(PROMPT, len(PROMPT), paths, VOCAB)
        drafts += 1
        assert drafts < 50
    assert drafts > 1, "the first ones are careful"
    assert allowed is not None
    assert {frozenset(np.flatnonzero(mask)) for mask in allowed} == {frozenset((A, B, END))}


async def test_a_tokenizer_that_cannot_be_read_counts_as_none(tmp_path: Path) -> None:
    """The library raises a plain Exception for a form of tokenizer.json that is newer than it."""
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "of tomorrow"}, "added_tokens": []}')
    grammars = TargetGrammars(DrafterSettings(kind="suffix", target=str(tmp_path)))
    for _ in range(2):
        assert await grammars.cursor(SamplingParams(grammar=Grammar(regex="a")), PROMPT, 2, "digest", [END]) is None


_TWO_TARGETS = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from drafter.grammar import TargetGrammars
from outrider.settings.drafter import DrafterSettings
grammars = TargetGrammars(DrafterSettings(kind="suffix"))
with ThreadPoolExecutor(2) as threads:
    first = threads.submit(grammars._load, "one", ())
    while "transformers" not in sys.modules:
        time.sleep(0.001)
    second = threads.submit(grammars._load, "other", ())
    print(first.result(), second.result())
"""


def test_two_targets_are_met_at_once_in_a_new_process() -> None:
    """The thread of one got a half of transformers, and every further session of its target with a grammar failed."""
    done = subprocess.run([sys.executable, "-c", _TWO_TARGETS], capture_output=True, text=True, check=False)
    assert (done.stdout.splitlines()[-1:], done.returncode) == (["None None"], 0), done.stderr


async def test_a_tokenizer_for_which_there_was_no_thread_is_loaded_by_the_next_session(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every later session with a grammar got the error of the first one."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    BYTES.save_pretrained(tmp_path)
    grammars = TargetGrammars(DrafterSettings(kind="suffix", target=str(tmp_path)))
    given = SamplingParams(grammar=Grammar(regex="a")), PROMPT, 2, Vocabulary.of(BYTES).digest, [END]
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            with pytest.raises(RuntimeError):
                await grammars.cursor(*given)
    assert await grammars.cursor(*given) is not None
