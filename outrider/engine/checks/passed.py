"""Records of start-up checks that passed: the same code does not compare the same model again on the same processor."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from outrider.base.config import home
from outrider.engine.native import NoCompiler
from outrider.engine.native.build import identity

_SMALLEST = 20_000_000  # parameters; a smaller model is checked at every start, which takes less than a second
_OUTRIDER = Path(__file__).parents[2]
_SOURCES = [path.read_bytes() for path in sorted([*_OUTRIDER.glob("engine/**/*.py"), *_OUTRIDER.glob("models/*.py")])]


def record_of(model: PreTrainedModel, *settings: Any) -> Path | None:
    """Return the file that exists once a model has passed with these settings; None: it is checked at every start.

    The name covers settings, formats of weights, kernels, processor, libraries and Outrider's code.
    """
    weights = [*model.parameters()]
    if model.device.type != "cpu" or sum(weight.numel() for weight in weights) < _SMALLEST:
        return None
    try:
        code = [identity(), *map(version, ("torch", "transformers", "gguf")), *_SOURCES]
        folder = home() / "checked"
    except (NoCompiler, OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    kinds = [getattr(getattr(weight, "quantized", None), "kind", weight.dtype) for weight in weights]
    return folder / hashlib.sha256(repr((code, kinds, settings)).encode()).hexdigest()[:32]
