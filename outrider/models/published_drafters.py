"""Recognition of published drafters by their files, for the choice of a kind. Nothing of a checkpoint is executed.

Imports no torch: the command line uses it too. `drafter.published` tells which format it is.
"""

from __future__ import annotations

import json
import re
import struct
import zipfile
from os.path import expanduser
from pathlib import Path
from typing import Any

from outrider.models.hub import download

PUBLISHED = "published"  # kind
_MAX_BYTES = 64 << 20
_ARCHITECTURE = re.compile(r"Eagle|DFlash|DSpark", re.IGNORECASE)
# The projection of hidden states, which language models do not have; in a JSON text or in a pickle.
_PROJECTION = re.compile(rb"(?<![\w.])(model\.)?(encoder\.)?fc\.weight(?!\w)")
_MTP = re.compile(rb"(?<![\w.])(model\.mtp_layers\.0\.input_proj|mtp\.fc|model\.layers\.\d+\.eh_proj)\.weight(?!\w)")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # owner/name
_MASK = "mask_embedding.pt"  # never read: a checkpoint that has one is refused


def drafter_folder(name: str) -> Path:
    """Return the folder of a drafter. That of a hub id is downloaded once, to where transformers keep targets."""
    folder = Path(expanduser(name))
    if folder.exists() or not _HUB_ID.fullmatch(name):
        return folder
    for weights in ("*.safetensors", "*.bin"):
        folder = download(name, "drafter", allow_patterns=["*.json", weights, _MASK], ignore_patterns=["*/*"])
        if any(folder.glob(weights)):
            break
    return folder


def is_published(folder: Path, name: str, target: str) -> bool:
    """Return whether a folder holds a published drafter: apart from its target, or as a module within it."""
    try:
        config: Any = json.loads((folder / "config.json").read_text("utf-8"))
        architectures = " ".join(map(str, config.get("architectures") or ()))
        if "speculators_model_type" in config or _ARCHITECTURE.search(architectures):
            return True
        names = _tensor_names(folder)
    except Exception:  # its files may be anything
        return False  # loading it as a model fails with the reason
    if _PROJECTION.search(names):
        return True
    is_target = name == target or Path(expanduser(target)).resolve() == folder.resolve()
    return is_target and bool(_MTP.search(names))


def _tensor_names(folder: Path) -> bytes:
    """Return a text in which the names of all tensors occur."""
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (folder / name).is_file():
            with (folder / name).open("rb") as file:
                return file.read(_MAX_BYTES)
    if (folder / "model.safetensors").is_file():
        with (folder / "model.safetensors").open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            return file.read(min(length, _MAX_BYTES))
    with zipfile.ZipFile(folder / "pytorch_model.bin") as archive:
        pickles = [name for name in archive.namelist() if name.endswith("data.pkl")]
        with archive.open(pickles[0]) as file:
            return file.read(_MAX_BYTES)
