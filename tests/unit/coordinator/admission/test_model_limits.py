"""Limits per model: how they are written, and what they refuse."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.admission.model_limits import ModelLimits, limits_of, read_limits
from coordinator.sessions.session_manager import SessionManager
from coordinator.workers.target import Target
from outrider.protocol.errors import InvalidRequest, Overloaded, StartupError
from outrider.protocol.sampling_params import SamplingParams
from outrider.settings.coordinator import CoordinatorSettings

ALICE, BOB = "alice", "bob"


def test_limits_by_name() -> None:
    text = "big=sessions:64 waiting:32, org/co:de=v2=context:4096 output:512 key_sessions:3"
    assert read_limits(text) == {
        "big": ModelLimits(sessions=64, waiting=32),
        "org/co:de=v2": ModelLimits(context=4096, output=512, key_sessions=3),
    }
    assert read_limits("") == read_limits(" , ") == {}


@pytest.mark.parametrize(
    "text",
    [
        "big",
        "big=",
        "=sessions:1",
        "big=sessions",
        "big=sessions:0",
        "big=sessions:-1",
        "big=sessions:1x",
        "big=sessions:²",
        "big=places:1",
        "big=sessions:1 sessions:2",
        "big=sessions:1,big=waiting:2",
        "big=sessions:1waiting:2",
        "big=sessions:1 code=sessions:2",
    ],
)
def test_what_is_no_limit_is_refused_at_the_start(text: str) -> None:
    with pytest.raises(StartupError, match=r"model_limits is .* must be NAME=LIMIT:NUMBER") as caught:
        read_limits(text)
    assert caught.value.field == "model_limits"
    nothing: Any = None
    with pytest.raises(StartupError, match="model_limits"):
        SessionManager(CoordinatorSettings(model_limits=text), "redis://127.0.0.1:1", nothing, nothing)


def refusal(limits: ModelLimits, *sessions: tuple[str, bool], tenant: str = ALICE) -> Overloaded | None:
    try:
        limits.admit("big", sessions, tenant)
    except Overloaded as error:
        return error
    return None


def test_sessions_of_a_model_are_limited() -> None:
    running, waiting = (BOB, False), (BOB, True)
    for limits, room, full, field in (
        (ModelLimits(sessions=2), [running], [running, waiting], "model.sessions"),
        (ModelLimits(waiting=2), [waiting, *[running] * 9], [waiting, waiting], "model.waiting"),
        (ModelLimits(key_sessions=1), [running] * 9, [(ALICE, False)], "model.key_sessions"),
    ):
        assert refusal(limits, *room) is None
        found = refusal(limits, *full)
        assert found is not None
        assert (found.field, found.retry_after_ms, found.http_status) == (field, 1000, 429)
        assert "big" in found.message
    assert refusal(ModelLimits(), *[waiting] * 1000) is None


def target_of(context: int) -> Target:
    made: Any = SimpleNamespace(info=SimpleNamespace(name="big", context_length=context), served_name="gpt")
    return cast(Target, made)


def test_limits_are_those_of_the_named_target() -> None:
    limits, none = ModelLimits(context=100, output=20), ModelLimits()
    for name in ("big", "gpt"):
        assert limits_of(CoordinatorSettings(model_limits=f"{name}=context:100 output:20"), target_of(1000)) == limits
    assert limits_of(CoordinatorSettings(model_limits="other=sessions:1"), target_of(1000)) == none
    assert [limits.context_of(target_of(context)) for context in (1000, 50)] == [100, 50]
    assert none.context_of(target_of(1000)) == 1000


def length(limits: ModelLimits, prompt: int, wanted: int | None, default: int | None = None) -> int | str:
    """The length that a request gets for a context of 1000 tokens, or why it gets none."""
    params = SamplingParams() if wanted is None else SamplingParams(max_tokens=wanted)
    try:
        fitted = limits.fitted(params, prompt, target_of(1000), given=wanted is not None, default=default)
    except InvalidRequest as error:
        return f"{error.field}: {error.limit}"
    return fitted.max_tokens


def test_lengths_of_a_model_are_limited() -> None:
    limits, none = ModelLimits(context=100, output=20), ModelLimits()
    assert [length(limits, 80, wanted) for wanted in (5, 20)] == [5, 20]
    assert length(limits, 80, 21) == "params.max_tokens: at most 20, the model's limit"
    assert str(length(limits, 90, 11)).startswith("params.max_tokens: at most 10: the context is 100 tokens")
    assert length(limits, 100, 1) == "prompt: under the context of 100 tokens"
    assert [length(limits, prompt, None, 50) for prompt in (10, 90)] == [20, 10]
    assert length(limits, 10, None) == 20
    assert str(length(limits, 90, None)).startswith("prompt: at most 80 to leave room for 20 output tokens")
    assert length(ModelLimits(context=200), 10, None) == 190, "no room for 256 after any prompt"
    assert [length(none, 10, wanted, 50) for wanted in (None, 990, 991, 1000)] == [50, 990, 990, 990]
    assert str(length(none, 10, 1001, 50)).startswith("params.max_tokens: at most 990: the context is 1000 tokens")
    assert length(limits, 90, 20, 50) == 10
    assert length(limits, 90, 21, 50) == "params.max_tokens: at most 20, the model's limit"
    assert str(length(none, 10, 991)).startswith("params.max_tokens: at most 990")
