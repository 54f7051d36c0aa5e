"""Who answers what in which order in `outrider bench drafters`: all take turns, prompt by prompt and round by round."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from outrider.bench.drafters import lanes
from outrider.bench.drafters.comparison import MODES, OUTRIDER, PLAIN, Contestant, Question, TimedAnswer, Trial
from outrider.bench.drafters.peers import Peer
from outrider.client.sync import Client
from outrider.protocol.errors import InvalidRequest

_WARM_UP_TOKENS = 16
_SEEDS_PER_ROUND = 1000

Asking = Callable[[Question], TimedAnswer]


@dataclass(frozen=True, slots=True)
class ContestExtent:
    """How much is asked."""

    prompts_per_kind: int
    rounds: int
    tokens: int
    gamma: int

    @classmethod
    def of(cls, quick: bool, prompts: int | None, rounds: int | None, tokens: int | None, gamma: int) -> ContestExtent:
        usual = cls(1, 1, 64, gamma) if quick else cls(3, 2, 128, gamma)
        return cls(prompts or usual.prompts_per_kind, rounds or usual.rounds, tokens or usual.tokens, gamma)


def questions(
    prompts: Sequence[tuple[str, Sequence[int]]], extent: ContestExtent, context_length: int
) -> list[Question]:
    """`prompts`: kind and tokens. The first so many of each kind, in all modes, round after round."""
    taken: list[tuple[str, Sequence[int]]] = []
    for kind, tokens in prompts:
        if sum(kind == other for other, _ in taken) < extent.prompts_per_kind:
            taken.append((kind, tokens))
    for kind, tokens in taken:
        if len(tokens) + extent.tokens > context_length:
            limit = f"at most {context_length - extent.tokens}: the context less the answer"
            raise InvalidRequest.of(f"a prompt of kind {kind}", f"{len(tokens)} tokens", limit)
    return [
        Question(kind, number, turn, mode, tuple(tokens), extent.tokens, _SEEDS_PER_ROUND * turn + number)
        for turn in range(extent.rounds)
        for number, (kind, tokens) in enumerate(taken)
        for mode in MODES
    ]


class Contest:
    """`clients`: of each lane, plain first."""

    def __init__(self, clients: Mapping[str, Client], peers: Sequence[Peer], gamma: int) -> None:
        self._clients = clients
        self._peers = peers
        self._gamma = gamma

    def field(self, question: Question) -> Iterator[tuple[Contestant, Asking]]:
        """Those who are asked it, in their order."""
        for name, client in self._clients.items():
            gamma = 0 if name == PLAIN else None
            yield Contestant(OUTRIDER, name), partial(_ask_lane, client, gamma)
            # How guesses fare differs little from round to round, unlike times: once is enough.
            if name != PLAIN and question.turn == 0:
                yield Contestant(OUTRIDER, name, self._gamma), partial(_ask_lane, client, self._gamma)
        if question.mode == "greedy":
            for peer in self._peers:
                for who in peer.contestants():
                    yield who, partial(peer.ask, who.drafter)

    def warm_up(self, question: Question) -> None:
        """So that nobody's first answer pays for caches that are still cold."""
        short = replace(question, max_tokens=_WARM_UP_TOKENS)
        for _, asking in self.field(short):
            asking(short)

    def run(self, asked: Sequence[Question], progress: TurnOrder) -> list[Trial]:
        turns = [(question, who, asking) for question in asked for who, asking in self.field(question)]
        progress.say(f"{len(turns)} answers")
        runs = []
        for number, (question, who, asking) in enumerate(turns):
            progress.show(f"{question.mode} {question.kind}: {who.engine} {who.drafter}", number, len(turns))
            runs.append(Trial(who, question, asking(question)))
        return runs


def _ask_lane(client: Client, gamma: int | None, question: Question) -> TimedAnswer:
    return lanes.ask(client, question, gamma)


class TurnOrder:
    """How far it is, on stderr: a bar in a terminal, a line per stage elsewhere."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None)
        self._said = ""

    def say(self, text: str) -> None:
        self._progress.update(self._task, description=text)
        if self._progress.disable and text != self._said:
            self._progress.console.print(text, highlight=False)
        self._said = text

    def show(self, text: str, done: int, total: int) -> None:
        self._progress.update(self._task, description=text, completed=done, total=total)


@contextlib.contextmanager
def showing_turns() -> Iterator[TurnOrder]:
    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield TurnOrder(progress)
