"""Comparison of runs of `outrider bench drafters`, and the values of its flags."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console

from outrider.bench.common.progress import turn_progress
from outrider.bench.drafters import command, peer, plot, setups
from outrider.bench.drafters.comparison import (
    OUTRIDER,
    PLAIN,
    BenchRequest,
    Candidate,
    Comparison,
    TimedAnswer,
    Trial,
    acceptance,
    adaptive_gamma,
    best_drafter,
)
from outrider.bench.drafters.peers import (
    Weights,
    llama_recipes,
    transformers_recipe,
    vllm_environment,
    vllm_recipes,
)
from outrider.bench.drafters.schedule import DraftersExtent, Measure, Schedule, bench_requests
from outrider.protocol.errors import InvalidRequest, OutriderError, PeerLost
from outrider.protocol.sampling_params import Verification
from outrider.protocol.statistics import DrafterStats, GenerationStats
from tests.architectures import save, tiny_model

REQUEST = BenchRequest("chat", 0, 0, "greedy", (1, 2), 8, 5)


def answer(rate: float, tokens: Sequence[int] = (4, 5, 6), stats: GenerationStats | None = None) -> TimedAnswer:
    """Return an answer with its first token after half a second and the others at this rate."""
    return TimedAnswer(tuple(tokens), ((1, 0.5), (len(tokens), 0.5 + (len(tokens) - 1) / rate)), stats)


def ran(drafter: str, rate: float, request: BenchRequest = REQUEST, engine: str = OUTRIDER, **more: object) -> Trial:
    return Trial(Candidate(engine, drafter), request, answer(rate, **more))  # type: ignore[arg-type]


def guessed(offered: Sequence[int], accepted: Sequence[int], steps: int, **more: float) -> GenerationStats:
    drafts, held = (offered[0] if offered else 0), sum(accepted)
    return GenerationStats(
        steps=steps,
        drafts=drafts,
        draft_tokens=sum(offered),
        accepted_tokens=held,
        offered_per_position=offered,
        accepted_per_position=accepted,
        acceptance_length=(held + drafts) / drafts if drafts else 0.0,
        **more,  # type: ignore[arg-type]
    )


def test_a_rate_is_that_of_the_tokens_after_the_first() -> None:
    assert answer(20.0).tokens_per_s == pytest.approx(20.0)
    assert answer(20.0).first_ms == pytest.approx(500.0)
    together = TimedAnswer((4, 5), ((2, 0.5),))
    assert together.tokens_per_s is None, "all came at once: there is no rate"


def test_acceptance_is_pooled_over_verdicts_not_over_answers() -> None:
    many = guessed([9, 5], [6, 1], steps=10, bytes_per_accepted_token=4.0, mean_draft_ms=2.0)
    few = guessed([1], [0], steps=20, mean_draft_ms=7.0)
    found = acceptance([many, few])
    assert found["offered_per_position"] == [10, 5]
    assert found["acceptance_per_position"] == [pytest.approx(0.6), pytest.approx(0.2)]
    assert found["acceptance_first"] == pytest.approx(0.6)
    assert found["acceptance_length"] == pytest.approx((7 + 9 + 1) / 10)
    assert found["guessed_share_of_steps"] == pytest.approx(10 / 30)
    assert found["bytes_per_accepted_token"] == pytest.approx(4.0)
    assert found["draft_ms_per_token"] == pytest.approx((9 * 2.0 + 7.0) / 15)


def test_nothing_guessed_leaves_no_rates() -> None:
    found = acceptance([guessed([], [], steps=12)])
    assert found["verdicts_with_guess"] == 0
    assert found["acceptance_per_position"] == []
    assert all(found[key] is None for key in ("acceptance_first", "acceptance_length", "draft_ms_per_token"))
    assert adaptive_gamma([GenerationStats(steps=3, mean_gamma=2.0), GenerationStats(steps=1)])[
        "mean_gamma"
    ] == pytest.approx(1.5)


def test_shares_of_several_drafters_are_added_up() -> None:
    one = GenerationStats(drafters=[DrafterStats(kind="a", guessed=3, accepted=1), DrafterStats(kind="b", guessed=1)])
    two = GenerationStats(drafters=[DrafterStats(kind="a", guessed=4, accepted=4)])
    assert acceptance([one, two])["sources"] == {
        "a": {"guessed": 7, "accepted": 5},
        "b": {"guessed": 1, "accepted": 0},
    }


def test_speedups_are_medians_of_ratios_within_a_turn() -> None:
    """Check that a machine half as fast in the second round changes no ratio."""
    later, last = replace(REQUEST, turn=1), replace(REQUEST, turn=2)
    comparison = Comparison(
        [
            ran(PLAIN, 40.0),
            ran("a", 60.0),
            ran("generate", 20.0, engine="transformers"),
            ran("lookup", 30.0, engine="transformers"),
            ran(PLAIN, 20.0, later),
            ran("a", 30.0, later),
            ran("generate", 10.0, later, engine="transformers"),
            ran("lookup", 5.0, later, engine="transformers"),
            ran(PLAIN, 40.0, last),
            ran("a", 400.0, last),
            ran("lookup", 40.0, last, engine="transformers"),
        ]
    )
    rows = {row["drafter"]: row for row in comparison.rows()}
    assert rows["a"]["speedup_vs_plain"] == pytest.approx(1.5)
    assert rows["a"]["speedup_quartiles"] == [pytest.approx(1.5), pytest.approx(1.5), pytest.approx(5.75)]
    assert rows["a"]["tokens_per_s"] == pytest.approx(60.0)
    assert rows[PLAIN]["speedup_vs_plain"] == pytest.approx(1.0)
    summary = comparison_with_acceptance(comparison).summary()
    assert summary["drafter"] == "a"
    assert summary["speedup_vs_plain"] == {"chat": pytest.approx(1.5)}
    # generate: 3 and 3; lookup: 2, 6 and 10
    assert summary["speedup_vs_best_transformers"] == {"chat": pytest.approx(3.0)}
    assert "speedup_vs_best_vllm" not in summary


def comparison_with_acceptance(comparison: Comparison) -> Comparison:
    fixed = Trial(Candidate(OUTRIDER, "a", 4), REQUEST, answer(50.0, stats=guessed([4], [2], steps=4)))
    return Comparison([*comparison.runs, fixed])


def test_the_best_drafter_is_the_best_over_all_kinds() -> None:
    def row(drafter: str, kind: str, speedup: float, mode: str = "greedy", engine: str = OUTRIDER) -> dict[str, object]:
        return {"engine": engine, "drafter": drafter, "kind": kind, "mode": mode, "speedup_vs_plain": speedup}

    rows = [row("one", "chat", 1.0), row("one", "edit", 3.0), row("both", "chat", 1.8), row("both", "edit", 1.8)]
    rows += [
        row("one", "chat", 9.0, mode="block"),
        row("generate", "chat", 9.0, engine="vllm"),
        row(PLAIN, "chat", 9.0),
    ]
    assert best_drafter(rows) == "both"


def test_texts_must_be_equal_where_guessing_changes_nothing() -> None:
    sampled, block = replace(REQUEST, mode="coupled"), replace(REQUEST, mode="block")
    comparison = Comparison(
        [
            ran(PLAIN, 40.0),
            ran("a", 60.0),
            ran("generate", 20.0, engine="transformers", tokens=(4, 5)),
            ran(PLAIN, 40.0, sampled),
            ran("a", 60.0, sampled, tokens=(4, 9, 6)),
            ran(PLAIN, 40.0, block),
            ran("a", 60.0, block, tokens=(7, 9, 6)),
        ]
    )
    equal = {(row["mode"], row["drafter"]): row["texts_equal"] for row in comparison.rows()}
    assert equal == {
        ("greedy", PLAIN): None,
        ("greedy", "a"): True,
        ("greedy", "generate"): False,
        ("coupled", PLAIN): None,
        ("coupled", "a"): False,
        ("block", PLAIN): None,
        ("block", "a"): None,
    }
    found = [(each["drafter"], each["mode"], each["first_different_token"]) for each in comparison.differences()]
    assert found == [("generate", "greedy", 2), ("a", "coupled", 1)]


def test_a_peer_that_refuses_has_a_row_that_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    refused = Trial(Candidate("transformers", "early exit"), REQUEST, TimedAnswer(error="OSError: no [/models/x]"))
    comparison = Comparison([ran(PLAIN, 40.0), ran("a", 60.0), refused])
    (row,) = [row for row in comparison.rows() if row["drafter"] == "early exit"]
    assert row["error"] == "OSError: no [/models/x]"
    assert row["tokens_per_s"] is None
    assert row["texts_equal"] is None
    assert comparison.differences() == []
    command._show(Console(), comparison.rows(), comparison.kinds, {"drafter": "a", "differences": []})
    assert "OSError: no [/models/x]" in " ".join(capsys.readouterr().out.split()), "brackets are no markup"


def test_a_plot_shows_the_first_mode_that_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --modes coupled it was empty, and said greedy."""
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    coupled = replace(REQUEST, mode="coupled")
    fixed = Trial(Candidate(OUTRIDER, "a", 4), coupled, answer(50.0, stats=guessed([2], [1], 2)))
    runs = [ran(PLAIN, 40.0, coupled), ran("a", 60.0, coupled), fixed]
    where = {"target": "tiny", "weights": "float32", "device": "cpu"}
    plot.draw(Comparison(runs).rows(), ["chat"], ["a"], where, tmp_path / "drafters.png")
    (bar,) = drawn[0].axes[0].patches
    assert bar.get_height() == pytest.approx(60 / 40)  # type: ignore[attr-defined]
    assert "coupled" in drawn[0].get_suptitle()


