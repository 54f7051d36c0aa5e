"""The config.json of a checkpoint. Every value is checked for its kind and bounds when it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.protocol.errors import StartupError

CONFIG = "config.json"
MAX_WIDTH = 1 << 17
MAX_LAYERS = 1 << 10
_MAX_BYTES = 1 << 20


def refused(folder: Path, reason: str, limit: str = "") -> StartupError:
    """Return the error for a checkpoint that cannot be used."""
    return StartupError(f"the drafter in {folder} {reason}", field="model", value=str(folder), limit=limit)


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """A JSON object of the configuration."""

    folder: Path
    values: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> CheckpointConfig:
        values = read_json(folder, CONFIG, _MAX_BYTES)
        if not isinstance(values, dict):
            raise refused(folder, f"has a {CONFIG} that is no object")
        return cls(folder, values)

    def section(self, name: str) -> CheckpointConfig:
        """Return an object within this one; an absent one is empty."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, value, "an object")
        return CheckpointConfig(self.folder, value or {})

    def having(self, /, **values: Any) -> CheckpointConfig:
        """Return this object with other values."""
        return CheckpointConfig(self.folder, {**self.values, **values})

    def integer(self, name: str, default: int | None = None, *, at_most: int = MAX_WIDTH, at_least: int = 1) -> int:
        value = self._known(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
            raise self.wrong(name, value, f"a whole number of {at_least} to {at_most}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._known(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e12:
            raise self.wrong(name, value, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._known(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str = "") -> str:
        value = self._known(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, value, "text")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._known(name, [])
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.wrong(name, value, "a list of texts")
        return tuple(value)

    def layer_ids(self, name: str) -> tuple[int, ...]:
        """Return a list of layers; an absent one is empty."""
        value = self._known(name, [])
        valid = isinstance(value, list) and len(value) <= MAX_LAYERS
        if not valid or not all(type(each) is int and 0 <= each <= MAX_LAYERS for each in value):
            raise self.wrong(name, value, f"a list of layers, 0 to {MAX_LAYERS}")
        return tuple(value)

    def must_be(self, name: str, *allowed: Any) -> None:
        """Refuse a setting whose other values are not implemented; the first allowed value is the default."""
        value = self._known(name, allowed[0])
        if value not in allowed:
            raise self.wrong(name, value, " or ".join(map(repr, allowed)))

    def _known(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is None:
            raise refused(self.folder, f"has no {name} in its {CONFIG}")
        return default

    def wrong(self, name: str, value: Any, limit: str) -> StartupError:
        return refused(self.folder, f"has {name} {value!r} in its {CONFIG}, must be {limit}", limit)


def read_json(folder: Path, name: str, max_bytes: int) -> Any:
    """Read a JSON file of a checkpoint, which may not be larger than `max_bytes`."""
    path = folder / name
    try:
        if path.stat().st_size > max_bytes:
            raise refused(folder, f"has a {name} of {path.stat().st_size} bytes", f"at most {max_bytes} bytes")
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise refused(folder, f"has no readable {name}: {error}") from error
