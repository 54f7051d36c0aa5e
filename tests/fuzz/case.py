"""Input as bytes with its destination: it can be stored and sent again even if the mutations change."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

CASES = Path(__file__).resolve().parent / "cases"

# Ways to end a call.
HALF_CLOSE = "half-close"  # the server must end the call
CANCEL = "cancel"  # cancel after the first answers
ABANDON = "abandon"  # cancel without reading


@dataclass(frozen=True, slots=True)
class Case:
    edge: str
    name: str  # description
    method: str  # a gRPC method, or `http`, `tcp` (HTTP's port), `h2` (gRPC's port)
    messages: tuple[bytes, ...]  # of a call; of a connection: its pieces
    end: str = HALF_CLOSE
    complete: bool = True  # an answer is required
    prelude: bytes = b""  # a GenerateRequest that creates the session of the messages
    answers: dict[str, tuple[bytes, ...]] = field(default_factory=dict)  # of a worker: its responses by method

    @property
    def inputs(self) -> int:
        """Return how many cases it counts for: a request, a connection, or the distinct messages of a stream."""
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
        """Write the case to a file that every run sends first."""
        folder.mkdir(parents=True, exist_ok=True)
        text = self.to_json()
        path = folder / f"{self.edge}-{hashlib.sha256(text.encode()).hexdigest()[:10]}.json"
        path.write_text(text + "\n")
        return path


def kept(folder: Path, edge: str) -> list[Case]:
    """Return the stored cases of an edge."""
    return [Case.from_json(path.read_text()) for path in sorted(folder.glob(f"{edge}-*.json"))]


def _packed(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {key: _packed(each) for key, each in value.items()}
    return [_packed(each) for each in value] if isinstance(value, list | tuple) else value
