"""The engine for CPUs: kernels in C, compiled on the machine that runs them."""

from outrider.engine.native.build import NoCompiler
from outrider.engine.native.engine import NativeEngine, dequantize

__all__ = ["NativeEngine", "NoCompiler", "dequantize"]
