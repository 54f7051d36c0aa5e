"""Targets of one `outrider up`: several models, each with verifiers and drafters of its own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from outrider.base.config import PREFIX, option
from outrider.launch.options import DRAFTER_FORMS
from outrider.models.drafter_choice import AUTO, choose_drafter
from outrider.models.hub import DEFAULT, DEFAULT_NAME
from outrider.protocol.errors import StartupError

Targets = Annotated[
    list[str] | None,
    option(
        "--target",
        "Target model: a directory, a .gguf file, a hub id, or 'default', which is the default. Repeatable, as MODEL "
        "or NAME=MODEL: clients choose one by its name, and the first answers requests without a model.",
        metavar="[NAME=]MODEL",
    ),
]
Drafters = Annotated[
    list[str] | None,
    option(
        "--drafter",
        f"{DRAFTER_FORMS}; this is the default. Repeatable; NAME= in front: only for the target of this name, "
        "otherwise for each.",
        metavar="[NAME=]KIND[:MODEL]",
    ),
]
REPEATED = frozenset({"target", "drafter"})  # flags whose values a file may list


@dataclass(frozen=True, slots=True)
class TargetPlan:
    """One target to start: the model, its name for clients (empty: its own), and its drafters as (kind, model)."""

    model: str
    name: str = ""
    drafters: tuple[tuple[str, str], ...] = ()


def planned(targets: Sequence[str] | None, drafters: Sequence[str] | None, number: int, engine: str) -> dict[str, Any]:
    """Return the fields of a launch plan for these flags; raise StartupError for flags that do not fit."""
    first, *others = plan_targets(_values("TARGET", targets), _values("DRAFTER", drafters), number, engine)
    return {"target": first.model, "name": first.name, "drafters": first.drafters, "others": tuple(others)}


def worker_settings(targets: Iterable[TargetPlan], verifiers: int, own: int) -> tuple[list[dict[str, Any]], ...]:
    """Return the settings in which the workers of several targets differ: of the verifiers and of the drafters."""
    verifying, drafting = [], []
    for target in targets:
        first = "".join(":".join(filter(None, each)) for each in target.drafters[:own])
        verifying += [{"target": target.model, "served_model_name": target.name, "own_drafter": first}] * verifiers
        drafting += [{"target": target.model, "kind": kind, "model": model} for kind, model in target.drafters[own:]]
    return verifying, drafting


def plan_targets(targets: Sequence[str], drafters: Sequence[str], number: int, engine: str) -> tuple[TargetPlan, ...]:
    """Return the targets with `number` drafters of each given kind."""
    plans = [_read_target(text) for text in targets or (DEFAULT,)]
    names = [plan.name or _own_name(plan.model) for plan in plans]
    if len(plans) > 1:
        plans = [replace(plan, name=name) for plan, name in zip(plans, names, strict=True)]
        _refuse_repeated("name", names)
        paths = [Path(os.path.expanduser(plan.model)) for plan in plans]
        _refuse_repeated("model", [str(path.resolve() if path.exists() else path) for path in paths])
    given = [_read_drafter(text, names) for text in drafters or (AUTO,)]
    chosen = {own: [text for name, text in given if name in ("", own)] or [AUTO] for own in names}
    return tuple(
        replace(plan, drafters=tuple(_drafter_for(engine, it, plan.model) for it in chosen[own] for _ in range(number)))
        for plan, own in zip(plans, names, strict=True)
    )


def _values(name: str, given: Sequence[str] | None) -> Sequence[str]:
    """Return the values of a flag. Its variable has one per line, for a value may contain spaces."""
    variable = os.environ.get(PREFIX + name, "")
    lines = [line.strip() for line in variable.splitlines() if line.strip()]
    return lines if given == variable.split() else given or ()


def _read_target(text: str) -> TargetPlan:
    """Return the target of NAME=MODEL or MODEL; a path may contain an equals sign."""
    name, equals, model = text.partition("=")
    if not (equals and name and model) or "/" in name or Path(os.path.expanduser(text)).exists():
        return TargetPlan(text)
    return TargetPlan(model, name)


def _read_drafter(text: str, names: Iterable[str]) -> tuple[str, str]:
    """Return the name of a drafter's target, empty for each, and the choice of the drafter."""
    name, equals, choice = text.partition("=")
    return (name, choice) if equals and name in names else ("", text)


def _own_name(model: str) -> str:
    if model == DEFAULT:
        return DEFAULT_NAME
    path = Path(os.path.expanduser(model))
    if not path.exists():
        return model  # a hub id
    return path.stem if path.suffix == ".gguf" else path.resolve().name


def _refuse_repeated(what: str, given: Sequence[str]) -> None:
    for each in (each for each in given if given.count(each) > 1):
        message = f"two targets have the {what} {each}; give each its own: --target NAME=MODEL"
        raise StartupError(message, field="target", value=each)


def _drafter_for(engine: str, drafter: str, target: str) -> tuple[str, str]:
    """Return a drafter's kind and model. The mock engine has its own drafter."""
    if engine != "mock":
        return choose_drafter(drafter, target)
    if drafter not in (AUTO, "mock"):
        raise StartupError.of("drafter", drafter, "mock", " with --engine mock")
    return "mock", ""
