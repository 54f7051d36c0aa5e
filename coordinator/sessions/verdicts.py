"""Verdict reader: it checks a verifier's replies against the messages that were sent to it.

The owner of the target's weights decides the text. Yet no reply may end a session early, make memory grow or violate
the request. A reply that no conforming verifier sends raises ProtocolViolation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from coordinator.persistence.session_record import SessionRecord
from coordinator.sessions.hidden_states.asked_states import AskedStates, check_ends
from coordinator.sessions.hidden_states.earlier_states import EarlierRequests
from outrider.protocol import convert, message_limits
from outrider.protocol.errors import OutriderError, ProtocolViolation, shorten
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.speculation import MAX_GAMMA, MAX_NODES, FinishReason, TokenKind, Verdict, VerifyTimings
from outrider.v1 import verifier_pb2 as verify

MAX_REPLY_BYTES = 64 * 1024  # without hidden states
_MAX_STEP_TOKENS = 1 << 20
_ROUNDING = 1e-6  # of a log probability of 0
# Kinds of the last token: the target's own after guesses, without guesses, or none at an accepted stop.
_AFTER_GUESSES = (TokenKind.RECOVERED, TokenKind.BONUS)
_PLAIN = (TokenKind.PLAIN,)
_NO_OWN_TOKEN = (TokenKind.NONE,)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The verifier's refusal of a guess from this source, or of steering."""

    source: int
    error: OutriderError


@dataclass(slots=True)
class SentMessages:
    """Messages sent over a verifier's stream; its replies cannot refer to anything else."""

    states: AskedStates = field(default_factory=AskedStates)
    earlier: EarlierRequests = field(default_factory=EarlierRequests)
    messages: int = 0  # guesses and steering
    sources: int = 0  # the highest number of a drafter
    guessed_to: int = 0  # the position after the furthest guess
    plain_steps: int = 1  # steps without guesses that a verdict may stand for
    direct: bool = False  # a drafter in the verifier's process guesses, without messages


