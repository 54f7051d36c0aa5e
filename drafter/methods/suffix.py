"""Suffix decoding: copy the most frequent continuation of the text's longest known suffix. No model.

After SuffixDecoding (arXiv 2411.04975). Counts come from the session's own tokens and from recently ended sessions. A
guess is extended while the counts say that it is likely to be accepted.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from drafter.interface import DraftRequest
from drafter.methods.registry import drafter
from drafter.methods.suffix_automaton import END, Automaton, Place
from drafter.tree_builder import Choice, TreeBuilder
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.speculation import Guess
from outrider.protocol.vocabulary import Vocabulary
from outrider.settings.drafter import DrafterSettings

_INDEXED_PER_REQUEST = 1024  # tokens of a session: the other sessions wait meanwhile
_SHARED_INDEXED_PER_REQUEST = 64  # tokens of ended sessions
_MAX_SALTS = 16
_DOUBT = 1.0  # a token that followed k of k occurrences of an n-token suffix has probability k / (k + doubt / n)
_SHARED_CONTEXT = 16  # tokens at the end of the text that are looked up in ended sessions
_SHARED_WEIGHT = 0.8  # of a continuation from ended sessions, relative to one from the session itself
_MAX_OPTIONS = 64  # continuations of one place that are compared for siblings


@dataclass(slots=True)
class _SessionText:
    """Indexed tokens of one session."""

    salt: str = ""
    automaton: Automaton = field(default_factory=Automaton)
    output: list[int] = field(default_factory=list)

    def index(self, request: DraftRequest) -> bool:
        """Index the committed tokens, up to the limit per request; return whether all are indexed."""
        self.salt = request.cache_salt
        known = self.automaton.size
        new = request.tokens[known : min(request.committed, known + _INDEXED_PER_REQUEST)]
        self.automaton.extend(new)
        self.output += new[max(0, request.prompt_length - known) :]
        return self.automaton.size >= request.committed


class _SharedText:
    """Indexed output of ended sessions with one cache salt, in two generations of equal size."""

    def __init__(self, tokens: int) -> None:
        self._generation_size = max(1, tokens // 2)
        self.generations = [Automaton()]
        self._waiting: deque[int] = deque(maxlen=tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Queue the output of a session; `index` adds it in small parts, so that no request waits long."""
        self._waiting.extend((*tokens, END))

    def index(self, max_tokens: int) -> None:
        for _ in range(min(max_tokens, len(self._waiting))):
            if self.generations[0].size >= self._generation_size:
                self.generations = [Automaton(), self.generations[0]]
            self.generations[0].append(self._waiting.popleft())


@dataclass(frozen=True, slots=True)
class _Continuation:
    """Copied tokens, and the probability that each of them is reached."""

    automaton: Automaton
    tokens: tuple[int, ...] = ()
    probabilities: tuple[float, ...] = ()
    weight: float = 1.0

    def expected(self, length: int | None = None) -> float:
        """Return how many of the first `length` tokens are expected to be accepted; None: of all."""
        return self.weight * sum(self.probabilities[:length])


