"""Drafter stream: one drafter while it works for a session, its guesses checked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from coordinator.control.estimator import PairEstimate
from coordinator.control.throughput_model import OPEN_NODES, SpeculationPlan
from coordinator.persistence.session_record import SessionRecord
from coordinator.sessions.hidden_states.earlier_states import EarlierProgress
from coordinator.sessions.hidden_states.window import HiddenStateWindow
from coordinator.sessions.seeds import worker_params
from coordinator.sessions.streams import WorkerStream
from coordinator.workers.worker_connection import WorkerConnection
from outrider.observability.tracing import Span
from outrider.protocol import convert, message_limits
from outrider.protocol.errors import InvalidRequest, ProtocolViolation
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.hidden_states.messages import FINAL_STATES, HiddenStates
from outrider.protocol.speculation import MAX_GAMMA, TreeShape
from outrider.v1 import common_pb2 as common
from outrider.v1 import drafter_pb2 as draft

# A drafter that keeps a tree ahead sends a message per subtree, at most 1,667 a second.
_MESSAGE_S = 0.0005  # mean time between two messages: 2,000 a second
_BURST = 256  # messages that may arrive at once
_UNREWARDED_PER_S = 250.0  # messages of a drafter none of whose guesses is accepted
_MAX_UNREWARDED = 2048  # messages above that rate since the last accepted guess
_MAX_MISSED = 64  # commits since then: a slow verifier checks few guesses in the time of so many messages
# A commit can cost a drafter its whole tree, which it then drafts again. Each commit allows that much.
_TOKENS_PER_COMMIT = 2 * OPEN_NODES
_BYTES_PER_COMMIT = 2 * message_limits.MAX_GUESS_BYTES
_JITTER_US = 2_000  # two messages may arrive closer together than they were sent
_COMMITS_KEPT = 16  # a stalled network delivers the guesses for several commits at once
_MAX_UNSENT_TOKENS = 64  # that a drafter without work learns of later


class DraftLimits:
    """The limits on the guesses that a drafter sends and on the drafting time that it reports.

    Each commit allows more guesses, up to a maximum: a fixed number per commit could be sent in full with each of them.
    """

    def __init__(self, now: float) -> None:
        self._allowance = float(_COMMITS_KEPT)  # of guesses, in commits' worth
        self._unrewarded = 0.0
        self._missed = 0  # commits since the last accepted guess
        self._spent_at = now
        self._answered_at = now
        self.asked_at = now  # the time of the last commit or steering

    def renew(self, now: float) -> None:
        """Allow the guesses that follow a commit."""
        self.asked_at = now
        self._missed += 1
        self._allowance = min(_COMMITS_KEPT, self._allowance + 1)

    def reward(self, accepted: int) -> None:
        """Forget the messages and commits before an accepted guess."""
        if accepted:
            self._unrewarded, self._missed = 0.0, 0

    def spend(self, guess: common.Guess, now: float) -> None:
        """Raise InvalidRequest for more guesses than a conforming drafter sends. An empty one counts as a token."""
        self._unrewarded = max(0.0, self._unrewarded - (now - self._spent_at) * _UNREWARDED_PER_S) + 1.0
        self._spent_at = now
        if self._unrewarded > _MAX_UNREWARDED and self._missed > _MAX_MISSED:
            limit = f"at most {_UNREWARDED_PER_S:g} messages a second while none is accepted"
            raise InvalidRequest.of("guesses", f"{_MAX_UNREWARDED} more", limit)
        num_tokens = max(1, len(guess.tokens))
        self._allowance -= max(num_tokens / _TOKENS_PER_COMMIT, guess.ByteSize() / _BYTES_PER_COMMIT)
        if self._allowance < 0:
            limit = f"at most {_TOKENS_PER_COMMIT} tokens and {_BYTES_PER_COMMIT} bytes per commit"
            raise InvalidRequest.of("guesses", f"more than {_COMMITS_KEPT} commits' worth", limit)

    def bound_us(self, draft_us: int, now: float, *, ahead: bool) -> int:
        """Return a reported drafting time, at most that since the drafter could start: ahead, since its last answer."""
        since = self._answered_at if ahead else max(self._answered_at, self.asked_at)
        self._answered_at = now
        return min(draft_us, int((now - since) * 1e6) + _JITTER_US)


class DrafterStream(WorkerStream[draft.DraftRequest, draft.DraftReply]):
    """Stream to a drafter. It receives commits at once, and counts as `joined` after it has opened the session."""

    def __init__(
        self,
        connection: WorkerConnection,
        record: SessionRecord,
        target: ModelInfo,
        span: Span,
        source: int,
        pair: PairEstimate,
        plan: SpeculationPlan,
        *,
        direct: bool = False,
    ) -> None:
        """Prepare the stream; `direct`: the session's verifier in the same process commits and takes the guesses."""
        request, earlier = record.request, EarlierProgress(connection.info.earlier_states)
        self._steering = plan.for_drafter()
        opening = draft.OpenDraft(
            session_id=record.session_id,
            epoch=record.epoch,
            tokens=[*request.prompt, *record.tokens],
            prompt_length=len(request.prompt),
            params=convert.params_to_proto(worker_params(request.params)),
            steer=convert.draft_steering_to_proto(self._steering),
            vocab_size=target.vocab_size,
            cache_salt=request.cache_salt,
            vocabulary_digest=target.vocabulary_digest,
            eos_token_ids=target.eos_token_ids,
            earlier_states=earlier.wanted,
            direct_source=source if direct else 0,
        )
        super().__init__(connection, draft.DraftRequest(open=opening), draft.DraftReply.FromString, span)
        self.source = source
        self.pair = pair
        self.plan = plan
        self.direct = direct
        self.shares_cores = direct  # with the session's verifier; set when it has opened the session
        self.joined = self.wants_hidden_states = False
        self.spec = connection.info.state_spec or FINAL_STATES  # of the hidden states that it reads
        self.received = self.relayed = 0  # the highest node ids: of all guesses, and of those sent to the verifier
        self.passed: common.Guess | None = None  # the newest empty guess: nothing to propose at its position
        self.limits = DraftLimits(time.monotonic())
        self.earlier = earlier
        self._unsent: tuple[int, ...] = ()  # committed tokens
        self._position = 0  # after them
        self._unsent_states: HiddenStateWindow | None = None

    async def guesses(self) -> AsyncIterator[common.Guess]:
        """Yield guesses as received, marked with their source, and record their drafting time.

        Raise ProtocolViolation for one that no conforming drafter sends. Reading is limited to a rate above that of
        any conforming drafter, so that a flood delays only its sender.
        """
        ready_at = time.monotonic()
        while (reply := await self.receive()) is not None:
            now = time.monotonic()
            ready_at = max(ready_at, now - _BURST * _MESSAGE_S) + _MESSAGE_S
            if ready_at > now:
                await asyncio.sleep(ready_at - now)
            if (kind := reply.WhichOneof("message") or "empty") != "guess":
                raise ProtocolViolation(f"{self.connection.info.address} sent a message that is {kind}, not a guess")
            guess = reply.guess
            try:
                message_limits.check_guess(guess)
                self.limits.spend(guess, now)
            except InvalidRequest as error:
                raise ProtocolViolation(error.message) from error
            guess.source = self.source
            guess.draft_us = self.limits.bound_us(guess.draft_us, time.monotonic(), ahead=self.plan.ahead)
            depth = len(guess.tokens)
            if guess.parents:
                depth = TreeShape(tuple(parent - 1 for parent in guess.parents)).depth
            if self.received:  # before the first guess it reads the prompt
                self.pair.observe_draft(depth, guess.draft_us, tree=self.plan.branches > 1)
            yield guess

    def commit(self, position: int, tokens: tuple[int, ...], hidden_states: HiddenStates | None) -> int:
        """Send committed tokens, later if its plan is plain; return the bytes of their hidden states."""
        if self.direct:
            return 0
        self.limits.renew(time.monotonic())
        if self._unsent and len(self._unsent) + len(tokens) > MAX_GAMMA + 1:
            self._send_committed()
        self._unsent += tokens
        self._position = position + len(tokens)
        states = hidden_states if self.joined and self.wants_hidden_states else None
        if states is not None:
            self._unsent_states = self._unsent_states or HiddenStateWindow()
            self._unsent_states.add(states)
        of_prompt = states is not None and states.count > len(tokens)
        if of_prompt or self.plan.gamma or len(self._unsent) >= _MAX_UNSENT_TOKENS:
            self._send_committed()
        return 0 if states is None else len(states.rows)

    def _send_committed(self) -> None:
        committed = draft.Committed(position=self._position - len(self._unsent), tokens=self._unsent)
        states = None if self._unsent_states is None else self._unsent_states.contents()
        if states is not None:
            committed.hidden_states.CopyFrom(convert.hidden_states_to_proto(self.earlier.follow(states)))
        self._unsent, self._unsent_states = (), None
        self.send(draft.DraftRequest(committed=committed))

    def steer(self, plan: SpeculationPlan, drafters: int = 1) -> None:
        before, self._steering = self._steering, plan.for_drafter(drafters)
        if self._steering != before:
            if self._unsent:
                self._send_committed()
            self.limits.asked_at = time.monotonic()
            self.send(draft.DraftRequest(steer=convert.draft_steering_to_proto(self._steering)))
        self.plan = plan
