"""An engine that answers no sooner than another device would."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch

from outrider.engine import SessionTokens
from outrider.engine.mock import MockEngine
from outrider.engine.throttled import ThrottledEngine, parse_blur, parse_pace
from outrider.protocol.cost_curve import CostCurve
from outrider.protocol.errors import StartupError


def test_a_step_takes_what_its_rows_cost() -> None:
    plain = MockEngine()
    paced = ThrottledEngine(MockEngine(), parse_pace("1:5,4:20"))
    for tokens, least in (([1], 5.0), ([1, 2, 3, 4], 20.0)):
        began = time.perf_counter()
        found = paced.extend([SessionTokens("s", tokens)])
        took = 1000 * (time.perf_counter() - began)
        assert took >= least
        assert torch.equal(found.all_logits, plain.extend([SessionTokens("s", tokens)]).all_logits), (
            "the answer is the engine's own"
        )


class FilledEngine(MockEngine):
    """An engine with cached blocks; it finds as many tokens as the salt has letters."""

    evictable_tokens = 7

    def match_prefix(self, session: str, tokens: Sequence[int], salt: str = "") -> int:
        return len(salt)


def test_everything_else_is_the_engines() -> None:
    engine = FilledEngine()
    paced = ThrottledEngine(engine, CostCurve((1,), (0.0,)))
    assert paced.info == engine.info
    assert (paced.device, paced.capacity_tokens) == (engine.device, engine.capacity_tokens)
    assert paced.match_prefix("s", [1, 2], "salt") == 4, "tenants find their own prefixes only"
    paced.extend([SessionTokens("s", [1, 2, 3])])
    assert (paced.length("s"), paced.evictable_tokens) == (3, 7)
    paced.truncate("s", 2)
    assert engine.length("s") == 2
    paced.compact("s", 1, ())
    assert engine.length("s") == 1
    paced.free("s")
    assert engine.length("s") == 0


def test_a_pace_is_read() -> None:
    assert parse_pace("1:40,16:40,32:80.5") == CostCurve((1, 16, 32), (40.0, 40.0, 80.5))
    assert parse_pace("1:4").at(100) == 4.0


@pytest.mark.parametrize("text", ["", "40", "x:1", "4:1,2:3", "1:-4", "0:1", "1:2,1:3", "1:inf", "1:nan"])
def test_a_pace_that_cannot_be_read_is_told(text: str) -> None:
    with pytest.raises(StartupError, match="pace"):
        parse_pace(text)


def test_from_a_position_on_it_says_something_else() -> None:
    """The same at the same position, however the step that asks is cut."""
    plain = MockEngine()
    blurred = ThrottledEngine(MockEngine(), CostCurve((1,), (0.0,)), parse_blur("2:1.5,4:0"))
    right = plain.extend([SessionTokens("s", [1, 2, 3, 4, 5])]).logits[0].clone()
    wrong = blurred.extend([SessionTokens("s", [1, 2, 3, 4, 5])])
    assert torch.equal(wrong.all_logits, wrong.logits[0])
    assert [bool(torch.equal(a, b)) for a, b in zip(right, wrong.logits[0], strict=True)] == [True] * 2 + [
        False
    ] * 2 + [True]
    blurred.extend([SessionTokens("t", [1, 2])])
    tree = blurred.extend([SessionTokens("t", [3, 3, 4], parents=(-1, -1, 1), logits_from=1)]).logits[0]
    assert torch.equal(tree[0], wrong.logits[0][2])
    assert torch.equal(tree[1], wrong.logits[0][3])


@pytest.mark.parametrize("text", ["4", "x:1", "4:1,2:3", "1:-4"])
def test_a_blur_that_cannot_be_read_is_told(text: str) -> None:
    with pytest.raises(StartupError, match="blur"):
        parse_blur(text)
    assert parse_blur("") == []
