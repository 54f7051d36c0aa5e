"""From a drafter's logits to guesses: what the target's own draw is likeliest to be, or a draw of one's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drafter.interface import DraftRequest
from drafter.tree_builder import Choice
from outrider.protocol.speculation import Distribution
from outrider.speculation import noise, sampling
from outrider.speculation.exponential_race import shared_choices, shared_draw
from outrider.speculation.sampling import History


def spread(logits: torch.Tensor, ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Logits for some ids as logits for all; the others cannot be drawn.  # [rows, vocab]"""
    return logits.new_full((len(logits), vocab_size), float("-inf")).index_copy_(1, ids, logits)


def adjusted(
    ask: DraftRequest, logits: torch.Tensor, said: Sequence[int], paths: Sequence[Sequence[int]]
) -> torch.Tensor:
    """As the request's parameters want them, after `said` and each of the paths."""
    logits = logits[:, : ask.vocab_size]
    history = None
    if ask.params.penalised:
        history = History(said, ask.prompt_length, logits.shape[-1], logits.device)
    return sampling.adjust(logits, ask.params, history, paths)


def offers(ask: DraftRequest, logits: torch.Tensor, paths: Sequence[Sequence[int]]) -> list[list[Choice]]:
    """What may follow each path from what is committed, likeliest first."""
    ready = adjusted(ask, logits, ask.tokens[: ask.committed], paths)
    ready, live = _restricted(ask, ready, paths)
    positions = [ask.committed + len(paths[row]) for row in live]
    found: list[list[Choice]] = [[] for _ in paths]
    if live:
        chosen = shared_choices(ready if len(live) == len(paths) else ready[live], ask.params, positions, ask.branches)
        for row, choices in zip(live, chosen, strict=True):
            found[row] = choices
    return found


def next_token(
    ask: DraftRequest, logits: torch.Tensor, tokens: Sequence[int], candidates: int
) -> tuple[int, Distribution | None] | None:
    """The token after `tokens`, and in rejection and block mode what it was drawn from.  # logits: [1, vocab]

    None: by the grammar nothing can follow.
    """
    ready, live = _restricted(ask, adjusted(ask, logits, tokens, [()]), [tokens[ask.committed :]])
    if not live:
        return None
    if ask.params.mode.needs_draft_probs:
        return _own_draw(ask, ready, tokens, candidates)
    if ask.params.greedy:
        return shared_draw(ready, ask.params, [len(tokens)])[0], None
    return shared_choices(ready, ask.params, [len(tokens)], 1)[0][0][0], None


def _restricted(
    ask: DraftRequest, logits: torch.Tensor, paths: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, Sequence[int]]:
    """What the grammar lets follow each path, and the rows in which that is anything."""
    masks = None
    if ask.rails is not None:
        masks = ask.rails.allowed(ask.tokens, ask.committed, paths, logits.shape[-1])
    if masks is None:
        return logits, range(len(paths))
    allowed = torch.from_numpy(masks).to(logits.device)
    logits = logits.masked_fill(~allowed, float("-inf"))
    # What can follow may be none of the ids that this drafter has logits for: then one is as likely as the other.
    unknown = torch.isneginf(logits).all(dim=-1, keepdim=True)
    return logits.masked_fill(allowed & unknown, 0.0), [row for row, mask in enumerate(masks) if mask.any()]


def _own_draw(
    ask: DraftRequest, ready: torch.Tensor, tokens: Sequence[int], candidates: int
) -> tuple[int, Distribution]:
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
