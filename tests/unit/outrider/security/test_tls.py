"""Certificates: what is taken, and that what cannot work is told in a sentence before anything starts."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import grpc
import pytest

from outrider.protocol.errors import StartupError
from outrider.security.channels import Channels
from outrider.security.credentials import Credentials
from outrider.security.tls import SYSTEM, Tls, certified_names
from outrider.settings.drafter import DrafterSettings
from tests.certificates import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("certificates"))


def settings(**more: object) -> DrafterSettings:
    return DrafterSettings(**{name: str(value) if isinstance(value, Path) else value for name, value in more.items()})


def refusal(**files: object) -> str:
    with pytest.raises(StartupError) as caught:
        Tls.of(settings(**files))
    return caught.value.message


def test_nothing_given_is_plain_text() -> None:
    assert Tls.load() is None
    assert Tls.of(settings()) is None
    assert Channels.of(Credentials(settings())) == Channels()


def test_a_whole_set(authority: Authority) -> None:
    mine = authority.issue("whole")
    tls = Tls.of(settings(tls_cert=mine.cert, tls_key=mine.key, tls_ca=authority.path, tls_client_auth=True))
    assert tls == Tls(mine.cert.read_bytes(), mine.key.read_bytes(), authority.path.read_bytes(), client_auth=True)
    assert "PRIVATE" not in repr(tls)
    assert tls.server_configuration()
    assert tls.channel_credentials()


def test_a_client_needs_no_certificate(authority: Authority) -> None:
    assert Tls.load(ca=str(authority.path)) == Tls(ca=authority.path.read_bytes())
    assert Tls.load(ca=SYSTEM) == Tls()


def test_both_or_neither(authority: Authority) -> None:
    mine = authority.issue("half")
    assert refusal(tls_cert=mine.cert) == "tls_cert is given without tls_key: both or neither"
    assert refusal(tls_key=mine.key) == "tls_key is given without tls_cert: both or neither"


@pytest.mark.parametrize("name", ["tls_cert", "tls_key", "tls_ca"])
def test_files_that_cannot_be_read(authority: Authority, tmp_path: Path, name: str) -> None:
    mine = authority.issue("read")
    files = {"tls_cert": mine.cert, "tls_key": mine.key, "tls_ca": authority.path}
    missing = tmp_path / "missing.pem"
    assert refusal(**files | {name: missing}) == f"{name}: cannot read {missing}: No such file or directory"
    assert refusal(**files | {name: tmp_path}) == f"{name}: cannot read {tmp_path}: Is a directory"
    homeless = "~no-user-has-this-name/x"
    assert refusal(**files | {name: homeless}) == f"{name}: cannot read {homeless}: Could not determine home directory."


@pytest.mark.timeout(10)
@pytest.mark.parametrize("name", ["tls_cert", "tls_key", "tls_ca"])
def test_a_pipe_is_not_waited_for(authority: Authority, tmp_path: Path, name: str) -> None:
    """As that of a shell's `<(command)`."""
    mine = authority.issue("piped")
    files = {"tls_cert": mine.cert, "tls_key": mine.key, "tls_ca": authority.path}
    os.mkfifo(pipe := tmp_path / "pipe")
    with pytest.raises(StartupError, match=f"{name}: cannot read {pipe}: a pipe can be read only once"):
        Credentials(settings(**files | {name: pipe}))


@pytest.mark.parametrize("client_auth", [False, True])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["", "marked"])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
async def test_files_of_an_editor_on_windows_serve(
    authority: Authority, tmp_path: Path, line_end: bytes, mark: bytes, client_auth: bool
) -> None:
    """OpenSSL, which checks them at the start, takes a mark of UTF-8 before them. gRPC does not."""
    mine = authority.issue("edited")
    given = {"tls_cert": mine.cert, "tls_key": mine.key, "tls_ca": authority.path}
    for name, path in given.items():
        (tmp_path / name).write_bytes(mark + path.read_bytes().replace(b"\n", line_end))
    files = {name: tmp_path / name for name in given}
    credentials = Credentials(settings(**files, tls_client_auth=client_auth))
    assert credentials.tls is not None
    offered = credentials.server_credentials()
    assert offered is not None
    server = grpc.aio.server()
    try:
        port = server.add_secure_port("127.0.0.1:0", offered)
        await server.start()
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials.tls.channel_credentials()) as channel:
            async with asyncio.timeout(10):
                await channel.channel_ready()
    finally:
        await server.stop(None)


