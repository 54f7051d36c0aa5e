"""Keys: how they are given, what they open, and that nobody gets to see them."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

import pytest

from coordinator.api.service import CoordinatorService
from coordinator.persistence.session_record import MAX_PRIORITY
from outrider.base import config
from outrider.base.config import has_secrets
from outrider.protocol.errors import KINDS, StartupError, Unauthenticated
from outrider.security.api_keys import ApiKeys, bearer
from outrider.security.channels import Channels
from outrider.security.credentials import Credentials
from outrider.security.tenants import NO_TENANT, Tenant, TenantLimits
from outrider.settings.coordinator import CoordinatorSettings
from outrider.settings.drafter import DrafterSettings

NOWHERE = "redis://127.0.0.1:1"


def test_a_key_opens_and_others_do_not() -> None:
    keys = ApiKeys.parse("alpha, beta", "api_keys")
    for right in ("Bearer alpha", "Bearer beta", "bearer beta", b"Bearer alpha", "Bearer  alpha "):
        assert keys.allows(right), right
    for wrong in (
        None,
        "",
        b"",
        "alpha",
        "Bearer",
        "Bearer ",
        "Bearer alph",
        "Bearer alphaa",
        "Bearer ALPHA",
        "Bearer alpha, beta",
        "Bearer alpha beta",
        "Basic alpha",
        "Bearer gammà",
        b"Bearer \xff\xfe",
    ):
        assert not keys.allows(wrong), wrong


def test_without_keys_the_door_stands_open() -> None:
    for text in ("", "  "):
        keys = ApiKeys.parse(text, "api_keys")
        assert not keys
        assert keys.allows(None)
        assert keys.allows("Bearer whatever")


def test_a_file_has_a_key_a_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the web page\nalpha\n\n  beta#2  \r\n# alpha's successor\n")
    keys = ApiKeys.parse(f"@{file}", "api_keys")
    assert keys.first == "alpha"
    assert keys.allows("Bearer beta#2")
    assert not keys.allows("Bearer # of the web page")
    assert repr(keys) == "ApiKeys(2)"


def test_a_file_of_keys_may_begin_with_a_mark_of_utf_8(tmp_path: Path) -> None:
    """Editors on Windows write one."""
    (file := tmp_path / "keys").write_bytes(b"\xef\xbb\xbfalpha\r\nbeta\r\n")
    keys = ApiKeys.parse(f"@{file}", "api_keys")
    assert (keys.first, keys.allows("Bearer beta"), keys.num_holders) == ("alpha", True, 2)


def test_a_client_takes_its_key_from_a_pipe() -> None:
    """As that of `--api-key @<(command)`: it is read once there, other than by services."""
    reading, writing = os.pipe()
    try:
        os.write(writing, b"secret\n")
        with pytest.raises(StartupError, match="a pipe can be read only once"):
            ApiKeys.parse(f"@/dev/fd/{reading}", "api_keys")
        os.close(writing)
        assert ApiKeys.parse(f"@/dev/fd/{reading}", "api_key").first == "secret"
    finally:
        os.close(reading)


@pytest.mark.parametrize("content", [None, "", "# nothing yet\n", b"\xff\xfe\x00"])
def test_a_file_that_gives_no_keys_is_refused(tmp_path: Path, content: str | bytes | None) -> None:
    """Otherwise a mistake would open the door to all."""
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(StartupError) as caught:
        ApiKeys.parse(f"@{file}", "api_keys")
    assert "api_keys" in caught.value.message
    assert str(file) in caught.value.message


@pytest.mark.parametrize("text", [",", "s3cret,,other", "s3cret,", "s3cret with spaces", "s3crét", "s3cret\tx"])
def test_a_key_that_no_header_can_carry_is_refused_unseen(text: str) -> None:
    with pytest.raises(StartupError) as caught:
        ApiKeys.parse(text, "api_keys")
    error = caught.value
    assert "api_keys: key " in error.message
    assert "s3cr" not in f"{error.message} {error.value} {error.limit}"


def test_both_of_two_sets() -> None:
    either = ApiKeys(["a"]) | ApiKeys(["b"]) | ApiKeys()
    assert [either.allows(bearer(key)) for key in "abc"] == [True, True, False]
    assert either.first == "a"


def test_every_key_is_compared_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time must not tell which of them it was, nor how much of it was right."""
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def counting(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    keys = ApiKeys(["first", "second", "a third one that is longer"])
    for header in ("Bearer first", "Bearer second", "Bearer no", None):
        compared.clear()
        keys.allows(header)
        assert len(compared) == 3
        assert len({len(digest) for pair in compared for digest in pair}) == 1


def test_settings_never_show_them() -> None:
    settings = CoordinatorSettings(api_keys="s3cret", fleet_key="f1eet", max_sessions=3)
    assert has_secrets(settings)
    for shown in (repr(settings), str(settings), str(settings.model_dump()), settings.model_dump_json()):
        assert "s3cret" not in shown
        assert "f1eet" not in shown
    assert config.flags(settings) == ["--max-sessions", "3"], "a command line is read by everybody on the machine"
    assert "f1eet" not in repr(Channels.of(Credentials(settings)))
    assert Channels.of(Credentials(settings)).key == "f1eet"
    assert not has_secrets(CoordinatorSettings(tls_client_auth=True))


def test_of_several_fleet_keys_the_first_is_shown() -> None:
    assert Channels.of(Credentials(DrafterSettings(fleet_key="new,old"))).key == "new"


def test_api_keys_need_a_fleet_key() -> None:
    with pytest.raises(StartupError) as caught:
        CoordinatorService(CoordinatorSettings(api_keys="s3cret"), NOWHERE)
    assert "fleet_key" in caught.value.message
    assert "worker" in caught.value.message, "it says why"
    assert "s3cret" not in caught.value.message


def test_the_error_has_its_statuses() -> None:
    assert KINDS["unauthenticated"] is Unauthenticated
    assert (Unauthenticated.grpc_status, Unauthenticated.http_status) == ("UNAUTHENTICATED", 401)


def test_a_key_has_a_holder(tmp_path: Path) -> None:
    """By name, else by a part of the key's digest; a bare key of an older file reads as before."""
    file = tmp_path / "keys"
    file.write_text(
        "# named, with limits\nweb: s3cret requests_per_minute=60 max_sessions=8\nweb: n3wer requests_per_minute=60 "
        "max_sessions=8\nbare:with=signs==\nbatch: other tokens_per_minute=1000\n"
    )
    keys = ApiKeys.parse(f"@{file}", "api_keys")
    web = keys.tenant_of("Bearer s3cret")
    assert web is not None
    assert (web.id, web.limits) == ("web", TenantLimits(requests_per_minute=60, max_sessions=8))
    assert keys.tenant_of("Bearer n3wer") == web, "a key can be changed without becoming somebody else"
    bare = keys.tenant_of("Bearer bare:with=signs==")
    assert bare is not None
    assert bare.id == "key-" + hashlib.sha256(b"bare:with=signs==").hexdigest()[:12]
    assert keys.tenant_of("Bearer web: s3cret") is None
    assert keys.tenant_of("Bearer nobody's") is None
    assert keys.first == "s3cret"
    assert ApiKeys().tenant_of(None) == NO_TENANT


def test_blanks_around_a_setting_are_no_part_of_it(tmp_path: Path) -> None:
    """The name of the file would be the key, as from an environment file with a blank after the sign."""
    file = tmp_path / "keys"
    file.write_text("s3cret\n")
    given = Credentials(CoordinatorSettings(api_keys=f" @{file} ")).keys["api_keys"]
    assert [given.allows(bearer(key)) for key in ("s3cret", f"@{file}")] == [True, False]
    assert ApiKeys.parse(f" @{file}", "api_key").first == "s3cret", "a client's likewise"


@pytest.mark.parametrize(
    "entry",
    [
        "web: s3cret requests=5",
        "web: s3cret max_sessions=-1",
        "web: s3cret max_sessions=1 max_sessions=2",
        "web: s3cret max_sessions=²",
        "web: s3cret max_sessions",
        f"web: s3cret priority={MAX_PRIORITY + 1}",
        f"web: s3cret best_priority=-{MAX_PRIORITY + 1}",
        "web: s3cret priority=--1",
        pytest.param("web: s3cret tokens_per_minute=" + 400 * "9", id="beyond a float"),
        pytest.param("web: s3cret tokens_per_minute=" + 5000 * "9", id="beyond what Python reads"),
        "a name: s3cret",
        "key-0123456789ab: s3cret",
        "web: s3cret max_sessions=1,web: s3cret-2",
    ],
)
def test_an_entry_that_does_not_read_is_refused_unseen(entry: str) -> None:
    with pytest.raises(StartupError) as caught:
        ApiKeys.parse(entry, "api_keys")
    assert "s3cr" not in f"{caught.value.message} {caught.value.value} {caught.value.limit}"


def test_the_class_of_a_key_is_one_that_a_request_may_have() -> None:
    """A session of another class would be stored, and could not be read again."""
    keys = ApiKeys.parse(f"web: s3cret priority={MAX_PRIORITY} best_priority=-{MAX_PRIORITY}", "api_keys")
    web = keys.tenant_of("Bearer s3cret")
    assert web is not None
    assert web.limits == TenantLimits(priority=MAX_PRIORITY, best_priority=-MAX_PRIORITY)


def test_what_belongs_to_a_tenant_has_other_names_than_another_s() -> None:
    one, other = Tenant("one"), Tenant("other")
    assert len({one.salt(""), one.salt("x"), other.salt(""), other.salt("x"), "", "x"}) == 6
    assert one.idempotency_key("k") != other.idempotency_key("k")
    assert (NO_TENANT.salt("x"), NO_TENANT.idempotency_key("k")) == ("x", "k"), "without keys nothing changes"
