"""One input: what is sent where, in bytes, so that it can be kept and sent again whatever becomes of the mutations."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

CASES = Path(__file__).resolve().parent / "cases"

# How a call ends from our side.
HALF_CLOSE = "half-close"  # all is said: the end must come
CANCEL = "cancel"  # hang up after the first answers
ABANDON = "abandon"  # hang up without reading


@dataclass(frozen=True, slots=True)
class Case:
    edge: str
    name: str  # what it is, for a person
    method: str  # a gRPC method, or `http`, `tcp` (HTTP's port), `h2` (gRPC's port)
    messages: tuple[bytes, ...]  # of a call; of a connection: its pieces
    end: str = HALF_CLOSE
    complete: bool = True  # an answer must come
    prelude: bytes = b""  # a GenerateRequest that makes the session that the messages speak of
    answers: dict[str, tuple[bytes, ...]] = field(default_factory=dict)  # of a worker: what it says, by method

    @property
    def inputs(self) -> int:
        """What it counts for: a request, a connection, or every message of a stream, equal ones once."""
        if self.method in ("http", "h2"):
            return 1
        return max(1, len(set(self.messages))) + sum(len(set(said)) for said in self.answers.values())

    def to_json(self) -> str:
        return json.dumps(_packed(asdict(self)), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Case:
        given = json.loads(text)
        for name in ("messages",):
            given[name] = tuple(base64.b64decode(each) for each in given[name])
        given["prelude"] = base64.b64decode(given["prelude"])
        given["answers"] = {
            name: tuple(base64.b64decode(each) for each in said) for name, said in given["answers"].items()
        }
        return cls(**given)

    def keep(self, folder: Path) -> Path:
        """As a file, from which it is sent again at the beginning of every run."""
        folder.mkdir(parents=True, exist_ok=True)
        text = self.to_json()
        path = folder / f"{self.edge}-{hashlib.sha256(text.encode()).hexdigest()[:10]}.json"
        path.write_text(text + "\n")
        return path


def kept(folder: Path, edge: str) -> list[Case]:
    """The cases of an edge that were kept."""
    return [Case.from_json(path.read_text()) for path in sorted(folder.glob(f"{edge}-*.json"))]


def _packed(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {key: _packed(each) for key, each in value.items()}
    return [_packed(each) for each in value] if isinstance(value, list | tuple) else value
