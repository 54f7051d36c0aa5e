"""EAGLE: goes on from the target's own hidden states, which come with each commit.

A place of its layer reads a state and the token after it. Places whose state
is the target's stay cached; behind them its own answers stand in, and are
replaced when the target's states arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from drafter.artifacts import read_trained
from drafter.draft_sampling import next_token, offers, spread
from drafter.interface import DraftRequest, DraftResult
from drafter.methods.registry import drafter
from drafter.settings import DrafterSettings
from drafter.tree_builder import ROOT, TreeBuilder
from outrider.base.openmp import let_go
from outrider.engine import Engine, SessionTokens
from outrider.engine.attention import NAME as RAGGED_ATTENTION
from outrider.engine.loading.loader import EngineOptions, make_engine, pick_device, pick_dtype, warm_up
from outrider.protocol.errors import Overloaded
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.speculation import Distribution, HiddenStates
from outrider.protocol.vocabulary import Vocabulary
from outrider.train.artifacts.eagle import METHOD, Eagle

_MOST_ROWS = 512


@dataclass(frozen=True, slots=True)
class _Answer:
    """To one row: the state it foretells, and the logits of what comes next."""

    state: torch.Tensor  # [1, hidden]
    logits: torch.Tensor  # [1, ids]


@dataclass(slots=True)
class _SessionState:
    """What is known and cached of a session. Its places begin at `first`."""

    first: int = 0
    states: list[torch.Tensor] = field(default_factory=list)  # the target's, not yet gone through
    rows: int = 0  # cached, with the target's states
    path: list[int] = field(default_factory=list)  # tokens of the rows cached after them, with answers for states
    answers: list[_Answer] = field(default_factory=list)  # of the last of `rows`, then of the path's
    grown: dict[tuple[int, ...], _Answer] = field(default_factory=dict)  # of a tree's places, by the path to them,
    grown_from: tuple[int, int] = (0, 0)  # from here: tokens committed, rows with the target's states

    @property
    def behind(self) -> int:
        """Index of the first token that stands beside no state of the target's."""
        return self.first + self.rows + 1

    @property
    def end(self) -> int:
        """The first place without a state of the target's."""
        return self.first + self.rows + sum(len(part) for part in self.states)

    def learn(self, features: HiddenStates) -> bool:
        """Take what is new. False: there is a gap, all before it is of no use."""
        rows = torch.from_numpy(np.frombuffer(features.rows, dtype="<f2").astype(np.float32))
        rows = rows.view(-1, features.width)
        fresh = not self.rows and not self.states
        if fresh or features.position > self.end:
            self.first, self.states, self.rows, self.path, self.answers = features.position, [rows], 0, [], []
            return fresh
        new = rows[self.end - features.position :]
        if len(new):
            self.states.append(new)
        return True


Work = Generator[SessionTokens, _Answer, DraftResult]


