"""The engine for CPUs: kernels in C, compiled on the machine that runs them."""

from outrider.engine.native.build import NoCompiler
from outrider.engine.native.engine import KINDS, NativeEngine, dequantize

__all__ = ["KINDS", "NativeEngine", "NoCompiler", "dequantize"]
