"""The private authority of `outrider up --tls`."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import pytest

from outrider.launch.authority import make_certificate
from outrider.protocol.errors import StartupError
from outrider.security.tls import certified_names

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")


@needs_openssl
def test_the_certificate_names_this_machine_and_the_authority_stays(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    cert, key, ca = make_certificate(folder, "0.0.0.0")
    names = certified_names(str(cert), str(key), str(ca))
    assert names[0] != "0.0.0.0"
    assert {"localhost", socket.gethostname(), "127.0.0.1"} <= set(names)
    trusted = ca.read_bytes()
    again = [str(file) for file in make_certificate(folder, "big.example.com")]
    assert ca.read_bytes() == trusted, "clients go on trusting it"
    assert "big.example.com" in certified_names(*again)
    assert folder.stat().st_mode & 0o777 == 0o700
    for secret in (key, folder / "ca.key"):
        assert secret.stat().st_mode & 0o777 == 0o600
    assert {file.name for file in folder.iterdir()} == {"ca.pem", "ca.key", "cert.pem", "cert.key"}


@needs_openssl
def test_strict_clients_accept_the_certificate(tmp_path: Path) -> None:
    """Those on Python 3.13 are strict unless told otherwise: OpenAI's client, too."""
    cert, key, ca = make_certificate(tmp_path / "tls", "localhost")
    strict = ssl.create_default_context(cafile=ca)
    strict.verify_flags |= ssl.VERIFY_X509_STRICT
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(cert, key)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = strict.wrap_bio(back, there, server_hostname="localhost")
    server = serving.wrap_bio(there, back, server_side=True)
    for end in (client, server, client):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    assert client.version() is not None
    assert client.getpeercert()


@needs_openssl
def test_an_authority_without_a_key_identifier_still_signs(tmp_path: Path) -> None:
    """The openssl command gives it one only where its configuration says so."""
    folder, config = tmp_path / "tls", tmp_path / "openssl.cnf"
    folder.mkdir()
    config.write_text("[req]\ndistinguished_name=dn\n[dn]\n")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-subj",
        "/CN=old",
    ]
    files = ["-keyout", str(folder / "ca.key"), "-out", str(folder / "ca.pem")]
    subprocess.run([*command, "-config", str(config), *files], check=True, capture_output=True)
    cert, key, ca = make_certificate(folder, "localhost")
    assert "localhost" in certified_names(str(cert), str(key), str(ca))


def test_without_openssl_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StartupError, match="needs the openssl command; or give --tls-cert"):
        make_certificate(tmp_path / "tls", "localhost")
