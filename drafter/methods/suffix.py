"""What followed the end of the text whenever it came before, in this session or lately in others. No model.

After SuffixDecoding (arXiv 2411.04975): the longest known end of the text is
followed along its most frequent continuations, for as long as counts say
that the guess is likely to hold.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from drafter.confidence import Proposal
from drafter.grammar_filter import fitting, lawful
from drafter.interface import DraftRequest, DraftResult
from drafter.methods.registry import drafter
from drafter.methods.suffix_automaton import END, Automaton, Place
from drafter.settings import DrafterSettings
from drafter.tree_builder import ROOT, TreeBuilder
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.speculation import WHOLE, Distribution
from outrider.protocol.vocabulary import Vocabulary

_PORTION = 1024  # tokens of a session that are taken in per ask: other sessions wait meanwhile
_SHARED_PORTION = 64  # … and of ended sessions
_MAX_SALTS = 16
_DOUBT = 1.0  # a token that followed a run of n tokens each of k times has probability k / (k + doubt / n)
_SHARED_CONTEXT = 16  # tokens of the text's end that are looked up among what others said
_SHARED_WEIGHT = 0.8  # of what others said, against what the session itself said
_OPTIONS = 64  # continuations of one place that are looked at for siblings


@dataclass(slots=True)
class _SessionText:
    """What one session has said."""

    salt: str
    automaton: Automaton = field(default_factory=Automaton)
    output: list[int] = field(default_factory=list)

    def take(self, ask: DraftRequest) -> bool:
        """Take in what is committed. False: there is more than a portion."""
        known = self.automaton.size
        new = ask.tokens[known : min(ask.committed, known + _PORTION)]
        self.automaton.extend(new)
        self.output += new[max(0, ask.prompt_length - known) :]
        return self.automaton.size >= ask.committed


class _SaltMemory:
    """What ended sessions of one salt have said: the latest, and before that as much again at most."""

    def __init__(self, tokens: int) -> None:
        self._generation = max(1, tokens // 2)
        self._generations = [Automaton()]
        self._waiting: deque[int] = deque(maxlen=tokens)

    def remember(self, tokens: Sequence[int]) -> None:
        """Taken in bit by bit: a long text must not keep the others waiting."""
        self._waiting.extend((*tokens, END))

    def take(self, most: int) -> None:
        for _ in range(min(most, len(self._waiting))):
            if self._generations[0].size >= self._generation:
                self._generations = [Automaton(), self._generations[0]]
            self._generations[0].append(self._waiting.popleft())

    @property
    def automata(self) -> Iterator[Automaton]:
        return (automaton for automaton in self._generations if automaton.size)

    @property
    def size(self) -> int:
        return sum(automaton.size for automaton in self._generations)


@dataclass(frozen=True, slots=True)
class _Lead:
    """A continuation: where the text's end was found, what to add, and how likely each token is to be reached."""

    automaton: Automaton
    place: Place
    tokens: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()
    weight: float = 1.0

    @property
    def expected(self) -> float:
        return self.weight * sum(self.chances)

    def cut(self, length: int) -> _Lead:
        return replace(self, tokens=self.tokens[:length], chances=self.chances[:length])


