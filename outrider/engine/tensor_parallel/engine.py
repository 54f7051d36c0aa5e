"""The engine of rank 0, and the loop in which the other ranks repeat its calls."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from typing import Any

import torch

from outrider.engine.interface import Engine, EngineWrapper, SessionTokens, StepResult
from outrider.engine.tensor_parallel.ranks import STOP, Command, RankGroup
from outrider.protocol.errors import Overloaded


class TensorParallelEngine(EngineWrapper):
    """Rank 0's engine: every call that changes the cache runs on all ranks. A step costs one message."""

    def __init__(self, inner: Engine, rank_group: RankGroup) -> None:
        super().__init__(inner)
        self._rank_group = rank_group
        self._pending: list[Command] = []  # sent with the next step

    def match_prefix(self, session: str, tokens: Sequence[int], salt: str = "") -> int:
        saved = self.inner.match_prefix(session, tokens, salt)
        # The last token is never matched: with one token more than was found, the others find the same.
        self._pending.append(["match_prefix", session, list(tokens[: saved + 1]), salt])
        return saved

    def extend(self, batch: Sequence[SessionTokens]) -> StepResult:
        calls = [[new.session, list(new.tokens), list(new.parents), new.logits_from, new.hidden_from] for new in batch]
        commands, self._pending = [*self._pending, ["extend", calls]], []
        with self._rank_group.step():
            self._rank_group.broadcast(commands)
            result = self.inner.extend(batch)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # a lost rank must show within the step's timeout
        return result

    def truncate(self, session: str, length: int) -> None:
        self.inner.truncate(session, length)
        self._pending.append(["truncate", session, length])

    def compact(self, session: str, base: int, indices: Sequence[int]) -> None:
        self.inner.compact(session, base, indices)
        self._pending.append(["compact", session, base, list(indices)])

    def free(self, session: str) -> None:
        self.inner.free(session)
        self._pending.append(["free", session])


def run_follower(engine: Engine, rank_group: RankGroup) -> None:
    """Repeat the calls of rank 0 until it stops. Signals are ignored: rank 0 may have streams to finish."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    while True:
        for name, *arguments in rank_group.receive():
            if name == STOP:
                return
            _apply(engine, name, arguments)


def _apply(engine: Engine, name: str, arguments: list[Any]) -> None:
    if name == "extend":
        with contextlib.suppress(Overloaded):  # rank 0 raises it as well
            engine.extend([SessionTokens(*new) for new in arguments[0]])
    else:
        getattr(engine, name)(*arguments)
