"""From logits to the distribution that was asked for: each parameter against a plain reference and transformers."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as theirs

from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import WHOLE
from outrider.speculation import noise, sampling
from outrider.speculation.acceptance import likeliest
from outrider.speculation.sampling import History

VOCAB = 40
CPU = torch.device("cpu")

logit_rows = st.integers(0, 2**32 - 1).map(
    lambda seed: torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2.5
)
all_params = st.builds(
    SamplingParams,
    temperature=st.floats(0.1, 3.0),
    top_k=st.one_of(st.just(0), st.integers(1, VOCAB + 5)),
    top_p=st.one_of(st.just(1.0), st.floats(0.05, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 0.9)),
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.3, 3.0)),
    presence_penalty=st.one_of(st.just(0.0), st.floats(-2.0, 2.0)),
    frequency_penalty=st.one_of(st.just(0.0), st.floats(-2.0, 2.0)),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5.0, 5.0), max_size=4),
)
texts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)


# --- a reference in plain Python -------------------------------------------------------------------------------------


def reference_logits(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """Bias, then the penalties one by one."""
    counts = Counter(output)
    adjusted = []
    for token, value in enumerate(logits):
        value += params.logit_bias.get(token, 0.0)
        if token in counts or token in prompt:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * counts[token]
        value -= params.presence_penalty * (token in counts)
        adjusted.append(value)
    return adjusted


def normalised(weights: dict[int, float]) -> dict[int, float]:
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


def reference_probs(logits: Sequence[float], params: SamplingParams) -> dict[int, float]:
    """Temperature, top-k, top-p, min-p: each on what the one before has left, normalised again."""
    highest = max(logits)
    probs = normalised({token: math.exp((x - highest) / params.temperature) for token, x in enumerate(logits)})
    if params.top_k:
        best = sorted(probs, key=probs.__getitem__, reverse=True)[: params.top_k]
        probs = normalised({token: probs[token] for token in best})
    if params.top_p < 1.0:
        kept, mass = {}, 0.0
        for token in sorted(probs, key=probs.__getitem__, reverse=True):
            if mass >= params.top_p:
                break
            kept[token] = probs[token]
            mass += probs[token]
        probs = normalised(kept)
    least = params.min_p * max(probs.values())
    return normalised({token: p for token, p in probs.items() if p >= least})


def dense(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    return sampling.candidates(logits, params).dense(logits.shape[-1])


def same(ours: torch.Tensor, expected: dict[int, float]) -> None:
    assert ours.sum().item() == pytest.approx(1.0)
    got = {token: p for token, p in enumerate(ours.tolist()) if p > 0.0}
    assert got == pytest.approx(expected, rel=1e-6)


# --- against the reference -------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(logits=logit_rows, params=all_params)
def test_cuts_match_the_reference(logits: torch.Tensor, params: SamplingParams) -> None:
    for row, ours in zip(logits.tolist(), dense(logits, params), strict=True):
        same(ours, reference_probs(row, params))


@settings(max_examples=150, deadline=None)
@given(
    logits=logit_rows,
    params=all_params,
    text=texts,
    path=st.lists(st.integers(0, VOCAB - 1), max_size=4),
    data=st.data(),
)
def test_bias_and_penalties_match_the_reference(
    logits: torch.Tensor, params: SamplingParams, text: list[int], path: list[int], data: st.DataObject
) -> None:
    """Row i continues the history by i guessed tokens."""
    prompt_length = data.draw(st.integers(1, len(text)))
    history = History(text, prompt_length, VOCAB, CPU)
    guessed = [path[:i] for i in range(3)]
    ours = sampling.adjust(logits, params, history, guessed)
    for i, row in enumerate(logits.tolist()):
        expected = reference_logits(row, params, text[:prompt_length], text[prompt_length:] + guessed[i])
        assert ours[i].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)


@settings(max_examples=60, deadline=None)
@given(logits=logit_rows, params=all_params, text=texts, more=texts)
def test_a_history_that_grows_is_the_history_of_the_whole(
    logits: torch.Tensor, params: SamplingParams, text: list[int], more: list[int]
) -> None:
    grown = History(text, 1, VOCAB, CPU)
    for token in more:
        grown.append([token])
    whole = History(text + more, 1, VOCAB, CPU)
    paths = [[], [3], [3, 3]]
    assert torch.equal(sampling.adjust(logits, params, grown, paths), sampling.adjust(logits, params, whole, paths))


def test_guessed_paths_leave_no_trace_in_the_history() -> None:
    params = SamplingParams(frequency_penalty=1.0)
    history = History([1, 2], 1, VOCAB, CPU)
    before = sampling.adjust(torch.zeros(1, VOCAB), params, history, [[]])
    sampling.adjust(torch.zeros(2, VOCAB), params, history, [[5], [5, 6]])
    assert torch.equal(before, sampling.adjust(torch.zeros(1, VOCAB), params, history, [[]]))


def test_adjusting_leaves_the_logits_alone() -> None:
    """Logprobs are taken from them afterwards."""
    logits = torch.randn(1, VOCAB)
    kept = logits.clone()
    params = SamplingParams(logit_bias={3: 5.0}, repetition_penalty=2.0, presence_penalty=1.0)
    dense(sampling.adjust(logits, params, History([1, 2], 1, VOCAB, CPU), [[]]), params)
    assert torch.equal(logits, kept)


def test_bias_comes_before_penalties() -> None:
    """A bias that turns the sign decides whether repetition divides or multiplies."""
    logits = torch.tensor([[-1.0, 0.5]])
    params = SamplingParams(logit_bias={0: 3.0}, repetition_penalty=2.0)
    adjusted = sampling.adjust(logits, params, History([0], 1, 2, CPU), [[]])
    assert adjusted.tolist() == [[1.0, 0.5]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_each_session_has_its_own_bias_to_the_bit(dtype: torch.dtype) -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(7)).to(dtype)
    kept = logits.clone()
    biases: list[tuple[dict[int, float], int]] = [
        ({}, 1),
        ({0: 1.3, VOCAB - 1: -77.7, 5: 0.1}, 2),
        ({7: -100.0}, 0),
        ({}, 2),
        ({5: 3.7}, 1),
    ]
    sessions = [sampling.Continuations(SamplingParams(logit_bias=bias), None, [(1,)] * rows) for bias, rows in biases]
    found = sampling.adjust_all(logits, sessions)
    precision = torch.promote_types(dtype, torch.float32)
    wanted = kept.to(precision, copy=True)
    for row, bias in enumerate(bias for bias, rows in biases for _ in range(rows)):
        for token, value in bias.items():
            wanted[row, token] += torch.tensor(value, dtype=precision)
    assert found.dtype == precision
    assert torch.equal(found, wanted)
    assert torch.equal(logits, kept)
    assert not torch.equal(found, kept)


def test_what_is_added_to_bfloat16_is_not_rounded_to_it() -> None:
    """With a bias of 100, a choice among few ids would go to the lowest, and a small penalty to nobody."""
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(8)).mul(8).bfloat16()
    params = SamplingParams(logit_bias={3: 100.0, 9: 100.0}, repetition_penalty=1.003, frequency_penalty=0.3)
    history = History([3, 4, 9], 1, VOCAB, CPU)
    rows = [sampling.adjust(each, params, history, [()] * 3) for each in (logits, logits.float())]
    assert torch.equal(*rows)
    assert not torch.equal(rows[0], rows[0].bfloat16())


def test_penalties_come_before_temperature() -> None:
    logits = torch.tensor([[1.0, 1.0]])
    params = SamplingParams(presence_penalty=1.0, temperature=0.5)
    adjusted = sampling.adjust(logits, params, History([1, 0], 1, 2, CPU), [[]])
    assert dense(adjusted, params)[0, 0].item() == pytest.approx(1 / (1 + math.exp(2.0)))


def test_temperature_comes_before_top_p() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    assert int((dense(logits, SamplingParams(top_p=0.6)) > 0).sum()) == 1
    assert int((dense(logits, SamplingParams(top_p=0.6, temperature=4.0)) > 0).sum()) == 2


def test_top_p_looks_at_what_top_k_has_left() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0]]) + torch.tensor([0.03, 0.02, 0.01, 0.0])
    assert int((dense(logits, SamplingParams(top_p=0.45)) > 0).sum()) == 2
    assert int((dense(logits, SamplingParams(top_p=0.45, top_k=2)) > 0).sum()) == 1


def test_min_p_looks_at_what_top_p_has_left() -> None:
    """The best id is the same before and after, so is the share of it: order shows only in rounding."""
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    params = SamplingParams(top_p=0.95, min_p=0.2)
    same(dense(logits, params)[0], reference_probs(logits[0].tolist(), params))
    assert int((dense(logits, params) > 0).sum()) == 2


def test_repetition_sees_the_prompt_and_the_others_do_not() -> None:
    history = History([4, 5], 1, VOCAB, CPU)
    logits = torch.ones(1, VOCAB)
    repeated = sampling.adjust(logits, SamplingParams(repetition_penalty=2.0), history, [[]])[0]
    present = sampling.adjust(logits, SamplingParams(presence_penalty=1.0), history, [[]])[0]
    assert (repeated[4].item(), repeated[5].item(), repeated[6].item()) == (0.5, 0.5, 1.0)
    assert (present[4].item(), present[5].item()) == (1.0, 0.0)


def test_a_prompt_token_that_is_said_is_punished_once() -> None:
    history = History([4, 4], 1, VOCAB, CPU)
    logits = torch.ones(1, VOCAB)
    assert sampling.adjust(logits, SamplingParams(repetition_penalty=2.0), history, [[4]])[0, 4].item() == 0.5


def test_an_impossible_logit_stays_impossible() -> None:
    """Engines mask ids with minus infinity."""
    logits = torch.tensor([[0.0, float("-inf"), 1.0]])
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=-2.0, logit_bias={1: 100.0}, top_p=0.99)
    probs = dense(sampling.adjust(logits, params, History([1, 1], 1, 3, CPU), [[]]), params)
    assert probs[0, 1].item() == 0.0
    assert bool(torch.isfinite(probs).all())


# --- rows are independent --------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(logits=logit_rows, params=all_params, text=texts)
def test_a_rows_result_does_not_depend_on_its_neighbours(
    logits: torch.Tensor, params: SamplingParams, text: list[int]
) -> None:
    history = History(text, 1, VOCAB, CPU)
    paths = [[], [1], [1, 2]]
    together = dense(sampling.adjust(logits, params, history, paths), params)
    for i, path in enumerate(paths):
        alone = dense(sampling.adjust(logits[i : i + 1], params, history, [path]), params)
        assert torch.equal(alone[0], together[i])


CUTS = [
    SamplingParams(temperature=0.7, seed=1, top_k=top_k, top_p=top_p, min_p=min_p)
    for top_k in (0, 40)
    for top_p in (1.0, 0.9)
    for min_p in (0.0, 0.05)
]


@pytest.mark.parametrize("vocab", [7, 203, 1000, 5000, 49_152])
def test_a_rows_bits_do_not_depend_on_the_batch_it_stands_in(vocab: int, request: pytest.FixtureRequest) -> None:
    """Vocabularies and batches of every kind of width: torch spreads its own sums over vectors and threads differently
    from one to the next."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    generator = torch.Generator().manual_seed(vocab)
    for size in (2, 5) if vocab < 5000 else (3,):
        scales = torch.tensor([0.2, 3.0, 6.0])[torch.randint(3, (size, 1), generator=generator)]
        batch = torch.randn(size, vocab, generator=generator) * scales
        for params in CUTS:
            together = sampling.candidates(batch, params)
            keys = [noise.key(1, noise.Use.COUPLED, row) for row in range(size)]
            ringing = noise.arrival_times(keys, together.ids, together.probs)
            for row in range(size):
                alone = sampling.candidates(batch[row : row + 1], params)
                assert torch.equal(alone.dense(vocab)[0], together.dense(vocab)[row]), (size, row, params)
                rung = noise.arrival_times(keys[row : row + 1], alone.ids, alone.probs)
                width = rung.shape[1]  # a neighbour may have wanted more ids looked at
                assert torch.equal(rung[0], ringing[row, :width]), (size, row, params)
                assert torch.isinf(ringing[row, width:]).all()