class SuffixDrafter:
    """Drafter that copies from the session's tokens and from recently ended sessions with the same cache salt."""

    needs_hidden_states = False

    def __init__(self, shared_tokens: int, factor: float, certainty: float) -> None:
        fingerprint = f"suffix-{shared_tokens}-{factor:g}-{certainty:g}"
        self.info = ModelInfo(name="suffix", fingerprint=fingerprint, architecture="none")
        self.vocabulary: Vocabulary | None = None
        self._shared_tokens = shared_tokens
        self._factor = factor
        self._certainty = certainty
        self._texts = defaultdict[str, _SessionText](_SessionText)
        self._shared_texts: OrderedDict[str, _SharedText] = OrderedDict()

    def draft(self, requests: Sequence[DraftRequest]) -> list[Guess]:
        return [self.propose(request) for request in requests]

    def propose(self, request: DraftRequest) -> Guess:
        text = self._texts[request.session]
        if not text.index(request):
            return request.chain()  # call again
        shared = self._shared_texts.get(request.cache_salt)
        if shared is not None:
            shared.index(_SHARED_INDEXED_PER_REQUEST)
        best = self._best_continuation(request, text.automaton, shared)
        if not best.tokens:
            return request.chain(done=True)
        if request.branches > 1:
            return replace(request.allowed(self._tree(request, best)), expected=best.expected())
        guess = request.allowed(request.chain(best.tokens))
        length = len(request.new_tokens(guess))
        return replace(guess, done=length < request.max_new_tokens, expected=best.expected(length))

    def forget(self, session: str) -> None:
        text = self._texts.pop(session, None)
        if text is None or not text.output or not self._shared_tokens:
            return
        shared = self._shared_texts.setdefault(text.salt, _SharedText(self._shared_tokens))
        self._shared_texts.move_to_end(text.salt)
        if len(self._shared_texts) > _MAX_SALTS:
            self._shared_texts.popitem(last=False)
        shared.add(text.output)

    def _best_continuation(self, request: DraftRequest, own: Automaton, shared: _SharedText | None) -> _Continuation:
        """Return the continuation with the most expected accepted tokens."""
        place = own.end
        for token in request.tokens[request.committed :]:
            place = own.advance(place, token)
        best = self._follow(own, place, request, 1.0)
        suffix = request.tokens[-_SHARED_CONTEXT:]
        for automaton in shared.generations if shared else ():
            other = self._follow(automaton, automaton.locate(suffix), request, _SHARED_WEIGHT)
            if other.expected() > best.expected():
                best = other
        return best

    def _follow(self, automaton: Automaton, place: Place, request: DraftRequest, weight: float) -> _Continuation:
        place = automaton.longest_followed(place)
        # Open guesses that match are no evidence: they may have been copied from there.
        length = min(place[1], max(1, place[1] - (len(request.tokens) - request.committed)))
        tokens: list[int] = []
        probabilities: list[float] = []
        probability = 1.0
        for _ in range(min(request.max_new_tokens, self._max_copied(length))):
            token, count, followed = automaton.most_frequent(place)
            probability *= count / (followed + _DOUBT / length)
            if probability < self._certainty or token == END:
                break
            tokens.append(token)
            probabilities.append(probability)
            # Beyond the end of the text, the copy continues with its own tokens: a loop stays a loop.
            place = automaton.longest_followed(automaton.advance(place, token))
        return _Continuation(automaton, tuple(tokens), tuple(probabilities), weight)

    def _max_copied(self, length: int) -> int:
        """Return how many tokens to copy after a match of `length` tokens."""
        return math.ceil(self._factor * length) if length else 0

    def _tree(self, request: DraftRequest, best: _Continuation) -> Guess:
        """Return a tree of the less frequent continuations as well, grown from all open guesses."""
        builder = TreeBuilder(request)
        automaton = best.automaton
        own = self._texts[request.session].automaton
        root = own.end if automaton is own else automaton.locate(request.tokens[: request.committed])
        known = request.open_guess
        reached = known.shape.accumulate(known.tokens, automaton.advance, root)
        places = dict(zip(known.paths, [root, *reached], strict=True))
        max_depth = self._max_copied(max(automaton.longest_followed(place)[1] for place in places.values()))
        for node in builder.expandable_nodes():
            builder.add_choices(node, _choices(automaton, places[builder.path(node)], request.branches))
        while (added := builder.add(math.log(self._certainty))) is not None:
            path = builder.path(added)
            places[path] = automaton.advance(places[path[:-1]], path[-1])
            if len(path) < max_depth:
                builder.add_choices(added, _choices(automaton, places[path], request.branches))
        return builder.guess(done=True)


def _choices(automaton: Automaton, place: Place, max_choices: int) -> list[Choice]:
    place = automaton.longest_followed(place)
    if not place[1]:
        return []
    _, _, followed = automaton.most_frequent(place)
    total = followed + _DOUBT / place[1]
    options = automaton.continuations(place, _MAX_OPTIONS)[:max_choices]
    return [(token, math.log(count / total)) for token, count in options if token != END]


@drafter("suffix")
def make(settings: DrafterSettings, progress: Callable[[str], None]) -> SuffixDrafter:
    return SuffixDrafter(settings.suffix_shared_tokens, settings.suffix_factor, settings.suffix_certainty)
