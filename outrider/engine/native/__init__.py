"""The fast engine for CPUs: one C file, compiled on the machine that it runs on."""

from outrider.engine.native.build import NoCompiler
from outrider.engine.native.engine import NativeEngine

__all__ = ["NativeEngine", "NoCompiler"]
