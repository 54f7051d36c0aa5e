"""Parser of /metrics as in `vllm bench serve`: by lines, and by parts of names."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

_LINE = re.compile(r"\s*(?P<name>vllm:spec_decode[^\s{]*_total)(?P<labels>\{.*\})?\s+(?P<value>\S+)\s*")
_POSITION = re.compile(r'position="(\d+)"')
# A name counts as the first of these that is a part of it: a fifth counter would be added to one of the four.
_PARTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens_per_pos", "num_accepted_tokens")


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums of one page, or the difference of two."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    accepted_at: dict[int, int] = field(default_factory=dict)

    def since(self, before: Counts) -> Counts:
        at = {place: count - before.accepted_at.get(place, 0) for place, count in self.accepted_at.items()}
        return Counts(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted - before.accepted,
            {place: count for place, count in at.items() if count},
        )

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / self.drafts

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.draft_tokens


def read(page: str) -> Counts | None:
    """Return None if the page has no metrics of speculation; the benchmark then omits it."""
    sums: Counter[str] = Counter()
    at: Counter[int] = Counter()
    for line in page.split("\n"):
        found = _LINE.fullmatch(line)
        if found is None:
            continue
        part = next(part for part in _PARTS if part in found["name"])
        sums[part] += int(float(found["value"]))
        if part == "num_accepted_tokens_per_pos" and (position := _POSITION.search(found["labels"] or "")):
            at[int(position[1])] += int(float(found["value"]))
        sums["lines"] += 1
    if not sums["lines"]:
        return None
    return Counts(sums["num_drafts"], sums["num_draft_tokens"], sums["num_accepted_tokens"], dict(at))
