"""A suffix automaton that counts: what followed each run of tokens so far, and how often.

Every run of a text is a path from state 0, and runs that always ended at the
same places share a state. A token is added in amortised constant time, and
its counts in at most `LONGEST` + 1 steps more, however much the text repeats
itself: runs longer than that are not told apart by what followed them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

LONGEST = 64  # tokens of context that counts are kept for
END = -1  # what may be appended between two texts: no text contains it
ROOT = 0
_NOWHERE = -1
_NONE = -2  # in place of the only token that leads on: there is none
_MANY = -3  # … there are several

Place = tuple[int, int]  # a state, and how many tokens of the text's end led there


class Automaton:
    __slots__ = (
        "_best",
        "_followed",
        "_last",
        "_length",
        "_link",
        "_more",
        "_only_state",
        "_only_token",
        "_seen",
        "_tip",
        "_tip_length",
        "size",
        "steps",
    )

    def __init__(self) -> None:
        self.size = 0  # tokens
        self.steps = 0  # looked at so far; for tests
        self._last = self._tip = ROOT
        self._tip_length = 0  # `_tip` is where the last LONGEST + 1 tokens lead
        self._length = array("i", [0])  # of a state's longest run
        self._link = array("i", [_NOWHERE])  # the state of its longest end that also ended elsewhere
        self._seen = array("i", [0])  # how often its runs ended
        self._followed = array("i", [0])  # … and went on
        self._best = array("i", [_NONE])  # the token that most often came next, of equals the latest
        # Most states lead on by one token only, and a dict for each would cost ten times as much.
        self._only_token = array("i", [_NONE])
        self._only_state = array("i", [_NOWHERE])
        self._more: dict[int, dict[int, int]] = {}

    def append(self, token: int) -> None:
        before = self._tip
        self._grow(token)
        self._move_tip(token)
        self._count(before, token)
        self.size += 1

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.append(token)

    @property
    def end(self) -> Place:
        """Where the text ends."""
        return self._tip, min(self._tip_length, LONGEST)

    def locate(self, tokens: Sequence[int]) -> Place:
        """The longest end of `tokens` that the text contains."""
        place = (ROOT, 0)
        for token in tokens[-LONGEST:]:
            place = self.advance(place, token)
        return place

    def advance(self, place: Place, token: int) -> Place:
        """From the longest known end of some tokens to that of one token more."""
        state, length = place
        while (target := self._to(state, token)) == _NOWHERE:
            self.steps += 1
            if state == ROOT:
                return ROOT, 0
            state = self._link[state]
            length = self._length[state]
        return self._shortened(target, length + 1)

    def known(self, place: Place) -> Place:
        """The longest end of a place's run that was ever followed by something; (0, 0) if none was."""
        state, length = self._shortened(*place)
        while state != ROOT and not self._followed[state]:
            state = self._link[state]
            length = self._length[state]
        return state, length

    def best(self, place: Place) -> tuple[int, int, int]:
        """The token that most often followed, how often it did, and how often anything did."""
        state = place[0]
        token = self._best[state]
        return token, self._seen[self._to(state, token)], self._followed[state]

    def nexts(self, place: Place, most: int) -> list[tuple[int, int]]:
        """All that followed, with how often; only the most frequent where there are more than `most`."""
        state = place[0]
        options = self._more.get(state, {})
        if not options or len(options) > most:
            token, seen, _ = self.best(place)
            return [(token, seen)] if seen else []
        self.steps += len(options)
        counted = [(token, self._seen[target]) for token, target in options.items()]
        return sorted((option for option in counted if option[1]), key=lambda option: -option[1])

    def _shortened(self, state: int, length: int) -> Place:
        """No more context than counts are kept for; and a state may have been split since somebody stood there."""
        length = min(length, LONGEST)
        while state != ROOT and self._length[self._link[state]] >= length:
            self.steps += 1
            state = self._link[state]
        return state, length

    def _to(self, state: int, token: int) -> int:
        only = self._only_token[state]
        if only == token:
            return self._only_state[state]
        if only == _MANY:
            return self._more[state].get(token, _NOWHERE)
        return _NOWHERE

    def _lead(self, state: int, token: int, target: int) -> None:
        only = self._only_token[state]
        if only in (_NONE, token):
            self._only_token[state] = token
            self._only_state[state] = target
        elif only == _MANY:
            self._more[state][token] = target
        else:
            self._more[state] = {only: self._only_state[state], token: target}
            self._only_token[state] = _MANY

    def _state(self, length: int, link: int) -> int:
        self._length.append(length)
        self._link.append(link)
        for numbers, first in ((self._seen, 0), (self._followed, 0), (self._best, _NONE)):
            numbers.append(first)
        self._only_token.append(_NONE)
        self._only_state.append(_NOWHERE)
        return len(self._length) - 1

    def _grow(self, token: int) -> None:
        """The textbook's step."""
        state = self._last
        new = self._last = self._state(self._length[state] + 1, ROOT)
        while state != _NOWHERE and self._to(state, token) == _NOWHERE:
            self.steps += 1
            self._lead(state, token, new)
            state = self._link[state]
        if state == _NOWHERE:
            return
        target = self._to(state, token)
        if self._length[target] != self._length[state] + 1:
            target = self._split(state, token, target)
        self._link[new] = target

    def _split(self, state: int, token: int, target: int) -> int:
        """The shorter runs of `target` now also end where its longer ones do not: a state of their own for them."""
        short = self._state(self._length[state] + 1, self._link[target])
        for numbers in (self._seen, self._followed, self._best, self._only_token, self._only_state):
            numbers[short] = numbers[target]
        if target in self._more:
            self._more[short] = dict(self._more[target])
        self._link[target] = short
        while state != _NOWHERE and self._to(state, token) == target:
            self.steps += 1
            self._lead(state, token, short)
            state = self._link[state]
        return short

    def _move_tip(self, token: int) -> None:
        state = self._to(self._tip, token)
        length = min(self._tip_length + 1, LONGEST + 1)
        while self._length[self._link[state]] >= length:
            self.steps += 1
            state = self._link[state]
        self._tip, self._tip_length = state, length

    def _count(self, before: int, token: int) -> None:
        """All ends of the text have been seen once more, and those of the text before were followed by `token`.

        Where most of the time goes, hence the local names.
        """
        seen, followed, best, link, to = self._seen, self._followed, self._best, self._link, self._to
        steps = 0
        state = self._tip
        while state != ROOT:
            steps += 1
            seen[state] += 1
            state = link[state]
        state = before
        while state != _NOWHERE:
            steps += 1
            followed[state] += 1
            now = best[state]
            if now != token and (now == _NONE or seen[to(state, token)] >= seen[to(state, now)]):
                best[state] = token
            state = link[state]
        self.steps += steps