class EagleDrafter:
    wants_features = True

    def __init__(self, eagle: Eagle, engine: Engine, info: ModelInfo, candidates: int) -> None:
        self.info = info
        self.vocabulary: Vocabulary | None = None  # it was made for one target: see ModelInfo.made_for
        self._eagle = eagle
        self._engine = engine
        self._candidates = candidates
        self._held: dict[str, _SessionState] = {}

    @torch.inference_mode()
    def draft(self, asks: Sequence[DraftRequest]) -> list[DraftResult]:
        """All sessions step together until each has what it was asked for."""
        works = {ask.session: self._work(ask) for ask in asks}
        drafts: dict[str, DraftResult] = {}
        batch: dict[str, SessionTokens] = {}
        for session, work in works.items():
            _go_on(session, work, None, batch, drafts)
        while batch:
            waiting, batch = batch, {}
            try:
                result = self._engine.extend(list(waiting.values()))
            except Overloaded:
                self._make_room(waiting, drafts)
                batch = waiting
                continue
            for session, logits, states in zip(waiting, result.logits, result.features, strict=True):
                answer = _Answer(states.clone(), logits.clone())
                _go_on(session, works[session], answer, batch, drafts)
        return [drafts[ask.session] for ask in asks]

    def forget(self, session: str) -> None:
        self._engine.free(session)
        self._held.pop(session, None)

    def _make_room(self, waiting: dict[str, SessionTokens], drafts: dict[str, DraftResult]) -> None:
        """The cache is full: give up a session that asks for nothing now; when there is no other, one that asks.

        It begins anew with the next states that come.
        """
        idle = next((session for session in self._held if session not in waiting), None)
        if idle is None:
            idle = next(iter(waiting))
            del waiting[idle]
            drafts[idle] = DraftResult(done=True)
        self.forget(idle)

    def _work(self, ask: DraftRequest) -> Work:
        held = self._held.pop(ask.session, None) or _SessionState()
        self._held[ask.session] = held  # the last of them is the one asked for last
        for features in ask.features:
            if not held.learn(features):
                self._engine.free(ask.session)
        yield from self._catch_up(ask, held)
        if not held.answers:
            return DraftResult(done=True)  # no state of the target's yet
        return (yield from self._grow(ask, held) if ask.branches > 1 else self._chain(ask, held))

    def _catch_up(self, ask: DraftRequest, held: _SessionState) -> Generator[SessionTokens, _Answer, None]:
        """Go through the target's states that are new, in place of the answers that stood in for them."""
        if not held.states:
            return
        states = torch.cat(held.states)
        held.states, held.path, held.answers = [], [], []
        self._engine.truncate(ask.session, held.rows)
        for start in range(0, len(states), _MOST_ROWS):
            part = states[start : start + _MOST_ROWS]
            at = held.first + held.rows + 1
            answer = yield self._rows(ask.session, part, ask.tokens[at : at + len(part)])
            held.rows += len(part)
            held.answers = [answer]

    def _follow(
        self, ask: DraftRequest, held: _SessionState, tokens: Sequence[int]
    ) -> Generator[SessionTokens, _Answer, None]:
        """Go through these tokens behind the target's states, each beside the answer to the one before it."""
        same = next((i for i, (a, b) in enumerate(zip(held.path, tokens, strict=False)) if a != b), len(tokens))
        if same < len(held.path):
            del held.path[same:], held.answers[same + 1 :]
            self._engine.truncate(ask.session, held.rows + same)
        for token in tokens[len(held.path) :]:
            answer = yield self._rows(ask.session, held.answers[-1].state, [token])
            held.path.append(token)
            held.answers.append(answer)

    def _chain(self, ask: DraftRequest, held: _SessionState) -> Work:
        tokens = list(ask.tokens)
        drafted: list[int] = []
        probs: list[Distribution] = []
        while len(drafted) < ask.room:
            yield from self._follow(ask, held, tokens[held.behind :])
            logits = spread(held.answers[-1].logits, self._eagle.ids, ask.vocab_size)
            found = next_token(ask, logits, tokens, self._candidates)
            if found is None:
                return DraftResult(tuple(drafted), tuple(probs), done=True)
            token, drawn_from = found
            tokens.append(token)
            drafted.append(token)
            if drawn_from is not None:
                probs.append(drawn_from)
        return DraftResult(tuple(drafted), tuple(probs))

    def _grow(self, ask: DraftRequest, held: _SessionState) -> Work:
        """A tree, about a level at a time: all of it goes through the layer with each level, which costs little more
        than a row, and nothing of it stays cached."""
        yield from self._follow(ask, held, ask.tokens[held.behind : ask.committed])
        cached = held.rows + len(held.path)
        growth = TreeBuilder(ask)
        answers = {ROOT: held.answers[-1]} | self._known(ask, held, growth)
        shown = [place for place in answers if place != ROOT]
        self._offer(ask, growth, list(answers), answers)
        for _ in range(ask.room):
            new = [node for node in growth.open_places() if node not in answers and growth.parents[node] in answers]
            if new:
                shown += new
                found = yield self._tree(ask.session, growth, shown, answers, len(new))
                self._engine.truncate(ask.session, cached)
                for i, node in enumerate(new):
                    answers[node] = _Answer(found.state[i : i + 1], found.logits[i : i + 1])
                    held.grown[tuple(growth.path(node))] = answers[node]
                self._offer(ask, growth, new, answers)
            added = [growth.add() for _ in range(growth.share)]
            if added[0] is None:
                return growth.draft(done=True)
        return growth.draft()

    def _known(self, ask: DraftRequest, held: _SessionState, growth: TreeBuilder) -> dict[int, _Answer]:
        """The answers to open guesses that were found before, from the same states of the target's."""
        here = (ask.committed, held.rows)
        if held.grown_from != here:
            held.grown, held.grown_from = {}, here
        paths = {node: tuple(growth.path(node)) for node in range(len(growth.tokens))}
        return {node: held.grown[path] for node, path in paths.items() if path in held.grown}

    def _offer(
        self, ask: DraftRequest, growth: TreeBuilder, places: Sequence[int], answers: dict[int, _Answer]
    ) -> None:
        logits = torch.cat([answers[place].logits for place in places])
        paths = [growth.path(place) for place in places]
        found = offers(ask, spread(logits, self._eagle.ids, ask.vocab_size), paths)
        for place, choices in zip(places, found, strict=True):
            growth.offer(place, choices)

    def _rows(self, session: str, states: torch.Tensor, tokens: Sequence[int]) -> SessionTokens:
        """The answer to the last one is wanted."""
        inputs = self._eagle.inputs(states, torch.tensor(tokens, device=self._eagle.embeddings.device))
        last = len(tokens) - 1
        return SessionTokens(session, tokens, logits_from=last, features_from=last, inputs=inputs)

    def _tree(
        self, session: str, growth: TreeBuilder, nodes: Sequence[int], answers: dict[int, _Answer], new: int
    ) -> SessionTokens:
        """The answers to the last `new` are wanted."""
        rows = {node: i for i, node in enumerate(nodes)}
        states = torch.cat([answers[growth.parents[node]].state for node in nodes])
        tokens = [growth.tokens[node] for node in nodes]
        first = len(nodes) - new
        return SessionTokens(
            session,
            tokens,
            tuple(rows.get(growth.parents[node], -1) for node in nodes),
            logits_from=first,
            features_from=first,
            inputs=self._eagle.inputs(states, torch.tensor(tokens, device=self._eagle.embeddings.device)),
        )


