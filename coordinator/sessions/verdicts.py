"""Checks of a verifier's replies against the messages that were sent to it.

The owner of the target's weights decides the text. Yet no reply may end a
session early, make memory grow or violate the request. A reply that no
conforming verifier sends raises ProtocolViolation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from coordinator.persistence.session_record import SessionRecord
from outrider.protocol import convert, message_limits
from outrider.protocol.errors import InvalidRequest, OutriderError, ProtocolViolation, shorten
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.speculation import (
    MAX_GAMMA,
    MAX_NODES,
    FinishReason,
    TokenKind,
    Verdict,
    VerifySteering,
    VerifyTimings,
)
from outrider.v1 import common_pb2 as common
from outrider.v1 import verifier_pb2 as verify

MAX_REPLY_BYTES = 64 * 1024  # without hidden states
_MAX_STEP_TOKENS = 1 << 20
_ROUNDING = 1e-6  # of a log probability of 0
_LAST = (TokenKind.RECOVERED, TokenKind.BONUS, TokenKind.PLAIN)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The verifier's refusal of a guess from this source, or of steering."""

    source: int
    error: OutriderError


@dataclass(slots=True)
class SentMessages:
    """Messages sent over a verifier's stream; its replies cannot refer to anything else."""

    hidden_states: bool = False  # requested at some time
    messages: int = 0  # guesses and steering
    sources: int = 0  # the highest number of a drafter
    guessed_to: int = 0  # the position after the furthest guess

    def add_guess(self, guess: common.Guess) -> None:
        self.messages += 1
        self.sources = max(self.sources, guess.source)
        self.guessed_to = max(self.guessed_to, guess.position + len(guess.tokens))

    def add_steering(self, steering: VerifySteering) -> None:
        self.messages += 1
        self.hidden_states = self.hidden_states or bool(steering.hidden_states)


