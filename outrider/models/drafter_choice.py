"""The kind and model of a drafter from what an operator names, and the best for a target. Imports no torch."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from importlib.resources import files
from pathlib import Path

from outrider.models.hub import DEFAULT, DEFAULT_NAME
from outrider.models.published_drafters import PUBLISHED, drafter_folder, is_published
from outrider.protocol.errors import StartupError

_REGISTERS = re.compile(r"^@drafter\(", re.MULTILINE)
MODEL_FREE = frozenset({"ngram", "suffix"})  # drafters that copy text: their process loads no torch
AUTO = "auto"
CARD = "card.json"  # in the folder of a trained drafter
SERVED_AS = {"distill": "model", "eagle3": PUBLISHED, "dspark": PUBLISHED}


def drafter_kinds() -> frozenset[str]:
    """Return the kinds of drafters: modules of `drafter.methods` that register one, read and not imported."""
    spec = importlib.util.find_spec("drafter.methods")
    folders = (spec.submodule_search_locations or ()) if spec else ()
    modules = (path for folder in folders for path in Path(folder).glob("*.py"))
    return frozenset(path.stem.replace("_", "-") for path in modules if _REGISTERS.search(path.read_text("utf-8")))


def best_drafter(target: str) -> str:
    """Return the best drafter kind for a target among those that come with Outrider."""
    bundled = Path(str(files("outrider.bundled")))
    if target in (DEFAULT, DEFAULT_NAME) and (bundled / DEFAULT_NAME / CARD).is_file():
        return f"suffix+{json.loads((bundled / DEFAULT_NAME / CARD).read_text())['method']}"
    return "suffix"


def choose_drafter(text: str, target: str) -> tuple[str, str]:
    """Return a drafter's kind and model, from KIND, KIND:MODEL, A+B or just a model: a folder, a file or a hub id."""
    if text == AUTO:
        return best_drafter(target), ""
    kind, _, model = text.partition(":")
    kinds, known = set(kind.split("+")), drafter_kinds()
    if kinds <= known:
        is_path = model.startswith((".", "/", "~")) or kinds & {"eagle", "medusa"}
        if model not in ("", DEFAULT) and is_path and not os.path.exists(os.path.expanduser(model)):
            raise StartupError(f"drafter is {text}: there is nothing at {model}", field="drafter", value=text)
        return kind, model
    folder = drafter_folder(text)
    if text.startswith((".", "/", "~")) and not folder.exists():
        raise StartupError(f"there is no model at {text}", field="drafter", value=text)
    if "/" not in text and text not in (DEFAULT, DEFAULT_NAME) and not (text and folder.exists()):
        raise StartupError.of("drafter", text, "a kind as in --help, KIND:MODEL, an existing path or owner/name")
    try:
        method = str(json.loads((folder / CARD).read_text())["method"])
    except (OSError, ValueError, KeyError, TypeError):
        return (PUBLISHED, str(folder)) if is_published(folder, text, target) else ("model", text)
    kind = SERVED_AS.get(method, method)
    if kind not in known:
        raise StartupError.of("drafter", text, f"of a kind that there is: its {CARD} names {kind}")
    return kind, str(folder)
