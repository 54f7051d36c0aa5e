"""From a drafter's logits to guesses: what the target's own draw is likeliest to be, or a draw of one's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drafter.drafters import Ask
from drafter.growth import Choice
from outrider import noise, sampling
from outrider.drawing import shared_choices, shared_draw
from outrider.messages import Distribution
from outrider.sampling import History


def spread(logits: torch.Tensor, ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Logits for some ids as logits for all; the others cannot be drawn.  # [rows, vocab]"""
    return logits.new_full((len(logits), vocab_size), float("-inf")).index_copy_(1, ids, logits)


def adjusted(ask: Ask, logits: torch.Tensor, said: Sequence[int], paths: Sequence[Sequence[int]]) -> torch.Tensor:
    """As the request's parameters want them, after `said` and each of the paths."""
    logits = logits[:, : ask.vocab_size]
    history = None
    if ask.params.penalised:
        history = History(said, ask.prompt_length, logits.shape[-1], logits.device)
    return sampling.adjust(logits, ask.params, history, paths)


def offers(ask: Ask, logits: torch.Tensor, paths: Sequence[Sequence[int]]) -> list[list[Choice]]:
    """What may follow each path from what is committed, likeliest first."""
    ready = adjusted(ask, logits, ask.tokens[: ask.committed], paths)
    return shared_choices(ready, ask.params, [ask.committed + len(path) for path in paths], ask.branches)


def next_token(
    ask: Ask, logits: torch.Tensor, tokens: Sequence[int], candidates: int
) -> tuple[int, Distribution | None]:
    """The token after `tokens`, and in rejection and block mode what it was drawn from.  # logits: [1, vocab]"""
    ready = adjusted(ask, logits, tokens, [()])
    if ask.params.mode.needs_draft_probs:
        return _own_draw(ask, ready, tokens, candidates)
    if ask.params.greedy:
        return shared_draw(ready, ask.params, [len(tokens)])[0], None
    return shared_choices(ready, ask.params, [len(tokens)], 1)[0][0][0], None


def _own_draw(ask: Ask, ready: torch.Tensor, tokens: Sequence[int], candidates: int) -> tuple[int, Distribution]:
    """Independent noise, and the distribution that the token was drawn from.

    The noise is one path's own. Another drafter of the session may have drawn
    for the same position behind guesses that failed, and block verification
    looks at such draws too: with their noise, a late guess that still fits
    would bias the text.
    """
    assert ask.params.seed is not None
    kept = sampling.candidates(ready, ask.params)
    ids = kept.ids if kept.ids.dim() == 1 else kept.ids[0]
    drawn_from = sampling.quantise(kept.probs[0], ids, candidates)
    key = noise.key(ask.params.seed, noise.Use.DRAFT, len(tokens), ask.committed)
    for token in tokens[ask.committed :]:
        key = noise.key(key, noise.Use.DRAFT, token)
    columns = noise.race([key], torch.tensor(drawn_from.ids), torch.tensor([drawn_from.weights]))
    return drawn_from.ids[int(columns[0])], drawn_from
