"""Before an engine serves, its answers are held against the model's own eager forward.

In one pass, in pieces, token by token, as a tree, and beside another session;
past windows, chunks and the like as far as that costs about a second, and
what each layer sees at positions beyond that by its rule. Whatever differs is
refused in words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import causal_mask_function

from outrider.engine.attention import Rule, allowed
from outrider.engine.block_manager import BLOCK_TOKENS
from outrider.engine.checks.reference import beside_a_far_row, truth, unknown_state, weights_read_as
from outrider.engine.interface import SessionTokens
from outrider.engine.model_spec import ModelSpec
from outrider.engine.paged import PagedEngine

_FLOP = 3e10  # of a pass over the longer text
_LEAST, _USUAL, _MOST = 24, 48, 640  # its tokens
_PAST = 12  # tokens after a boundary
_OTHER = 12  # tokens of the other session
_STEPS = 4
_BRANCH = 3
_FAR = 8
_BOUNDARIES = ("window", "chunk", "original_max_position", "floor_scale")
# Rounding, and no more. Arithmetic in fewer bits is judged by how far it takes the model itself from the truth.
_TOLERANCES = {"cpu": 1e-4, "cuda": 1e-3}
_TIMES_ROUNDING = 3.0
_UNKNOWN_ROUNDING = 0.1
_LONG, _SHORT = "check", "check, the other"
_IN_ONE = "in one pass"


class Differs(Exception):
    """What runs a model does not answer as the model does; says how."""


@dataclass(frozen=True, slots=True)
class Text:
    tokens: list[int]
    truth: torch.Tensor  # [tokens, vocab]


@dataclass(frozen=True, slots=True)
class ReferenceLogits:
    """The model's own answers to a text and to a shorter one."""

    long: Text
    short: Text

    @classmethod
    def of(cls, model: PreTrainedModel, length: int) -> ReferenceLogits:
        ids = _some_ids(model, length + _OTHER)
        return cls(*(Text(part, truth(model, part)) for part in (ids[:length], ids[length:])))

    def distance(self, other: ReferenceLogits) -> float:
        return max(_distance(self.long.truth, other.long.truth), _distance(self.short.truth, other.short.truth))


def examine(model: PreTrainedModel, context: int) -> None:
    """Raises Differs for a model that keeps more than keys and values, or whose rows feel how far on others are."""
    kept = unknown_state(model)
    if kept is not None:
        raise Differs(f"{kept}: state that Outrider cannot roll back or keep apart by session")
    for name, module in model.named_modules():
        if getattr(module, "attn_temperature_tuning", False):  # Llama 4 counts positions within the step
            raise Differs(f"{name} scales attention by a row's place in the step, which holds many sessions")
    ids = _some_ids(model, _FAR)
    own, beside = truth(model, ids), beside_a_far_row(model, ids, context - 1)
    _compare("beside a token at a far position", beside, own, _tolerance(model))


def hold_against(model: PreTrainedModel, engine: PagedEngine, weights: str | None = None) -> None:
    """Raises Differs. `weights`: in which format the engine reads them, its arithmetic being in float32; None: it does
    as the model does."""
    length = _affordable(model, engine)
    if weights is not None:
        with weights_read_as(model, weights):
            truths = ReferenceLogits.of(model, length)
        tolerance = _tolerance(model, torch.float32)
    else:
        truths = ReferenceLogits.of(model, length)
        tolerance = _tolerance(model) if model.dtype == torch.float32 else _rounding(model, truths)
    _check_answers(engine, truths, tolerance)