@pytest.mark.parametrize(
    ("text", "drafters"),
    [
        ("ngram", [("ngram", (("ngram", ""),))]),
        ("ngram, model:/a/b:c", [("ngram", (("ngram", ""),)), ("model:/a/b:c", (("model", "/a/b:c"),))]),
        ("suffix+model:x", [("suffix+model:x", (("suffix+model", "x"),))]),
        ("suffix&model:x", [("suffix&model:x", (("suffix", ""), ("model", "x")))]),
    ],
)
def test_drafters_by_name(text: str, drafters: list[tuple[str, tuple[tuple[str, str], ...]]]) -> None:
    assert [(setup.name, setup.drafters) for setup in setups.parse(text)] == drafters


@pytest.mark.parametrize("text", ["ngram,", "&ngram", "ngram+oracle", ":model", "ngram,ngram", "plain"])
def test_drafters_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="--drafters"):
        setups.check_kinds(setups.parse(text), ["ngram", "model"])


def test_questions_go_round_by_round_prompt_by_prompt() -> None:
    extent = DraftersExtent.of(True, 2, 2, 3, 4)
    requests = bench_requests([("a", [1]), ("b", [2]), ("a", [3]), ("a", [4])], extent, 100)
    greedy = [(request.turn, request.kind, request.prompt) for request in requests if request.mode == "greedy"]
    one_round = [("a", (1,)), ("b", (2,)), ("a", (3,))]
    assert greedy == [(turn, *each) for turn in (0, 1) for each in one_round]
    assert len(requests) == 3 * len(greedy)
    seeds = {(request.turn, request.number): request.seed for request in requests}
    assert len(set(seeds.values())) == len(seeds) == 6, "one seed per prompt and round, in all modes the same"
    with pytest.raises(InvalidRequest, match="a prompt of kind a is 98 tokens, must be at most 97"):
        bench_requests([("a", [1] * 98)], extent, 100)