def test_a_file_of_keys_in_the_home_of_no_user_cannot_be_read() -> None:
    with pytest.raises(StartupError, match="fleet_key: cannot read ~no-user-has-this-name/x: Could not determine home"):
        Credentials(settings(fleet_key="@~no-user-has-this-name/x"))


def test_a_key_of_another_certificate(authority: Authority) -> None:
    mine, other = authority.issue("mine"), authority.issue("other")
    message = refusal(tls_cert=mine.cert, tls_key=other.key)
    assert f"tls_cert {mine.cert} and tls_key {other.key} are no pair" in message
    assert "MISMATCH" in message


def test_a_key_with_a_password_is_refused_and_not_asked_for(authority: Authority) -> None:
    mine = authority.issue("hidden", password=b"hush")
    assert "the key has a password" in refusal(tls_cert=mine.cert, tls_key=mine.key)


def test_files_that_are_something_else(authority: Authority, tmp_path: Path) -> None:
    mine = authority.issue("else")
    text = tmp_path / "notes.txt"
    text.write_text("buy milk\n")
    assert "no pair" in refusal(tls_cert=text, tls_key=mine.key)
    assert "no pair" in refusal(tls_cert=mine.cert, tls_key=text)
    files = {"tls_cert": mine.cert, "tls_key": mine.key}
    assert f"tls_ca {text} holds no certificate" in refusal(**files, tls_ca=text)


def test_an_empty_file_of_authorities_is_refused(authority: Authority, tmp_path: Path) -> None:
    """With no authorities gRPC would trust its own, which are public."""
    mine = authority.issue("empty")
    empty = tmp_path / "ca.pem"
    empty.touch()
    assert f"tls_ca {empty} holds no certificate" in refusal(tls_cert=mine.cert, tls_key=mine.key, tls_ca=empty)
    with pytest.raises(StartupError, match="holds no certificate"):
        Tls.load(ca=str(empty))


def test_a_service_with_an_authority_alone_would_listen_in_plain_text(authority: Authority) -> None:
    assert "plain text" in refusal(tls_ca=authority.path)


@pytest.mark.parametrize("ca", ["", SYSTEM])
def test_to_ask_callers_needs_an_authority(authority: Authority, ca: str) -> None:
    mine = authority.issue("asks")
    assert "tls_client_auth needs" in refusal(tls_cert=mine.cert, tls_key=mine.key, tls_ca=ca, tls_client_auth=True)
    assert "tls_client_auth needs" in refusal(tls_client_auth=True)


def test_a_certificate_is_looked_at_as_its_callers_do(authority: Authority, tmp_path: Path) -> None:
    public = authority.issue("public", hosts=["*.example.com", "a.example.com"])
    local = authority.issue("local")
    assert certified_names(str(public.cert), str(public.key), str(authority.path)) == ["*.example.com", "a.example.com"]
    assert certified_names(str(local.cert), str(local.key), str(authority.path)) == ["127.0.0.1"]
    stranger = Authority.make(tmp_path, "stranger")
    for ca in (str(stranger.path), SYSTEM, ""):
        with pytest.raises(StartupError, match=f"trust {ca or SYSTEM}.*would refuse tls_cert .*local.pem"):
            certified_names(str(local.cert), str(local.key), ca)


def test_a_shared_certificate_goes_by_its_name(authority: Authority) -> None:
    mine = authority.issue("shared", hosts=["outrider.internal"])
    tls = Tls.of(settings(tls_cert=mine.cert, tls_key=mine.key, tls_ca=authority.path, tls_name="outrider.internal"))
    assert tls is not None
    assert tls.channel_options() == [("grpc.ssl_target_name_override", "outrider.internal")]
    assert Tls.load(ca=SYSTEM).channel_options() == []
    with pytest.raises(StartupError, match="tls_name is given without tls_cert or tls_ca"):
        Tls.load(name="outrider.internal")
