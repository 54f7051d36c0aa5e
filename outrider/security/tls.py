"""TLS: certificates, trusted authorities, and the gRPC credentials made from them.

A service with any of these settings uses TLS only, for incoming and outgoing connections. The module imports little,
because health checks start it every few seconds.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field, replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import grpc

from outrider.base.atomic_files import read_named
from outrider.protocol.errors import StartupError

if TYPE_CHECKING:
    from outrider.base.config import Settings  # slow to import, and health checks do not need it

SYSTEM = "system"  # as --tls-ca: the authorities that come with gRPC


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates and key in PEM. Without a certificate a process can call but not listen."""

    cert: bytes = b""
    key: bytes = field(default=b"", repr=False)
    ca: bytes = b""  # empty: the authorities that come with gRPC
    client_auth: bool = False
    name: str = ""  # required in the certificates of servers; empty: the host of the call
    # For servers other than gRPC's: with the client authentication of gRPC, and without any.
    context: ssl.SSLContext | None = field(default=None, repr=False, compare=False)
    lenient_context: ssl.SSLContext | None = field(default=None, repr=False, compare=False)

    @classmethod
    def load(cls, *, cert: str = "", key: str = "", ca: str = "", name: str = "") -> Self | None:
        """Read the files; return None if none is named. Raise StartupError for settings that cannot work."""
        if not (cert or key or ca):
            if name:
                message = "tls_name is given without tls_cert or tls_ca: nothing would be encrypted"
                raise StartupError(message, field="tls_name", value=name)
            return None
        if bool(cert) != bool(key):
            there, missing = ("tls_cert", "tls_key") if cert else ("tls_key", "tls_cert")
            raise StartupError(f"{there} is given without {missing}: both or neither", field=missing, limit="a file")
        given = cls(
            cert=read_named("tls_cert", cert) if cert else b"",
            key=read_named("tls_key", key) if key else b"",
            ca=read_named("tls_ca", ca) if ca not in ("", SYSTEM) else b"",
            name=name,
        )
        context = _context(cert, key) if cert else None
        if ca not in ("", SYSTEM):  # not by its content: with an empty file, gRPC would trust its own authorities
            _trust(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ca)
        return replace(given, context=context, lenient_context=context)

    @classmethod
    def of(cls, settings: Settings) -> Self | None:
        """Return the TLS settings of a service. Raise StartupError if it could not listen or check its clients."""
        named = {"cert": settings.tls_cert, "key": settings.tls_key, "ca": settings.tls_ca}
        given = cls.load(**named, name=settings.tls_name)
        if given is not None and not given.cert:
            message = "tls_ca is given without tls_cert and tls_key: this service would listen in plain text"
            raise StartupError(message, field="tls_cert", limit="a file")
        if not settings.tls_client_auth:
            return given
        if given is None or not given.ca:
            message = "tls_client_auth needs tls_cert, tls_key and a tls_ca file, the authority of client certificates"
            raise StartupError(message, field="tls_ca", value=settings.tls_ca, limit="a file")
        asking = _context(settings.tls_cert, settings.tls_key)
        asking.verify_mode = ssl.CERT_REQUIRED
        _trust(asking, settings.tls_ca)
        # A resumed TLS session would skip the certificate check, even after its authority was removed.
        asking.num_tickets = 0
        asking.options |= ssl.OP_NO_TICKET
        return replace(given, client_auth=True, context=asking)

    def server_configuration(self) -> grpc.ServerCertificateConfiguration:
        asked = self.ca if self.client_auth else None  # the authorities of callers
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], root_certificates=asked)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials of outgoing calls, with our certificate for servers that require one."""
        return grpc.ssl_channel_credentials(
            root_certificates=self.ca or None, private_key=self.key or None, certificate_chain=self.cert or None
        )

    def channel_options(self) -> list[tuple[str, str]]:
        return [("grpc.ssl_target_name_override", self.name)] if self.name else []


def certified_names(cert: str, key: str, ca: str) -> list[str]:
    """Return the names in a certificate that is valid for callers who trust `ca`, hosts before addresses.

    Raise StartupError for a certificate that such callers would refuse; a handshake in memory checks it.
    """
    caller = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    caller.check_hostname = False
    if ca in ("", SYSTEM):
        with as_file(files("grpc") / "_cython" / "_credentials" / "roots.pem") as bundle:
            caller.load_verify_locations(bundle)
    else:
        _trust(caller, ca)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    calling = caller.wrap_bio(back, there)
    called = _context(cert, key).wrap_bio(there, back, server_side=True)
    try:
        while not (_handshake(calling) & _handshake(called)):
            pass
    except ssl.SSLError as error:
        _refuse("tls_cert", cert, f"callers who trust {ca or SYSTEM} (tls_ca) would refuse tls_cert {cert}", error)
    shown: dict[str, Any] = calling.getpeercert() or {}
    found = sorted((kind, name) for kind, name in shown.get("subjectAltName", ()) if kind in ("DNS", "IP Address"))
    if not found:
        message = f"tls_cert {cert} names no host (subjectAltName)"
        raise StartupError(message, field="tls_cert", value=cert, limit="a host")
    return [name for _, name in found]


def _handshake(end: ssl.SSLObject) -> bool:
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def _context(cert: str, key: str) -> ssl.SSLContext:
    """Return a server context. Raise StartupError for a mismatched pair: gRPC would listen and fail every call."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without this, OpenSSL would prompt for the password of an encrypted key.
        context.load_cert_chain(Path(cert).expanduser(), Path(key).expanduser(), password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        _refuse("tls_key", key, f"tls_cert {cert} and tls_key {key} are no pair of a certificate and its key", error)
    return context


def _trust(context: ssl.SSLContext, path: str) -> None:
    try:
        context.load_verify_locations(Path(path).expanduser())
    except ssl.SSLError as error:
        _refuse("tls_ca", path, f"tls_ca {path} holds no certificate", error)


def _refuse(field: str, path: str, what: str, error: Exception) -> NoReturn:
    message = f"{what}: {getattr(error, 'reason', None) or error}; files must be PEM, keys without a password"
    raise StartupError(message, field=field, value=path) from error


def _no_password() -> str:
    raise ValueError("the key has a password")