def test_chosen_modes_are_measured_in_their_order() -> None:
    extent = DraftersExtent.of(True, 1, 1, 3, 4, "block,greedy")
    assert [request.mode for request in bench_requests([("a", [1])], extent, 100)] == ["greedy", "block"]
    with pytest.raises(InvalidRequest, match="--modes is greedy,, must be some of greedy, coupled, block"):
        DraftersExtent.of(True, 1, 1, 3, 4, "greedy,")


class InterruptedSchedule(Schedule):
    """A schedule of two candidates; the user presses Ctrl-C in the middle of the third prompt."""

    def candidates(self, request: BenchRequest) -> Iterator[tuple[Candidate, Measure]]:
        yield Candidate(OUTRIDER, PLAIN), lambda _: answer(10)
        yield Candidate(OUTRIDER, "ngram"), self.interrupted if request.number == 2 else lambda _: answer(20)

    def interrupted(self, request: BenchRequest) -> TimedAnswer:
        raise KeyboardInterrupt


class TerminatedSchedule(InterruptedSchedule):
    """The same, with a fixed γ too, ended by SIGTERM."""

    def candidates(self, request: BenchRequest) -> Iterator[tuple[Candidate, Measure]]:
        yield from super().candidates(request)
        yield Candidate(OUTRIDER, "ngram", 4), lambda _: answer(15, stats=guessed([2], [1], 2))

    def interrupted(self, request: BenchRequest) -> TimedAnswer:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("SIGTERM has no effect")


def test_an_interruption_keeps_what_all_candidates_have_answered(capsys: pytest.CaptureFixture[str]) -> None:
    schedule = InterruptedSchedule({}, [], 4)
    requests = [replace(REQUEST, number=number) for number in range(4)]
    with turn_progress() as progress:
        runs = schedule.run(requests, progress)
        with pytest.raises(KeyboardInterrupt):
            schedule.run(requests[2:], progress)
    assert [(run.request.number, run.candidate.drafter) for run in runs] == [
        (number, drafter) for number in (0, 1) for drafter in (PLAIN, "ngram")
    ]
    assert "the results are those of 4 of 8 answers" in capsys.readouterr().err
    assert [row["speedup_vs_plain"] for row in Comparison(runs).rows()] == [1, 2]