class SuffixDrafter:
    wants_features = False

    def __init__(self, shared_tokens: int, factor: float, certainty: float) -> None:
        self.info = ModelInfo(
            name="suffix", fingerprint=f"suffix-{shared_tokens}-{factor:g}-{certainty:g}", architecture="none"
        )
        self.vocabulary: Vocabulary | None = None
        self._shared_tokens = shared_tokens
        self._factor = factor
        self._certainty = certainty
        self._texts: dict[str, _SessionText] = {}
        self._memories: OrderedDict[str, _SaltMemory] = OrderedDict()

    def draft(self, asks: Sequence[DraftRequest]) -> list[DraftResult]:
        return [self.propose(ask).draft for ask in asks]

    def propose(self, ask: DraftRequest) -> Proposal:
        text = self._texts.setdefault(ask.session, _SessionText(ask.cache_salt))
        if not text.take(ask):
            return Proposal(DraftResult(), 0.0)  # ask again
        memory = self._memories.get(ask.cache_salt)
        if memory is not None:
            memory.take(_SHARED_PORTION)
        lead = self._lead(ask, text.automaton, memory)
        if ask.branches == 1:
            lead = lead.cut(fitting(ask, lead.tokens))
        if not lead.tokens:
            return Proposal(DraftResult(done=True), 0.0)
        if ask.branches > 1:
            return Proposal(lawful(ask, self._tree(ask, lead)), lead.expected)
        probs: tuple[Distribution, ...] = ()
        if ask.params.mode.needs_draft_probs:
            probs = tuple(Distribution((token,), (WHOLE,)) for token in lead.tokens)
        return Proposal(DraftResult(lead.tokens, probs, done=len(lead.tokens) < ask.room), lead.expected)

    def forget(self, session: str) -> None:
        text = self._texts.pop(session, None)
        if text is None or not text.output or not self._shared_tokens:
            return
        memory = self._memories.setdefault(text.salt, _SaltMemory(self._shared_tokens))
        self._memories.move_to_end(text.salt)
        if len(self._memories) > _MAX_SALTS:
            self._memories.popitem(last=False)
        memory.remember(text.output)

    def _lead(self, ask: DraftRequest, own: Automaton, memory: _SaltMemory | None) -> _Lead:
        """The continuation that most is expected of."""
        place = own.end
        for token in ask.tokens[ask.committed :]:
            place = own.advance(place, token)
        best = self._follow(own, place, ask, 1.0)
        for automaton in memory.automata if memory else ():
            other = self._follow(automaton, automaton.locate(ask.tokens[-_SHARED_CONTEXT:]), ask, _SHARED_WEIGHT)
            if other.expected > best.expected:
                best = other
        return best

    def _follow(self, automaton: Automaton, place: Place, ask: DraftRequest, weight: float) -> _Lead:
        place = start = automaton.known(place)
        # Open guesses that match are no evidence: they may have been copied from there.
        length = min(place[1], max(1, place[1] - (len(ask.tokens) - ask.committed)))
        tokens: list[int] = []
        chances: list[float] = []
        chance = 1.0
        for _ in range(min(ask.room, self._reach(length))):
            token, seen, followed = automaton.best(place)
            chance *= seen / (followed + _DOUBT / length)
            if chance < self._certainty or token == END:
                break
            tokens.append(token)
            chances.append(chance)
            # Past the end of the text the copy goes on with itself: a loop is continued as a loop.
            place = automaton.known(automaton.advance(place, token))
        return _Lead(automaton, start, tuple(tokens), tuple(chances), weight)

    def _reach(self, length: int) -> int:
        """How far a match of some length is trusted."""
        return math.ceil(self._factor * length) if length else 0

    def _tree(self, ask: DraftRequest, lead: _Lead) -> DraftResult:
        """The same continuations with their runners-up, from all open guesses."""
        growth = TreeBuilder(ask)
        automaton = lead.automaton
        own = self._texts[ask.session].automaton
        places = {ROOT: own.end if automaton is own else automaton.locate(ask.tokens[: ask.committed])}
        for node, (token, parent) in enumerate(zip(growth.tokens, growth.parents, strict=True)):
            places[node] = automaton.advance(places[parent], token)
        limit = self._reach(max(automaton.known(place)[1] for place in places.values()))
        for place in growth.open_places():
            growth.offer(place, _choices(automaton, places[place], ask.branches))
        while (added := growth.add(math.log(self._certainty))) is not None:
            places[added] = automaton.advance(places[growth.parents[added]], growth.tokens[added])
            if growth.depth(added) < limit:
                growth.offer(added, _choices(automaton, places[added], ask.branches))
        return growth.draft(done=True)


def _choices(automaton: Automaton, place: Place, most: int) -> list[tuple[int, float]]:
    place = automaton.known(place)
    if not place[1]:
        return []
    _, _, followed = automaton.best(place)
    total = followed + _DOUBT / place[1]
    options = automaton.nexts(place, _OPTIONS)[:most]
    return [(token, math.log(seen / total)) for token, seen in options if token != END]


@drafter("suffix")
def make(settings: DrafterSettings, progress: Callable[[str], None]) -> SuffixDrafter:
    return SuffixDrafter(settings.suffix_shared_tokens, settings.suffix_factor, settings.suffix_certainty)
