"""Certificates for tests: an authority and the certificates that it signs."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = timedelta(days=1)
_NOT_IN_USE = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
_SIGNS = x509.KeyUsage(
    **dict.fromkeys((*_NOT_IN_USE, "encipher_only", "decipher_only"), False), key_cert_sign=True, crl_sign=True
)


@dataclass(frozen=True, slots=True)
class Certificate:
    """Paths of PEM files."""

    cert: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Authority:
    """Certificate authority of a fleet. `path` is its certificate."""

    path: Path
    _name: x509.Name
    _key: ec.EllipticCurvePrivateKey

    @classmethod
    def make(cls, folder: Path, name: str = "authority") -> Self:
        folder.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _named(name)
        usage = x509.BasicConstraints(ca=True, path_length=None)
        path = folder / f"{name}.pem"
        path.write_bytes(_signed(subject, subject, key, key, [(usage, True), (_SIGNS, True)]))
        return cls(path, subject, key)

    def issue(
        self, name: str, *, address: str = "127.0.0.1", hosts: Sequence[str] = (), password: bytes = b""
    ) -> Certificate:
        """Issue a certificate for a service at these hosts, for use as server and as client."""
        key = ec.generate_private_key(ec.SECP256R1())
        addresses = [] if hosts else [x509.IPAddress(ipaddress.ip_address(address))]
        names = x509.SubjectAlternativeName([*(x509.DNSName(host) for host in hosts), *addresses])
        made = Certificate(self.path.with_name(f"{name}.pem"), self.path.with_name(f"{name}.key"))
        made.cert.write_bytes(_signed(_named(name), self._name, key, self._key, [(names, False)]))
        hidden = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        made.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden))
        return made


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _signed(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    by: ec.EllipticCurvePrivateKey,
    extensions: Sequence[tuple[x509.ExtensionType, bool]],
) -> bytes:
    """Sign a certificate with what strict clients require, as those of Python 3.13."""
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - _DAY)
    builder = builder.not_valid_after(now + _DAY)
    subject_key = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key())
    for extension, critical in (*extensions, (subject_key, False), (issuer_key, False)):
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(by, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
