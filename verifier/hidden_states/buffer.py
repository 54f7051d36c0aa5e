"""Hidden states of one session that its verdicts carry to drafters trained on the target."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import torch

from outrider.engine.paged.block_manager import BLOCK_TOKENS
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.hidden_states.messages import FINAL_STATES, HiddenStates, StateSpec, StateSpecs
from verifier.hidden_states.kept import KeptStates, StateBlocks

_MAX_VERDICT_BYTES = 24 << 20  # of all states: a message has 32 MiB
PROMPT_WINDOW = 256  # positions at the end of a prompt whose hidden states the first verdict carries


class HiddenStateBuffer:
    """The states that a session is to send, and those of its prompt, without gaps, until the next verdict."""

    def __init__(self, enabled: bool, salt: str, tokens: list[int]) -> None:
        """Begin with the final states or with none, of `tokens`, which the session extends."""
        self._salt, self.tokens = salt, tokens
        self.specs: tuple[StateSpec, ...] = (FINAL_STATES,) if enabled else ()
        self._first = max(0, len(tokens) - PROMPT_WINDOW)  # position to send
        # By spec: the position after them, and rows of consecutive positions.  # [tokens, row] each
        self._parts: dict[int, tuple[int, list[torch.Tensor]]] = {}
        self.blocks: StateBlocks | None = None

    def follow(self, kept: KeptStates) -> int:
        """Return how many tokens the session may take from the cache: in its window, only those with kept states."""
        self.blocks = blocks = StateBlocks(kept, self._salt, self.tokens)
        return min((blocks.known_to(spec, self._first) for spec in self.specs), default=len(self.tokens))

    def begin(self, cached: int) -> None:
        """Take the states of the first `cached` tokens, which will not be computed, from those kept."""
        assert self.blocks is not None, "it follows the kept ones"
        if cached % BLOCK_TOKENS:
            return  # vLLM's blocks may have another size
        for spec in self.specs:
            if found := self.blocks.find(spec, self._first, cached):
                self._parts[spec.number] = cached, [torch.cat(found)[-(cached - self._first) :]]

    def newest(self) -> HiddenStates | None:
        """Return the newest final states, of those sent or to be sent, for a drafter that begins now."""
        end, rows = self.blocks.newest(FINAL_STATES, PROMPT_WINDOW) if self.blocks else (0, [])
        return message_of(FINAL_STATES, end, torch.cat(rows)[-PROMPT_WINDOW:], _MAX_VERDICT_BYTES) if rows else None

    def steer(self, final: bool | None = None, others: StateSpecs | None = None) -> None:
        """Send the final states or no longer, and these others; None: as before."""
        final = FINAL_STATES in self.specs if final is None else final
        beside = [spec for spec in self.specs if spec.number] if others is None else others.specs
        self._send((FINAL_STATES, *beside) if final else tuple(beside))

    def refuse(self, check: Callable[[StateSpec], None]) -> list[InvalidRequest]:
        """Send no longer what `check` raises an error for; return the errors."""
        errors: list[InvalidRequest] = []
        kept = []
        for spec in self.specs:
            try:
                check(spec)
                kept.append(spec)
            except InvalidRequest as error:
                errors.append(error)
        self._send(tuple(kept))
        return errors

    def refuse_missing(self, asked: Iterable[StateSpec], sent: Container[int]) -> list[InvalidRequest]:
        """Send no longer what a step was `asked` for but has not `sent`: its projection is gone. Return the errors."""
        missing = [spec for spec in asked if spec.projection and spec.number not in sent and spec in self.specs]
        self._send(tuple(spec for spec in self.specs if spec not in missing))
        return [InvalidRequest.of("states.projection", each.projection, "one that is held") for each in missing]

    def add(self, end: int, states: Mapping[int, torch.Tensor], new: Sequence[int] = ()) -> None:
        """Add states that end before position `end`; `new` tokens are about to be committed."""
        for spec in self.specs:
            if (rows := states.get(spec.number)) is None:
                continue
            start = end - len(rows)
            if self.blocks is not None:
                self.blocks.keep(spec, start, rows, new)
            if start < self._first:
                rows, start = rows[self._first - start :].clone(), self._first  # not a view of the whole prompt
            if len(rows):
                known_end, parts = self._parts.get(spec.number, (0, []))
                follows = known_end == start  # otherwise there is a gap
                self._parts[spec.number] = end, [*parts, rows] if follows else [rows]

    def take(
        self, end: int, states: Mapping[int, torch.Tensor], new: Sequence[int], cut: int = 0
    ) -> dict[int, HiddenStates]:
        """Return what ends before position `end` for a verdict of `new` tokens: the buffered states and `states`.

        The last `cut` of these are left out: the output has ended before them.
        """
        self.add(end, {number: rows[: len(rows) - cut] for number, rows in states.items()}, new)
        parts, self._parts = self._parts, {}
        return {
            spec.number: message_of(spec, end, torch.cat(parts[spec.number][1]), _MAX_VERDICT_BYTES // len(self.specs))
            for spec in self.specs
            if spec.number in states and spec.number in parts
        }

    def _send(self, specs: tuple[StateSpec, ...]) -> None:
        self.specs = specs
        if self.blocks is not None:
            self.blocks.clear(specs)
        self._parts = {spec.number: self._parts[spec.number] for spec in specs if spec.number in self._parts}


def message_of(spec: StateSpec, end: int, rows: torch.Tensor, max_bytes: int) -> HiddenStates:
    """Return the last of the rows before position `end`, as many as the bytes allow."""
    rows = rows[-max(1, max_bytes // rows[0].nbytes) :]
    width = rows.shape[-1] - spec.float8  # a row of float8 has a byte more
    return HiddenStates(end - len(rows), width, rows.numpy().tobytes(), spec.number, spec.float8)
