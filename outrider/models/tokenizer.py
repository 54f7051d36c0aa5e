"""The files of the target's tokenizer, which verifiers send to coordinators. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from outrider.protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Only plain data files are sent, never code.
_VOCABULARIES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")
_OTHERS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
PROBE = {"role": "user", "content": "outrider"}
FILES = frozenset({*_VOCABULARIES, *_OTHERS})


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, into: Path) -> dict[str, Path]:
    """Save a tokenizer, and return its files by name."""
    several = isinstance(tokenizer.chat_template, dict) and "default" in tokenizer.chat_template
    tokenizer.save_pretrained(into, save_jinja_files=not several)  # else those with names lie in a folder
    return {path.name: path for path in sorted(into.iterdir()) if path.name in FILES}


def write_file(into: Path, name: str, data: bytes) -> None:
    """Append a piece of a file that a peer sent. Raises InvalidRequest for an unknown file name."""
    if name not in FILES:
        raise InvalidRequest.of("tokenizer file", name, "one of the known tokenizer files")
    with (into / name).open("ab") as handle:
        handle.write(data)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder as it was saved: its class may make another one from the settings beside it."""
    # Here: it takes half a second. By `from`, a second thread gets what transformers replaces at its import's end.
    transformers = import_module("transformers")
    kind = transformers.PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else transformers.AutoTokenizer
    return cast("PreTrainedTokenizerBase", kind.from_pretrained(folder, trust_remote_code=False))


def read_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """Return a model's tokenizer. Some that see images have their chat template in a file that only processors read."""
    transformers = import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    with suppress(OSError):  # there is none
        if not tokenizer.chat_template:
            apart = Path(transformers.utils.cached_file(str(name), "chat_template.json"))
            tokenizer.chat_template = json.loads(apart.read_text(encoding="utf-8"))["chat_template"]
    return cast("PreTrainedTokenizerBase", tokenizer)


def in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its text as a list of parts."""
    text = message.get("content")
    return {**message, "content": [{"type": "text", "text": text}]} if isinstance(text, str) else message


def wants_parts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template loses contents that are texts, as those of many models that see images."""
    for message in (PROBE, in_parts(PROBE)):
        with suppress(Exception):  # templates are programs and may raise anything
            if PROBE["content"] in str(tokenizer.apply_chat_template([dict(message)], tokenize=False)):
                return message is not PROBE
    return False


def tokenizer_json(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of its tokenizer.json. Raises ValueError for a tokenizer without one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{type(tokenizer).__name__} has no fast form")
    return str(backend.to_str())
