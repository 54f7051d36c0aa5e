"""Requests that the clients send."""

from __future__ import annotations

from typing import Any, cast

import numpy
import pytest

from outrider.client.events import make_request
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling_params import SamplingParams


def test_a_request_names_its_class_only_if_it_is_given() -> None:
    assert make_request("x", {"priority": -3}).priority == -3
    assert make_request("x", {"priority": 0}).HasField("priority")
    assert not make_request("x", {}).HasField("priority")


def test_an_option_that_no_request_has_is_told() -> None:
    """One that belongs to the sampling parameters would be ignored."""
    wrong: Any = {"temperature": 0.0, "max_tokens": 4}
    with pytest.raises(InvalidRequest, match="temperature is no option"):
        make_request("x", wrong)


@pytest.mark.parametrize("given", [{"chat": [("user", "x")]}, {"tokens": [1]}])
def test_a_request_with_several_prompts_is_refused(given: Any) -> None:
    """One of them would be ignored."""
    with pytest.raises(InvalidRequest, match="not several"):
        make_request("x", given)
    with pytest.raises(InvalidRequest, match="not several"):
        make_request("", given)
    assert make_request(None, given).WhichOneof("input") != "prompt"
    assert make_request("x", {"chat": [], "tokens": ()}).WhichOneof("input") == "prompt"


@pytest.mark.parametrize(
    "given", [{"gamma": -1}, {"gamma": 2**40}, {"tokens": [-1]}, {"priority": 2**70}, {"gamma": "4"}]
)
def test_numbers_that_no_request_can_carry_are_refused(given: Any) -> None:
    with pytest.raises(InvalidRequest):
        make_request(None if "tokens" in given else "x", given)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(verification=cast(Any, "greedy")), SamplingParams(grammar=cast(Any, "a+")), cast(Any, {1})],
)
def test_parameters_of_a_wrong_type_are_refused(params: SamplingParams) -> None:
    with pytest.raises(InvalidRequest):
        make_request("x", {"params": params})


def test_tokens_may_be_an_array() -> None:
    assert make_request(None, {"tokens": cast(Any, numpy.array([1, 2]))}).tokens.ids == [1, 2]
    with pytest.raises(InvalidRequest, match="not several"):
        make_request("x", {"tokens": cast(Any, numpy.array([1, 2]))})


def test_tokens_and_a_chat_may_come_from_an_iterator() -> None:
    assert make_request(None, {"tokens": cast(Any, map(int, "12"))}).tokens.ids == [1, 2]
    asked = make_request(None, {"chat": cast(Any, iter([("user", "x")]))}).chat.messages
    assert [(message.role, message.content) for message in asked] == [("user", "x")]


def test_a_text_that_is_not_utf8_is_told() -> None:
    with pytest.raises(InvalidRequest, match="a text is not UTF-8"):
        make_request("\udcff", {})


def test_a_text_is_no_list_of_stop_strings() -> None:
    """Each of its characters ended the text."""
    with pytest.raises(InvalidRequest, match=r"params\.stop is abc, must be a list of texts"):
        make_request("x", {"params": SamplingParams(stop="abc")})  # type: ignore[arg-type]
    assert make_request("x", {"params": SamplingParams(stop=["abc"])}).params.stop == ["abc"]  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"verification": "greedy"}, {"grammar": "x"}])
def test_a_text_where_a_value_of_ours_is_meant_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="'str' object"):
        make_request("x", {"params": SamplingParams(**wrong)})


@pytest.mark.parametrize("chat", ["hello", ["hi"], [{"role": "user", "content": "hi"}]])
def test_a_message_that_is_no_pair_is_refused(chat: Any) -> None:
    """A dict unpacks to its keys: the target was asked "content" by somebody called "role"."""
    with pytest.raises(InvalidRequest, match="pairs"):
        make_request(None, {"chat": chat})
