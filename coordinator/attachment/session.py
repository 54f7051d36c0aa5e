"""Attached sessions: requests of an engine that serves its own clients and takes guesses from the drafters here.

The engine verifies as a verifier does, on a stream that it has opened. The text is its own: a lost stream costs
only the guesses. An engine is not trusted: its messages are checked like a verifier's, and its name for the model
reaches no history of another tenant or target.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from coordinator.persistence.session_record import SessionRecord, SessionRequest, SpeculationOptions
from coordinator.sessions.drafting import Drafting, DraftingContext
from coordinator.sessions.stats import RequestStats
from coordinator.sessions.verdicts import SentMessages, VerdictReader
from outrider.observability.metrics import CoordinatorMetrics
from outrider.observability.tracing import OFF
from outrider.protocol import convert, message_limits
from outrider.protocol.checks import MAX_IDS, check_count, check_number, check_tokens
from outrider.protocol.errors import Expired, InvalidRequest, OutriderError, PeerLost
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo
from outrider.protocol.speculation import MAX_GAMMA, FinishReason, SessionOpening, VerifySteering
from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import verifier_pb2 as verify

METRICS_NAME = "attached"  # of all engines' requests: their own names would not be bounded
_MAX_UNSENT = 1024  # messages
_SHORTEST_STEP_S = 0.001  # on average; faster verdicts are read at this rate
_BURST = 64
_SILENCE_S = 600.0  # between verdicts; a request may wait for its first one
_PLAIN_STEPS = 8  # of a verdict while no guesses are made
_HISTORIES = 32  # of a tenant's engines, which may give their models any names
_CHAINS_ONLY = SpeculationOptions(branches=1)


@dataclass(slots=True)
class AttachedEngine:
    """Engine in the place of a connection to a verifier."""

    info: WorkerInfo
    sessions: int = 1
    round_trip_ms: float = 0.0  # not measured: coordinators run beside their engines


class AttachedSession:
    """One request of an engine, to which `outbox` goes."""

    def __init__(
        self, opening: pb.OpenAttached, salt: str, tenant_id: str, context: DraftingContext, metrics: CoordinatorMetrics
    ) -> None:
        model = _model(opening, tenant_id)
        engine = WorkerInfo("", Role.VERIFIER, METRICS_NAME, model, machine=opening.machine)
        self.connection = AttachedEngine(engine)
        self._record = _record(opening, model, salt, tenant_id)
        self.outbox: asyncio.Queue[verify.VerifyRequest | None] = asyncio.Queue()  # None: the end
        self._sent = SentMessages(plain_steps=_PLAIN_STEPS)
        self._reader = VerdictReader(self._record, model, self._sent, time.monotonic())
        self._stats = RequestStats(metrics.of(METRICS_NAME))
        gamma_max, self._overrun = min(context.gamma_max, opening.max_guesses), False
        possible = replace(context, gamma_max=gamma_max, accepts=lambda drafter: not drafter.hidden_states)
        self._drafting = Drafting(self._record, model, possible, self._stats)

    async def follow(self, requests: AsyncIterator[pb.AttachRequest]) -> None:
        """Keep drafters attached while the engine sends verdicts."""
        self._stats.start(self._record, OFF, METRICS_NAME)
        self.steer(VerifySteering(gamma=0))
        failure: OutriderError | None = None
        try:
            async with self._drafting.attached_to(self):
                await self._read(requests)
            self._record.finish_reason = self._record.finish_reason or FinishReason.STOP
        except OutriderError as error:
            failure = error
            raise
        finally:
            self._stats.finish(self._record, failure)

    def guess(self, guess: common.Guess) -> None:
        self._sent.sources = max(self._sent.sources, guess.source)
        self._sent.guessed_to = max(self._sent.guessed_to, guess.position + len(guess.tokens))
        self._send(verify.VerifyRequest(guess=guess))

    def steer(self, steering: VerifySteering) -> None:
        message = verify.VerifyRequest(steer=convert.verify_steering_to_proto(steering))
        message.steer.plain_steps = 1 if self._drafting.control.plan.gamma else _PLAIN_STEPS
        self._send(message)

    def _send(self, message: verify.VerifyRequest) -> None:
        self._overrun |= self.outbox.qsize() > _MAX_UNSENT
        if not self._overrun:  # else `_read` ends the session: here a drafter would be blamed
            self._sent.messages += 1
            self.outbox.put_nowait(message)

    async def _read(self, requests: AsyncIterator[pb.AttachRequest]) -> None:
        ready_at = time.monotonic()
        try:
            while True:
                async with asyncio.timeout(_SILENCE_S):
                    request = await anext(requests, None)
                if request is None:
                    return
                if self._overrun:
                    raise PeerLost("the engine does not read its guesses")
                now = time.monotonic()
                steps = max(1, min(_PLAIN_STEPS, len(request.reply.verdict.tokens) - request.reply.verdict.accepted))
                ready_at = max(ready_at, now - _BURST * _SHORTEST_STEP_S) + steps * _SHORTEST_STEP_S
                if ready_at > now:
                    await asyncio.sleep(ready_at - now)
                self._receive(request.reply)
        except TimeoutError as error:
            raise Expired(f"no verdict for {_SILENCE_S:g} s") from error

    def _receive(self, reply: verify.VerifyReply) -> None:
        kind = reply.WhichOneof("message")
        if kind == "refused":
            self._drafting.receive(self._reader.refusal(reply))
            return
        if kind != "verdict":
            raise InvalidRequest.of("message", kind or "empty", "verdict or refused")
        verdict = self._reader.verdict(reply.verdict, time.monotonic())
        self._record.append(verdict.tokens, verdict.kinds, ())
        self._record.finish_reason = verdict.finish_reason
        self._stats.record_verdict(verdict, self._drafting.control.plan)
        self._drafting.commit(verdict)


def _model(opening: pb.OpenAttached, tenant_id: str) -> ModelInfo:
    check_count("open.model", opening.model.ByteSize(), message_limits.MAX_SMALL_BYTES, "bytes")
    model = convert.model_from_proto(opening.model)
    if not model.vocabulary_digest:
        raise InvalidRequest.of("open.model.vocabulary_digest", "empty", "the digest of the vocabulary")
    check_number("open.model.vocab_size", model.vocab_size, 1, MAX_IDS)
    check_tokens("open.model.eos_token_ids", model.eos_token_ids, model.vocab_size)
    number = zlib.crc32(model.fingerprint.encode()) % _HISTORIES
    return replace(model, fingerprint=f"{METRICS_NAME} {tenant_id} {number}")


def _record(opening: pb.OpenAttached, model: ModelInfo, salt: str, tenant_id: str) -> SessionRecord:
    check_count("open.tokens", len(opening.tokens), message_limits.MAX_OPEN_TOKENS, "tokens")
    if not 1 <= opening.max_guesses <= MAX_GAMMA:
        raise InvalidRequest.of("open.max_guesses", opening.max_guesses, f"in [1, {MAX_GAMMA}]")
    params = convert.params_from_proto(opening.params)
    given = SessionOpening(secrets.token_hex(12), 0, tuple(opening.tokens), opening.prompt_length, params)
    given.check_for(model.vocab_size, VerifySteering(), opening.cache_salt)
    if params.mode.needs_draft_probs or params.grammar is not None or params.logprobs is not None:
        raise InvalidRequest.of("open.params", "rejection, block, grammar or logprobs", "greedy or coupled, without")
    if len(given.tokens) - given.prompt_length >= params.max_tokens:
        raise InvalidRequest.of("open.params.max_tokens", params.max_tokens, "more than the committed output")
    request = SessionRequest(given.tokens[: given.prompt_length], params, _CHAINS_ONLY, cache_salt=salt)
    output = list(given.tokens[given.prompt_length :])
    return SessionRecord(given.session_id, request, tokens=output, model=model.fingerprint, tenant=tenant_id)
