"""One session: draft, verify, commit.

`Session.run` holds the stream to a verifier; `Drafting` holds those to the drafters. Guesses are relayed to the
verifier. Verdicts become text, records and commits. Losing a drafter costs speed only. After the loss of a verifier,
prompt and committed tokens are sent to another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog
from structlog.contextvars import bind_contextvars

from coordinator.admission.quotas import Quotas
from coordinator.admission.waiting.seats import Seats
from coordinator.admission.waiting.urgency import urgency
from coordinator.persistence.session_record import SessionRecord
from coordinator.persistence.write_behind import Entry, WriteBehind
from coordinator.placement.sent_prefixes import PromptPrefix
from coordinator.sessions.detokenizer import TextStream
from coordinator.sessions.drafting import Drafting, DraftingContext
from coordinator.sessions.output import SessionOutput
from coordinator.sessions.stats import RequestStats
from coordinator.sessions.streams import VerifierStream
from coordinator.workers.choosers import NoVerifier, VerifierChooser
from coordinator.workers.target import Target
from outrider.observability.metrics import CoordinatorMetrics
from outrider.observability.tracing import Tracing
from outrider.protocol.errors import Expired, Fenced, OutriderError, Overloaded, PeerLost, Unavailable
from outrider.protocol.speculation import FinishReason, Verdict
from outrider.security.error_interceptor import as_outrider_error
from outrider.security.tenants import tenant

log = structlog.get_logger(__name__)

_EXTRA_TOKENS = 64  # KV cache slots that a verifier needs besides prompt and output
MAX_FRUITLESS = 5  # verifiers lost in a row without a verdict, or full before the first one


@dataclass(frozen=True, slots=True)
class SessionContext:
    """Components that all sessions of a coordinator share."""

    write_behind: WriteBehind
    drafting: DraftingContext
    metrics: CoordinatorMetrics
    tracing: Tracing
    worker_wait_s: float
    seats: Callable[[str], Seats]  # by target
    quotas: Quotas


class Session:
    """A session of this coordinator: new, taken over from another coordinator, or finished and read again."""

    def __init__(self, record: SessionRecord, target: Target, context: SessionContext) -> None:
        self.record = record
        self.stats = RequestStats(context.metrics.of(target.info.name))
        self.followers = 0
        self.error: OutriderError | None = None
        self.target = target
        request = record.request
        self.output = SessionOutput(TextStream(target.decode, request.prompt, request.params.stop))
        self._context = context
        self._tenant = tenant()
        self.urgency = urgency() if request.priority is None else replace(urgency(), priority=request.priority)
        message = f"session {record.session_id} is owned by another coordinator now"
        lost = Fenced(message, field="session_id", value=record.session_id)
        self._entry = Entry(record, lambda cancelled: self.cancel() if cancelled else self.stop(lost))
        self._task: asyncio.Task[None] | None = None
        self._refused = 0  # by full verifiers
        prefix = PromptPrefix(request.prompt, request.cache_salt, request.params.max_tokens + _EXTRA_TOKENS)
        pool, ends = context.drafting.worker_pool, target.info.eos_token_ids
        self._verifiers = VerifierChooser(pool, context.worker_wait_s, target.identity, prefix, ends)
        self.drafting = Drafting(record, target.info, context.drafting, self.stats)
        self.output.append(record.tokens, record.kinds, record.logprobs)
        if record.finished:
            self._end()

    @property
    def ended(self) -> bool:
        return self.output.ended

    def start(self) -> None:
        """Start generating; logs and trace of the calling task name the session from now on."""
        bind_contextvars(session_id=self.record.session_id)
        self.stats.start(self.record, self._context.tracing, self.target.info.name)
        self._task = asyncio.create_task(self.run())
        self._task.add_done_callback(lambda _: self.stats.finish(self.record, self.error))

    async def opened(self) -> None:
        """Wait until Redis has the session: before that, its id must not be sent. It ends if another resumes it."""
        if self._task is not None:
            await self._context.write_behind.write_first(self._entry)

    def store(self, *, in_doubt: bool = False) -> None:
        self._entry.in_doubt |= in_doubt
        self._context.write_behind.mark_changed(self._entry)

    def cancel(self) -> None:
        """End the session for good, at the client's request."""
        if not self.ended and not self.record.finished:
            self.record.finish_reason = FinishReason.CANCELLED
            self.store()
            self.stop()

    def stop(self, error: OutriderError | None = None) -> None:
        """Stop without finishing; the record can be resumed. What has finished stays as it is."""
        if self._task is not None:
            self._task.cancel()
        drawn = self.record.request.params.mode.needs_draft_probs  # then the end counts once it is stored
        if not self.ended and (drawn or not self.record.finished):
            self.error = self.error or error
        self._end()

    async def closed(self) -> None:
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    # The main loop.

    async def run(self) -> None:
        """Generate until the output ends, on one verifier after another."""
        fruitless = 0
        try:
            self.store()
            seats, num_tokens = self._context.seats(self.target.identity), self._verifiers.prompt.num_tokens
            while not self.record.finished:
                before = len(self.record.tokens)
                try:
                    held = seats.taken(self.record.tenant, num_tokens, self.urgency.priority, resumed=before > 0)
                    async with held as seat:
                        while await self._run_on_one_verifier():
                            pass  # with its seat: those of the draining verifier are no longer counted
                        seats.measure(seat, self.record, self.stats.values)
                except NoVerifier:
                    raise  # none was lost
                except (PeerLost, Unavailable, Expired) as error:
                    fruitless = 0 if len(self.record.tokens) > before else fruitless + 1
                    log.info("verifier lost", error=error.message)
                    self.stats.record_verifier_loss(error)
                    if fruitless > MAX_FRUITLESS:
                        raise
            if self.record.request.params.mode.needs_draft_probs:  # another coordinator would draw another end
                await self._context.write_behind.write_first(self._entry, "session ended without redis")
        except asyncio.CancelledError:
            log.debug("session stopped")  # the task would keep the error, and with it the session
        except BaseException as error:  # a panic in a tokenizer is no Exception
            self.error = as_outrider_error(error).with_traceback(None)
        finally:
            self._end()

    async def _run_on_one_verifier(self) -> bool:
        connection = await self._verifiers.wait_for(prefer=self.record.verifier)
        try:
            states = self.drafting.begin_states(connection.info)
            span = self.stats.span.child("verify", connection.attributes)
            async with VerifierStream(connection, self.record, self.target.info, span, states) as verifier:
                await verifier.opened()
                connection.record_success()
                self.record.verifier = connection.info.worker_id
                async with self.drafting.attached_to(verifier):
                    async for reply in verifier.replies():
                        if not isinstance(reply, Verdict):
                            self.drafting.receive(reply)
                            continue
                        self._commit(reply)
                        if self.record.finished or (connection.info.draining and self._verifiers.move(self.record)):
                            return not self.record.finished
                if not self.record.finished:
                    raise PeerLost(f"{connection.info.address} ended the stream before the output was complete")
        except Overloaded:
            connection.record_full()
            self._refused += 1
            another = self._refused <= MAX_FRUITLESS and self._verifiers.available() is not None
            if not self.record.tokens and not another:
                raise
        except OutriderError as error:
            raise self._verifiers.record_failure(connection, error, self.record.verifier) from None
        return False

    def _commit(self, verdict: Verdict) -> None:
        """Append a verdict's tokens to the output and the record, and send them to the drafters."""
        record = self.record
        kinds = verdict.kinds
        taken = self.output.append(verdict.tokens, kinds, verdict.logprobs)
        record.append(verdict.tokens[:taken], kinds[:taken], verdict.logprobs[:taken])
        record.finish_reason = FinishReason.STOP if self.output.rest.stop else verdict.finish_reason
        counted = verdict
        if taken < len(verdict.tokens):  # up to a stop string
            kept = min(taken, verdict.accepted)
            sources = tuple(replace(each, accepted=min(kept, each.accepted)) for each in verdict.sources)
            counted = replace(verdict, tokens=verdict.tokens[:taken], accepted=kept, sources=sources)
        self.stats.record_verdict(counted, self.drafting.control.plan)
        self._context.quotas.spend(self._tenant, taken)
        self._context.write_behind.mark_changed(self._entry)
        self.drafting.commit(verdict)
        self.output.notify()  # after the commit, which is on the path of the next round

    def _end(self) -> None:
        self.output.end(finished=self.record.finished)
        self._entry.on_fenced = lambda _: None  # which knows the session: it would live until a garbage collection
        if self.output.rest.stop and self.record.finish_reason is FinishReason.LENGTH:  # found in text held back
            self.record.finish_reason = FinishReason.STOP
