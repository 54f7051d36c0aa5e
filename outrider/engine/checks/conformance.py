"""The comparison of an engine's logits with the model's own eager forward, before the engine serves.

Logits are compared in one pass, in pieces, token by token, as a tree, and with another session in the step. The text
reaches past windows and chunks as far as about a second allows. Beyond that, each layer's mask rule is compared. An
engine that differs is refused with the reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
import torch
from transformers import PreTrainedModel
from transformers.masking_utils import causal_mask_function

from outrider.engine.checks.reference import reference_logits, unsupported_state, weights_in_format
from outrider.engine.interface import SessionTokens
from outrider.engine.model_spec import ModelSpec
from outrider.engine.paged.block_manager import BLOCK_TOKENS
from outrider.engine.paged.engine import PagedEngine
from outrider.engine.transformers.attention import Rule, allowed

log = structlog.get_logger(__name__)

_FLOP = (3e10, 3e13)  # of a pass over the long text, on a CPU and on a GPU: about a second
_USUAL_TOKENS = (48, 96)  # of the long text; a GPU has another kernel for more than FEW_TOKENS
_MIN_TOKENS, _MAX_TOKENS = 24, 640
_PAST_BOUNDARY = 12  # tokens after a boundary
_SHORT_TOKENS = 12  # of the other session
_STEPS = 4
_BRANCH = 3
_FAR_TOKENS = 8
_BOUNDARIES = ("window", "chunk", "original_max_position", "floor_scale")
# These cover float32 rounding only. With fewer bits the tolerance is a multiple of the model's own rounding error.
_TOLERANCES = {"cpu": 1e-4, "cuda": 1e-3}
_TIMES_ROUNDING = 3.0
_ROUNDED_ROWS = 5e-3  # products in integers, after the same engine without them
_UNKNOWN_ROUNDING = 0.1
_LONG, _SHORT = "check", "check, the other"
_WHOLE = "in one pass"


class Differs(Exception):
    """An engine's logits differ from the model's; the message says where."""


@dataclass(frozen=True, slots=True)
class ReferenceText:
    """A text, and the model's own logits after each of its tokens."""

    tokens: list[int]
    logits: torch.Tensor  # [tokens, vocab]


def reference_texts(model: PreTrainedModel, length: int) -> list[ReferenceText]:
    """Return a text of this length and a shorter one, of random tokens."""
    ids = _random_ids(model, length + _SHORT_TOKENS)
    return [ReferenceText(part, reference_logits(model, part)) for part in (ids[:length], ids[length:])]


def check_supported(model: PreTrainedModel, context: int) -> None:
    """Raise Differs for a model with other state than keys and values, or with logits that depend on other tokens'
    positions in the step."""
    state = unsupported_state(model)
    if state is not None:
        raise Differs(f"{state}: state that Outrider cannot roll back or keep apart by session")
    for name, module in model.named_modules():
        if getattr(module, "attn_temperature_tuning", False):  # Llama 4 counts positions within the step
            raise Differs(f"{name} scales attention by a token's index in the step, which holds many sessions")
    ids = _random_ids(model, _FAR_TOKENS)
    own, with_far = reference_logits(model, ids), reference_logits(model, ids, context - 1)
    _compare("with a token at a far position", with_far, own, _tolerance(model))


def check_logits(model: PreTrainedModel, engine: PagedEngine, weights: str | None = None) -> None:
    """Raise Differs where the engine's logits are too far from the model's.

    `weights` is the format in which the engine reads them, with float32 arithmetic; None: as the model itself.
    """
    length = _affordable_length(model, engine)
    with contextlib.nullcontext() if weights is None else weights_in_format(model, weights):
        reference = reference_texts(model, length)
    in_float32 = weights is not None or model.dtype == torch.float32
    tolerance = _tolerance(model, torch.float32) if in_float32 else _rounding_tolerance(model, reference)
    if engine.in_integers:
        engine.exact = True
        _compare_steps(engine, reference, tolerance)
        engine.exact, tolerance = False, _ROUNDED_ROWS
    _compare_steps(engine, reference, tolerance)


def check_windows(spec: ModelSpec, rules: Mapping[int, Rule], context: int) -> None:
    """Raise Differs where a layer's window is not its model's, at any position up to the end of the context."""
    keys = torch.arange(context)
    for index, layer in enumerate(spec.layers):
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


