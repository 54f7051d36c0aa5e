"""The same request gives the same text as in earlier releases, whichever way it is drafted."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster import Cluster
from tests.e2e.recorded import answers, recorded

_WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"gamma": 4, "drafter": "model"},
    {"gamma": 3, "drafter": "ngram"},
    {"gamma": 0},
)


@pytest.mark.timeout(300)
async def test_recorded_requests_keep_their_texts(cluster: Cluster) -> None:
    lines = recorded()
    assert len(lines) >= 200
    bodies = [line["body"] | {"speculation": _WAYS[number // 3 % len(_WAYS)]} for number, line in enumerate(lines)]
    for body, line, choices in zip(bodies, lines, await answers(cluster.coordinators[0].web, bodies), strict=True):
        assert choices == line["choices"], body
