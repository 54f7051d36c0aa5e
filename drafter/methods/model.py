"""A small causal LM with the target's vocabulary, all sessions in one forward pass.

A chain grows by a token per step. A tree grows by a level or so per step:
what is new in it goes through the model together with the paths that lead
there, which costs little more than one row, and nothing of it stays cached.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from drafter.draft_sampling import next_token, offers, spread
from drafter.interface import DraftRequest, DraftResult
from drafter.methods.registry import drafter
from drafter.settings import DrafterSettings
from drafter.tree_builder import ROOT, Choice, TreeBuilder
from outrider.engine import Engine, SessionTokens
from outrider.engine.loading.loader import EngineOptions, LoadedModel, load_model
from outrider.protocol.errors import Overloaded, StartupError
from outrider.protocol.vocabulary import Vocabulary
from outrider.train.artifacts import card as cards

_PREFILL_ROWS = 512

Trail = tuple[int, ...]  # guessed tokens, from what is committed


@dataclass(slots=True)
class _Offered:
    """What may follow the open guesses of a session, as far as the model was asked: it stays true, whatever else is
    guessed. By the path from what is committed."""

    committed: int
    branches: int
    choices: dict[Trail, list[Choice]] = field(default_factory=dict)

    def move(self, ask: DraftRequest) -> None:
        """Some of it has been committed since."""
        new = tuple(ask.tokens[self.committed : ask.committed])
        kept = self.choices if ask.branches == self.branches else {}
        self.choices = {path[len(new) :]: found for path, found in kept.items() if path[: len(new)] == new}
        self.committed, self.branches = ask.committed, ask.branches


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
        self._offered: dict[str, _Offered] = {}
        self._shown: dict[str, list[int]] = {}  # the open guesses that go through the model in this step
        self.vocabulary: Vocabulary | None = vocabulary

    def draft(self, asks: Sequence[DraftRequest]) -> list[DraftResult]:
        able = [ask for ask in asks if len(ask.tokens) < self.info.context_length]
        drafts: dict[str, DraftResult] = {}
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
        return [drafts.get(ask.session, DraftResult(done=True)) for ask in asks]

    def forget(self, session: str) -> None:
        self._engine.free(session)
        self._cached.pop(session, None)
        self._offered.pop(session, None)

    def _make_room(self, able: list[DraftRequest]) -> None:
        """The cache is full: give up the session that was drafted longest ago; when there is no other, one that asks.

        What is given up is cached again when it is asked for again.
        """
        asking = {ask.session for ask in able}
        idle = next((session for session in self._cached if session not in asking), None)
        self.forget(idle or able.pop().session)

    def _rows(self, ask: DraftRequest) -> SessionTokens:
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
            return SessionTokens(ask.session, new, logits_from=len(new))
        return SessionTokens(ask.session, new, logits_from=len(new) - 1) if ask.branches == 1 else self._tree(ask, new)

    def _tree(self, ask: DraftRequest, new: Sequence[int]) -> SessionTokens:
        """The open guesses that the model has not been asked about, behind the paths that lead there."""
        offered = self._offered.setdefault(ask.session, _Offered(ask.committed, ask.branches))
        offered.move(ask)
        shown: set[int] = set()
        for node, path in enumerate(_paths(ask)):
            if path not in offered.choices:
                while node != ROOT and node not in shown:
                    shown.add(node)
                    node = ask.open_parents[node]
        order = self._shown[ask.session] = sorted(shown)
        last = len(new) - 1
        rows = {node: last + 1 + i for i, node in enumerate(order)}
        parents = (*range(-1, last), *(rows.get(ask.open_parents[node], last) for node in order))
        tokens = [*new, *(ask.open_tokens[node] for node in order)]
        return SessionTokens(ask.session, tokens, parents if order else (), logits_from=last)

    def _drafted(self, ask: DraftRequest, rows: SessionTokens, logits: torch.Tensor) -> DraftResult:
        """What a step's logits make of an ask; what it has cached is noted."""
        cached = self._cached[ask.session]
        chain = range(len(rows.tokens))
        if rows.parents:
            chain = range(rows.logits_from + 1)
            self._engine.keep(ask.session, len(cached), chain)
        cached.extend(rows.tokens[: len(chain)])
        if not len(logits):
            return DraftResult()  # a prompt longer than a step's share is not through yet: ask again
        return self._draw(ask, logits) if ask.branches == 1 else self._grow(ask, logits)

    def _grow(self, ask: DraftRequest, logits: torch.Tensor) -> DraftResult:
        """The likeliest of what may follow all open guesses: a share of what may be added, for deeper levels will want
        theirs. `logits` are those after what is committed and after each guess that was shown."""
        known = self._offered[ask.session].choices
        paths = _paths(ask)
        asked = [(), *(paths[node] for node in self._shown.pop(ask.session))]
        new = [row for row, path in enumerate(asked) if path not in known]
        if new:
            chosen = [asked[row] for row in new]
            known.update(zip(chosen, offers(ask, self._by_id(logits[new]), chosen), strict=True))
        growth = TreeBuilder(ask)
        for place, path in zip(range(ROOT, len(paths)), [(), *paths], strict=True):
            growth.offer(place, known[path])
        added = [growth.add() for _ in range(growth.share)]
        return growth.draft(done=added[0] is None)

    def _by_id(self, logits: torch.Tensor) -> torch.Tensor:
        """A column per id; ids that the engine leaves out are impossible.  # [rows, vocab]"""
        return logits if self._columns is None else spread(logits, self._columns, self.info.vocab_size)

    def _draw(self, ask: DraftRequest, logits: torch.Tensor) -> DraftResult:
        found = next_token(ask, self._by_id(logits), ask.tokens, self._candidates)
        if found is None:
            return DraftResult(done=True)
        token, drawn_from = found
        return DraftResult((token,), () if drawn_from is None else (drawn_from,))


def _paths(ask: DraftRequest) -> list[Trail]:
    """To each open guess, from what is committed."""
    paths: list[Trail] = []
    for token, parent in zip(ask.open_tokens, ask.open_parents, strict=True):
        paths.append((*(paths[parent] if parent != ROOT else ()), token))
    return paths


def _common(cached: Sequence[int], tokens: Sequence[int]) -> int:
    """Length of the common prefix. What differs lies near the end, so look there first."""
    length = min(len(cached), len(tokens))
    if list(cached[:length]) == list(tokens[:length]):
        return length
    return next(i for i in range(length) if cached[i] != tokens[i])


@drafter("model")
def make(settings: DrafterSettings, progress: Callable[[str], None]) -> ModelDrafter:
    return load(settings, progress)[0]


def load(settings: DrafterSettings, progress: Callable[[str], None]) -> tuple[ModelDrafter, LoadedModel]:
    """Load the model that the settings name, and make a drafter of it."""
    if not settings.model:
        raise StartupError(
            f"kind {settings.kind} needs --model", field="model", value="", limit="a directory, file or hub id"
        )
    head_ids = read_vocabulary(settings.draft_vocabulary) if settings.draft_vocabulary else None
    loaded = load_model(settings.model, replace(EngineOptions.of(settings), head_ids=head_ids), progress)
    made_for = cards.read_card(Path(settings.model)).target_lineage if cards.is_trained(settings.model) else ""
    drafter = ModelDrafter(loaded.engine, loaded.vocabulary, settings.draft_candidates, head_ids, made_for)
    return drafter, loaded


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
