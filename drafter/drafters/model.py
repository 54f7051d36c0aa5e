"""A small causal LM with the target's vocabulary, one token per session and step, all sessions in one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from drafter.drafters import Ask, Draft, drafter
from drafter.settings import DrafterSettings
from outrider import noise, sampling
from outrider.drawing import shared_draw
from outrider.engine import Engine, Rows
from outrider.engine.load import EngineOptions, load_model
from outrider.errors import Overloaded, StartupError
from outrider.messages import Distribution, ModelInfo
from outrider.sampling import History
from outrider.vocabulary import Vocabulary

_PREFILL_ROWS = 512
_WIDE = 64  # ids that a coupled draw looks at: the rest would hardly ever win


class ModelDrafter:
    wants_features = False

    def __init__(self, engine: Engine, vocabulary: Vocabulary, candidates: int) -> None:
        self._engine = engine
        self._candidates = candidates
        self._cached: dict[str, list[int]] = {}
        self.vocabulary: Vocabulary | None = vocabulary

    @property
    def info(self) -> ModelInfo:
        return self._engine.info

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
                cached = self._cached[ask.session]
                cached.extend(rows.tokens)
                # A prompt longer than a step's share is not through yet: ask again.
                drafts[ask.session] = self._draw(ask, logits) if len(cached) == len(ask.tokens) else Draft()
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
        """Roll back to what is still true, then the tokens not seen yet."""
        cached = self._cached.pop(ask.session, None)
        if cached is None:
            cached = list(ask.tokens[: self._engine.adopt(ask.session, ask.tokens, ask.cache_salt)])
        self._cached[ask.session] = cached  # the last of them is the one asked for last
        same = _common(cached, ask.tokens)
        same = min(same, len(ask.tokens) - 1)  # the last one must go through for its logits
        del cached[same:]
        self._engine.truncate(ask.session, same)
        new = ask.tokens[same : same + _PREFILL_ROWS]
        whole = same + len(new) == len(ask.tokens)
        return Rows(ask.session, new, logits_from=len(new) - 1 if whole else len(new))

    def _draw(self, ask: Ask, logits: torch.Tensor) -> Draft:
        logits = logits[:, : ask.vocab_size]
        position = len(ask.tokens)
        history = None
        if ask.params.penalised:
            history = History(ask.tokens, ask.prompt_length, logits.shape[-1], logits.device)
        adjusted = sampling.adjust(logits, ask.params, history, [()])
        if ask.params.mode.needs_draft_probs:
            token, drawn_from = self._draw_own(ask, adjusted, position)
            return Draft((token,), (drawn_from,))
        if not ask.params.greedy and not 0 < ask.params.top_k <= _WIDE:
            adjusted = _only_best(adjusted, _WIDE)
        return Draft((shared_draw(adjusted, ask.params, [position])[0],))

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


def _only_best(logits: torch.Tensor, count: int) -> torch.Tensor:
    """All but the likeliest ids made impossible."""
    best = logits.topk(min(count, logits.shape[-1]), dim=-1)
    return torch.full_like(logits, float("-inf")).scatter_(1, best.indices, best.values)


@drafter("model")
def make(settings: DrafterSettings, progress: Callable[[str], None]) -> ModelDrafter:
    if not settings.model:
        raise StartupError("kind model needs --model", field="model", value="", limit="a directory, file or hub id")
    loaded = load_model(settings.model, EngineOptions.of(settings), progress)
    return ModelDrafter(loaded.engine, loaded.vocabulary, settings.draft_candidates)
