"""Schedule of `outrider bench drafters`: all candidates take turns, prompt by prompt and round by round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from outrider.bench.common.progress import TurnProgress
from outrider.bench.drafters import setups
from outrider.bench.drafters.comparison import MODES, OUTRIDER, PLAIN, BenchRequest, Candidate, TimedAnswer, Trial
from outrider.bench.drafters.peers import Peer
from outrider.client.sync import Client
from outrider.protocol.errors import InvalidRequest, OutriderError

_WARM_UP_TOKENS = 16
_SEEDS_PER_ROUND = 1000

Measure = Callable[[BenchRequest], TimedAnswer]


@dataclass(frozen=True, slots=True)
class DraftersExtent:
    """Number and length of the answers."""

    prompts_per_kind: int
    rounds: int
    tokens: int
    gamma: int
    modes: Sequence[str] = MODES

    @classmethod
    def of(
        cls,
        quick: bool,
        prompts: int | None,
        rounds: int | None,
        tokens: int | None,
        gamma: int,
        modes: str = ",".join(MODES),
    ) -> DraftersExtent:
        default = cls(1, 1, 64, gamma) if quick else cls(3, 2, 128, gamma)
        chosen = tuple(mode for mode in MODES if mode in modes.split(","))
        if len(chosen) < len(modes.split(",")):
            raise InvalidRequest.of("--modes", modes, f"some of {', '.join(MODES)}, separated by commas")
        return cls(
            prompts or default.prompts_per_kind, rounds or default.rounds, tokens or default.tokens, gamma, chosen
        )


def bench_requests(
    prompts: Sequence[tuple[str, Sequence[int]]], extent: DraftersExtent, context_length: int
) -> list[BenchRequest]:
    """Return the requests for the first prompts (kind, tokens) of each kind, in all modes, round by round."""
    taken: list[tuple[str, Sequence[int]]] = []
    for kind, tokens in prompts:
        if sum(kind == other for other, _ in taken) < extent.prompts_per_kind:
            taken.append((kind, tokens))
    for kind, tokens in taken:
        if len(tokens) + extent.tokens > context_length:
            limit = f"at most {context_length - extent.tokens}: the context less the answer"
            raise InvalidRequest.of(f"a prompt of kind {kind}", f"{len(tokens)} tokens", limit)
    return [
        BenchRequest(kind, number, turn, mode, tuple(tokens), extent.tokens, _SEEDS_PER_ROUND * turn + number)
        for turn in range(extent.rounds)
        for number, (kind, tokens) in enumerate(taken)
        for mode in extent.modes
    ]


class Schedule:
    """Order of measurements. `clients` holds one per drafter setup, plain decoding first."""

    def __init__(self, clients: Mapping[str, Client], peers: Sequence[Peer], gamma: int) -> None:
        self._clients = clients
        self._peers = peers
        self._gamma = gamma
        self.failure = ""  # that ended it early

    def candidates(self, request: BenchRequest) -> Iterator[tuple[Candidate, Measure]]:
        """Yield the candidates for this request in their order."""
        for name, client in self._clients.items():
            gamma = 0 if name == PLAIN else None
            yield Candidate(OUTRIDER, name), partial(setups.measure, client, gamma=gamma)
            # Acceptance varies little between rounds, unlike times: one round is enough.
            if name != PLAIN and request.turn == 0:
                yield Candidate(OUTRIDER, name, self._gamma), partial(setups.measure, client, gamma=self._gamma)
        if request.mode == "greedy":
            for peer in self._peers:
                for candidate in peer.candidates():
                    yield candidate, partial(peer.measure, candidate.drafter)

    def warm_up(self, request: BenchRequest) -> None:
        """Fill the caches of every candidate before answers are timed."""
        short = replace(request, max_tokens=_WARM_UP_TOKENS)
        for _, measure in self.candidates(short):
            measure(short)

    def run(self, requests: Sequence[BenchRequest], progress: TurnProgress) -> list[Trial]:
        """Measure all requests; after an interruption or a failure return those that every candidate has answered."""
        turns = [(request, list(self.candidates(request))) for request in requests]
        total = sum(len(candidates) for _, candidates in turns)
        progress.set_text(f"{total} answers")
        runs: list[Trial] = []
        try:
            for request, candidates in turns:
                trials: list[Trial] = []
                for candidate, measure in candidates:
                    text = f"{request.mode} {request.kind}: {candidate.engine} {candidate.drafter}"
                    progress.show(text, len(runs) + len(trials), total)
                    trials.append(Trial(candidate, request, measure(request)))
                runs += trials
        except (KeyboardInterrupt, OutriderError) as error:
            if not runs:
                raise
            self.failure = error.message if isinstance(error, OutriderError) else ""
            ended = "failed" if self.failure else "interrupted"
            progress.set_text(f"{ended}: the results are those of {len(runs)} of {total} answers")
        return runs
