"""Published drafters that guess a whole block in one pass: P-EAGLE, DFlash and DSpark.

A block is computed once for each commit and gives logits per place. DSpark's logits also depend on the token before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from drafter.draft_sampling import draft_places
from drafter.hidden_states.received import ReceivedStates, evicted
from drafter.interface import DraftRequest
from drafter.published.dflash import PublishedDflash, PublishedDspark
from drafter.published.eagle3 import PublishedPeagle
from drafter.published.row_engine import SessionCaches
from drafter.published.rows import CommittedRows, DraftKvCache
from outrider.protocol.errors import Overloaded
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.speculation import Guess

# As --suffix-certainty: the least probability, by the confidence head, that all guesses up to a place hold.
_MIN_CONFIDENCE = 0.1


@dataclass(slots=True)
class _BlockSession(ReceivedStates):
    """A session's latest block, which begins after token `first + num_cached`."""

    hidden: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # [places, width]
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # without the token before  # [places, ids]


class BlockDrafter:
    """Drafter whose guesses for several places come from one pass over all sessions."""

    def __init__(
        self, module: PublishedPeagle | PublishedDflash, capacity: int, info: ModelInfo, candidates: int
    ) -> None:
        self.info = info
        self.vocab_limit = len(module.embed_tokens.weight)
        self._module = module
        self._caches = SessionCaches(module, capacity)
        self._candidates = candidates
        self._sessions: dict[str, _BlockSession] = {}  # least recently drafted first

    @torch.inference_mode()
    def draft(self, requests: Sequence[DraftRequest]) -> list[Guess]:
        for request in requests:
            state = self._sessions.pop(request.session, None) or _BlockSession()
            self._sessions[request.session] = state
            for hidden_states in request.hidden_states:
                if not state.add(hidden_states):
                    self._caches.free(request.session)
        known = self._sessions.get
        if new := {each.session: each for each in requests if known(each.session, _BlockSession()).new_states}:
            self._compute(new)
        return [self._draft(request) for request in requests]

    def forget(self, session: str) -> None:
        self._caches.free(session)
        self._sessions.pop(session, None)

    def _compute(self, batch: dict[str, DraftRequest]) -> None:
        """Compute the blocks after new states. Where the caches are full, a session starts again with its next ones."""
        while batch:
            states = [self._sessions[session].next_states() for session in batch]
            try:
                caches = self._caches.of(list(batch), sum(len(part) + self._module.places for part in states))
            except Overloaded:
                self.forget(evicted(self._sessions, batch))
                continue
            self._guess(batch.values(), states, caches)
            return

    def _guess(
        self, requests: Iterable[DraftRequest], states: Sequence[torch.Tensor], caches: Iterable[DraftKvCache]
    ) -> None:
        weight, rows = self._module.embed_tokens.weight, []
        sessions = [self._sessions[request.session] for request in requests]
        for request, session, new, cache in zip(requests, sessions, states, caches, strict=True):
            tokens = request.tokens[session.path_start : session.path_start + len(new)]
            cache.truncate(session.num_cached)  # a pass that failed may have left more
            rows.append(CommittedRows(cache, new.to(weight), tokens))
        for session, new, hidden in zip(sessions, states, self._module.guess(rows), strict=True):
            session.cached(len(new))
            session.hidden, session.logits = hidden, self._module.logits(hidden).float()

    def _draft(self, request: DraftRequest) -> Guess:
        session = self._sessions.get(request.session, _BlockSession())
        if session.new_states:
            return request.chain()  # the other sessions come first
        # Skip the places whose tokens are committed by now.
        skipped = request.committed - session.first - session.num_cached - 1
        num_places = len(session.logits) - skipped
        if num_places <= 0:
            return request.chain(done=True)
        module, ids = self._module, self._module.column_ids
        if isinstance(module, PublishedDspark):
            rows = _MarkovRows(module, session, request, skipped)
            return draft_places(request, rows, num_places, self._candidates, ids, by_level=True)
        logits = session.logits[skipped:]
        return draft_places(request, lambda paths: logits[list(map(len, paths))], num_places, self._candidates, ids)


class _MarkovRows:
    """Logits of a block's places after paths of guesses, with what DSpark's Markov head adds."""

    def __init__(self, module: PublishedDspark, session: _BlockSession, request: DraftRequest, skipped: int) -> None:
        self._module = module
        self._session = session
        self._skipped = skipped
        self._since = request.tokens[session.first + session.num_cached : request.committed]  # the anchor first
        self._states: dict[tuple[int, ...], torch.Tensor] = {}  # of the head, after these tokens of the block
        # Rejection and block verification need a length of guesses that does not depend on what is drawn.
        self._may_end = request.branches == 1 and not request.params.mode.needs_draft_probs
        self._certain = 1.0  # probability that all guesses of this draft hold

    def __call__(self, paths: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the logits after each path; no row: the confidence head ends the draft here."""
        places = [len(path) + self._skipped for path in paths]
        histories = [(*self._since, *path) for path in paths]
        hidden, logits = self._session.hidden[places], self._session.logits[places]
        previous = torch.tensor([history[-1] for history in histories], device=logits.device)
        confidence = self._module.confidence(hidden, previous) if self._may_end else None
        if confidence is not None:
            self._certain *= float(confidence)
            if self._certain < _MIN_CONFIDENCE:
                return logits[:0]
        states = torch.stack([self._state_before(history) for history in histories])
        following, bias = self._module.markov(states, previous, hidden)
        self._states.update(zip(histories, following, strict=True))
        return logits + bias

    def _state_before(self, history: tuple[int, ...]) -> torch.Tensor:
        """Return the head's state before the last of these tokens, which the pass for it follows."""
        before, width = history[:-1], self._module.markov_head.state_width
        hidden = self._session.hidden
        if not before or not width:
            return hidden.new_zeros(width)
        if before not in self._states:
            last = torch.tensor(before[-1:], device=hidden.device)
            states, _ = self._module.markov(self._state_before(before)[None], last, hidden[len(before) - 1, None])
            self._states[before] = states[0]
        return self._states[before]
