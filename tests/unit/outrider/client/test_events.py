"""Requests that the clients send."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.client.events import make_request
from outrider.protocol.errors import InvalidRequest


def test_a_request_names_its_class_only_if_it_is_given() -> None:
    assert make_request("x", {"priority": -3}).priority == -3
    assert make_request("x", {"priority": 0}).HasField("priority")
    assert not make_request("x", {}).HasField("priority")


def test_an_option_that_no_request_has_is_told() -> None:
    """One that belongs to the sampling parameters would be ignored."""
    wrong: Any = {"temperature": 0.0, "max_tokens": 4}
    with pytest.raises(InvalidRequest, match="temperature is no option"):
        make_request("x", wrong)
