"""One session: draft, verify, commit.

`Session.run` holds the stream to a verifier and, beside it, those to its
drafters (see `drafting`). Guesses are relayed the one way, verdicts become
text, records and commits the other way. Losing a drafter costs speed only;
losing a verifier replays prompt and committed tokens to another.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import structlog
from structlog.contextvars import bind_contextvars

from coordinator.admission.quotas import Quotas
from coordinator.admission.seats import Seats
from coordinator.control.throughput_model import SpeculationPlan
from coordinator.persistence.session_record import SessionRecord
from coordinator.persistence.store import fenced
from coordinator.persistence.write_behind import Entry, WriteBehind
from coordinator.sessions.detokenizer import TextPiece, TextStream
from coordinator.sessions.drafting import Drafting, DraftingContext
from coordinator.sessions.seeds import verifier_params
from coordinator.sessions.stats import RequestStats
from coordinator.sessions.streams import VerifierStream
from coordinator.sessions.verdicts import Refusal
from coordinator.workers.target import Target
from coordinator.workers.worker_pool import WorkerConnection, WorkerPool
from outrider.observability.metrics import CoordinatorMetrics
from outrider.observability.request_context import current
from outrider.observability.tracing import Span, Tracing
from outrider.protocol import convert
from outrider.protocol.errors import (
    Expired,
    Fenced,
    OutriderError,
    Overloaded,
    PeerLost,
    ProtocolViolation,
    Unavailable,
)
from outrider.protocol.fleet import Role
from outrider.protocol.speculation import FinishReason, TokenKind, TokenLogprobs, Verdict
from outrider.security.tenants import tenant
from outrider.v1 import common_pb2 as common
from outrider.v1 import verifier_pb2 as verify

log = structlog.get_logger(__name__)

MAX_READ = 512  # tokens that a follower gets at once
_PAGE = 64  # tokens; what a verifier needs beside prompt and output
MAX_FRUITLESS = 5  # verifiers lost in a row without a single verdict


@dataclass(frozen=True, slots=True)
class Token:
    """One output token as a follower sees it."""

    token: int
    kind: TokenKind
    text: str
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class SessionContext:
    """What every session of a coordinator works with."""

    roster: WorkerPool
    journal: WriteBehind
    means: DraftingContext
    metrics: CoordinatorMetrics
    tracing: Tracing
    worker_wait_s: float
    seats: Seats
    quotas: Quotas


class Session:
    """Grows from a record: a new one, one taken over from another coordinator, or a finished one to be read again."""

    def __init__(self, record: SessionRecord, target: Target, deps: SessionContext, *, durable: int = 0) -> None:
        self.record = record
        self.stats = RequestStats(deps.metrics.of(target.info.name))
        self.followers = 0
        self.error: OutriderError | None = None
        self.ended = False
        self.rest = TextPiece("")
        self.target = target
        self._deps = deps
        self._entry = Entry(record, self._fenced, durable)
        self._tokens: list[Token] = []
        self._watchers: list[asyncio.Event] = []
        self._task: asyncio.Task[None] | None = None
        request = record.request
        self._text = TextStream(target.decode, request.prompt, request.params.stop)
        self._dropped: set[str] = set()  # verifiers that this session does not go back to
        self._drafting = Drafting(record, target, deps.means, self.stats)
        for index, (token, kind) in enumerate(zip(record.tokens, record.kinds, strict=True)):
            if self._show(token, kind, record.logprobs_of(index)).stop:
                break
        if record.finished:
            self._end()

    @property
    def plan(self) -> SpeculationPlan:
        """How it is drafted now."""
        return self._drafting.plan

    # For those who follow.

    async def follow(self, start: int) -> AsyncIterator[tuple[int, list[Token]]]:
        """Output tokens from position `start` on, as they come, until the session ends."""
        at = start
        with self.watched() as news:
            while True:
                news.clear()
                if new := self.read(at):
                    yield at, new
                    at += len(new)
                elif self.ended:
                    return
                else:
                    await news.wait()

    def read(self, at: int) -> list[Token]:
        """Return some of the output tokens from this position on. Nothing is kept for a follower: it reads on here."""
        return self._tokens[at : at + MAX_READ]

    @contextlib.contextmanager
    def watched(self, news: asyncio.Event | None = None) -> Iterator[asyncio.Event]:
        """Set an event whenever there is more to read, or the end."""
        news = news or asyncio.Event()
        self._watchers.append(news)
        try:
            yield news
        finally:
            self._watchers.remove(news)

    def start(self) -> None:
        """For the call that this task works for: its logs and its trace name the session from now on."""
        bind_contextvars(session_id=self.record.session_id)
        self.stats.began(self.record, self._span())
        self._task = asyncio.create_task(self.run())
        self._task.add_done_callback(lambda _: self.stats.ended(self.record, self.error))

    async def opened(self) -> None:
        """To be awaited before anybody hears of it: another coordinator could take it over now."""
        if self._task is not None:
            await self._deps.journal.opened(self._entry)

    def cancel(self) -> None:
        """Somebody asked for the end: it is final."""
        if not self.ended:
            self.record.finish_reason = FinishReason.CANCELLED
            self._deps.journal.changed(self._entry)
            self.stop()

    def stop(self, error: OutriderError | None = None) -> None:
        """Leave off without finishing; the record can be resumed."""
        if self._task is not None:
            self._task.cancel()
        self.error = self.error or error
        self._end()

    async def closed(self) -> None:
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    # The main loop.

    async def run(self) -> None:
        """Until the output ends: one verifier's time after the other."""
        fruitless = 0
        try:
            self._deps.journal.changed(self._entry)
            while not self.record.finished:
                before = len(self.record.tokens)
                try:
                    going_on = before > 0
                    async with self._deps.seats.taken(self.record.tenant, self._room_needed, going_on=going_on):
                        await self._with_one_verifier()
                except (PeerLost, Unavailable, Expired) as error:
                    fruitless = 0 if len(self.record.tokens) > before else fruitless + 1
                    log.info("verifier lost", error=error.message)
                    self.stats.lost_verifier(error)
                    if fruitless > MAX_FRUITLESS or isinstance(error, _NoFollowers):
                        raise
        except OutriderError as error:
            self.error = error
        except Exception as error:
            log.exception("session failed")
            self.error = OutriderError(f"internal error: {type(error).__name__}")
        finally:
            self._end()

    async def _with_one_verifier(self) -> None:
        link = await self._find_verifier()
        try:
            features = self._drafting.wants_features
            span = self.stats.span.child("verify", link.attributes)
            async with VerifierStream(
                link, self._open_verify(features), span, self.record, self.target.info
            ) as verifier:
                await verifier.opened()
                link.worked()
                self.record.verifier = link.info.worker_id
                async with self._drafting.beside(verifier, features=features):
                    async for news in verifier.news():
                        if isinstance(news, Refusal):
                            self._drafting.refused(news)
                            continue
                        self._commit(news)
                        if self.record.finished or self._should_move(link):
                            return
                if not self.record.finished:
                    raise PeerLost(f"{link.info.address} ended the stream before the output was complete")
        except Overloaded:
            link.full()
            if self._deps.roster.choose(Role.VERIFIER, self._may_have) is None and not self.record.tokens:
                raise
        except OutriderError as error:
            if (meant := self._failed_at(link, error)) is error:
                raise
            raise meant from error

    def _failed_at(self, link: WorkerConnection, error: OutriderError) -> OutriderError:
        """A verifier did not do; what that means for the session."""
        if isinstance(error, ProtocolViolation):
            self._dropped.add(link.info.worker_id)
            self._deps.roster.shunning.report(link.info, error.message)
        elif isinstance(error, PeerLost | Unavailable | Expired):
            link.failed()
        elif not isinstance(error, Fenced):
            self._dropped.add(link.info.worker_id)
            if self._deps.roster.choose(Role.VERIFIER, self._may_have) is not None:  # one may be alone in what it says
                return PeerLost(f"{link.info.address} does not take the session: {error.message}")
        return error

    @property
    def _room_needed(self) -> int:
        request = self.record.request
        return len(request.prompt) + request.params.max_tokens + _PAGE

    def _commit(self, verdict: Verdict) -> None:
        """What the target has said is final: show it, record it, tell the drafters."""
        record = self.record
        self._drafting.judged(verdict)
        self.stats.judged(verdict, self.plan)
        reason = verdict.finish_reason
        for i, (token, kind) in enumerate(zip(verdict.tokens, verdict.kinds, strict=True)):
            logprobs = verdict.logprobs[i] if verdict.logprobs else None
            record.append(token, kind, logprobs)
            piece = self._show(token, kind, logprobs)
            if piece.stop:
                reason = FinishReason.STOP
                break
        record.finish_reason = reason
        self._deps.quotas.spend(tenant(), len(verdict.tokens))
        self._deps.journal.changed(self._entry)
        self._wake_followers()
        if not record.finished:
            self._drafting.committed(verdict)

    # Choosing and opening.

    async def _find_verifier(self) -> WorkerConnection:
        """The one that had the session before, if it can be had: its cache may still know the prompt."""
        roster = self._deps.roster
        link = await roster.wait_for(
            self._deps.worker_wait_s,
            lambda: roster.choose(Role.VERIFIER, self._may_have, prefer=self.record.verifier),
        )
        if link is None:
            dropped = f"; this session has dropped {len(self._dropped)}" if self._dropped else ""
            raise _NoFollowers(
                f"no verifier has been available for {self._deps.worker_wait_s:g} s{dropped}", retry_after_ms=5000
            )
        return link

    def _may_have(self, link: WorkerConnection) -> bool:
        return link.info.worker_id not in self._dropped

    def _should_move(self, link: WorkerConnection) -> bool:
        """A verifier that drains hands its sessions over, if there is somebody to take them."""
        return link.info.draining and self._deps.roster.choose(Role.VERIFIER, self._may_have) is not None

    def _open_verify(self, features: bool) -> verify.OpenVerify:
        request = self.record.request
        return verify.OpenVerify(
            session_id=self.record.session_id,
            epoch=self.record.epoch,
            tokens=[*request.prompt, *self.record.tokens],
            prompt_length=len(request.prompt),
            params=convert.params_to_proto(verifier_params(self.record)),
            steer=common.Steer(gamma=0),
            features=features,
            cache_salt=request.cache_salt,
            tenant=self.record.tenant,
        )

    def _span(self) -> Span:
        origin, request = current(), self.record.request
        return self._deps.tracing.start(
            "generate",
            origin.carrier,
            {
                "outrider.session_id": self.record.session_id,
                "outrider.request_id": origin.request_id,
                "outrider.verification": request.params.mode.name.lower(),
                "gen_ai.request.model": self.target.info.name,
                "gen_ai.request.max_tokens": request.params.max_tokens,
                "gen_ai.usage.input_tokens": len(request.prompt),
            },
        )

    # Keeping the output.

    def _show(self, token: int, kind: TokenKind, logprobs: TokenLogprobs | None) -> TextPiece:
        piece = self._text.add(token)
        self._tokens.append(Token(token, kind, piece.text, logprobs))
        if piece.stop:
            self.rest = TextPiece("", piece.stop)
        return piece

    def _end(self) -> None:
        if self.ended:
            return
        if self.record.finished and not self.rest.stop:
            self.rest = self._text.end()
        self.ended = True
        self._wake_followers()

    def _wake_followers(self) -> None:
        for news in self._watchers:
            news.set()

    def _fenced(self) -> None:
        self.stop(fenced(self.record.session_id))


class _NoFollowers(Unavailable):
    """No verifier came in time: trying on would not help."""