def test_a_rows_bits_do_not_depend_on_how_wide_the_processors_vectors_are() -> None:
    """Where a processor's exponentials are another's, so is everything else. (Where they are not, `arithmetic` tells
    the models apart.)"""
    code = """
import hashlib, torch
from outrider.speculation import sampling
from outrider.protocol.sampling_params import SamplingParams
logits = (torch.arange(40_000) * 2_654_435_761 % 1_000_003).to(torch.float64).view(8, -1) / 50_000
found = [sampling.candidates(logits, SamplingParams(top_p=top_p, min_p=min_p)).probs
         for top_p in (1.0, 0.9) for min_p in (0.0, 0.05)]
for tensors in ([logits.exp(), logits.neg().exp()], found):
    print(hashlib.sha256(b"".join(each.numpy().tobytes() for each in tensors)).hexdigest())
"""
    shown = {}
    for capability in ("avx2", "avx512"):
        environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        exponentials, probs = done.stdout.split()
        assert shown.setdefault(exponentials, probs) == probs, capability


def test_a_flat_neighbour_does_not_change_a_peaked_rows_nucleus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flat row needs the full sort; the peaked one must come out of it as from its own fast look."""
    monkeypatch.setattr(sampling, "_NUCLEUS_SIZES", (8,))
    peaked = torch.linspace(8.0, -8.0, VOCAB)
    params = SamplingParams(top_p=0.9)
    alone = dense(peaked[None], params)
    together = dense(torch.stack([peaked, torch.linspace(0.01, 0.0, VOCAB)]), params)
    assert torch.equal(alone[0], together[0])


def test_a_flat_row_is_sorted_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full sort of a real vocabulary takes as long as ten first looks: with neighbours it took that for each row."""
    sorted_rows: list[int] = []
    sort = torch.Tensor.sort

    def counted(values: torch.Tensor, *given: Any, **named: Any) -> Any:
        if values.shape[-1] == 5000:
            sorted_rows.append(len(values))
        return sort(values, *given, **named)

    monkeypatch.setattr(torch.Tensor, "sort", counted)
    rows = torch.randn(9, 5000, generator=torch.Generator().manual_seed(0)) * 6
    rows[4] = 0.01 * rows[4]
    params = SamplingParams(top_p=0.95)
    found = dense(rows, params)
    assert sorted_rows == [1]
    for row, logits in zip(found, rows, strict=True):
        assert torch.equal(row, dense(logits[None], params)[0])
        assert float(row.sum()) == pytest.approx(1.0)


