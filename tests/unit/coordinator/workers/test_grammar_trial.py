"""What the compilation of a grammar may take, tried in real processes."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from transformers import PreTrainedTokenizerBase

from coordinator.workers.grammar_trial import GrammarTrial
from outrider.models.tokenizer import tokenizer_json
from outrider.protocol.errors import InvalidRequest, Unavailable
from outrider.protocol.sampling_params import Grammar, SamplingParams
from outrider.speculation.grammar import GrammarCompiler
from outrider.testing.toy_models import byte_tokenizer

ENDS = [256]
GRAMMAR = Grammar(regex="(yes|no)")
DEFINED = {str(i): {"pattern": f".*b.{{{8 + i}}}"} for i in range(16)}
MINUTES = [
    Grammar(json_schema=json.dumps({"allOf": [{"pattern": f".*a.{{{10 + i}}}"} for i in range(20)]})),
    Grammar(json_schema=json.dumps({"allOf": [{"$ref": f"#/$defs/{i}"} for i in range(16)], "$defs": DEFINED})),
]


def children() -> set[int]:
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


@pytest.fixture
def trial() -> GrammarTrial:
    return GrammarTrial(partial(tokenizer_json, byte_tokenizer()), ENDS)


@pytest.mark.parametrize("minutes", MINUTES, ids=["all of many patterns", "by their names"])
def test_one_that_takes_minutes_is_refused_within_seconds_and_others_are_not(
    trial: GrammarTrial, minutes: Grammar
) -> None:
    trial(GRAMMAR)
    servers = children()
    with pytest.raises(InvalidRequest, match="must be compiled within") as refused:
        trial(minutes)
    assert refused.value.field == minutes.field
    trial(Grammar(json_object=True))
    assert children() == servers


def test_an_error_is_left_to_the_compiler(trial: GrammarTrial) -> None:
    compiler = GrammarCompiler(partial(tokenizer_json, byte_tokenizer()), ENDS, trial)
    with pytest.raises(InvalidRequest, match="unclosed group"):
        compiler.compile(SamplingParams(grammar=Grammar(regex="(")))


def test_a_tokenizer_of_unknown_bytes_is_told_as_such() -> None:
    tokenizer = partial(tokenizer_json, cast(PreTrainedTokenizerBase, SimpleNamespace()))
    compiler = GrammarCompiler(tokenizer, ENDS, GrammarTrial(tokenizer, ENDS))
    with pytest.raises(InvalidRequest, match="are unknown"):
        compiler.compile(SamplingParams(grammar=GRAMMAR))


def test_only_new_grammars_are_tried() -> None:
    tried: list[Grammar] = []
    compiler = GrammarCompiler(partial(tokenizer_json, byte_tokenizer()), ENDS, tried.append)
    for _ in range(2):
        compiler.compile(SamplingParams(grammar=GRAMMAR))
    assert tried == [GRAMMAR]


def test_a_server_that_was_ended_is_started_again(trial: GrammarTrial) -> None:
    before = children()
    trial(GRAMMAR)
    (server,) = children() - before
    os.kill(server, signal.SIGKILL)
    trial(GRAMMAR)
    assert len(children() - before - {server}) == 1


def test_the_server_is_this_one_s_wherever_it_starts(
    trial: GrammarTrial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("coordinator", "outrider"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    trial(GRAMMAR)


def test_a_server_that_does_not_start_is_no_fault_of_the_grammar(
    trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(Unavailable):
        trial(GRAMMAR)
    monkeypatch.undo()
    trial(GRAMMAR)


def test_the_server_ends_with_its_owner() -> None:
    before = children()
    trial = GrammarTrial(partial(tokenizer_json, byte_tokenizer()), ENDS)
    trial(GRAMMAR)
    assert len(children() - before) == 1
    del trial
    gc.collect()
    assert not children() - before
