"""Quotas of API keys: sessions, requests, tokens."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

from coordinator.admission.quotas import Quotas, TokenBucket
from outrider.protocol.errors import Overloaded, Unavailable
from outrider.security.tenants import Tenant, TenantLimits
from outrider.settings.coordinator import CoordinatorSettings

GREEDY, MODEST, THIRD = Tenant("greedy"), Tenant("modest"), Tenant("third")


def refusal(quotas: Quotas, tenant: Tenant, held: int, live: int) -> Overloaded | None:
    try:
        quotas.admit(tenant, held, live)
    except Overloaded as error:
        return error
    return None


def test_one_key_cannot_hold_all_sessions() -> None:
    quotas = Quotas(CoordinatorSettings(max_sessions=512), several=lambda: True)
    assert refusal(quotas, GREEDY, 383, 383) is None
    full = refusal(quotas, GREEDY, 384, 384)
    assert full is not None
    assert (full.field, full.retry_after_ms) == ("key.sessions", 1000)
    assert refusal(quotas, MODEST, 0, 384) is None
    assert refusal(quotas, THIRD, 0, 512) is not None
    alone = Quotas(CoordinatorSettings(max_sessions=512), several=lambda: False)
    assert refusal(alone, GREEDY, 511, 511) is None


@pytest.mark.parametrize("sessions", [1, 2, 4])
def test_the_last_place_is_for_a_key_without_sessions(sessions: int) -> None:
    quotas = Quotas(CoordinatorSettings(max_sessions=sessions), several=lambda: True)
    assert refusal(quotas, MODEST, 0, sessions - 1) is None
    quotas.admit_takeover(MODEST, 0, 2 * sessions - 1)
    assert sessions == 1 or refusal(quotas, GREEDY, sessions - 1, sessions - 1) is not None


def test_limits_of_a_key_and_of_all_keys() -> None:
    settings = CoordinatorSettings(default_requests_per_minute=2, default_max_sessions=3, default_tokens_per_minute=100)
    quotas = Quotas(settings, several=lambda: True)
    assert [refusal(quotas, MODEST, 0, 0) is None for _ in range(3)] == [True, True, False]
    late = refusal(quotas, MODEST, 0, 0)
    assert late is not None
    assert late.field == "key.requests_per_minute"
    assert 0 < (late.retry_after_ms or 0) <= 30_000
    named = replace(GREEDY, limits=TenantLimits(requests_per_minute=0, max_sessions=5, tokens_per_minute=10))
    assert refusal(quotas, named, 4, 4) is None, "its own limits, not the default ones"
    assert refusal(quotas, named, 5, 5) is not None
    quotas.spend(named, 25)
    spent = refusal(quotas, named, 0, 0)
    assert spent is not None
    assert spent.field == "key.tokens_per_minute"
    assert 80_000 < (spent.retry_after_ms or 0) <= 96_000, "15 beyond the limit are paid back first"
    assert refusal(quotas, THIRD, 0, 0) is None


@pytest.mark.parametrize(
    ("tenant", "held", "live", "taken"),
    [
        (GREEDY, 767, 767, True),
        (GREEDY, 768, 768, False),
        (MODEST, 0, 1000, True),
        (MODEST, 0, 1024, False),
        (replace(THIRD, limits=TenantLimits(max_sessions=2)), 3, 3, True),
        (replace(THIRD, limits=TenantLimits(max_sessions=2)), 4, 4, False),
    ],
)
def test_sessions_of_a_failed_coordinator_are_taken_up_to_twice_the_limits(
    tenant: Tenant, held: int, live: int, taken: bool
) -> None:
    quotas = Quotas(CoordinatorSettings(max_sessions=512), several=lambda: True)
    with contextlib.nullcontext() if taken else pytest.raises(Unavailable):
        quotas.admit_takeover(tenant, held, live)


def test_a_bucket_fills_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    bucket = TokenBucket(60)
    bucket.take(60)
    assert bucket.wait_s() == pytest.approx(1.0)
    now += 0.5
    assert bucket.wait_s() == pytest.approx(0.5)
    now += 3600
    bucket.take(60)
    assert bucket.wait_s() == pytest.approx(1.0), "no more than a minute's worth is kept"
    unlimited = TokenBucket(0)
    unlimited.take(10**9)
    assert unlimited.wait_s() == 0.0


def test_changed_limits_of_a_key_hold_at_once() -> None:
    quotas = Quotas(CoordinatorSettings(), several=lambda: False)
    quotas.admit(Tenant("a", TenantLimits(max_sessions=1)), 0, 0)
    with pytest.raises(Overloaded):
        quotas.admit(Tenant("a", TenantLimits(max_sessions=1)), 1, 1)
    quotas.admit(Tenant("a", TenantLimits(max_sessions=2)), 1, 1)


def test_a_request_that_is_refused_for_its_key_s_tokens_is_none_of_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a client that tries again while it has no tokens would have no requests when it has."""
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    settings = CoordinatorSettings(default_requests_per_minute=2, default_tokens_per_minute=100)
    quotas = Quotas(settings, several=lambda: True)
    quotas.spend(MODEST, 101)
    for _ in range(5):
        assert getattr(refusal(quotas, MODEST, 0, 0), "field", None) == "key.tokens_per_minute"
    now += 2.0
    assert refusal(quotas, MODEST, 0, 0) is None