def test_ties_at_the_edge_of_the_nucleus_fall_alike_whatever_the_neighbours() -> None:
    """In bfloat16 ties are common. Rows are one session's guesses: were a row cut otherwise because of what else was
    guessed, the text would depend on the drafter."""
    params = SamplingParams(top_p=0.5)
    flat = torch.zeros(3000)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        row = (torch.randn(3000, generator=generator) * 2).to(torch.bfloat16).float()
        alone = dense(row[None], params)[0]
        together = dense(torch.stack([row, flat]), params)[0]
        assert torch.equal(alone > 0, together > 0)


@settings(max_examples=80, deadline=None)
@given(logits=logit_rows, top_p=st.floats(0.05, 0.999), look=st.sampled_from([1, 2, 8, VOCAB - 1]))
def test_the_first_look_finds_the_nucleus_that_the_full_sort_finds(
    logits: torch.Tensor, top_p: float, look: int
) -> None:
    params = SamplingParams(top_p=top_p)
    whole = dense(logits, params)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_NUCLEUS_SIZES", (look,))
        quick = dense(logits, params)
    assert torch.equal(quick > 0, whole > 0)
    assert torch.allclose(quick, whole, rtol=1e-12, atol=0.0)


def test_a_real_vocabulary_takes_the_fast_path_and_a_flat_one_the_slow() -> None:
    generator = torch.Generator().manual_seed(0)
    for scale in (6.0, 0.01):
        logits = torch.randn(1, 5000, generator=generator) * scale
        params = SamplingParams(top_p=0.95)
        same(dense(logits, params)[0], reference_probs(logits[0].tolist(), params))


