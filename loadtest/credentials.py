"""Client credentials and trusted authorities: read from flags by each process, never sent to another one."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from outrider.security.api_keys import ApiKeys
from outrider.security.tls import SYSTEM, Tls


@dataclass(frozen=True, slots=True)
class ClientCredentials:
    """API key and TLS settings of the load test's clients."""

    api_key: str = field(default="", repr=False)
    tls: Tls | None = None  # None: without TLS
    context: ssl.SSLContext | None = None  # the same settings, for HTTP

    @classmethod
    def load(cls, *, api_key: str = "", tls_ca: str = "", tls_cert: str = "", tls_key: str = "") -> Self:
        """Load the credentials; raise StartupError if they are invalid."""
        key = ApiKeys.parse(api_key, "api_key").first
        tls = Tls.load(cert=tls_cert, key=tls_key, ca=tls_ca)
        if tls is None:
            return cls(key)
        context = ssl.create_default_context(cafile=None if tls_ca in ("", SYSTEM) else Path(tls_ca).expanduser())
        if tls_cert:
            context.load_cert_chain(Path(tls_cert).expanduser(), Path(tls_key).expanduser())
        return cls(key, tls, context)
