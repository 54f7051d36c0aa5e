"""Client credentials and trusted authorities: read from flags by each process, never sent to another one."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from os.path import expanduser
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
    def load(
        cls, *, api_key: str = "", tls_ca: str = "", tls_cert: str = "", tls_key: str = "", tls_name: str = ""
    ) -> Self:
        """Load the credentials; raise StartupError if they are invalid."""
        key = ApiKeys.parse(api_key, "api_key").first
        tls = Tls.load(cert=tls_cert, key=tls_key, ca=tls_ca, name=tls_name)
        if tls is None:
            return cls(key)
        context = ssl.create_default_context(cafile=None if tls_ca in ("", SYSTEM) else expanduser(tls_ca))
        if tls_cert:
            context.load_cert_chain(expanduser(tls_cert), expanduser(tls_key))
        return cls(key, tls, context)