def test_the_likeliest_id_always_survives() -> None:
    logits = torch.tensor([[5.0, 0.0, -5.0]])
    for params in (SamplingParams(top_k=1), SamplingParams(top_p=1e-9), SamplingParams(min_p=1.0)):
        assert dense(logits, params).tolist() == [[1.0, 0.0, 0.0]]


def test_extreme_temperatures_give_a_distribution() -> None:
    logits = torch.tensor([[80.0, -300.0, 10.0]])
    for temperature in (1e-6, 1e-3, 10.0):
        probs = dense(logits, SamplingParams(temperature=temperature))
        assert bool(torch.isfinite(probs).all())
        assert probs.sum().item() == pytest.approx(1.0)


# --- against transformers --------------------------------------------------------------------------------------------


def through(logits: torch.Tensor, *processors: theirs.LogitsProcessor, ids: Sequence[int] = (0,)) -> torch.Tensor:
    scores = logits.to(torch.float64)
    for processor in processors:
        scores = processor(torch.tensor([list(ids)] * len(logits)), scores)
    return scores.softmax(-1)


@settings(max_examples=60, deadline=None)
@given(logits=logit_rows, temperature=st.floats(0.2, 3.0), top_k=st.integers(1, VOCAB))
def test_temperature_and_top_k_match_transformers(logits: torch.Tensor, temperature: float, top_k: int) -> None:
    expected = through(logits, theirs.TemperatureLogitsWarper(temperature), theirs.TopKLogitsWarper(top_k))
    assert torch.allclose(dense(logits, SamplingParams(temperature=temperature, top_k=top_k)), expected)


