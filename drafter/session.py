"""One session at the drafter: what is committed, the open chain of guesses, and what of it has been sent."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from drafter.drafters import Ask, Draft
from outrider.errors import InvalidRequest
from outrider.messages import (
    NO_STEERING,
    Distribution,
    Guess,
    SamplingParams,
    Steering,
    check_opening,
    check_tokens,
)


@dataclass(frozen=True, slots=True)
class Opening:
    """What a stream's first message says."""

    session_id: str
    epoch: int
    tokens: tuple[int, ...]
    prompt_length: int
    params: SamplingParams
    vocab_size: int
    steering: Steering = NO_STEERING
    cache_salt: str = ""

    def check(self) -> None:
        if self.vocab_size < 1:
            raise InvalidRequest.of("open.vocab_size", self.vocab_size, "at least 1")
        check_opening(
            self.session_id,
            self.tokens,
            self.prompt_length,
            self.params,
            self.steering,
            self.vocab_size,
            self.cache_salt,
        )


@dataclass(slots=True)
class _Open:
    """A guessed token whose fate is not known yet."""

    token: int
    draft_prob: Distribution | None
    node_id: int = 0  # given when it is sent


class Session:
    """Owned by the loop; the stream reads `outbox`, which ends with None."""

    def __init__(self, opening: Opening) -> None:
        self.id = opening.session_id
        self.key = f"{opening.session_id}@{opening.epoch}@{id(self)}"
        self.params = opening.params
        self._cache_salt = opening.cache_salt
        self.outbox: asyncio.Queue[Guess | None] = asyncio.Queue()
        self.rollbacks = 0
        self._vocab_size = opening.vocab_size
        self._prompt_length = opening.prompt_length
        self._committed = list(opening.tokens)
        self._chain: list[_Open] = []
        self._gamma = 0
        self._exhausted = False
        self._passed_at = -1
        self._next_id = 1
        self._draft_us = 0
        self.steer(opening.steering)

    def ask(self) -> Ask | None:
        """What the drafter is to do for this session now."""
        last_useful = self._prompt_length + self.params.max_tokens - 1
        ahead = min(self._gamma, last_useful - len(self._committed))
        room = ahead - len(self._chain)
        if room <= 0 or self._exhausted:
            return None
        return Ask(
            session=self.key,
            tokens=self._committed + [guess.token for guess in self._chain],
            committed=len(self._committed),
            prompt_length=self._prompt_length,
            room=room,
            params=self.params,
            vocab_size=self._vocab_size,
            cache_salt=self._cache_salt,
        )

    def take(self, draft: Draft, spent_us: int) -> None:
        """Lengthen the chain; send it when it reaches γ or nothing more will come."""
        probs: tuple[Distribution | None, ...] = draft.draft_probs or (None,) * len(draft.tokens)
        self._chain.extend(_Open(token, prob) for token, prob in zip(draft.tokens, probs, strict=True))
        self._exhausted = draft.done
        self._draft_us += spent_us
        if self.ask() is None:
            self._send()

    def commit(self, position: int, tokens: tuple[int, ...]) -> None:
        """The target has spoken: keep the chain as far as it agrees, drop the rest."""
        known = len(self._committed)
        if position > known:
            raise InvalidRequest.of("committed.position", position, f"at most {known}, the tokens known here")
        new = tokens[known - position :]
        check_tokens("committed.tokens", new, self._vocab_size)
        if not new:
            return
        for token in new:
            if self._chain and self._chain[0].token == token:
                del self._chain[0]
            else:
                self.rollbacks += 1
                self._chain.clear()
        self._committed.extend(new)
        self._exhausted = False

    def steer(self, steering: Steering) -> None:
        steering.check()
        if steering.gamma is not None:
            self._gamma = steering.gamma
            self._exhausted = False

    def _send(self) -> None:
        unsent = [guess for guess in self._chain if not guess.node_id]
        position = len(self._committed) + len(self._chain) - len(unsent)
        if not unsent:
            if not self._chain and self._exhausted and self._passed_at < position:
                self._passed_at = position
                self.outbox.put_nowait(Guess(position, 0, 0, (), draft_us=self._spent()))
            return
        parent = self._chain[-len(unsent) - 1].node_id if len(self._chain) > len(unsent) else 0
        first_id = self._next_id
        for guess in unsent:
            guess.node_id = self._next_id
            self._next_id += 1
        self.outbox.put_nowait(
            Guess(
                position=position,
                first_id=first_id,
                parent=parent,
                tokens=tuple(guess.token for guess in unsent),
                draft_probs=tuple(guess.draft_prob for guess in unsent if guess.draft_prob is not None),
                draft_us=self._spent(),
            )
        )

    def _spent(self) -> int:
        spent, self._draft_us = self._draft_us, 0
        return spent