class VerdictReader:
    """Reader of one stream's replies. The stream updates `sent`, the session its record."""

    def __init__(self, record: SessionRecord, target: ModelInfo, sent: SentMessages, now: float) -> None:
        self._record = record
        self._target = target
        self._sent = sent
        self._accounted_to = now  # the verifier's reported times are accounted for up to here
        self._stops = record.request.params.ending_tokens(target.eos_token_ids)

    def check_opened(self, opened: verify.Opened) -> None:
        _at_most("opened", opened.ByteSize(), message_limits.MAX_SMALL_BYTES, " bytes")
        model, target = opened.model, self._target
        text_id = model.text_digest or model.fingerprint
        # In a fleet of mixed verifiers, the weights are what they have in common.
        same_weights = bool(model.weights_digest) and self._record.model == model.weights_digest
        for name, value, wanted in (
            ("position", opened.position, self._record.position),
            ("model", target.text_id if same_weights else text_id, target.text_id),
            ("model.eos_token_ids", tuple(model.eos_token_ids), target.eos_token_ids),
        ):
            if value != wanted:
                raise _violation(f"opened.{name}", value, wanted)

    def refusal(self, reply: verify.VerifyReply) -> Refusal:
        _at_most("refused", reply.ByteSize(), message_limits.MAX_SMALL_BYTES, " bytes")
        self._sent.messages -= 1
        if self._sent.messages < 0 and not self._sent.direct:
            raise _violation("refused", "unasked", "one for each guess or steer at most")
        error = convert.error_from_proto(reply.refused)
        error.message = shorten(error.message)
        return Refusal(reply.source, error)

    def verdict(self, proto: verify.Verdict, now: float) -> Verdict:
        self._check_sizes(proto)
        try:
            verdict = convert.verdict_from_proto(proto)
        except ValueError as error:  # an unknown enum value
            raise ProtocolViolation(f"verdict: {error}") from error
        self._check_tokens(verdict)
        self._bound_timings(verdict.timings, now, verdict.steps)
        self._check_guesses(verdict)
        self._check_end(verdict)
        self._check_logprobs(verdict, self._record.request.params.logprobs)
        if verdict.hidden_states is not None or verdict.layer_states:
            check_ends(verdict)
        return verdict

    def _check_sizes(self, proto: verify.Verdict) -> None:
        """Check sizes before anything is converted."""
        entries, wanted = len(proto.logprobs), self._record.request.params.logprobs
        if entries != (0 if wanted is None else len(proto.tokens)):
            raise _violation("verdict.logprobs", f"{entries} entries", "one per token if asked for, else none")
        _at_most("verdict.sources", len(proto.sources), self._sent.sources, " entries")
        size = proto.ByteSize()
        if proto.HasField("hidden_states") or proto.layer_states:
            size -= self._sent.states.check(proto)
        _at_most("verdict", size, MAX_REPLY_BYTES, " bytes")

    def _bound_timings(self, timings: VerifyTimings, now: float, steps: int) -> None:
        """Reduce the times of a step: those of all steps are no longer than the time since the last verdict."""
        _at_most("verdict.timings.batch_tokens", timings.batch_tokens, _MAX_STEP_TOKENS)
        _at_most("verdict.timings.session_tokens", timings.session_tokens, timings.batch_tokens)
        _at_most("verdict.timings.sessions", timings.sessions, _MAX_STEP_TOKENS)
        _at_most("verdict.timings.step_tokens", timings.step_tokens, _MAX_STEP_TOKENS)
        _at_most("verdict.timings.cached_tokens", timings.cached_tokens, self._record.position)
        allowed_us = max(0, int((now - self._accounted_to) * 1e6 / steps))
        timings.step_us = min(timings.step_us, allowed_us)
        timings.wait_us = min(timings.wait_us, allowed_us - timings.step_us)
        timings.draft_us = min(timings.draft_us, timings.wait_us)
        self._accounted_to += steps * (timings.step_us + timings.wait_us) / 1e6

    def _check_tokens(self, verdict: Verdict) -> None:
        record, tokens = self._record, verdict.tokens
        if verdict.position != record.position:
            raise _violation("verdict.position", verdict.position, record.position)
        left = min(MAX_GAMMA + 1, record.request.params.max_tokens - len(record.tokens))
        if not 1 <= len(tokens) <= left:
            raise _violation("verdict.tokens", f"{len(tokens)} tokens", f"1 to {left} tokens")
        _at_most("verdict.tokens", max(tokens), self._target.vocab_size - 1)

    def _check_guesses(self, verdict: Verdict) -> None:
        accepted, tokens = verdict.accepted, len(verdict.tokens)
        _at_most("verdict.accepted", accepted, min(tokens, verdict.proposed))
        if tokens - accepted > (1 if verdict.proposed else self._sent.plain_steps):
            raise _violation("verdict.accepted", accepted, f"at least {tokens - 1} of {tokens} tokens")
        ahead = MAX_GAMMA if self._sent.direct else max(0, self._sent.guessed_to - verdict.position)
        _at_most("verdict.proposed", verdict.proposed, min(MAX_GAMMA, ahead, verdict.nodes))
        _at_most("verdict.nodes", verdict.nodes, MAX_NODES if verdict.proposed else 0)
        remaining = MAX_GAMMA if self._sent.direct else min(MAX_GAMMA, max(0, ahead - tokens))
        _at_most("verdict.remaining_depth", verdict.remaining_depth, remaining)
        _at_most("verdict.accepted_from_branch", verdict.accepted_from_branch, accepted)
        seen = {tally.source for tally in verdict.sources}
        if len(seen) < len(verdict.sources) or 0 in seen:
            raise _violation("verdict.sources", [tally.source for tally in verdict.sources], "each once, from 1 on")
        for tally in verdict.sources:
            _at_most("verdict.sources.source", tally.source, self._sent.sources)
            _at_most("verdict.sources.proposed", tally.proposed, verdict.proposed)
            _at_most("verdict.sources.accepted", tally.accepted, accepted)
        allowed: tuple[TokenKind, ...]
        if tokens > accepted:
            allowed = _AFTER_GUESSES if verdict.proposed else _PLAIN
        else:
            allowed = _NO_OWN_TOKEN if verdict.finish_reason is not FinishReason.NONE else ()
        if verdict.last not in allowed:
            raise _violation("verdict.last", verdict.last.name, [kind.name for kind in allowed] or "given")

    def _check_end(self, verdict: Verdict) -> None:
        """Check that the output ends where the request defines its end, and nowhere else."""
        params, reason = self._record.request.params, verdict.finish_reason
        *before, last = verdict.tokens
        if not self._stops.isdisjoint(before):
            raise _violation("verdict.tokens", "more tokens", "none after a stop")
        full = len(self._record.tokens) + len(verdict.tokens) == params.max_tokens
        allowed = {FinishReason.LENGTH if full else FinishReason.NONE}
        if last in self._stops:
            allowed = {FinishReason.STOP}
        elif params.grammar is not None:  # its end is not computed here
            allowed.add(FinishReason.STOP)
        if reason not in allowed:
            raise _violation("verdict.finish_reason", reason.name, sorted(kind.name for kind in allowed))

    def _check_logprobs(self, verdict: Verdict, wanted: int | None) -> None:
        for entry in verdict.logprobs:
            counts = (len(entry.top_ids), len(entry.top_logprobs))
            if counts != (wanted, wanted):
                raise _violation("verdict.logprobs.top_ids", counts, f"{wanted} each")
            _at_most("verdict.logprobs.top_ids", max(entry.top_ids, default=0), self._target.vocab_size - 1)
            for value in (entry.logprob, *entry.top_logprobs):
                if not -math.inf < value <= _ROUNDING:
                    raise _violation("verdict.logprobs", value, "finite and at most 0")


def _at_most(name: str, value: int, high: int, unit: str = "") -> None:
    if value > high:
        raise _violation(name, f"{value}{unit}", f"at most {high}{unit}")


def _violation(name: str, value: object, limit: object) -> ProtocolViolation:
    return ProtocolViolation(f"{name} is {shorten(str(value))}, must be {shorten(str(limit))}")