def _go_on(
    session: str, work: Work, answer: _Answer | None, batch: dict[str, SessionTokens], drafts: dict[str, DraftResult]
) -> None:
    """Hand a session what its rows gave: it asks for the next ones, or has its draft."""
    try:
        batch[session] = work.send(answer)  # type: ignore[arg-type]
    except StopIteration as end:
        drafts[session] = end.value


@drafter(METHOD)
def make(settings: DrafterSettings, progress: Callable[[str], None]) -> EagleDrafter:
    trained = read_trained(settings, METHOD, progress)
    eagle = Eagle.from_weights(trained.card.shape, trained.weights, trained.ends).eval()
    eagle.to(pick_device(settings.device))
    return EagleDrafter(eagle, engine_for(eagle, settings, progress), trained.info, settings.draft_candidates)


def engine_for(eagle: Eagle, settings: DrafterSettings, progress: Callable[[str], None]) -> Engine:
    """The layer alone; its weights were written down in bfloat16."""
    device = pick_device(settings.device)
    dtype = torch.bfloat16 if settings.dtype == "auto" else pick_dtype(settings.dtype, device)
    body = eagle.body.to(dtype).eval()
    body.set_attn_implementation(RAGGED_ATTENTION)
    info = ModelInfo("eagle", "", vocab_size=len(eagle.ids), context_length=eagle.shape.context)
    options = replace(EngineOptions.of(settings), prefix_tokens=0)  # its cache depends on more than the tokens
    if device.type == "cuda":
        options = replace(options, compile="off")  # graphs take ids, not inputs
    engine = make_engine(body, info, options, progress)
    progress("warming up")
    warm_up(engine)
    let_go()
    return engine