def _rounding_tolerance(model: PreTrainedModel, reference: Sequence[ReferenceText]) -> float:
    """Return the tolerance for 16-bit arithmetic: a multiple of the model's own distance from float32."""
    try:
        with weights_in_format(model, "float32"):
            exact = reference_texts(model, len(reference[0].tokens))
    except (RuntimeError, TypeError) as error:  # a module does not take float32, or memory does not suffice
        log.warning("start-up check only coarse: no float32 reference", tolerance=_UNKNOWN_ROUNDING, error=str(error))
        return _UNKNOWN_ROUNDING
    distances = (_distance(own.logits, other.logits) for own, other in zip(reference, exact, strict=True))
    return max(_tolerance(model), _TIMES_ROUNDING * max(distances))


def _tolerance(model: PreTrainedModel, dtype: torch.dtype | None = None) -> float:
    if (dtype or model.dtype) == torch.float32:
        return _TOLERANCES.get(model.device.type, _TOLERANCES["cuda"])
    return 8 * torch.finfo(model.dtype).eps


def _affordable_length(model: PreTrainedModel, engine: PagedEngine) -> int:
    """Return the length of the text to compare: past the boundaries in the configuration, as far as affordable."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    capacity = min(engine.capacity_tokens - BLOCK_TOKENS - 2, engine.info.context_length or _MAX_TOKENS)
    on_gpu = model.device.type != "cpu"
    longest = min(_MAX_TOKENS, max(_MIN_TOKENS, int(_FLOP[on_gpu] / 2 / parameters)), capacity)
    past = [number + _PAST_BOUNDARY for number in _boundaries(model.config.get_text_config().to_dict())]
    return min(longest, max([_USUAL_TOKENS[on_gpu], *(length for length in past if length <= longest)]))


def _boundaries(config: Mapping[str, Any]) -> Iterator[int]:
    """Yield the lengths in a configuration at which, by their names, something changes."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _boundaries(value)
        elif isinstance(value, int) and any(part in name for part in _BOUNDARIES):
            yield value


def _compare_steps(engine: PagedEngine, reference: Sequence[ReferenceText], tolerance: float) -> None:
    try:
        for kind, batch, expected in _steps(reference):
            for found, (indices, logits) in zip(engine.extend(batch).logits, expected, strict=True):
                _compare(kind, found.float() if indices is None else found[indices].float(), logits, tolerance)
            if kind == _WHOLE:
                engine.free(_LONG)
    finally:
        engine.free(_LONG)
        engine.free(_SHORT)
        engine.blocks.pool.evict_all()


Expected = tuple[list[int] | None, torch.Tensor]  # indices of the compared tokens, None: all; their reference logits


def _steps(reference: Sequence[ReferenceText]) -> Iterator[tuple[str, list[SessionTokens], list[Expected]]]:
    """Yield steps of every kind that an engine runs, with the expected logits."""
    long, short = reference

    def piece(session: str, text: ReferenceText, start: int, end: int) -> tuple[SessionTokens, Expected]:
        return SessionTokens(session, text.tokens[start:end]), (None, text.logits[start:end])

    def step(kind: str, *pieces: tuple[SessionTokens, Expected]) -> tuple[str, list[SessionTokens], list[Expected]]:
        return kind, [tokens for tokens, _ in pieces], [expected for _, expected in pieces]

    whole, half = len(long.tokens), len(short.tokens) // 2
    tree = whole - _BRANCH
    single = tree - _STEPS
    yield step(_WHOLE, piece(_LONG, long, 0, whole))
    yield step("in pieces", piece(_LONG, long, 0, single // 2))
    yield step("with another session", piece(_SHORT, short, 0, half), piece(_LONG, long, single // 2, single))
    for at in range(single, tree):
        yield step("token by token", piece(_LONG, long, at, at + 1))
    wrong = long.tokens[0]
    first, *others = long.tokens[tree:]
    guesses = SessionTokens(_LONG, [wrong, first, wrong, *others], (-1, -1, 1, 1, 3))
    branch: Expected = [1, 3, 4], long.logits[tree:]
    yield step("as a tree", piece(_SHORT, short, half, len(short.tokens)), (guesses, branch))


def _compare(kind: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    if found.shape != expected.shape:
        raise Differs(f"{kind} it answers {list(found.shape)} logits, the model {list(expected.shape)}")
    distance = _distance(found, expected)
    if not distance <= tolerance:
        raise Differs(f"{kind} its answers are {distance:.2g} away from the model itself, may be {tolerance:.2g}")


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the distance of the worst token's logits, relative to the mean norm."""
    return float((found - expected).norm(dim=-1).max() / expected.norm(dim=-1).mean())


def _random_ids(model: PreTrainedModel, count: int) -> list[int]:
    vocab_size = model.get_input_embeddings().weight.shape[0]
    ids: list[int] = torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    return ids
