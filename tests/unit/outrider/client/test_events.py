"""Requests that the clients send."""

from __future__ import annotations

from outrider.client.events import make_request


def test_a_request_names_its_class_only_if_it_is_given() -> None:
    assert make_request("x", {"priority": -3}).priority == -3
    assert make_request("x", {"priority": 0}).HasField("priority")
    assert not make_request("x", {}).HasField("priority")