def check_windows(plan: ModelSpec, rules: Mapping[int, Rule], context: int) -> None:
    """Raises Differs where a layer's window is another than its model's, at any position up to the context's end."""
    keys = torch.arange(context)
    for index, layer in enumerate(plan.layers):
        rule, window = rules[index], layer.window
        if rule is causal_mask_function and window is None:
            continue
        edges = [*(window or 0) + torch.arange(-2, 3), *context // torch.tensor([1, 2, 3, 5, 9, 17, 33, 65])]
        queries = torch.tensor(sorted({int(edge) - 1 for edge in edges if 1 <= edge <= context}))
        seen = keys <= queries[:, None]
        if window is not None:
            seen &= keys > queries[:, None] - window
        if not torch.equal(seen, allowed(rule, queries, keys)):
            raise Differs(f"layer {index} sees other positions than in the model")


def _rounding(model: PreTrainedModel, truths: ReferenceLogits) -> float:
    """How far arithmetic in fewer bits may be from the model's own in the same."""
    try:
        with weights_read_as(model, "float32"):
            exact = ReferenceLogits.of(model, len(truths.long.tokens))
    except (RuntimeError, TypeError):  # its modules do not take float32, or there is no room for it
        return _UNKNOWN_ROUNDING
    return max(_tolerance(model), _TIMES_ROUNDING * truths.distance(exact))


def _tolerance(model: PreTrainedModel, dtype: torch.dtype | None = None) -> float:
    if (dtype or model.dtype) == torch.float32:
        return _TOLERANCES.get(model.device.type, _TOLERANCES["cuda"])
    return 8 * torch.finfo(model.dtype).eps


def _affordable(model: PreTrainedModel, engine: PagedEngine) -> int:
    """How long a text to compare: past the boundaries that the configuration names, as far as that is affordable."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    room = min(engine.capacity_tokens - BLOCK_TOKENS - 2, engine.info.context_length or _MOST)
    most = min(_MOST, max(_LEAST, int(_FLOP / 2 / parameters)), room)
    named = _numbers(model.config.get_text_config().to_dict())
    return min(most, max([_USUAL, *(number + _PAST for number in named if number + _PAST <= most)]))


def _numbers(config: Mapping[str, Any]) -> Iterator[int]:
    """Lengths at which, by its name, something changes."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif isinstance(value, int) and any(part in name for part in _BOUNDARIES):
            yield value


def _check_answers(engine: PagedEngine, truths: ReferenceLogits, tolerance: float) -> None:
    try:
        for way, asked, wanted in _ways(truths):
            for found, (rows, true) in zip(engine.extend(asked).logits, wanted, strict=True):
                _compare(way, found.float() if rows is None else found[rows].float(), true, tolerance)
            if way == _IN_ONE:
                engine.free(_LONG)
    finally:
        engine.free(_LONG)
        engine.free(_SHORT)
        engine.evict_all()


Wanted = tuple[list[int] | None, torch.Tensor]  # of which rows, None: all; their true logits


def _ways(truths: ReferenceLogits) -> Iterator[tuple[str, list[SessionTokens], list[Wanted]]]:
    """Every way in which an engine is asked."""
    long, short = truths.long, truths.short

    def piece(session: str, text: Text, start: int, end: int) -> tuple[SessionTokens, Wanted]:
        return SessionTokens(session, text.tokens[start:end]), (None, text.truth[start:end])

    def step(way: str, *pieces: tuple[SessionTokens, Wanted]) -> tuple[str, list[SessionTokens], list[Wanted]]:
        return way, [rows for rows, _ in pieces], [wanted for _, wanted in pieces]

    whole, half = len(long.tokens), len(short.tokens) // 2
    tree = whole - _BRANCH
    single = tree - _STEPS
    yield step(_IN_ONE, piece(_LONG, long, 0, whole))
    yield step("in pieces", piece(_LONG, long, 0, single // 2))
    yield step("beside another session", piece(_SHORT, short, 0, half), piece(_LONG, long, single // 2, single))
    for at in range(single, tree):
        yield step("token by token", piece(_LONG, long, at, at + 1))
    wrong = long.tokens[0]
    first, *others = long.tokens[tree:]
    guesses = SessionTokens(_LONG, [wrong, first, wrong, *others], (-1, -1, 1, 1, 3))
    branch: Wanted = [1, 3, 4], long.truth[tree:]
    yield step("as a tree", piece(_SHORT, short, half, len(short.tokens)), (guesses, branch))


def _compare(way: str, found: torch.Tensor, true: torch.Tensor, tolerance: float) -> None:
    if found.shape != true.shape:
        raise Differs(f"{way} it answers {list(found.shape)} logits, the model {list(true.shape)}")
    distance = _distance(found, true)
    if not distance <= tolerance:
        raise Differs(f"{way} its answers are {distance:.2g} away from the model itself, may be {tolerance:.2g}")


def _distance(found: torch.Tensor, true: torch.Tensor) -> float:
    """Of the worst row, as a part of what rows are on average."""
    return float((found - true).norm(dim=-1).max() / true.norm(dim=-1).mean())


def _some_ids(model: PreTrainedModel, count: int) -> list[int]:
    known = model.get_input_embeddings().weight.shape[0]
    ids: list[int] = torch.randint(known, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    return ids