@settings(max_examples=60, deadline=None)
@given(logits=logit_rows, temperature=st.floats(0.2, 3.0), top_p=st.floats(0.05, 0.99))
def test_temperature_and_top_p_match_transformers(logits: torch.Tensor, temperature: float, top_p: float) -> None:
    expected = through(logits, theirs.TemperatureLogitsWarper(temperature), theirs.TopPLogitsWarper(top_p))
    assert torch.allclose(dense(logits, SamplingParams(temperature=temperature, top_p=top_p)), expected)


@settings(max_examples=60, deadline=None)
@given(logits=logit_rows, top_k=st.integers(1, VOCAB), top_p=st.floats(0.05, 0.99))
def test_top_k_then_top_p_match_transformers(logits: torch.Tensor, top_k: int, top_p: float) -> None:
    expected = through(logits, theirs.TopKLogitsWarper(top_k), theirs.TopPLogitsWarper(top_p))
    assert torch.allclose(dense(logits, SamplingParams(top_k=top_k, top_p=top_p)), expected)


@settings(max_examples=60, deadline=None)
@given(logits=logit_rows, min_p=st.floats(0.001, 0.99))
def test_min_p_matches_transformers(logits: torch.Tensor, min_p: float) -> None:
    assert torch.allclose(dense(logits, SamplingParams(min_p=min_p)), through(logits, theirs.MinPLogitsWarper(min_p)))


@settings(max_examples=60, deadline=None)
@given(logits=logit_rows, penalty=st.floats(0.3, 3.0), text=texts)
def test_repetition_penalty_matches_transformers(logits: torch.Tensor, penalty: float, text: list[int]) -> None:
    params = SamplingParams(repetition_penalty=penalty)
    ours = dense(sampling.adjust(logits, params, History(text, 1, VOCAB, CPU), [[], [], []]), params)
    expected = through(logits, theirs.RepetitionPenaltyLogitsProcessor(penalty), ids=text)
    assert torch.allclose(ours, expected, rtol=1e-5)


