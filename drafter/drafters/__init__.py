"""The ways to draft. Each is one file here that registers a class under its name; nothing else needs to know of it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from drafter.settings import DrafterSettings
from outrider.errors import StartupError
from outrider.messages import Distribution, ModelInfo, SamplingParams
from outrider.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Ask:
    """Where one session stands: continue `tokens` by up to `room` tokens.

    The first `committed` of them are final, the rest are this drafter's own
    open guesses; `prompt_length` of them are the prompt. A drafter may answer
    with fewer tokens and will be asked again for the rest.
    """

    session: str
    tokens: Sequence[int]
    committed: int
    prompt_length: int
    room: int
    params: SamplingParams
    vocab_size: int
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Draft:
    """More of a session's chain. `done`: nothing more is to be had until something is committed."""

    tokens: tuple[int, ...] = ()
    draft_probs: tuple[Distribution, ...] = ()
    done: bool = False


class Drafter(Protocol):
    """One instance serves all sessions, in one thread."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The vocabulary it speaks; None if any will do."""
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


def kinds() -> list[str]:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return sorted(_factories)


def make(settings: DrafterSettings, progress: Callable[[str], None]) -> Drafter:
    if settings.kind not in kinds():
        raise StartupError(
            f"there is no drafter {settings.kind!r}", field="kind", value=settings.kind, limit=", ".join(kinds())
        )
    return _factories[settings.kind](settings, progress)
