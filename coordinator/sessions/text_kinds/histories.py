"""Pair histories by kind of text: what a session starts from, and what it leaves to later ones.

The history of a pair alone is a mixture of all texts: after an edit it
promises what no chat can hold. It serves kinds that were not seen yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from coordinator.control.estimator import CREDIT, MAX_CREDIT, Estimator, PairEstimate, PairHistory
from coordinator.persistence.pair_history import PairHistoryStore
from coordinator.sessions.text_kinds.recognition import TextRecogniser

_Wait = Callable[[], None]  # called as long as the session waits
POLL_S = 0.25  # of a session that waits for its verifier's other sessions to leave
MAX_UNSEEN = 0.4  # acceptance that a warm text is started with while only cold ones were seen


class TextHistories:
    """Histories of one target and one drafter by kind, as one session needs them."""

    def __init__(self, pairs: PairHistoryStore, target: str, drafter: str, text: TextRecogniser) -> None:
        self._pairs = pairs
        self._target = target
        self._drafter = drafter
        self._text = text
        self._recalled: dict[str, PairHistory | None] = {}
        self._credits: dict[str, float] = {}  # by kind, with what this session has gained
        self._credit = CREDIT  # of the session, when they were noted last

    async def recall(self) -> None:
        """Recall what this session may need."""
        kinds = ["", *self._text.kinds]
        found = await asyncio.gather(*(self._pairs.recall(self._target, self._key(kind)) for kind in kinds))
        self._recalled = dict(zip(kinds, found, strict=True))

    async def until_promising(
        self, tokens: Sequence[int], own: PairEstimate, session: Estimator, pay: Callable[[], bool], wait: _Wait
    ) -> None:
        """Wait while others share the verifier and guesses in such a text do not pay beside them.

        To tell takes as long as a choice of plan, so it is done when the kind of the text or the load has changed.
        """
        judged = None
        while session.shared:
            if len(tokens) >= self._text.due:
                self._text.read(tokens)
            before, judged = judged, (self._text.kind, int(session.other_sessions.value).bit_length())
            if judged != before:
                self.start(own, session.pair, alone=True)
                if pay():
                    return
            wait()
            await asyncio.sleep(POLL_S)

    def start(self, own: PairEstimate, session: PairEstimate, *, alone: bool) -> None:
        """Start a drafter's estimates from its history, and the session's too if no better drafter is attached."""
        history = self._recalled[self._text.kind] or self._recalled[self._text.start] or self._of_all_texts()
        if history is not None:
            own.start_from(history)
        expected = own.accepted_tokens * own.proposal_rate.value
        if not alone and expected > session.accepted_tokens * session.proposal_rate.value:
            session.start_from(history or PairHistory())
        elif alone and history is not None:
            session.start_from(history)
        self._lend(session)

    def read(self, tokens: Sequence[int], own: PairEstimate, session: PairEstimate, *, alone: bool) -> None:
        """Read the answer so far. If its kind has changed, keep what it has shown and expect what the new one has."""
        left = self._text.kind
        if not self._text.read(tokens):
            return
        self._note_credit(left, session)
        self._lend(session)
        if left != self._text.start:
            self._remember(left, _shown(own, session, alone=alone) if session.checked else None)
        if (known := self._recalled[self._text.kind]) is not None:
            session.expect(known.acceptance)

    def remember(self, own: PairEstimate, session: PairEstimate, *, alone: bool) -> None:
        """Keep what the session has shown: for texts of its kind, for those that begin like it, and for all."""
        self._note_credit(self._text.kind, session)
        for kind in {"", self._text.start, self._text.kind}:
            self._remember(kind, _shown(own, session, alone=alone) if own.checked else None)

    def _of_all_texts(self) -> PairHistory | None:
        """Return the history of the pair; it does not tell a warm text what cold ones have accepted."""
        history = self._recalled[""]
        if history is None or self._text.cold:
            return history
        return replace(history, acceptance=[min(each, MAX_UNSEEN) for each in history.acceptance])

    def _lend(self, session: PairEstimate) -> None:
        """Begin with the credit of the text's kind. Each has its own: edits do not pay for chats."""
        known = self._recalled[self._text.kind] or PairHistory()
        session.credit = self._credit = min(CREDIT, self._credits.setdefault(self._text.kind, known.credit))

    def _note_credit(self, kind: str, session: PairEstimate) -> None:
        gained, self._credit = session.credit - self._credit, session.credit
        self._credits[kind] = max(-MAX_CREDIT, min(MAX_CREDIT, self._credits[kind] + gained))

    def _remember(self, kind: str, shown: PairHistory | None) -> None:
        self._pairs.remember(self._target, self._key(kind), shown, self._credits.get(kind, CREDIT))

    def _key(self, kind: str) -> str:
        return f"{self._drafter} {kind}".rstrip()


def _shown(own: PairEstimate, session: PairEstimate, *, alone: bool) -> PairHistory:
    """Return what a drafter and its session have shown; `alone`: no other drafter was in the session."""
    of_drafter, of_session = own.history(), session.history()
    if alone:  # the session's acceptance is the drafter's, without tokens from branches
        of_drafter = replace(of_drafter, acceptance=of_session.acceptance)
    return replace(
        of_drafter,
        tree_gain=of_session.tree_gain,
        ahead_gain=of_session.ahead_gain,
        tree_rows=of_session.tree_rows,
        paces=of_session.paces,
    )