# --- what a drafter sends --------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    weights=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=60).filter(lambda w: sum(w) > 1e-6),
    keep=st.integers(1, 40),
    data=st.data(),
)
def test_quantised_parts_sum_to_the_whole(weights: list[float], keep: int, data: st.DataObject) -> None:
    probs = torch.tensor(weights, dtype=torch.float64)
    probs /= probs.sum()
    ids = torch.tensor(data.draw(st.permutations(range(0, 3 * len(weights), 3))))
    made = sampling.quantise(probs, ids, keep)
    made.check("draft", 3 * len(weights))
    assert sum(made.weights) == WHOLE
    assert list(made.ids) == sorted(set(made.ids))
    assert len(made.ids) <= keep
    by_id = dict(zip(ids.tolist(), probs.tolist(), strict=True))
    left_out = [p for token, p in by_id.items() if token not in made.ids]
    mass = sum(sorted(weights, reverse=True)[:keep]) / sum(weights)
    for token, weight in zip(made.ids, made.weights, strict=True):
        assert by_id[token] > 0.0
        assert weight / WHOLE == pytest.approx(by_id[token] / mass, abs=(keep + 1) / WHOLE)
    if len(made.ids) == keep and left_out:
        assert max(left_out) <= min(by_id[token] for token in made.ids) + 1e-12


def test_a_certain_token_is_a_point() -> None:
    made = sampling.quantise(torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([7, 9]), 24)
    assert (made.ids, made.weights) == ((7,), (WHOLE,))


def test_what_top_k_removed_is_not_quantised() -> None:
    kept = sampling.candidates(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), SamplingParams(top_k=3, top_p=0.7))
    made = sampling.quantise(kept.probs[0], kept.ids[0], 24)
    assert set(made.ids) <= {2, 3}


# --- logprobs --------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(logits=logit_rows, top=st.integers(0, 20), tokens=st.lists(st.integers(0, VOCAB - 1), min_size=3, max_size=3))
def test_logprobs_are_natural_logarithms_of_the_softmax(logits: torch.Tensor, top: int, tokens: list[int]) -> None:
    found = sampling.logprobs(logits, tokens, top)
    assert len(found) == 3
    for row, token, entry in zip(logits.tolist(), tokens, found, strict=True):
        total = math.log(sum(map(math.exp, row)))
        assert entry.logprob == pytest.approx(row[token] - total, abs=1e-6)
        order = sorted(range(VOCAB), key=row.__getitem__, reverse=True)[:top]
        assert list(entry.top_ids) == order
        assert list(entry.top_logprobs) == pytest.approx([row[i] - total for i in order], abs=1e-6)


def test_log_probabilities_are_finite_whatever_the_logits_are() -> None:
    """A prompt may hold a token whose embedding is NaN: its verifier would be taken for one that lies."""
    rows = torch.zeros(4, VOCAB)
    rows[0, 1:] = -torch.inf
    rows[1, 3] = torch.nan
    rows[2] = -torch.inf
    rows[3, 1:] = torch.finfo(torch.float32).min
    for row, entry in enumerate(sampling.logprobs(rows, [1] * 4, 3)):
        assert entry.logprob == -9999.0
        assert list(entry.top_logprobs) == [-9999.0 if row in (1, 2) else 0.0, -9999.0, -9999.0]


def test_the_likeliest_token_is_that_of_torch() -> None:
    """The first of equal ones; a NaN counts as the largest."""
    rows = torch.randn(5, 999, generator=torch.Generator().manual_seed(1))
    rows[0, [7, 70, 700]] = 9.0
    rows[1, [8, 80]] = torch.nan
    rows[2] = -torch.inf
    for logits in (rows, rows.bfloat16(), rows[:, ::2], rows[:0]):
        assert torch.equal(likeliest(logits), logits.argmax(dim=-1))
    assert likeliest(rows)[:3].tolist() == [7, 8, 0]
