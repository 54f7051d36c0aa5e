"""Known targets: those that the verifiers of a fleet serve, by the names that clients use."""

from __future__ import annotations

import math
import time
from asyncio import Semaphore
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, replace

from coordinator.workers.target import Target
from outrider.base.aio import until
from outrider.protocol.errors import NotFound, Overloaded, StartupError, Unavailable, shorten

MAX_TARGETS = 64  # each has a tokenizer in memory
_RETRY_MS = 2000
_POLL_S = 0.05
_MAX_WAITING = 512  # requests


@dataclass(frozen=True, slots=True)
class ModelNames:
    """Names that an operator gives to targets."""

    served: str = ""  # of the default target; empty: its own
    default: str = ""  # name or alias of the default target; empty: the first that is known
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, served: str, default: str, aliases: str) -> ModelNames:
        """Read the settings; aliases are NAME=MODEL, separated by commas."""
        pairs = [part.partition("=") for part in aliases.split(",") if part.strip()]
        for name, equals, model in pairs:
            if not (name.strip() and equals and model.strip()):
                raise StartupError.of("alias", name + equals + model, "NAME=MODEL, separated by commas")
        return cls(served, default, {name.strip(): model.strip() for name, _, model in pairs})


class KnownTargets:
    """Targets by identity, in the order in which they became known."""

    def __init__(self, names: ModelNames | None = None) -> None:
        self._names = names or ModelNames()
        self._by_identity: dict[str, Target] = {}
        self._changed_at = time.monotonic()
        self.settle_s = 0.0  # after a change, in which further targets may follow: no name is unknown
        self._may_wait = Semaphore(_MAX_WAITING)

    def __iter__(self) -> Iterator[Target]:
        return iter(list(self._by_identity.values()))

    def of(self, identity: str) -> Target | None:
        return self._by_identity.get(identity)

    @property
    def first(self) -> Target | None:
        return next(iter(self), None)

    def check_any(self) -> None:
        """Raise Unavailable before a target is known."""
        if self.first is None:
            raise Unavailable("no verifier has reported yet; is one starting?", retry_after_ms=_RETRY_MS)

    @property
    def default(self) -> Target | None:
        """Return the target of requests without a model."""
        wanted = self._names.aliases.get(self._names.default, self._names.default)
        if wanted in ("", self._names.served):
            return self.first
        return next((target for target in self if target.info.name == wanted), None)

    @property
    def settles_in_s(self) -> float:
        """Return for how long further targets may follow; 0 or less: none is expected."""
        return self._changed_at + self.settle_s - time.monotonic()

    async def find(self, model: str | None, within_s: float = math.inf) -> Target:
        """Return the target that a request names; wait for it until the fleet has settled, at most `within_s`."""
        if not self._may_wait.locked():
            async with self._may_wait:
                await until(lambda: self._find(model) is not None, min(within_s, self.settles_in_s), _POLL_S)
        return self.named(model)

    def _find(self, model: str | None) -> Target | None:
        return self.listed().get(model) if model else self.default

    def named(self, model: str | None) -> Target:
        """Return the target that a request names; without a name, the default."""
        self.check_any()
        if (found := self._find(model)) is not None:
            return found
        wanted = f"model {shorten(repr(model))}" if model else f"the default model {self._names.default}"
        if self.settles_in_s > 0 or model in (None, "", self._names.served, self._names.default, *self._names.aliases):
            raise Unavailable(f"no verifier of {wanted} has reported yet; is one starting?", retry_after_ms=_RETRY_MS)
        names = ", ".join(self.listed())
        raise NotFound(f"there is no {wanted} here, only {shorten(names)}", field="model", value=model, limit=names)

    def listed(self) -> dict[str, Target]:
        """Return the targets by name, the default first. A target's own name precedes an alias."""
        ordered = sorted(self, key=lambda target: target is not self.default)
        named: dict[str, Target] = {}
        for target in ordered:
            named.setdefault(target.served_name, target)
        own = {target.info.name: target for target in ordered}
        for alias, model in self._names.aliases.items():
            if (meant := named.get(model) or own.get(model)) is not None:
                named.setdefault(alias, meant)
        return named

    def check_room(self, verifiers: Callable[[str], Sized]) -> None:
        """Raise Overloaded if no further target can be added; `verifiers` returns those of a target."""
        if sum(len(verifiers(target.identity)) > 0 for target in self) >= MAX_TARGETS:
            raise Overloaded(f"{MAX_TARGETS} targets are served", field="model", limit=MAX_TARGETS)

    def add(self, target: Target, verifiers: Callable[[str], Sized]) -> None:
        """Add a target, in the place of one of the same name. Others without verifiers are forgotten."""
        known = [target if each.info.name == target.info.name else each for each in self]
        kept = [each for each in known if each is target or verifiers(each.identity)]
        self._by_identity = {each.identity: each for each in (*kept, target)}
        self._changed_at = time.monotonic()
        default = self.default
        for each in self:
            name = (self._names.served if each is default else "") or each.info.name
            if name != each.served_name:
                self._by_identity[each.identity] = replace(each, served_name=name)
