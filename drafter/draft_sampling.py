"""Sampling of guesses from a drafter's logits: with the target's noise, or from the drafter's own distribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from drafter.interface import DraftRequest
from drafter.tree_builder import Choice, TreeBuilder
from outrider.protocol.sampling_params import Verification
from outrider.protocol.speculation import Distribution, Guess
from outrider.speculation import noise, sampling
from outrider.speculation.exponential_race import shared_choices, shared_draw
from outrider.speculation.sampling import History

Ids = torch.Tensor | None  # of the columns of logits, ascending; None: the whole vocabulary
# Logits of the places after these paths of guesses (empty: the first after the committed tokens); no row: it ends.
Rows = Callable[[Sequence[Sequence[int]]], torch.Tensor]


def adjust_logits(
    request: DraftRequest, logits: torch.Tensor, ids: Ids, tokens: Sequence[int], paths: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, Ids]:
    """Apply penalties and biases to the logits after `tokens` and each path; these need the whole vocabulary."""
    params, history = request.params, None
    whole = params.penalised or params.logit_bias or request.grammar_cursor
    if ids is not None:
        if not whole:
            return logits, ids
        columns = max(request.vocab_size, int(ids[-1]) + 1)
        logits = logits.new_full((len(logits), columns), float("-inf")).index_copy_(1, ids, logits)
    if whole and (unknown := request.vocab_size - logits.shape[-1]) > 0:  # the target's vocabulary has more
        logits = torch.nn.functional.pad(logits, (0, unknown), value=float("-inf"))
    logits = logits[:, : request.vocab_size]
    if params.penalised:
        history = History(tokens, request.prompt_length, logits.shape[-1], logits.device)
    return sampling.adjust(logits, params, history, paths), None


def token_choices(
    request: DraftRequest, logits: torch.Tensor, paths: Sequence[Sequence[int]], ids: Ids = None
) -> list[list[Choice]]:
    """Return the likeliest next tokens after each path from the committed position, likeliest first."""
    adjusted, ids = adjust_logits(request, logits, ids, request.tokens[: request.committed], paths)
    adjusted, live = _mask_by_grammar(request, adjusted, paths)
    positions = [request.committed + len(paths[row]) for row in live]
    live_logits = adjusted if len(live) == len(paths) else adjusted[live]
    chosen = shared_choices(live_logits, request.params, positions, request.branches, ids) if live else []
    choices = dict(zip(live, chosen, strict=True))
    return [choices.get(row, []) for row in range(len(paths))]


def add_choices(request: DraftRequest, tree: TreeBuilder, nodes: Sequence[int], logits: torch.Tensor, ids: Ids) -> None:
    """State the likeliest next tokens after nodes of a tree."""
    choices = token_choices(request, logits, [tree.path(node) for node in nodes], ids)
    for node, node_choices in zip(nodes, choices, strict=True):
        tree.add_choices(node, node_choices)


def next_token(
    request: DraftRequest, logits: torch.Tensor, tokens: Sequence[int], candidates: int, ids: Ids = None
) -> tuple[int, list[Distribution]] | None:
    """Return the token after `tokens`, with its distribution in rejection and block mode.  # logits: [1, ids]

    None means that the grammar allows no token here, or that the logits are not finite.
    """
    adjusted, ids = adjust_logits(request, logits, ids, tokens, [()])
    adjusted, live = _mask_by_grammar(request, adjusted, [tokens[request.committed :]])
    if not live:
        return None
    if request.params.mode.needs_draft_probs:
        return _draw_with_own_noise(request, adjusted, tokens, candidates, ids)
    if request.params.greedy:
        column = shared_draw(adjusted, request.params, [len(tokens)])[0]
        return column if ids is None else int(ids[column]), []
    choices = shared_choices(adjusted, request.params, [len(tokens)], 1, ids)[0]
    return (choices[0][0], []) if choices else None


def draft_places(
    request: DraftRequest, rows: Rows, num_places: int, candidates: int, ids: Ids, *, by_level: bool = False
) -> Guess:
    """Draft through places that are predicted together. `by_level`: about a level of a tree at once."""
    if request.branches > 1:
        return _draft_tree(request, rows, num_places, ids, by_level)
    tokens = list(request.tokens)
    probs: list[Distribution] = []
    first = len(tokens) - request.committed
    for _ in range(first, min(num_places, first + request.room)):
        logits = rows([tokens[request.committed :]])
        choice = next_token(request, logits, tokens, candidates, ids) if len(logits) else None
        if choice is None:
            break
        tokens.append(choice[0])
        probs += choice[1]
    drafted = tokens[len(request.tokens) :]
    return request.chain(drafted, probs, done=len(drafted) < request.max_new_tokens)


def _draft_tree(request: DraftRequest, rows: Rows, num_places: int, ids: Ids, by_level: bool) -> Guess:
    builder = TreeBuilder(request)
    new: list[int] = builder.expandable_nodes()
    while new:
        new = [node for node in new if builder.depth(node) < num_places]
        if new:
            add_choices(request, builder, new, rows([builder.path(node) for node in new]), ids)
        added = [builder.add() for _ in range(builder.level_budget if by_level else 1)]
        new = [node for node in added if node is not None]
    return builder.guess(done=builder.remaining > 0)


def draws_plainly(request: DraftRequest) -> bool:
    """Return whether its tokens are the likeliest ones or draws that the target shares, from the logits as they are."""
    params = request.params
    adjusted = params.penalised or params.logit_bias or request.grammar_cursor
    drawn = params.mode is Verification.COUPLED and not any(sampling.cut_kind(params))
    return not adjusted and (params.greedy or drawn)


def _mask_by_grammar(
    request: DraftRequest, logits: torch.Tensor, paths: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, Sequence[int]]:
    """Mask the tokens that the grammar forbids after each path; return the rows that keep at least one token."""
    masks = None
    if request.grammar_cursor is not None:
        masks = request.grammar_cursor.allowed(request.tokens, request.committed, paths, logits.shape[-1])
    if masks is None:
        return logits, range(len(paths))
    allowed = torch.from_numpy(masks).to(logits.device)
    logits = logits.masked_fill(~allowed, float("-inf"))
    # A drafter with a reduced vocabulary may have no logits for any allowed id: these ids are then equally likely.
    unknown = torch.isneginf(logits).all(dim=-1, keepdim=True)
    return logits.masked_fill(allowed & unknown, 0.0), [row for row, mask in enumerate(masks) if mask.any()]


def _draw_with_own_noise(
    request: DraftRequest, logits: torch.Tensor, tokens: Sequence[int], candidates: int, ids: Ids
) -> tuple[int, list[Distribution]] | None:
    """Draw a token with noise of this path alone; return it with the distribution that it was drawn from.

    Block verification also looks at guesses of other drafters for the same position whose path failed. With shared
    noise, a late guess that still fits would depend on them and bias the text.
    """
    assert request.params.seed is not None
    if request.params.top_p == 1.0:  # the other cuts leave the shares of the likeliest ids as they are
        logits, columns = logits.topk(min(candidates, logits.shape[-1]), dim=-1)
        ids = columns[0] if ids is None else ids[columns[0]]
    kept = sampling.candidates(logits, request.params)
    if kept.probs.isnan().any():
        return None
    columns = kept.ids if kept.ids.dim() == 1 else kept.ids[0]
    distribution = sampling.quantise(kept.probs[0], columns if ids is None else ids[columns], candidates)
    key = noise.key(request.params.seed, noise.Use.DRAFT, len(tokens), request.committed)
    for token in tokens[request.committed :]:
        key = noise.key(key, noise.Use.DRAFT, token)
    columns = noise.exponential_race([key], torch.tensor(distribution.ids), torch.tensor([distribution.weights]))
    return distribution.ids[int(columns[0])], [distribution]
