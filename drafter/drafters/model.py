"""A small causal LM with the target's vocabulary, all sessions in one forward pass.

A chain grows by a token per step. A tree grows by a level or so per step: all
of it goes through the model again, which costs little more than one row, and
nothing of it stays cached.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from drafter.drafters import Ask, Draft, drafter
from drafter.drafters.translate import TranslatingDrafter, load_target_tokenizer
from drafter.growth import ROOT, Growth
from drafter.settings import DrafterSettings
from outrider import noise, sampling
from outrider.drawing import shared_choices, shared_draw
from outrider.engine import Engine, Rows
from outrider.engine.load import EngineOptions, load_model
from outrider.errors import Overloaded, StartupError
from outrider.messages import Distribution
from outrider.sampling import History
from outrider.trained import card as cards
from outrider.vocabulary import Vocabulary

_PREFILL_ROWS = 512


class ModelDrafter:
    wants_features = False

    def __init__(
        self,
        engine: Engine,
        vocabulary: Vocabulary,
        candidates: int,
        head_ids: Sequence[int] | None = None,
        made_for: str = "",
    ) -> None:
        self.info = replace(engine.info, made_for=made_for)
        self._engine = engine
        self._candidates = candidates
        # The engine's columns, where it has not one for every id.
        self._columns = None if head_ids is None else torch.tensor(head_ids, device=engine.device)
        self._cached: dict[str, list[int]] = {}
        self.vocabulary: Vocabulary | None = vocabulary

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        able = [ask for ask in asks if len(ask.tokens) < self.info.context_length]
        drafts: dict[str, Draft] = {}
        while able:
            batch = [self._rows(ask) for ask in able]
            try:
                result = self._engine.extend(batch)
            except Overloaded:
                self._make_room(able)
                continue
            for ask, rows, logits in zip(able, batch, result.logits, strict=True):
                drafts[ask.session] = self._drafted(ask, rows, logits)
            break
        return [drafts.get(ask.session, Draft(done=True)) for ask in asks]

    def forget(self, session: str) -> None:
        self._engine.free(session)
        self._cached.pop(session, None)

    def _make_room(self, able: list[Ask]) -> None:
        """The cache is full: give up the session that was drafted longest ago; when there is no other, one that asks.

        What is given up is cached again when it is asked for again.
        """
        asking = {ask.session for ask in able}
        idle = next((session for session in self._cached if session not in asking), None)
        self.forget(idle or able.pop().session)

    def _rows(self, ask: Ask) -> Rows:
        """Roll back to what is still true, then the tokens not seen yet; of a tree all that is open."""
        chain = ask.tokens if ask.branches == 1 else ask.tokens[: ask.committed]
        cached = self._cached.pop(ask.session, None)
        if cached is None:
            cached = list(chain[: self._engine.adopt(ask.session, chain, ask.cache_salt)])
        self._cached[ask.session] = cached  # the last of them is the one asked for last
        same = _common(cached, chain)
        same = min(same, len(chain) - 1)  # the last one must go through for its logits
        del cached[same:]
        self._engine.truncate(ask.session, same)
        new = chain[same : same + _PREFILL_ROWS]
        if same + len(new) < len(chain):
            return Rows(ask.session, new, logits_from=len(new))
        last = len(new) - 1
        if ask.branches == 1 or not ask.open_tokens:
            return Rows(ask.session, new, logits_from=last)
        parents = (*range(-1, last), *(last + 1 + parent if parent >= 0 else last for parent in ask.open_parents))
        return Rows(ask.session, [*new, *ask.open_tokens], parents, logits_from=last)

    def _drafted(self, ask: Ask, rows: Rows, logits: torch.Tensor) -> Draft:
        """What a step's logits make of an ask; what it has cached is noted."""
        cached = self._cached[ask.session]
        chain = range(len(rows.tokens))
        if rows.parents:
            chain = range(rows.logits_from + 1)
            self._engine.keep(ask.session, len(cached), chain)
        cached.extend(rows.tokens[: len(chain)])
        if not len(logits):
            return Draft()  # a prompt longer than a step's share is not through yet: ask again
        return self._draw(ask, logits) if ask.branches == 1 else self._grow(ask, logits)

    def _grow(self, ask: Ask, logits: torch.Tensor) -> Draft:
        """The likeliest of what may follow all open guesses: a share of what may be added, for deeper levels will want
        theirs. `logits` are those after what is committed and after each open guess."""
        growth = Growth(ask)
        places = range(ROOT, len(ask.open_tokens))
        adjusted = self._adjusted(ask, logits, ask.tokens[: ask.committed], [growth.path(place) for place in places])
        positions = [ask.committed + growth.depth(place) for place in places]
        choices = shared_choices(adjusted, ask.params, positions, ask.branches)
        for place, offered in zip(places, choices, strict=True):
            growth.offer(place, offered)
        added = [growth.add() for _ in range(growth.share)]
        return growth.draft(done=added[0] is None)

    def _adjusted(
        self, ask: Ask, logits: torch.Tensor, said: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        logits = self._by_id(logits)[:, : ask.vocab_size]
        history = None
        if ask.params.penalised:
            history = History(said, ask.prompt_length, logits.shape[-1], logits.device)
        return sampling.adjust(logits, ask.params, history, paths)

    def _by_id(self, logits: torch.Tensor) -> torch.Tensor:
        """A column per id; ids that the engine leaves out are impossible.  # [rows, vocab]"""
        if self._columns is None:
            return logits
        wide = logits.new_full((len(logits), self.info.vocab_size), float("-inf"))
        return wide.index_copy_(1, self._columns, logits)

    def _draw(self, ask: Ask, logits: torch.Tensor) -> Draft:
        position = len(ask.tokens)
        adjusted = self._adjusted(ask, logits, ask.tokens, [()])
        if ask.params.mode.needs_draft_probs:
            token, drawn_from = self._draw_own(ask, adjusted, position)
            return Draft((token,), (drawn_from,))
        if ask.params.greedy:
            return Draft(tuple(shared_draw(adjusted, ask.params, [position])))
        return Draft((shared_choices(adjusted, ask.params, [position], 1)[0][0][0],))

    def _draw_own(self, ask: Ask, adjusted: torch.Tensor, position: int) -> tuple[int, Distribution]:
        """Rejection and block: independent noise, and the distribution that the token was drawn from."""
        assert ask.params.seed is not None
        kept = sampling.candidates(adjusted, ask.params)
        ids = kept.ids if kept.ids.dim() == 1 else kept.ids[0]
        drawn_from = sampling.quantise(kept.probs[0], ids, self._candidates)
        key = noise.key(ask.params.seed, noise.Use.DRAFT, position, ask.committed)
        columns = noise.race([key], torch.tensor(drawn_from.ids), torch.tensor([drawn_from.weights]))
        return drawn_from.ids[int(columns[0])], drawn_from


def _common(cached: Sequence[int], tokens: Sequence[int]) -> int:
    """Length of the common prefix. What differs lies near the end, so look there first."""
    length = min(len(cached), len(tokens))
    if list(cached[:length]) == list(tokens[:length]):
        return length
    return next(i for i in range(length) if cached[i] != tokens[i])


@drafter("model")
def make(settings: DrafterSettings, progress: Callable[[str], None]) -> ModelDrafter | TranslatingDrafter:
    if not settings.model:
        raise StartupError("kind model needs --model", field="model", value="", limit="a directory, file or hub id")
    head_ids = read_vocabulary(settings.draft_vocabulary) if settings.draft_vocabulary else None
    loaded = load_model(settings.model, replace(EngineOptions.of(settings), head_ids=head_ids), progress)
    made_for = cards.read_card(Path(settings.model)).target_lineage if cards.is_trained(settings.model) else ""
    drafter = ModelDrafter(loaded.engine, loaded.vocabulary, settings.draft_candidates, head_ids, made_for)
    if not settings.target_tokenizer:
        return drafter
    target = load_target_tokenizer(settings.target_tokenizer, progress)
    if Vocabulary.of(target) == loaded.vocabulary:
        return drafter
    return TranslatingDrafter(drafter, loaded.tokenizer, target)


def read_vocabulary(path: str) -> tuple[int, ...]:
    """The ids in a file, ascending."""
    try:
        found = json.loads(Path(path).read_text())
        ids = found["ids"] if isinstance(found, dict) else found
        if not all(type(token) is int for token in ids):
            raise ValueError("not all of them are whole numbers")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StartupError(
            f"cannot read ids from {path}: {error}", field="draft_vocabulary", value=path, limit="a JSON list of ids"
        ) from error
    return tuple(sorted(set(ids)))
