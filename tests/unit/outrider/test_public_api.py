"""What users import, and what importing it loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

import outrider


@pytest.mark.parametrize("name", outrider.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(outrider, name) is not None


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        outrider.Nothing  # noqa: B018


def test_all_and_the_homes_agree() -> None:
    assert sorted(outrider.__all__) == sorted(outrider._HOME_OF)


@pytest.mark.parametrize("module", ["sampling_params", "speculation", "fleet", "cost_curve", "convert", "errors"])
def test_the_protocol_loads_neither_grpc_nor_torch(module: str) -> None:
    script = (
        f"import sys, outrider.protocol.{module}\n"
        "found = [name for name in ('grpc', 'torch', 'transformers') if name in sys.modules]\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
