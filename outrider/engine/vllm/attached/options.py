"""Settings of the attached mode: the part "outrider" of vLLM's `--additional-config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from outrider.protocol.errors import StartupError
from outrider.runtime.worker_service import check_address
from outrider.security.api_keys import ApiKeys
from outrider.security.channels import Channels
from outrider.security.tls import Tls


@dataclass(frozen=True, slots=True)
class AttachOptions:
    """Addresses of the coordinators, the longest wait for their drafters, key and certificates."""

    coordinators: str = ""  # host:port,host:port
    max_wait_ms: float = 20.0  # that a step waits for guesses
    api_key: str = ""  # @FILE
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_name: str = ""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Read the settings; raise StartupError for what cannot be."""
        given = config.get("outrider") or {}
        known = {field.name for field in fields(cls)}
        for name in given.keys() - known:
            raise _invalid(name, "unknown", ", ".join(sorted(known)))
        options = cls(**given)
        if not options.addresses:
            raise _invalid("coordinators", "missing", "host:port,host:port")
        if options.api_key and not options.api_key.startswith("@"):
            raise _invalid("api_key", "no file", "@FILE: vLLM writes its configuration to its log")
        return options

    @property
    def addresses(self) -> list[str]:
        return [check_address("outrider.coordinators", part) for part in self.coordinators.split(",") if part]

    def channels(self) -> Channels:
        tls = Tls.load(cert=self.tls_cert, key=self.tls_key, ca=self.tls_ca, name=self.tls_name)
        return Channels(tls, ApiKeys.parse(self.api_key, "outrider.api_key").first)


def _invalid(name: str, problem: str, limit: str) -> StartupError:
    return StartupError(f"additional_config: outrider.{name} is {problem}", limit=limit)
