"""Registry of the drafting methods by name. Each module of this package registers its factories."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from drafter.interface import Drafter
from outrider.models.drafter_choice import drafter_kinds
from outrider.protocol.errors import StartupError
from outrider.settings.drafter import DrafterSettings

Factory = Callable[[DrafterSettings, Callable[[str], None]], Drafter]

_factories: dict[str, Factory] = {}


def drafter(name: str) -> Callable[[Factory], Factory]:
    """Register a factory of a drafting method."""

    def register(factory: Factory) -> Factory:
        _factories[name] = factory
        return factory

    return register


def make(settings: DrafterSettings, progress: Callable[[str], None]) -> Drafter:
    """Build the drafter of `settings.kind`; several kinds joined by + are blended."""
    names = settings.kind.split("+")
    for name in names:
        if name not in drafter_kinds():
            raise StartupError.of("kind", settings.kind, f"one of {', '.join(sorted(drafter_kinds()))}")
        # Of these kinds only: a drafter without a model must not load torch.
        importlib.import_module(f"drafter.methods.{name.replace('-', '_')}")
    if len(set(names)) < len(names):
        raise StartupError("drafter kind given twice", field="kind", value=settings.kind, limit="each kind once")
    members = {name: _factories[name](settings, progress) for name in names}
    if len(members) == 1:
        return members[names[0]]
    from drafter.blend.blend import BlendDrafter  # here, since one kind alone does not need it

    return BlendDrafter(members)
