"""Formats of published drafters, and how a checkpoint shows which one it has."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from drafter.published.checkpoint_config import CheckpointConfig, refused
from drafter.published.eagle3 import PublishedEagle3
from drafter.published.module import ModuleMaker

_MODULES: dict[str, ModuleMaker] = {"eagle3": PublishedEagle3}
_SPECULATORS = frozenset({"eagle3", "peagle", "dflash", "dflash2", "dspark", "mtp"})
_LAYER_TYPES = ("llama", "qwen3")


@dataclass(frozen=True, slots=True)
class RecognisedFormat:
    """A format, the configuration in its original layout, and the module that reads it."""

    name: str
    speculators: bool  # the layout of the `speculators` library
    config: CheckpointConfig
    make: ModuleMaker
    made_for: str = ""

    @property
    def title(self) -> str:
        return f"{self.name}, {'speculators' if self.speculators else 'original'} layout"


def recognise(config: CheckpointConfig, names: Collection[str]) -> RecognisedFormat:
    """Return the format of a checkpoint. Raise StartupError if it is unknown or not implemented."""
    speculators = "speculators_model_type" in config.values
    if speculators:
        name = config.text("speculators_model_type")
        if name not in _SPECULATORS:
            raise config.wrong("speculators_model_type", name, ", ".join(sorted(_SPECULATORS)))
    else:
        name = _by_files(config, names)
    make = _MODULES.get(name)
    if make is None:
        raise refused(config.folder, f"has the format {name}, which is not supported", ", ".join(_MODULES))
    if not speculators:
        return RecognisedFormat(name, speculators, config, make)
    made_for = config.section("speculators_config").section("verifier").text("name_or_path")
    return RecognisedFormat(name, speculators, _unfolded(config), make, made_for)


def _by_files(config: CheckpointConfig, names: Collection[str]) -> str:
    architectures = config.texts("architectures")
    for name, fits in _SIGNS:
        if any(fits(each) for each in architectures):
            return name
    if any(each.endswith("hidden_norm.weight") for each in names) and "fc.weight" in names:
        return "eagle3"
    shown = ", ".join(architectures) or "no architecture"
    raise refused(config.folder, f"is no drafter that is known: {shown}", ", ".join(_MODULES))


_SIGNS: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ("dspark", lambda text: "DSpark" in text),
    ("dflash2", lambda text: text.startswith("DFlash2")),
    ("dflash", lambda text: "DFlash" in text),
    ("eagle3", lambda text: "eagle3" in text.lower()),
)


def _unfolded(config: CheckpointConfig) -> CheckpointConfig:
    """Return the configuration of the layers with the settings around it, as vLLM 0.32 combines them."""
    layers = config.section("transformer_layer_config")
    layers.must_be("model_type", *_LAYER_TYPES)
    eagle3 = config.text("speculators_model_type") == "eagle3"
    outer = {name: value for name, value in config.values.items() if name in _OUTER and value is not None}
    return layers.having(**{"norm_before_residual": eagle3, **outer})


_OUTER = (
    "draft_vocab_size",
    "eagle_aux_hidden_state_layer_ids",
    "fc_norm",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
    "target_hidden_size",
)
