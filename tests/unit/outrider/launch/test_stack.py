"""What `outrider up` gives its services on their command lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.launch.stack import LaunchPlan, Stack


@pytest.mark.parametrize("given", [False, True])
def test_metrics_are_opened_where_that_is_asked_for(
    given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stack, "_launch", lambda *_: None)
    stack = Stack(LaunchPlan(target="", coordinators=2, open_metrics=given), "", tmp_path)
    stack.start_coordinators()
    assert [("--open-metrics" in child.command) for child in stack.children] == [given] * 2
