"""Drafters of one session: attaching, steering, and relaying their guesses.

All feed one guess tree at the verifier. The loss of one costs only its guesses; another is attached once available.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from coordinator.control.drafter_selection import DrafterSelection
from coordinator.control.estimator import BEGINNING, READING, TIMED_OUT, BestDrafter, Estimator, PairEstimate
from coordinator.control.gamma import Controller
from coordinator.control.throughput_model import PLAIN
from coordinator.persistence.pair_history import PairHistoryStore
from coordinator.persistence.session_record import SessionRecord
from coordinator.placement.choice import load_of
from coordinator.sessions.drafter_stream import DrafterStream
from coordinator.sessions.hidden_states.delivery import ProjectionDelivery
from coordinator.sessions.hidden_states.earlier_states import EarlierReply, ask_earlier, relay_earlier
from coordinator.sessions.hidden_states.session_states import SessionStates
from coordinator.sessions.stats import RequestStats
from coordinator.sessions.streams import VerifierStream
from coordinator.sessions.text_kinds.histories import TextHistories
from coordinator.sessions.text_kinds.recognition import TextRecogniser
from coordinator.sessions.verdicts import Refusal
from coordinator.workers.choosers import Accepts, DrafterChooser
from coordinator.workers.worker_connection import WorkerConnection
from coordinator.workers.worker_pool import WorkerPool
from outrider.base.aio import background
from outrider.protocol.errors import InvalidRequest, OutriderError, Overloaded, PeerLost
from outrider.protocol.fleet import ModelInfo, WorkerInfo
from outrider.protocol.hidden_states.messages import StateSpec
from outrider.protocol.speculation import SourceTally, Verdict, VerifySteering
from outrider.v1 import common_pb2 as common

# Of drafters without a network: a draft's start and a tree's level (until measured) in tokens of a chain; such a token
# (until measured) in plain steps; a wait beside the draft's start, ms.
DIRECT_START, DIRECT_LEVEL, DIRECT_TOKEN, DIRECT_WAIT_MS = 3, 5.0, 0.06, 1.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DraftingContext:
    """Components that the drafting of all sessions shares."""

    worker_pool: WorkerPool
    pairs: PairHistoryStore
    gamma_max: int
    drafters: int  # per session at most
    accepts: Accepts | None = None  # None: any that the verifier's hidden states suffice for
    delivery: ProjectionDelivery | None = None  # None: hidden states of layers cannot be asked for


class GuessReceiver(Protocol):
    """Verifier of a session's guesses: the stream to a verifier, or an attached engine."""

    connection: Any  # with `info`, `sessions` and `round_trip_ms`

    def guess(self, guess: common.Guess) -> None: ...

    def steer(self, steering: VerifySteering) -> None: ...


def share_cores(one: WorkerInfo, other: WorkerInfo) -> bool:
    """Return whether two workers report that they run on the CPU of the same machine."""
    same = bool(one.machine) and one.machine == other.machine
    return same and all(worker.model.device in ("", "cpu") for worker in (one, other))


