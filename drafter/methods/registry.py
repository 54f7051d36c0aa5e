"""Registry of the drafting methods by name. Each module of this package registers its factories."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

from drafter import methods
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
        module = f"{methods.__name__}.{name.replace('-', '_')}"
        if name.replace("-", "").isidentifier() and importlib.util.find_spec(module) is not None:
            importlib.import_module(module)  # of these kinds only: a drafter without a model must not load torch
        if name not in _factories:
            raise StartupError.of("kind", settings.kind, f"one of {', '.join(sorted(drafter_kinds()))}")
    if len(set(names)) < len(names):
        raise StartupError("drafter kind given twice", field="kind", value=settings.kind, limit="each kind once")
    members = {name: _factories[name](settings, progress) for name in names}
    if len(members) == 1:
        return members[names[0]]
    from drafter.blend.blend import BlendDrafter  # here, since one kind alone does not need it

    return BlendDrafter(members)
