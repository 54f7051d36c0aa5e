"""The drafters of one session: attached, told, steered, and their guesses relayed.

All feed one guess tree at the verifier. Losing one costs its guesses and
nothing else: another is attached when there is one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import structlog

from coordinator.control.drafter_selection import DrafterSelection
from coordinator.control.estimator import Estimator, PairEstimate, PairHistory
from coordinator.control.gamma import Controller, FixedChoices
from coordinator.control.throughput_model import PLAIN, SpeculationPlan
from coordinator.persistence.pair_history import PairHistoryStore
from coordinator.persistence.session_record import SessionRecord
from coordinator.sessions.attached_drafter import AttachedDrafter
from coordinator.sessions.hidden_states import HiddenStateWindow
from coordinator.sessions.seeds import drafter_params
from coordinator.sessions.stats import RequestStats
from coordinator.sessions.streams import DrafterStream, VerifierStream
from coordinator.sessions.verdicts import Refusal
from coordinator.workers.target import Target
from coordinator.workers.worker_pool import LOOK_EVERY_S, WorkerConnection, WorkerPool
from outrider.base.aio import background
from outrider.protocol import convert
from outrider.protocol.errors import InvalidRequest, OutriderError, PeerLost, ProtocolViolation
from outrider.protocol.fleet import Role, WorkerInfo
from outrider.protocol.speculation import Steering, Verdict
from outrider.v1 import common_pb2 as common
from outrider.v1 import drafter_pb2 as draft

log = structlog.get_logger(__name__)

DRAFTER_WAIT_S = 3600.0
LOOK_FOR_MORE_S = 1.0  # for a drafter beside another: a newcomer is noticed at once all the same


@dataclass(frozen=True, slots=True)
class DraftingContext:
    """What drafting has to work with."""

    roster: WorkerPool
    pairs: PairHistoryStore
    gamma_max: int
    drafters: int  # per session at most


def share_cores(one: WorkerInfo, other: WorkerInfo) -> bool:
    """Whether two workers run on the CPU of the same machine, as far as they tell."""
    same = bool(one.machine) and one.machine == other.machine
    return same and all(worker.model.device in ("", "cpu") for worker in (one, other))


class Drafting:
    def __init__(self, record: SessionRecord, target: Target, means: DraftingContext, stats: RequestStats) -> None:
        wish = record.request.wish
        self._record = record
        self._wish = wish
        self._target = target
        self._means = means
        self._stats = stats
        self._positions = max(means.gamma_max, wish.gamma or 0)
        wishes = FixedChoices(wish.gamma, wish.patience_us, wish.branches, wish.ahead)
        single = record.request.params.mode.needs_draft_probs
        self._control = Controller(means.gamma_max, Estimator(self._positions), wishes, single=single)
        stats.control = self._control
        self._selection = DrafterSelection()
        self._window = HiddenStateWindow()
        self._verifier: VerifierStream | None = None
        self._attached: dict[int, AttachedDrafter] = {}  # by source
        self._sources = 0
        self._models: set[str] = set()  # fingerprints of those attached and those that are about to be
        self._shunned: set[str] = set()  # drafters that sent this session nonsense
        self._features_on = False
        self._passed_at = -1

    @property
    def plan(self) -> SpeculationPlan:
        return self._control.plan

    @property
    def wants_features(self) -> bool:
        """Whether somebody attached builds on the target's hidden states, or may soon be."""
        if any(drafter.wants_features for drafter in self._attached.values()):
            return True
        room = len(self._models) < self._places
        return room and self._means.roster.choose(Role.DRAFTER, self._builds_on_features) is not None

    # What the session says.

    @asynccontextmanager
    async def beside(self, verifier: VerifierStream, *, features: bool) -> AsyncIterator[None]:
        """Have drafters attached whenever there are any, for as long as this verifier has the session."""
        self._verifier = verifier
        self._window.clear()
        self._features_on = features
        self._passed_at = -1
        load = verifier.link.info.load
        self._control.estimator.attach_verifier(load.cost, load.sessions)
        try:
            async with background(*(self._keep_drafting(verifier, place) for place in range(self._places))):
                yield
        finally:
            self._verifier = None

    def judged(self, verdict: Verdict) -> None:
        """Learn from a verdict."""
        awaited = self._control.wait_timeout_ms > 0 and not verdict.offered
        tallies = {tally.source: tally for tally in verdict.sources}
        for drafter in self._joined:
            drafter.judged(tallies.get(drafter.source), awaited=awaited)
        if self._control.plan.gamma or tallies:
            self._selection.observe(verdict.sources)
        self._control.observe(verdict)

    def committed(self, verdict: Verdict) -> None:
        """Pass on what is final, and let γ follow."""
        if verdict.features is not None and self._features_on:
            self._window.add(verdict.features)
        now = time.monotonic()
        for drafter in self._attached.values():
            self._stats.feature_bytes += drafter.committed(verdict.position, verdict.tokens, verdict.features, now)
        self._steer()

    def refused(self, refusal: Refusal) -> None:
        """The verifier says that somebody sends nonsense."""
        drafter = self._attached.get(refusal.source)
        if drafter is not None:
            worker_id = drafter.link.info.worker_id
            self._shunned.add(worker_id)
            drafter.hang_up(ProtocolViolation(f"the verifier refuses its guesses: {refusal.error.message}"))

    # One drafter's time.

    async def _keep_drafting(self, verifier: VerifierStream, place: int) -> None:
        """One drafter after the other, for ever."""
        look_every_s = LOOK_FOR_MORE_S if place else LOOK_EVERY_S
        while True:
            link = await self._means.roster.wait_for(DRAFTER_WAIT_S, self._choose, look_every_s=look_every_s)
            if link is None:
                continue
            model = link.info.model.fingerprint
            self._models.add(model)
            try:
                await self._with_one_drafter(verifier, link)
            except OutriderError as error:
                log.info("drafter lost", error=error.message)
                if isinstance(error, InvalidRequest | ProtocolViolation):
                    self._shunned.add(link.info.worker_id)
                if isinstance(error, ProtocolViolation):
                    self._means.roster.shunning.report(link.info, error.message)
                self._stats.lost_drafter(error)
                link.failed()
            finally:
                self._models.discard(model)
                self._ask_for_features()
                self._steer()

    async def _with_one_drafter(self, verifier: VerifierStream, link: WorkerConnection) -> None:
        history = await self._means.pairs.recall(self._target.info.fingerprint, link.info.model.fingerprint)
        self._sources += 1
        source = self._sources
        span = self._stats.span.child("draft", link.attributes)
        async with DrafterStream(link, self._opening(), source, span) as hop:
            drafter = AttachedDrafter(hop, source, PairEstimate(self._positions), self._control.plan, time.monotonic())
            self._attached[source] = drafter
            try:
                opened = await hop.opened()
                self._join(drafter, opened.opened.features, history)
                async for guess in hop.guesses():
                    self._relay(verifier, drafter, guess)
                if not link.info.draining:
                    raise PeerLost(f"{link.info.address} ended the stream while there was something to guess")
            finally:
                self._leave(drafter)

    def _join(self, drafter: AttachedDrafter, wants_features: bool, history: PairHistory | None) -> None:
        drafter.link.worked()
        self._begin_from(drafter, history)
        drafter.joined = True
        drafter.wants_features = wants_features
        self._stats.attached(drafter.source, drafter.link.info.kind)
        self._selection.add(drafter.source, drafter.pair.accepted_tokens, drafter.pair.proposal_rate)
        self._ask_for_features()
        held = self._window.held()
        if wants_features and held is not None:
            self._stats.feature_bytes += drafter.committed(self._record.position, (), held, time.monotonic())
        self._steer()

    def _begin_from(self, drafter: AttachedDrafter, history: PairHistory | None) -> None:
        """The pair begins from what it has shown before; so does γ, unless those at work promise more."""
        pair, together = drafter.pair, self._control.estimator.pair
        if history is not None:
            pair.start_from(history)
        expected = pair.accepted_tokens * pair.proposal_rate
        if self._joined and expected > together.accepted_tokens * together.proposal_rate:
            together.start_from(history or PairHistory())
        elif not self._joined and history is not None:
            together.start_from(history)

    def _relay(self, verifier: VerifierStream, drafter: AttachedDrafter, guess: common.Guess) -> None:
        drafter.guessed(guess, time.monotonic())
        self._stats.guessed(guess)
        self._see_whether_late(drafter, guess)
        if guess.tokens:
            verifier.guess(guess)
        else:
            self._pass_on()

    def _see_whether_late(self, drafter: AttachedDrafter, guess: common.Guess) -> None:
        """What was committed before a guess came judges it here."""
        at = guess.position - len(self._record.request.prompt)
        if guess.parent == 0 and guess.tokens and 0 <= at < len(self._record.tokens):
            hit = self._record.tokens[at] == guess.tokens[0]
            drafter.pair.observe_late_guess(hit=hit)
            self._control.estimator.pair.observe_late_guess(hit=hit)

    def _leave(self, drafter: AttachedDrafter) -> None:
        del self._attached[drafter.source]
        self._selection.remove(drafter.source)
        if drafter.pair.checked_steps:
            target, model = self._target.info.fingerprint, drafter.link.info.model.fingerprint
            together = self._control.estimator.pair.history()
            own = drafter.pair.history()
            if self._sources == 1:  # what all showed together is what it showed: first guesses told from runners-up
                own = replace(own, acceptance=together.acceptance)
            shown = replace(
                own,
                tree_gain=together.tree_gain,
                ahead_gain=together.ahead_gain,
                tree_rows=together.tree_rows,
                paces=together.paces,
            )
            self._means.pairs.remember(target, model, shown)

    # Steering.

    @property
    def _joined(self) -> list[AttachedDrafter]:
        return [drafter for drafter in self._attached.values() if drafter.joined]

    def _steer(self) -> None:
        """Let control decide; tell both ends what changed."""
        verifier = self._verifier
        if verifier is None:
            return
        round_trips_ms = verifier.link.round_trip_ms
        best = self._attached.get(self._selection.best or 0)
        if best is not None:
            round_trips_ms += best.link.round_trip_ms
            self._control.estimator.pair.draft_ms = best.pair.draft_ms
            self._control.estimator.pair.level_ms = best.pair.level_ms
            self._control.shared_cores = share_cores(verifier.link.info, best.link.info)
            self._stats.drafter_kind = best.link.info.kind
        steering = self._control.decide(round_trips_ms, attached=best is not None)
        plan = self._control.plan
        if steering is not None:
            self._tell_of_plan()
            verifier.steer(steering)
        now = time.monotonic()
        for source, gamma in self._selection.gammas(plan.gamma).items():
            self._attached[source].steer(plan if gamma else PLAIN, now)
        self._pass_on()

    def _tell_of_plan(self) -> None:
        if not log.is_enabled_for(logging.DEBUG):
            return  # what else was considered takes a millisecond to find
        considered = {choice.plan.label: round(choice.tokens_per_s, 1) for choice in self._control.best_per_mode()}
        log.debug("plan", plan=self._control.plan.label, considered=considered)

    def _pass_on(self) -> None:
        """Once everybody who may guess has nothing to guess, the verifier need not wait."""
        asked = [drafter.passed for drafter in self._joined if drafter.plan.gamma]
        passed = [guess for guess in asked if guess is not None]
        if not passed or len(passed) < len(asked):
            return
        first = min(passed, key=lambda guess: guess.position)
        if self._verifier is not None and first.position >= max(self._record.position, self._passed_at + 1):
            self._passed_at = first.position
            self._verifier.guess(first)

    def _ask_for_features(self) -> None:
        wanted = self.wants_features
        if self._verifier is None or wanted == self._features_on:
            return
        self._features_on = wanted
        self._verifier.steer(Steering(features=wanted))
        if not wanted:
            self._window.clear()

    # Choosing and opening.

    @property
    def _places(self) -> int:
        return self._means.drafters if self._control.wants_drafter else 0

    def _choose(self) -> WorkerConnection | None:
        return self._means.roster.choose(Role.DRAFTER, self._fits)

    def _fits(self, link: WorkerConnection) -> bool:
        """Never two of one model. One more is a luxury: it must have room."""
        return (
            self._wish.drafter in ("", link.info.kind)
            and link.info.worker_id not in self._shunned
            and link.info.model.fingerprint not in self._models
            and (not self._models or link.occupancy() < 1.0)
        )

    def _builds_on_features(self, link: WorkerConnection) -> bool:
        return link.info.features and self._fits(link)

    def _opening(self) -> draft.OpenDraft:
        request = self._record.request
        return draft.OpenDraft(
            session_id=self._record.session_id,
            epoch=self._record.epoch,
            tokens=[*request.prompt, *self._record.tokens],
            prompt_length=len(request.prompt),
            params=convert.params_to_proto(drafter_params(self._record, self._sources)),
            steer=convert.steering_to_proto(self._control.plan.for_drafter()),
            vocab_size=self._target.info.vocab_size,
            cache_salt=request.cache_salt,
            vocabulary_digest=self._target.info.vocabulary_digest,
            eos_token_ids=self._target.info.eos_token_ids,
        )