class FailedSchedule(TerminatedSchedule):
    """The same; a peer ends there."""

    def interrupted(self, request: BenchRequest) -> TimedAnswer:
        raise PeerLost("llama.cpp has ended")


def test_a_failure_keeps_them_and_is_told_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = FailedSchedule({}, [], 4)
    requests = [replace(REQUEST, number=number) for number in range(4)]
    with turn_progress() as progress:
        runs = schedule.run(requests, progress)
    assert len(runs) == 6
    assert "failed: the results are those of 6 of 12 answers" in capsys.readouterr().err
    shown: list[object] = []
    monkeypatch.setattr(command, "_show", lambda *given: shown.append(given))
    with pytest.raises(OutriderError, match=r"llama\.cpp has ended"):
        command._report(Comparison(runs), [], {"failed": schedule.failure}, tmp_path / "bench.json", None)
    assert shown
    assert (tmp_path / "bench.json").exists()


def test_sigterm_keeps_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `timeout` and job schedulers end a long benchmark."""
    requests = [replace(REQUEST, number=number) for number in range(4)]

    def measure(*arguments: Any) -> tuple[Comparison, dict[str, Any]]:
        return Comparison(TerminatedSchedule({}, [], 4).run(requests, arguments[-1])), {}

    monkeypatch.setattr(command, "_measure", measure)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        command.drafters(drafter_list="ngram", json_file=tmp_path / "rows.json")
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["drafter"], row["answers"], row["speedup_vs_plain"]) for row in rows] == [
        (PLAIN, 2, 1),
        ("ngram", 2, 2),
    ]


def test_quick_is_less_of_the_same() -> None:
    assert DraftersExtent.of(True, None, None, None, 4) == DraftersExtent(1, 1, 64, 4)
    assert DraftersExtent.of(False, None, 5, None, 4) == DraftersExtent(3, 5, 128, 4)


@pytest.mark.parametrize(
    ("mode", "temperature", "verification"),
    [
        ("greedy", 0.0, Verification.GREEDY),
        ("coupled", 1.0, Verification.COUPLED),
        ("block", 1.0, Verification.BLOCK),
    ],
)
def test_modes_are_verifications(mode: str, temperature: float, verification: Verification) -> None:
    params = setups.sampling(replace(REQUEST, mode=mode))
    params.check()
    assert (params.temperature, params.mode, params.seed) == (temperature, verification, 5)


def test_peers_load_the_same_weights(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    weights = Weights(str(tmp_path), "float32", "cpu", 2, 512, (0,))
    assert transformers_recipe(weights, None).spec["dtype"] == "float32"
    python = tmp_path / "env" / "bin" / "python"
    library = tmp_path / "env" / "lib" / "libiomp5.so"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    plain, ngram = vllm_recipes(weights, python, "")
    assert (plain.spec["way"], ngram.spec["way"]) == ("plain", "ngram")
    assert plain.spec["context"] == 512
    assert str(library) in plain.environment["LD_PRELOAD"]
    assert plain.environment["HF_HUB_OFFLINE"] == "1"
    assert plain.environment["OMP_NUM_THREADS"] == "2"
    assert "VLLM_CPU_KVCACHE_SPACE" not in plain.environment, "what the user has set stays"
    assert "OMP_NUM_THREADS" not in vllm_environment(python, replace(weights, threads=0)), "as many as the others"
    assert vllm_recipes(weights, python, "bfloat16")[0].spec["dtype"] == "bfloat16"
    gguf = tmp_path / "model.gguf"
    assert [recipe.spec["model"] for recipe in llama_recipes(weights, python, gguf)] == [str(gguf)] * 2


def test_a_peer_answers_with_the_text_of_a_model_that_sees_images(tmp_path: Path) -> None:
    """As Outrider, which serves these for their texts."""
    save(model := tiny_model("mistral3", {}), tmp_path)
    spec = {"model": str(tmp_path), "threads": 0, "dtype": "float32", "device": "cpu", "early_exit": 0}
    _, answer = peer._transformers(spec)
    request = {"prompt": [5, 6, 7, 8], "eos": [], "max_tokens": 6}
    plain, looked_up = (answer(request | {"way": way})["tokens"] for way in ("plain", "lookup"))
    logits = model(torch.tensor([[5, 6, 7, 8, *plain[:-1]]])).logits[0, 3:]
    assert plain == looked_up == logits.argmax(dim=-1).tolist()
