"""Pair histories by kind of text: what a session starts from, and what it leaves to later ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from coordinator.control.estimator import REFILL, Estimator, PairEstimate, PairHistory, pair_shown
from coordinator.persistence.pair_history import PairHistoryStore
from coordinator.sessions.text_kinds.recognition import TextRecogniser

_Wait = Callable[[], None]
POLL_S = 0.25  # of a session that waits for its verifier's other sessions to leave
POLL_ALONE_S = 0.01  # of one that is alone, doubled while its text stands still: it may become another kind
IN_VAIN = 3.0  # plain steps that a kind waits longer after a drafter that gained nothing
COPIES_GAINED = 18.0  # what copies are taken to have gained before the first one: guesses probably hold
LOAN = 1 / 3  # of what a kind has gained, that one text may lose
MAX_UNSEEN = 0.4  # acceptance that a warm text is started with while only cold ones were seen


class TextHistories:
    """Histories of one target and one drafter by kind, as one session needs them."""

    def __init__(self, pairs: PairHistoryStore, target: str, drafter: str, text: TextRecogniser) -> None:
        self._pairs, self._target, self._drafter, self._text = pairs, target, drafter, text
        self._recalled: dict[str, PairHistory | None] = {}

    async def recall(self) -> None:
        """Recall what this session may need."""
        kinds = ["", *self._text.kinds]
        found = await asyncio.gather(*(self._pairs.recall(self._target, self._key(kind)) for kind in kinds))
        self._recalled = dict(zip(kinds, found, strict=True))

    async def until_promising(
        self, tokens: Sequence[int], own: PairEstimate, session: Estimator, pay: Callable[[], bool], wait: _Wait
    ) -> None:
        """Wait while guesses in such a text do not pay: beside others, as far as is known; alone, while it has a debt.

        A long prompt is dear to read, so its answer shows first whether it copies. `pay` takes as long as a choice of
        plan, so it is asked when the kind of the text changed or the load fell. `wait` is called as long as it waits.
        """
        text, paid, pause, judged = self._text, 0, POLL_ALONE_S, ("", 99)
        while session.shared or text.may_copy or self._settle(text.kind, REFILL * (len(tokens) - paid)) < 0.0:
            pause = POLL_ALONE_S if len(tokens) > paid or text.may_copy else min(POLL_S, 2 * pause)
            if (paid := len(tokens)) >= text.due:
                text.read(tokens)
            least, load = judged[1] if text.kind == judged[0] else 99, int(session.other_sessions.value).bit_length()
            before, judged = judged, (text.kind, min(least, load if session.shared else 99))
            if session.shared and judged != before:
                self.start(own, session.pair, alone=True)
                if pay():
                    return
            if session.shared or (judged == before and not text.may_copy):  # else it may need the states of the prompt
                wait()
            await asyncio.sleep(POLL_S if session.shared else pause * (judged == before))

    def start(self, own: PairEstimate, session: PairEstimate, *, alone: bool) -> None:
        """Start a drafter's estimates from its history, and the session's too if no better drafter is attached."""
        history = self._recalled[self._text.kind] or self._recalled[self._text.start] or self._of_all_texts()
        own.start_from(history or PairHistory())
        better = own.accepted_tokens * own.proposal_rate.value > session.accepted_tokens * session.proposal_rate.value
        if (alone and history is not None) or (better and not alone):
            session.start_from(history or PairHistory())
        balance = self._settle(self._text.kind, 0.0)
        session.lend(balance, LOAN * balance)
        self._attached_as, self._gained = self._text.kind, 0.0

    def read(self, tokens: Sequence[int], own: PairEstimate, session: PairEstimate, *, alone: bool) -> None:
        """Read the answer so far. If its kind has changed, keep what it has shown and expect what the new one has."""
        left, changed = self._text.kind, self._text.read(tokens)
        if changed and left != self._text.start and session.checked:
            self._pairs.remember(self._target, self._key(left), pair_shown(own, session, alone=alone))
        if changed or session.credit <= 0.0:  # then the text borrows again from what its kind has gained
            self._account(left, session)
            uncounted = self._text.kind == self._attached_as or self._recalled[self._text.kind] is None
            balance = self._settle(self._text.kind, 0.0) + self._gained * uncounted
            session.lend(balance, max(session.credit, LOAN * balance))
        if changed and (known := self._recalled[self._text.kind]) is not None:
            session.expect(known.acceptance)

    def remember(self, own: PairEstimate, session: PairEstimate, *, alone: bool, reading: float | None) -> None:
        """Keep what the session has shown. `reading`: the cost of a drafter on its verifier's cores, or None."""
        if own.checked:
            for kind in {"", self._text.start, self._text.kind}:
                self._pairs.remember(self._target, self._key(kind), pair_shown(own, session, alone=alone))
        if reading is not None:
            self._account(self._text.kind, session)
            self._settle(self._attached_as, self._gained - reading - IN_VAIN * (reading > 0.0 >= self._gained))

    def _of_all_texts(self) -> PairHistory | None:
        """Return the history of the pair; it does not tell a warm text what cold ones have accepted."""
        if (history := self._recalled[""]) is None or self._text.cold:
            return history
        return replace(history, acceptance=[min(each, MAX_UNSEEN) for each in history.acceptance])

    def _account(self, kind: str, session: PairEstimate) -> None:
        """Count what a part of the text gained for its kind. The kind that it began as gets the sum, at the end."""
        self._gained += session.credit - session.lent
        if kind != self._attached_as:
            self._settle(kind, session.credit - session.lent)

    def _settle(self, kind: str, gained: float) -> float:
        return self._pairs.settle(self._target, self._key(kind), gained) + COPIES_GAINED * kind.endswith("copy")

    def _key(self, kind: str) -> str:
        return f"{self._drafter} {kind}".rstrip()