class VerdictReader:
    """Reader of one stream's replies. The stream updates `sent`, the session its record."""

    def __init__(self, record: SessionRecord, target: ModelInfo, sent: SentMessages, now: float) -> None:
        self._record = record
        self._target = target
        self._sent = sent
        self._accounted_to = now  # the verifier's reported times are accounted for up to here
        params = record.request.params
        self._stops = set(params.stop_token_ids)
        if params.grammar is not None or not params.ignore_eos:
            self._stops.update(target.eos_token_ids)

    def check_opened(self, opened: verify.Opened) -> None:
        _size("opened", opened.ByteSize(), message_limits.MAX_SMALL_BYTES)
        _hold("opened.position", opened.position, opened.position == self._record.position, self._record.position)
        model, target = opened.model, self._target
        _hold("opened.model", model.fingerprint, model.fingerprint == target.fingerprint, target.fingerprint)
        ends = tuple(model.eos_token_ids)
        _hold("opened.model.eos_token_ids", ends, ends == target.eos_token_ids, target.eos_token_ids)

    def refusal(self, reply: verify.VerifyReply) -> Refusal:
        _size("refused", reply.ByteSize(), message_limits.MAX_SMALL_BYTES)
        self._sent.messages -= 1
        _hold("refused", "unasked", self._sent.messages >= 0, "one for each guess or steer at most")
        error = convert.error_from_proto(reply.refused)
        error.message = shorten(error.message)
        return Refusal(reply.source, error)

    def verdict(self, proto: verify.Verdict, now: float) -> Verdict:
        self._check_sizes(proto)
        verdict = _converted(proto)
        self._check_tokens(verdict)
        self._check_guesses(verdict)
        self._check_end(verdict)
        self._check_logprobs(verdict)
        self._check_hidden_states(verdict)
        return replace(verdict, timings=self._checked_timings(verdict.timings, now))

    def _check_sizes(self, proto: verify.Verdict) -> None:
        """Check sizes before anything is converted."""
        _count("verdict.tokens", len(proto.tokens), MAX_GAMMA + 1)
        _count("verdict.logprobs", len(proto.logprobs), len(proto.tokens))
        most = self._record.request.params.logprobs or 0
        for entry in proto.logprobs:
            _count("verdict.logprobs.top_ids", len(entry.top_ids), most)
            _count("verdict.logprobs.top_logprobs", len(entry.top_logprobs), most)
        _count("verdict.sources", len(proto.sources), self._sent.sources)
        if proto.HasField("features"):
            _hold("verdict.features", "given", self._sent.hidden_states, "absent: none were asked for")
            try:
                message_limits.check_hidden_states("verdict.features", proto.features)
            except InvalidRequest as error:
                raise ProtocolViolation(error.message) from error
        _size("verdict", proto.ByteSize() - len(proto.features.rows), MAX_REPLY_BYTES)

    def _check_tokens(self, verdict: Verdict) -> None:
        record, tokens = self._record, verdict.tokens
        _hold("verdict.position", verdict.position, verdict.position == record.position, record.position)
        left = record.request.params.max_tokens - len(record.tokens)
        _hold("verdict.tokens", f"{len(tokens)} tokens", 1 <= len(tokens) <= left, f"1 to {left} tokens")
        vocab_size = self._target.vocab_size
        _hold("verdict.tokens", max(tokens), max(tokens) < vocab_size, f"token ids in [0, {vocab_size - 1}]")

    def _check_guesses(self, verdict: Verdict) -> None:
        accepted, tokens = verdict.accepted, len(verdict.tokens)
        _range("verdict.accepted", accepted, min(tokens, verdict.proposed))
        _hold("verdict.accepted", accepted, tokens - accepted <= 1, f"at least {tokens - 1} of {tokens} tokens")
        ahead = max(0, self._sent.guessed_to - verdict.position)
        _range("verdict.offered", verdict.proposed, min(MAX_GAMMA, ahead, verdict.nodes))
        _range("verdict.nodes", verdict.nodes, MAX_NODES if verdict.proposed else 0)
        _range("verdict.left", verdict.remaining_depth, min(MAX_GAMMA, max(0, ahead - tokens)))
        _range("verdict.beside", verdict.accepted_from_branch, accepted)
        seen = [tally.source for tally in verdict.sources]
        _hold("verdict.sources", seen, len(set(seen)) == len(seen), "each once")
        for tally in verdict.sources:
            _hold("verdict.sources.source", tally.source, 1 <= tally.source <= self._sent.sources, "one that guessed")
            _range("verdict.sources.offered", tally.proposed, verdict.proposed)
            _range("verdict.sources.accepted", tally.accepted, accepted)
        if tokens == accepted:
            ends = verdict.finish_reason is not FinishReason.NONE
            _hold("verdict.last", verdict.last.name, ends and verdict.last is TokenKind.NONE, "given, unless it ends")
        else:
            allowed = _LAST[:2] if verdict.proposed else _LAST[2:]
            _hold("verdict.last", verdict.last.name, verdict.last in allowed, [kind.name for kind in allowed])

    def _check_end(self, verdict: Verdict) -> None:
        """Check that the output ends where the request defines its end, and nowhere else."""
        params, reason = self._record.request.params, verdict.finish_reason
        *before, last = verdict.tokens
        _hold("verdict.tokens", "more tokens", not self._stops.intersection(before), "none after a stop")
        full = len(self._record.tokens) + len(verdict.tokens) == params.max_tokens
        if last in self._stops:
            allowed = {FinishReason.STOP}
        elif params.grammar is not None:  # its end is not computed here
            allowed = {FinishReason.STOP, FinishReason.LENGTH if full else FinishReason.NONE}
        else:
            allowed = {FinishReason.LENGTH if full else FinishReason.NONE}
        _hold("verdict.finish_reason", reason.name, reason in allowed, sorted(kind.name for kind in allowed))

    def _check_logprobs(self, verdict: Verdict) -> None:
        wanted = self._record.request.params.logprobs
        _hold(
            "verdict.logprobs",
            f"{len(verdict.logprobs)} entries",
            len(verdict.logprobs) == (0 if wanted is None else len(verdict.tokens)),
            "one per token if asked for, else none",
        )
        for entry in verdict.logprobs:
            counts = (len(entry.top_ids), len(entry.top_logprobs))
            _hold("verdict.logprobs.top_ids", counts, counts == (wanted, wanted), f"{wanted} each")
            highest = max(entry.top_ids, default=0)
            _hold("verdict.logprobs.top_ids", highest, highest < self._target.vocab_size, "token ids")
            for value in (entry.logprob, *entry.top_logprobs):
                _hold("verdict.logprobs", value, -math.inf < value <= _ROUNDING, "finite and at most 0")

    def _check_hidden_states(self, verdict: Verdict) -> None:
        """Check that hidden states reach exactly to the token before the last one."""
        states = verdict.hidden_states
        if states is None:
            return
        end = states.position + len(states.rows) // (2 * states.width)
        wanted = verdict.position + len(verdict.tokens) - 1
        _hold("verdict.features", f"up to {end}", end == wanted, f"up to {wanted}")

    def _checked_timings(self, reported: VerifyTimings, now: float) -> VerifyTimings:
        """Return the reported times, together no longer than the time since the last verdict."""
        _range("verdict.timings.rows", reported.batch_tokens, _MAX_STEP_TOKENS)
        _range("verdict.timings.session_rows", reported.session_tokens, reported.batch_tokens)
        _range("verdict.timings.sessions", reported.sessions, _MAX_STEP_TOKENS)
        _range("verdict.timings.step_tokens", reported.step_tokens, _MAX_STEP_TOKENS)
        _range("verdict.timings.cached_tokens", reported.cached_tokens, self._record.position)
        allowed_us = max(0, int((now - self._accounted_to) * 1e6))
        step_us = min(reported.step_us, allowed_us)
        wait_us = min(reported.wait_us, allowed_us - step_us)
        self._accounted_to += (step_us + wait_us) / 1e6
        return replace(reported, step_us=step_us, wait_us=wait_us)


def _converted(proto: verify.Verdict) -> Verdict:
    try:
        return convert.verdict_from_proto(proto)
    except ValueError as error:  # an unknown enum value
        raise ProtocolViolation(f"verdict: {error}") from error


def _hold(name: str, value: object, holds: bool, limit: object) -> None:
    if not holds:
        raise ProtocolViolation(f"{name} is {shorten(str(value))}, must be {shorten(str(limit))}")


def _range(name: str, value: int, high: int) -> None:
    _hold(name, value, value <= high, f"at most {high}")


def _count(name: str, count: int, high: int) -> None:
    _hold(name, f"{count} entries", count <= high, f"at most {high} entries")


def _size(name: str, size: int, limit: int) -> None:
    _hold(name, f"{size} bytes", size <= limit, f"at most {limit} bytes")
