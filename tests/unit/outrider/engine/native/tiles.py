"""Kernels with AMX tiles: the processor's own, or emulated ones, which have the same bits."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import pytest

from outrider.base.config import home
from outrider.engine.native import build
from outrider.engine.native import engine as native_engine


@cache
def library() -> ctypes.CDLL:
    own = build.library()
    if own.outrider_tiles():
        return own
    return build.load(build.compile_for("native", home() / "kernels", "-DEMULATED_TILES"))


@contextmanager
def tiles() -> Iterator[None]:
    """Let engines that are made meanwhile have tiles."""
    found = library()
    if not found.outrider_tiles():
        pytest.skip("this processor cannot fill tiles: it has no AVX-512 with bfloat16")
    with patch.object(native_engine, "library", lambda: found):
        yield
