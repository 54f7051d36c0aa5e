"""Formats of published drafters, and how a checkpoint shows which one it has."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from drafter.published.checkpoint_config import CheckpointConfig, refused
from drafter.published.dflash import PublishedDflash, PublishedDspark
from drafter.published.eagle import PublishedEagle
from drafter.published.eagle3 import PublishedEagle3, PublishedPeagle
from drafter.published.layers import QWEN_NEXT
from drafter.published.module import ModuleMaker
from drafter.published.mtp.modules import DeepseekMtp, MimoMtp, QwenMtp, SpeculatorsMtp

_MODULES: dict[str, ModuleMaker] = {
    "deepseek-mtp": DeepseekMtp,
    "dflash": PublishedDflash,
    "dspark": PublishedDspark,
    "eagle": PublishedEagle,
    "eagle3": PublishedEagle3,
    "mimo-mtp": MimoMtp,
    "mtp": SpeculatorsMtp,
    "peagle": PublishedPeagle,
    "qwen3-next-mtp": QwenMtp,
}
# Architectures, and tensors that formats of other architectures do not have; the first sign that is found decides.
_ARCHITECTURES = (("dspark", "DSpark"), ("dflash2", "^DFlash2"), ("dflash", "DFlash"), ("domino", "^Domino"))
_TENSORS = (
    ("peagle", r"mask_hidden"),
    ("eagle3", r"(midlayer|layers\.0)\.hidden_norm\.weight"),
    ("mimo-mtp", r"model\.mtp_layers\.0\.input_proj\.weight"),
    ("qwen3-next-mtp", r"mtp\.fc\.weight"),
    ("deepseek-mtp", r"model\.layers\.\d+\.eh_proj\.weight"),
    ("eagle", r"fc\.weight"),
)
_SPECULATORS = frozenset({"eagle3", "peagle", "dflash", "dflash2", "dspark", "mtp"})
_LAYER_TYPES = ("llama", "qwen3")
_AROUND = ("architectures", "model_type", "transformer_layer_config")  # settings of the file, not of the drafter


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
    if config.section("dflash_config").values.get("projector_type") == "dspark":
        return "dspark"
    for name, sign in _ARCHITECTURES:
        if any(re.search(sign, each) for each in architectures):
            return name
    for name, sign in _TENSORS:
        if any(re.fullmatch(sign, each) for each in names):
            return name
    shown = ", ".join(architectures) or "no architecture"
    raise refused(config.folder, f"is no drafter that is known: {shown}", ", ".join(_MODULES))


def _unfolded(config: CheckpointConfig) -> CheckpointConfig:
    """Return the configuration of the layers with the settings around it, as vLLM 0.32 combines them."""
    layers = config.section("transformer_layer_config")
    kind = config.text("speculators_model_type")
    layers.must_be("model_type", *((QWEN_NEXT,) if kind == "mtp" else _LAYER_TYPES))
    outer = {name: value for name, value in config.values.items() if name not in _AROUND and value is not None}
    return layers.having(**{"norm_before_residual": kind == "eagle3", "sample_from_anchor": False, **outer})
