"""The private authority of `outrider up --tls`."""

from __future__ import annotations

import shutil
import socket
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


def test_without_openssl_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StartupError, match="needs the openssl command; or give --tls-cert"):
        make_certificate(tmp_path / "tls", "localhost")
