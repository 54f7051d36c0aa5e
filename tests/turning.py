"""A target whose next token is the last one plus one, mostly, and published drafters that follow it by its states.

Tokens are points on circles, and a step to the next token is a turn of each. So a drafter can turn a state by as many
steps as it guesses ahead: of a state at another position, or of another token, every guess is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from outrider.testing.toy_models import make_model
from tests import published
from tests.published import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, VOCAB, Maker, Weights, weights_of, write

_CIRCLES = HEAD_DIM // 2
_TURNED = slice(0, HEAD_DIM)  # of a row: where the target and heads read the token
_EMBEDDED, _STATE = slice(HEAD_DIM, 2 * HEAD_DIM), slice(2 * HEAD_DIM, 3 * HEAD_DIM)  # in blocks, apart from it
_SHARPNESS = 0.18  # the next token has a probability of 0.8 at temperature 1
_SURE = 10.0  # queries and keys: a head reads one row
FROM_STATE = 0.4  # share of the guess; the rest comes from the token after the state, which may have been drawn
MASK = 5

KINDS: dict[str, Maker] = {
    "eagle": published.eagle,
    "eagle3": partial(
        published.eagle3, draft_vocab=None, attention_bias=True, norm_before_residual=True, norm_output=True
    ),
    "dflash": partial(published.dflash, attention_bias=True),
    "dspark": partial(published.dflash, kind="dspark", attention_bias=True),
}


def target(folder: Path) -> Path:
    """Write a target of six layers, none of which adds anything."""
    folder = make_model(folder, seed=7, hidden=HIDDEN, layers=6)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        model.model.embed_tokens.weight.copy_(_points(_TURNED))
        model.lm_head.weight.copy_(_SHARPNESS * _points(_TURNED, ahead=-1))
    model.save_pretrained(folder)
    return folder


def drafter(kind: str, folder: Path, of: Path, *, from_state: float = FROM_STATE) -> Path:
    """Write a checkpoint that guesses by the target's states, and by the last token."""
    checkpoint = KINDS[kind](folder)
    config = json.loads((checkpoint / "config.json").read_text())
    heads = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, HIDDEN)
    weights = weights_of(checkpoint)
    for layer in {name.rpartition(".q_proj.")[0] for name in weights} - {""} if kind != "eagle" else ():
        sides = zip(("q_proj", "k_proj", "v_proj", "o_proj"), heads, strict=True)
        weights |= {f"{layer}.{side}.bias": torch.zeros(width) for side, width in sides}
    for name, weight in weights.items():
        weight.fill_(1.0 if "norm" in name else 0.0)
    head = weights_of(of)["lm_head.weight"]
    embeddings = _points(_EMBEDDED) if kind in ("dflash", "dspark") else _points(_TURNED)
    embeddings[MASK if kind in ("dflash", "dspark") else VOCAB :][:1] = 0
    weights |= {"lm_head.weight": head.clone(), "embed_tokens.weight": embeddings}
    if "confidence_head.proj.bias" in weights:
        weights["confidence_head.proj.bias"].fill_(10.0)
    _FOLLOW[kind](weights, from_state)
    for file in checkpoint.glob("*.safetensors*"):
        file.unlink()
    return write(checkpoint, config, weights)


def _points(where: slice, ahead: int = 0) -> torch.Tensor:
    """Return the points of the tokens that are so far ahead of each one.  # [vocab, hidden]"""
    circles = torch.randperm(VOCAB // 2, generator=torch.Generator().manual_seed(3))[:_CIRCLES] + 1
    angles = 2 * torch.pi * (torch.arange(VOCAB)[:, None] + ahead) * circles / VOCAB
    points = torch.zeros(VOCAB, HIDDEN)
    points[:, where] = torch.cat([angles.cos(), angles.sin()], dim=1)
    return points


def _turn(steps: int) -> torch.Tensor:
    """Return the map of each token's point to that of the token so many steps after it.  # [head, head]"""
    now, then = (_points(_TURNED, ahead)[:, _TURNED].double() for ahead in (0, steps))
    return torch.linalg.lstsq(now, then).solution.T.float()


def _eagle(weights: Weights, from_state: float) -> None:
    scale = (HIDDEN / _CIRCLES) ** 0.5  # of the target's final norm
    weights["fc.weight"][_TURNED, _TURNED] = (1 - from_state) * scale * torch.eye(HEAD_DIM)
    weights["fc.weight"][_TURNED, HIDDEN:][:, _TURNED] = from_state * _turn(1)


def _eagle3(weights: Weights, from_state: float) -> None:
    """Each row reads itself: the state, which the residual holds already, and the embedding."""
    attention = "midlayer.self_attn"
    weights["fc.weight"][_TURNED, _TURNED] = torch.eye(HEAD_DIM)
    weights[f"{attention}.v_proj.weight"][:HEAD_DIM, _TURNED] = torch.eye(HEAD_DIM)
    weights[f"{attention}.v_proj.weight"][HEAD_DIM:, HIDDEN:][:, _TURNED] = torch.eye(HEAD_DIM)
    for head, added in ((0, (1 - from_state) * torch.eye(HEAD_DIM)), (2, from_state * _turn(1) - torch.eye(HEAD_DIM))):
        _look(weights, attention, head, 0)
        weights[f"{attention}.o_proj.weight"][_TURNED, head * HEAD_DIM :][:, :HEAD_DIM] = added


def _block(weights: Weights, from_state: float, *, first: int) -> None:
    """The heads of two layers read the anchor and the state before it, from four places of a block.

    Guess g is made at place g + `first` − 1. A state is turned by one step more than the token after it.
    """
    weights["fc.weight"][_STATE, _TURNED] = torch.eye(HEAD_DIM)
    for guess in range(1, 5):
        attention, place = f"layers.{(guess - 1) // 2}.self_attn", guess + first - 1
        values = weights[f"{attention}.v_proj.weight"]
        values[:HEAD_DIM, _EMBEDDED] = values[HEAD_DIM:, _STATE] = torch.eye(HEAD_DIM)
        for head, back, share in ((0, place, 1 - from_state), (2, place + 1, from_state)):
            number = head + (guess - 1) % 2
            _look(weights, attention, number, back)
            turned = share * _turn(guess - 1 + (head > 0))
            weights[f"{attention}.o_proj.weight"][_TURNED, number * HEAD_DIM :][:, :HEAD_DIM] = turned


def _look(weights: Weights, attention: str, head: int, back: int) -> None:
    """Let a head read the row so many positions back: rotation alone tells rows apart."""
    frequencies = 10_000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = (back * frequencies).cos(), (back * frequencies).sin()
    weights[f"{attention}.k_proj.bias"].fill_(_SURE)
    weights[f"{attention}.q_proj.bias"][head * HEAD_DIM :][:HEAD_DIM] = _SURE * torch.cat([cos + sin, cos - sin])
    for norm in ("q_norm", "k_norm"):
        if f"{attention}.{norm}.weight" in weights:
            weights[f"{attention}.{norm}.weight"].fill_(_SURE)


_FOLLOW: dict[str, Callable[[Weights, float], None]] = {
    "eagle": _eagle,
    "eagle3": _eagle3,
    "dflash": partial(_block, first=1),
    "dspark": partial(_block, first=0),
}
