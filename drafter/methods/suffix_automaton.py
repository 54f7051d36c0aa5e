"""Suffix automaton that counts which tokens followed each substring of a text.

Every substring of the text is a path from state 0; substrings with the same end positions share a state. Adding a token
takes amortised constant time, and updating the counts at most `LONGEST` + 1 further steps. Substrings longer than
`LONGEST` share their counts with their suffixes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

LONGEST = 64  # tokens of context with counts of their own
END = -1  # separator between two texts: no token has this id
ROOT = 0
_NOWHERE = -1
_NONE = -2  # instead of the only transition's token: no transition
_MANY = -3  # instead of the only transition's token: several transitions

Place = tuple[int, int]  # a state, and the length of the suffix that leads to it


class _Transitions:
    """Transitions of all states. Most states have one: two arrays take a tenth of the memory of a dict per state."""

    def __init__(self) -> None:
        self._only_token = array("i")
        self._only_target = array("i")
        self._many: dict[int, dict[int, int]] = {}

    def target(self, state: int, token: int) -> int:
        only = self._only_token[state]
        if only == token:
            return self._only_target[state]
        return self._many[state].get(token, _NOWHERE) if only == _MANY else _NOWHERE

    def several(self, state: int) -> dict[int, int]:
        """Return the targets by token of a state with several transitions, else nothing."""
        return self._many.get(state, {})

    def add_state(self) -> None:
        self._only_token.append(_NONE)
        self._only_target.append(_NOWHERE)

    def add(self, state: int, token: int, target: int) -> None:
        only = self._only_token[state]
        if only in (_NONE, token):
            self._only_token[state] = token
            self._only_target[state] = target
        elif only == _MANY:
            self._many[state][token] = target
        else:
            self._many[state] = {only: self._only_target[state], token: target}
            self._only_token[state] = _MANY

    def copy(self, state: int, to: int) -> None:
        self._only_token[to] = self._only_token[state]
        self._only_target[to] = self._only_target[state]
        if state in self._many:
            self._many[to] = dict(self._many[state])


class Automaton:
    """Counting suffix automaton of one text, built token by token."""

    def __init__(self) -> None:
        self.size = 0  # tokens
        self._last = self._tip = ROOT
        self._tip_length = 0  # `_tip` is the state of the last LONGEST + 1 tokens
        self._length = array("i")  # of a state's longest substring
        self._link = array("i")  # suffix link: the longest suffix in another state
        self._count = array("i")  # occurrences of its substrings
        self._followed = array("i")  # occurrences that a token followed
        self._best = array("i")  # most frequent next token; among equals the latest
        self._transitions = _Transitions()
        self._new_state(0, _NOWHERE)  # ROOT

    def append(self, token: int) -> None:
        before = self._tip
        self._extend(token)
        self._move_tip(token)
        self._update_counts(before, token)
        self.size += 1

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.append(token)

    @property
    def end(self) -> Place:
        """Return the place at the end of the text."""
        return self._tip, min(self._tip_length, LONGEST)

    def locate(self, tokens: Sequence[int]) -> Place:
        """Return the place of the longest suffix of `tokens` that the text contains."""
        place = (ROOT, 0)
        for token in tokens[-LONGEST:]:
            place = self.advance(place, token)
        return place

    def advance(self, place: Place, token: int) -> Place:
        """Return the place of the longest known suffix after one more token."""
        state, length = place
        while (target := self._transitions.target(state, token)) == _NOWHERE:
            if state == ROOT:
                return ROOT, 0
            state = self._link[state]
            length = self._length[state]
        return self._normalised(target, length + 1)

    def longest_followed(self, place: Place) -> Place:
        """Return the place of the longest suffix that a token ever followed; (0, 0) if there is none."""
        state, length = self._normalised(*place)
        while state != ROOT and not self._followed[state]:
            state = self._link[state]
            length = self._length[state]
        return state, length

    def most_frequent(self, place: Place) -> tuple[int, int, int]:
        """Return the most frequent next token, its count, and the count of all next tokens."""
        state = place[0]
        token = self._best[state]
        return token, self._count[self._transitions.target(state, token)], self._followed[state]

    def continuations(self, place: Place, max_options: int) -> list[tuple[int, int]]:
        """Return the next tokens with their counts; only the most frequent if there are more than `max_options`."""
        options = self._transitions.several(place[0])
        if not options or len(options) > max_options:
            token, count, _ = self.most_frequent(place)
            return [(token, count)] if count else []
        counted = [(token, self._count[target]) for token, target in options.items()]
        return sorted((option for option in counted if option[1]), key=lambda option: -option[1])

    def _normalised(self, state: int, length: int) -> Place:
        """Limit the context to `LONGEST`; follow splits of the state since the place was returned."""
        length = min(length, LONGEST)
        while state != ROOT and self._length[self._link[state]] >= length:
            state = self._link[state]
        return state, length

    def _new_state(self, length: int, link: int) -> int:
        self._length.append(length)
        self._link.append(link)
        for numbers, first in ((self._count, 0), (self._followed, 0), (self._best, _NONE)):
            numbers.append(first)
        self._transitions.add_state()
        return len(self._length) - 1

    def _extend(self, token: int) -> None:
        """Add a token to the automaton: the textbook algorithm, without counts."""
        state = self._last
        new = self._last = self._new_state(self._length[state] + 1, ROOT)
        while state != _NOWHERE and self._transitions.target(state, token) == _NOWHERE:
            self._transitions.add(state, token, new)
            state = self._link[state]
        if state == _NOWHERE:
            return
        target = self._transitions.target(state, token)
        if self._length[target] != self._length[state] + 1:
            target = self._split(state, token, target)
        self._link[new] = target

    def _split(self, state: int, token: int, target: int) -> int:
        """Give the shorter substrings of `target` a state of their own: they now end where the longer ones do not."""
        short = self._new_state(self._length[state] + 1, self._link[target])
        for numbers in (self._count, self._followed, self._best):
            numbers[short] = numbers[target]
        self._transitions.copy(target, short)
        self._link[target] = short
        while state != _NOWHERE and self._transitions.target(state, token) == target:
            self._transitions.add(state, token, short)
            state = self._link[state]
        return short

    def _move_tip(self, token: int) -> None:
        state = self._transitions.target(self._tip, token)
        length = min(self._tip_length + 1, LONGEST + 1)
        while self._length[self._link[state]] >= length:
            state = self._link[state]
        self._tip, self._tip_length = state, length

    def _update_counts(self, before: int, token: int) -> None:
        """Count one more occurrence of all suffixes, and `token` after those of the text before it. The hot path."""
        counts, followed, best = self._count, self._followed, self._best
        link, target = self._link, self._transitions.target
        state = self._tip
        while state != ROOT:
            counts[state] += 1
            state = link[state]
        state = before
        while state != _NOWHERE:
            followed[state] += 1
            most_frequent = best[state]
            if most_frequent != token and (
                most_frequent == _NONE or counts[target(state, token)] >= counts[target(state, most_frequent)]
            ):
                best[state] = token
            state = link[state]
