"""Well-behaved clients: they retry as documented, resume broken streams, and check every token."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from outrider.client.aio import AsyncClient
from outrider.client.events import Finished, Reply, Started, Tokens
from outrider.protocol.errors import Fenced, NotFound, OutriderError, Overloaded, PeerLost, Unavailable
from outrider.protocol.speculation import FinishReason
from tests.chaos.cases import Answer, Case
from tests.chaos.fleet import Fleet
from tests.chaos.ledger import Ledger, Talk

SILENT_S = 60.0  # without any message: a hang
LONGEST_S = 180.0  # for one session, faults included
WISHES: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"gamma": 4, "drafter": "model"},
    {"gamma": 3, "drafter": "suffix"},
    {"gamma": 0},
    {"gamma": 6, "branches": 2, "drafter": "model"},
    {"drafter": "hostile"},
    {"gamma": 8, "ahead": True, "drafter": "model"},
)


_NOT_TIMED = ("slow", "hop", "cancel", "leave", "whole", "key")  # these pause, or have one answer at the end


class Violation(Exception):
    """Violation of a guarantee."""

    def __init__(self, what: str, told: str) -> None:
        super().__init__(told)
        self.what = what


@dataclass(slots=True)
class Got:
    """Received part of a choice, compared with the expected one."""

    case: Case
    answer: Answer | None
    ledger: Ledger
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: int = 0
    stop: str = ""

    def take(self, position: int, token_ids: list[int], text: str) -> None:
        have = len(self.token_ids)
        if position != have:
            what = "lost" if position > have else "doubled"
            self.ledger.wrong(what, abs(position - have), f"{self.case.name}: position {position} after {have} tokens")
            raise Violation("", "told already")
        if self.answer is not None:
            wanted = self.answer.token_ids[position : position + len(token_ids)]
            if token_ids != wanted:
                count = sum(a != b for a, b in zip(token_ids, wanted, strict=False)) + max(
                    0, len(token_ids) - len(wanted)
                )
                self.ledger.wrong("wrong", count, f"{self.case.name}: {token_ids} at {position}, must be {wanted}")
                raise Violation("", "told already")
        self.token_ids += token_ids
        self.say(text)

    def say(self, text: str) -> None:
        self.text += text
        if self.answer is not None and not self.answer.text.startswith(self.text):
            at = next((i for i, (a, b) in enumerate(zip(self.text, self.answer.text, strict=False)) if a != b), -1)
            self.ledger.wrong("wrong", 1, f"{self.case.name}: the text differs at character {at} of {len(self.text)}")
            raise Violation("", "told already")

    def check(self) -> None:
        """Check the choice at its end."""
        if self.answer is None:
            if self.finish == FinishReason.LENGTH and self.token_ids and len(self.token_ids) != self.case.longest:
                raise Violation("lost", f"{self.case.name}: {len(self.token_ids)} of {self.case.longest} tokens")
            return
        wanted = self.answer
        if self.token_ids and self.token_ids != wanted.token_ids:
            missing = len(wanted.token_ids) - len(self.token_ids)
            raise Violation("lost", f"{self.case.name}: ended {missing} tokens early, finish {self.finish}")
        for name in ("text", "finish", "stop"):
            mine, theirs = getattr(self, name), getattr(wanted, name)
            if mine != theirs and not (name == "stop" and not mine):
                raise Violation("wrong", f"{self.case.name}: {name} is {mine!r:.200}, must be {theirs!r:.200}")


class Customer(ABC):
    """Base of all clients: one session after the other, each of another kind."""

    manners: tuple[str, ...] = ()

    def __init__(self, number: int, fleet: Fleet, cases: list[Case], ledger: Ledger, seed: int, think_s: float) -> None:
        self.rng = random.Random(f"{seed}/{number}")
        self.fleet = fleet
        self.ledger = ledger
        self.number = number
        self._cases = cases
        self._think_s = think_s

    async def run(self, over: Callable[[], bool]) -> None:
        while not over():
            case, manner = self.rng.choice(self._cases), self.rng.choice(self.manners)
            await self.session(case, manner)
            await asyncio.sleep(self.rng.uniform(0, self._think_s))

    async def session(self, case: Case, manner: str) -> None:
        talk = self.ledger.talk(f"{manner}: {case.name}", paced=manner in _NOT_TIMED)
        self.ledger.counts[f"manner {manner}"] += 1
        try:
            async with asyncio.timeout(LONGEST_S):
                await self.serve(case, manner, talk)
        except Violation as found:
            if found.what:
                self.ledger.wrong(found.what, 1, f"client {self.number} {manner}: {found}")
        except TimeoutError:
            self.ledger.wrong("hang", 1, f"client {self.number} {manner}: {case.name} not over in {LONGEST_S:g} s")
        talk.ended = time.monotonic()
        self.ledger.counts["sessions"] += 1

    @abstractmethod
    async def serve(self, case: Case, manner: str, talk: Talk) -> None:
        """Send a request, read the answer and check it."""

    async def pause(self, seconds: float | None) -> None:
        await asyncio.sleep((seconds or 0.3) * self.rng.uniform(1.0, 1.5))


class GrpcCustomer(Customer):
    manners = ("plain",) * 8 + ("hop",) * 4 + ("twice", "at once", "slow", "cancel", "leave")

    async def serve(self, case: Case, manner: str, talk: Talk) -> None:
        endpoints = list(self.fleet.endpoints)
        if self.rng.random() < 0.5:
            endpoints.reverse()
        async with AsyncClient(endpoints, api_key=self.fleet.keys.api) as client:
            asking = _Asking(self, client, case, talk)
            if manner == "at once":
                beside = _Asking(self, client, case, talk)
                beside.key, beside.wish = asking.key, asking.wish
                await asyncio.gather(asking.whole(), beside.whole())
                self._same(asking, beside, talk)
            elif manner == "hop":
                await self._hop(asking, endpoints)
            elif manner in ("leave", "cancel"):
                await self._break_off(asking, manner)
            else:
                await asking.whole(read_slowly=manner == "slow")
            if manner == "twice":
                again = _Asking(self, client, case, talk)
                again.key, again.wish = asking.key, asking.wish
                await again.whole()
                self._same(asking, again, talk)

    def _same(self, one: _Asking, other: _Asking, talk: Talk) -> None:
        """Check that one idempotency key is one generation, unless Redis has lost it."""
        unknown = self.fleet.was_unknown(one.session_id) or self.ledger.may_be_lost(talk)
        if one.session_id != other.session_id and not unknown:
            raise Violation("key", f"{one.case.name}: one key, two sessions {one.session_id}, {other.session_id}")
        if one.session_id == other.session_id and one.got.token_ids != other.got.token_ids:
            raise Violation("key", f"{one.case.name}: one session, two answers")

    async def _hop(self, asking: _Asking, endpoints: list[str]) -> None:
        """Disconnect during the answer and resume with the other coordinator."""
        await asking.whole(leave_after=self.rng.randrange(1, asking.case.longest))
        if asking.got.finish:
            return
        await asyncio.sleep(self.rng.uniform(0, 1))
        async with AsyncClient(endpoints[::-1], api_key=self.fleet.keys.api) as other:
            asking.client = other
            await asking.whole()

    async def _break_off(self, asking: _Asking, manner: str) -> None:
        await asking.whole(leave_after=self.rng.randrange(1, asking.case.longest))
        if manner == "cancel" and not asking.got.finish:
            with contextlib.suppress(PeerLost, Unavailable, NotFound):
                await asking.client.cancel(asking.session_id)


class _Asking:
    """Request over gRPC, retried until its answer is complete."""

    def __init__(self, customer: Customer, client: AsyncClient, case: Case, talk: Talk) -> None:
        self.client = client
        self.case = case
        self.key = secrets.token_hex(8)
        self.wish = customer.rng.choice(WISHES)
        self.session_id = ""
        self._customer = customer
        self._talk = talk
        self.got = self._nothing()

    def _nothing(self) -> Got:
        return Got(self.case, self.case.answers[0] if self.case.answers else None, self._customer.ledger)

    async def whole(self, *, leave_after: int = 0, read_slowly: bool = False) -> None:
        while not self.got.finish:
            try:
                async with contextlib.aclosing(self._stream()) as replies:
                    if await self._listen(replies, leave_after, read_slowly):
                        return
            except NotFound as error:
                self._lost(error)
            except (PeerLost, Unavailable, Overloaded, Fenced) as error:
                self._customer.ledger.counts[f"told {error.code}"] += 1
                await self._customer.pause((error.retry_after_ms or 0) / 1000)
            except OutriderError as error:
                raise Violation("error", f"{self.case.name}: {type(error).__name__} {error.message}") from error
        self.got.check()

    def _stream(self) -> AsyncGenerator[Reply, None]:
        if self.session_id:
            return self.client.resume(self.session_id, len(self.got.token_ids), self.got.token_ids)
        options: dict[str, Any] = {"params": self.case.sampling(), "idempotency_key": self.key, **self.wish}
        if self.case.chat:
            return self.client.generate(chat=[("user", self.case.prompt)], **options)
        return self.client.generate(self.case.prompt, **options)

    async def _listen(self, replies: AsyncGenerator[Reply, None], leave_after: int, read_slowly: bool) -> bool:
        """Return whether the client disconnected before the end."""
        while True:
            try:
                async with asyncio.timeout(SILENT_S):
                    reply = await anext(replies, None)
            except TimeoutError:
                raise Violation("hang", f"{self.case.name}: no news for {SILENT_S:g} s") from None
            self._talk.heard()
            if isinstance(reply, Started):
                self.session_id = reply.session_id
            elif isinstance(reply, Tokens):
                self.got.take(reply.position, list(reply.token_ids), reply.text)
                if 0 < leave_after <= len(self.got.token_ids):
                    return True
                if read_slowly:
                    await asyncio.sleep(self._customer.rng.choice((0, 0, 0.02, 0.3)))
            elif isinstance(reply, Finished):
                self.got.say(reply.text)
                self.got.finish, self.got.stop = int(reply.finish_reason), reply.stop
                return False
            else:
                raise PeerLost("the stream ended before the output was complete")

    def _lost(self, error: NotFound) -> None:
        """Start again: the key and the seed give the same answer."""
        ledger = self._customer.ledger
        told = f"{self.case.name}: {error.message} after {len(self.got.token_ids)} tokens"
        if not ledger.may_be_lost(self._talk) and not self._customer.fleet.was_unknown(self.session_id):
            raise Violation("lost session", told)
        ledger.counts["begun again"] += 1
        ledger.lost_by_design.append(told)
        self.session_id = ""
        self.got = self._nothing()
