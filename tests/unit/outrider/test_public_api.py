"""What users import, and what importing it loads."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys

import pytest
from google.protobuf.message import Message

import outrider


@pytest.mark.parametrize("name", outrider.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(outrider, name) is not None


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        outrider.Nothing  # noqa: B018


@pytest.mark.parametrize("home", outrider._HOMES)
def test_every_home_has_public_names_that_no_earlier_one_has(home: str) -> None:
    earlier = [importlib.import_module(f"outrider.{each}") for each in outrider._HOMES[: outrider._HOMES.index(home)]]
    own = {name for name in outrider.__all__ if not any(hasattr(each, name) for each in earlier)}
    assert own & vars(importlib.import_module(f"outrider.{home}")).keys()


def test_names_of_the_protocol_load_no_grpc() -> None:
    script = "import sys, outrider; outrider.SamplingParams, outrider.ServerInfo; assert 'grpc' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize("module", ["sampling_params", "speculation", "fleet", "cost_curve", "convert", "errors"])
def test_the_protocol_loads_neither_grpc_nor_torch(module: str) -> None:
    script = (
        f"import sys, outrider.protocol.{module}\n"
        "found = [name for name in ('grpc', 'torch', 'transformers') if name in sys.modules]\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_no_protobuf_type_is_part_of_the_public_api() -> None:
    """Neither as a base, a field, a parameter nor a result."""
    found = []
    for name in outrider.__all__:
        member = getattr(outrider, name)
        parts = [member, *vars(member).values()] if inspect.isclass(member) else [member]
        for part in parts:
            if inspect.isclass(part) and issubclass(part, Message):
                found.append(name)
            if not getattr(part, "__name__", "").startswith("_") or getattr(part, "__name__", "") == "__init__":
                hints = getattr(part, "__annotations__", {})
                found += [
                    f"{name}: {hint}" for hint in map(str, hints.values()) if re.search(r"\b(pb|common|rpc)\.", hint)
                ]
    assert not found, found
