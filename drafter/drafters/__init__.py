"""The ways to draft. Each is one file here that registers a class under its name; nothing else needs to know of it."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from drafter.calibration import Calibration
from drafter.grammar import Rails
from drafter.settings import DrafterSettings
from outrider.errors import StartupError
from outrider.messages import MAX_GAMMA, Distribution, Features, ModelInfo, SamplingParams
from outrider.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Ask:
    """Where one session stands: continue `tokens` by up to `room` tokens.

    The first `committed` of them are final, the rest are the longest chain of
    this drafter's own open guesses; `prompt_length` of them are the prompt. A
    drafter may answer with fewer tokens and will be asked again for the rest.

    One that branches looks at all open guesses, `open_tokens`, where guess i
    hangs from guess `open_parents[i]` (−1: from what is committed). It may
    give a place up to `branches` children, no more than `budget` new guesses
    in all, and none deeper than `depth` past what is committed.
    """

    session: str
    tokens: Sequence[int]
    committed: int
    prompt_length: int
    room: int
    params: SamplingParams
    vocab_size: int
    cache_salt: str = ""
    open_tokens: tuple[int, ...] = ()
    open_parents: tuple[int, ...] = ()
    branches: int = 1
    budget: int = MAX_GAMMA
    depth: int = MAX_GAMMA
    share: int = 1  # of a tree, to be added per level at least
    features: tuple[Features, ...] = ()  # the target's hidden states that came since the last ask
    calibration: Calibration = field(default_factory=Calibration, compare=False)  # of this drafter's shares
    rails: Rails | None = field(default=None, compare=False)  # through the session's grammar


@dataclass(frozen=True, slots=True)
class Draft:
    """More guesses: a chain that goes on where `Ask.tokens` ends, or a tree.

    In a tree token i hangs from `parents[i]`: −1 for what was committed, then
    the open guesses of the ask in their order, then this draft's own tokens.
    `done`: nothing more is to be had until something is committed.
    """

    tokens: tuple[int, ...] = ()
    draft_probs: tuple[Distribution, ...] = ()
    done: bool = False
    parents: tuple[int, ...] = ()


class Drafter(Protocol):
    """One instance serves all sessions, in one thread."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The vocabulary it speaks; None if any will do."""
        ...

    @property
    def wants_features(self) -> bool:
        """Whether it builds on the target's hidden states."""
        ...

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        """One draft per ask, in order. In rejection and block mode every token must have been drawn from the
        distribution given with it, and none that was drawn may be left out."""
        ...

    def forget(self, session: str) -> None:
        """The session has ended."""
        ...


Factory = Callable[[DrafterSettings, Callable[[str], None]], Drafter]
FactoryT = TypeVar("FactoryT", bound=Factory)
_factories: dict[str, Factory] = {}


def drafter(name: str) -> Callable[[FactoryT], FactoryT]:
    """Register a way to draft."""

    def register(factory: FactoryT) -> FactoryT:
        _factories[name] = factory
        return factory

    return register


def _import(name: str) -> None:
    """Load the module of one kind, so that a drafter that runs no model loads no torch."""
    module = f"{__name__}.{name.replace('-', '_')}"
    if name.replace("-", "").isidentifier() and importlib.util.find_spec(module) is not None:
        importlib.import_module(module)


def kinds() -> list[str]:
    """Return the names of all drafters; loads every one of them."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return sorted(_factories)


def make(settings: DrafterSettings, progress: Callable[[str], None]) -> Drafter:
    """The drafter of a kind; of several joined by + one that blends them."""
    names = settings.kind.split("+")
    for name in names:
        _import(name)
        if name not in _factories:
            raise StartupError(
                f"there is no drafter {name!r}", field="kind", value=settings.kind, limit=", ".join(kinds())
            )
    if len(set(names)) < len(names):
        raise StartupError("a drafter is named twice", field="kind", value=settings.kind, limit="each once")
    members = {name: _factories[name](settings, progress) for name in names}
    if len(members) == 1:
        return members[names[0]]
    from drafter.drafters.blend import BlendDrafter  # it imports what stands above

    return BlendDrafter(members)