class Drafting:
    """Drafters of one session and the γ control that steers them."""

    def __init__(self, record: SessionRecord, target: ModelInfo, context: DraftingContext, stats: RequestStats) -> None:
        options = record.request.speculation
        self._record = record
        self._states = SessionStates(context.delivery)
        accepts = context.accepts or self._states.accepts
        self._chooser = DrafterChooser(context.worker_pool, target, options.drafter, accepts)
        self._target = target
        self._context = context
        self._stats = stats
        self._positions = max(context.gamma_max, options.gamma or 0)
        single = record.request.params.mode.needs_draft_probs
        self._estimator = Estimator(self._positions)
        self.control = Controller(context.gamma_max, self._estimator, options, single=single)
        stats.control = self.control
        self._selection = DrafterSelection()
        self._verifier: GuessReceiver | None = None
        self._attached: dict[int, DrafterStream] = {}  # by source
        self._best: BestDrafter | None = None  # at the last choice of a plan
        self._text = TextRecogniser(record.request)
        self._histories: dict[int, TextHistories] = {}  # by source
        self._resting = False
        self._sources = 0
        self._passed_at = -1

    def begin_states(self, verifier: WorkerInfo) -> VerifySteering:
        """Return the hidden states that a stream to this verifier asks for from its start."""
        self._states.begin(verifier)
        return self._states.request(self._readable_states()) or VerifySteering()

    @asynccontextmanager
    async def attached_to(self, verifier: GuessReceiver) -> AsyncIterator[None]:
        """Keep drafters attached while this verifier has the session."""
        others, plain = load_of(verifier.connection) - 1, getattr(verifier.connection, "plain_steps", None)
        self._estimator.attach_verifier(verifier.connection.info.load.cost, max(0, others), plain)
        self.control.decide(None)  # its steps are plain until a drafter joins
        self._verifier, self._passed_at, self.control.paying_nodes = verifier, -1, 0
        self._chooser.verifier = verifier.connection.info.worker_id
        places = range(self._context.drafters * self.control.wants_drafter)
        async with background(*(self._keep_drafting(verifier, place) for place in places)):
            try:
                yield
            finally:
                self._verifier = None  # drafters that end from here on steer no verifier

    def commit(self, verdict: Verdict) -> None:
        """Learn from a verdict, send its tokens to the drafters and choose the next plan."""
        awaited = self.control.waits_ms(verdict) > 0 and not verdict.proposed
        tallies = {tally.source: tally for tally in verdict.sources}
        if self.control.plan.gamma or tallies:
            self._selection.observe(verdict.sources)
        for drafter in self._attached.values():
            if drafter.joined:
                tally = tallies.get(drafter.source, SourceTally(drafter.source, 0, 0))
                if drafter.direct:
                    self._observe_direct(drafter, verdict, tally.proposed)
                expected = drafter.plan.gamma > 0 and (awaited or drafter.source in tallies)
                drafter.pair.observe_verdict(tally.proposed, tally.accepted, due=expected)
                drafter.limits.reward(tally.accepted)
        self.control.observe(verdict, self._best)
        if self._record.finished:
            return
        carries_states = verdict.hidden_states is not None or verdict.layer_states
        if carries_states:
            self._states.add(verdict)
        for drafter in self._attached.values():
            states = self._states.of(verdict, drafter.spec) if carries_states else None
            self._stats.hidden_bytes += drafter.commit(verdict.position, verdict.tokens, states)
        if carries_states:
            ask_earlier(self._verifier, self._attached.values(), self._states)
        best, tokens = self._attached.get(self._selection.best or 0), self._record.tokens
        if best is not None and len(tokens) >= self._text.due:
            self._histories[best.source].read(tokens, best.pair, self._estimator.pair, alone=self._sources == 1)
        due = self.control.due or len(self._attached) > 1 or self._resting != self.control.resting
        (self._steer if due and self._attached else self._forward_pass)()

    def _observe_direct(self, drafter: DrafterStream, verdict: Verdict, proposed: int) -> None:
        """Learn how long a drafter without a network took, or took longer than."""
        timings, tree = verdict.timings, drafter.plan.branches > 1
        drafter.pair.observe_draft(verdict.proposed + DIRECT_START, timings.draft_us, tree=tree)
        self._stats.record_guessed(drafter.source, proposed, timings.draft_us)
        late = 0.0 < TIMED_OUT * self.control.wait_timeout_ms <= timings.wait_us / 1000 and not verdict.proposed
        drafter.pair.late = drafter.pair.late + 1 if late and drafter.plan.gamma else 0
        # Before, it may read the prompt; and other load delays it on a CPU.
        if drafter.pair.late > BEGINNING and drafter.connection.info.model.device not in ("", "cpu"):
            drafter.pair.observe_late_draft(drafter.plan.gamma + DIRECT_START, timings.wait_us, tree=tree)

    def receive(self, reply: Refusal | EarlierReply) -> None:
        """Detach the drafter whose guess the verifier refused, or whose projection it lacks; pass earlier states on."""
        if isinstance(reply, EarlierReply):
            self._stats.hidden_bytes += relay_earlier(self._attached.values(), reply)
        elif digest := self._states.missing(reply.error):
            for each in self._attached.values():
                if each.spec.projection == digest:
                    each.cancel(PeerLost("the verifier does not have its projection"))
        elif (drafter := self._attached.get(reply.source)) is not None:
            reason = f"the verifier refuses its guesses: {reply.error.message}"
            self._chooser.exclude(drafter.connection.info, reason)
            drafter.cancel(InvalidRequest(reason))

    async def _keep_drafting(self, verifier: GuessReceiver, place: int) -> None:
        """Attach one drafter after another to this place."""
        while True:
            if (connection := await self._chooser.wait_for(place, verifier.connection.info.address)) is None:
                continue
            try:
                with self._chooser.in_use(connection):
                    await self._run_one_drafter(verifier, connection)
            except OutriderError as error:
                self._chooser.record_loss(connection, error)
                if not isinstance(error, Overloaded):  # a full one was never attached
                    log.info("drafter lost", error=error.message)
            finally:
                self._want_hidden_states()
                self._steer()

    async def _run_one_drafter(self, verifier: GuessReceiver, connection: WorkerConnection) -> None:
        model = connection.info.model.fingerprint
        histories = TextHistories(self._context.pairs, self._target.fingerprint, model, self._text)
        await histories.recall()
        pair = PairEstimate(self._positions)
        options = self._record.request.speculation
        adaptive = options.gamma is None and not options.ahead
        linked = verifier if isinstance(verifier, VerifierStream) and self._can_link(verifier, connection) else None
        may_wait = linked is None or not self._text.cold or self._estimator.shared
        first_beside = share_cores(verifier.connection.info, connection.info) and not self._attached
        if adaptive and may_wait and first_beside:

            def pay() -> bool:
                return self.control.would_guess(_best_drafter(verifier, connection, pair, shares_cores=True))

            await histories.until_promising(self._record.tokens, pair, self._estimator, pay, self._want_hidden_states)
        source = self._sources = self._sources + 1
        if linked is not None:
            linked.expect_direct(source)
        pair.link(direct=linked is not None, trust=self._text.cold)
        if self._context.drafters == 1:
            self._estimator.attach_drafter(connection.direct_waits if linked else None, trust=self._text.cold)
        span = self._stats.span.child("draft", connection.attributes)
        async with DrafterStream(
            connection, self._record, self._target, span, source, pair, self.control.plan, direct=linked is not None
        ) as drafter:
            self._attached[source], self._histories[source] = drafter, histories
            try:
                opened = await drafter.opened()
                drafter.shares_cores = drafter.direct or share_cores(verifier.connection.info, connection.info)
                self._join(drafter, opened.opened.hidden_states)
                async for guess in drafter.guesses():
                    self._relay(verifier, drafter, guess)
                if not connection.info.draining:
                    raise PeerLost(f"{connection.info.address} ended the stream before the session ended")
            except OutriderError as error:
                if drafter.joined:
                    self._stats.record_drafter_loss(error)
                raise
            finally:
                self._leave(drafter)

    def _can_link(self, verifier: VerifierStream, drafter: WorkerConnection) -> bool:
        """Return whether both are one process, and no other drafter needs what the verifier hands to this one."""
        info, alone = drafter.info, self._context.drafters == 1
        return alone and info.address == verifier.connection.info.address and info.state_spec is None

    def _join(self, drafter: DrafterStream, wants_hidden_states: bool) -> None:
        drafter.connection.record_success()
        alone = not any(other.joined for other in self._attached.values())
        self._histories[drafter.source].start(drafter.pair, self._estimator.pair, alone=alone)
        drafter.joined = True
        drafter.wants_hidden_states = wants_hidden_states
        self._stats.record_drafter(drafter.source, drafter.connection.info.kind)
        self._selection.add(drafter.source, drafter.pair.accepted_tokens, drafter.pair.proposal_rate.value)
        self._want_hidden_states()
        if wants_hidden_states and (known := self._states.known(drafter.spec)) is not None:
            self._stats.hidden_bytes += drafter.commit(self._record.position, (), known)
        self._steer()

    def _relay(self, verifier: GuessReceiver, drafter: DrafterStream, guess: common.Guess) -> None:
        """Send a guess on, unless its first token came too late and was wrong, or it follows such a guess."""
        self._stats.record_guess(guess)
        late = self._record.position - guess.position
        useful = guess.parent <= drafter.relayed or guess.parent > drafter.received  # unknown parents are refused there
        last_id = guess.first_id + len(guess.tokens) - 1
        drafter.received = max(drafter.received, last_id)
        if not guess.tokens:
            if late < 0:  # after guesses that are open: no more of them before the next commit
                guess.position, guess.parent = self._record.position, 0
            if useful:
                drafter.passed = guess
                self._forward_pass()
            return
        if guess.parent == 0 and late > 0:  # its position was committed before it arrived
            committed = self._record.tokens[-late] if late <= len(self._record.tokens) else None
            for pair in (drafter.pair, self._estimator.pair):
                pair.observe_late_guess(hit=guess.tokens[0] == committed)
            parents = guess.parents or [0]  # of a chain, the first token's alone
            useful = committed in [token for token, parent in zip(guess.tokens, parents, strict=False) if parent == 0]
        if useful:
            drafter.relayed = max(drafter.relayed, last_id)
            verifier.guess(guess)

    def _leave(self, drafter: DrafterStream) -> None:
        """Detach a drafter and store its pair history."""
        del self._attached[drafter.source]
        self._selection.remove(drafter.source)
        histories = self._histories.pop(drafter.source)
        reading: float | None = None
        chosen = drafter.joined and drafter.shares_cores and self._record.request.speculation.gamma is None
        if chosen and not self._estimator.shared:  # beside others, guesses are judged anew
            reading = 0.0 if drafter.direct and self._text.cold else READING
        histories.remember(drafter.pair, self._estimator.pair, alone=self._sources == 1, reading=reading)

    def _steer(self) -> None:
        """Choose a plan and send what changed to verifier and drafters."""
        if (verifier := self._verifier) is None:
            return
        self._best = None
        if (best := self._attached.get(self._selection.best or 0)) is not None:
            self._stats.drafter_kind = best.connection.info.kind
            self._best = _best_drafter(verifier, best.connection, best.pair, shares_cores=best.shares_cores)
        steering = self.control.decide(self._best)
        plan = self.control.plan
        if steering is not None:
            if log.is_enabled_for(logging.DEBUG):  # the alternatives take a millisecond to compute
                considered = {each.plan.label: round(each.tokens_per_s, 1) for each in self.control.best_per_mode()}
                wait_ms = round(self.control.wait_timeout_ms, 1)
                log.debug("plan changed", plan=plan.label, wait_ms=wait_ms, considered=considered)
            verifier.steer(steering)
        for source, gamma in self._selection.gammas(plan.gamma).items():
            self._attached[source].steer(plan if gamma else PLAIN, len(self._attached))
        if self._resting != self.control.resting:
            self._resting = self.control.resting
            self._want_hidden_states()
        self._forward_pass()

    def _forward_pass(self) -> None:
        """End the verifier's wait with an empty guess once no drafter that may guess has one."""
        asked = [drafter.passed for drafter in self._attached.values() if drafter.joined and drafter.plan.gamma]
        passed = [guess for guess in asked if guess is not None]
        if not passed or len(passed) < len(asked):
            return
        first = min(passed, key=lambda guess: guess.position)
        if self._verifier is not None and first.position >= max(self._record.position, self._passed_at + 1):
            self._passed_at = first.position
            self._verifier.guess(first)

    def _want_hidden_states(self) -> None:
        if self._verifier is not None and (steering := self._states.request(self._readable_states())) is not None:
            self._verifier.steer(steering)

    def _readable_states(self) -> list[StateSpec]:
        """Return what the attached drafters read, unless they rest, then what available ones would."""
        attached = [each.spec for each in self._attached.values() if each.wants_hidden_states and not self._resting]
        return [*attached, *self._chooser.readable_states(self._context.drafters * self.control.wants_drafter)]


def _best_drafter(
    verifier: GuessReceiver, drafter: WorkerConnection, pair: PairEstimate, *, shares_cores: bool
) -> BestDrafter:
    if not pair.direct:
        round_trips_ms, level_ms = verifier.connection.round_trip_ms + drafter.round_trip_ms, pair.level_ms.value
        return BestDrafter(round_trips_ms, pair.draft_ms.value or level_ms, level_ms or None, shares_cores)
    cost = verifier.connection.info.load.cost
    draft_ms = pair.draft_ms.value or (DIRECT_TOKEN * cost.at(1) if cost.rows else 0.0)
    level_ms = pair.level_ms.value or DIRECT_LEVEL * draft_ms
    return BestDrafter(DIRECT_WAIT_MS + DIRECT_START * draft_ms, draft_ms, level_ms, shares_cores)
