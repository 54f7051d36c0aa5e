"""Settings of the attached mode: the part "outrider" of vLLM's `--additional-config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, Field, ValidationError

from outrider.protocol.errors import StartupError
from outrider.runtime.worker_service import addresses
from outrider.security.api_keys import ApiKeys
from outrider.security.channels import Channels
from outrider.security.tls import Tls


class AttachOptions(BaseModel, extra="forbid", frozen=True, hide_input_in_errors=True):
    """Addresses of the coordinators, the longest wait for their drafters, key and certificates."""

    coordinators: str = Field(min_length=1)  # host:port,host:port
    max_wait_ms: float = Field(20.0, ge=0, allow_inf_nan=False)  # that a step waits for guesses
    api_key: str = ""  # @FILE
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_name: str = ""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Read the settings; raise StartupError for what cannot be."""
        try:
            options = cls.model_validate(config.get("outrider", {}))
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(("outrider", *map(str, first["loc"])))
            names = ", ".join(sorted(cls.model_fields))
            raise StartupError(f"additional_config: {name}: {first['msg']}. Settings: {names}") from error
        if not options.addresses:
            raise StartupError("additional_config: outrider.coordinators has no host:port")
        if options.api_key and not options.api_key.startswith("@"):
            why = "must be @FILE: vLLM writes its configuration to its log"
            raise StartupError(f"additional_config: outrider.api_key is no file, {why}")
        return options

    @property
    def addresses(self) -> list[str]:
        return addresses("outrider.coordinators", self.coordinators)

    def channels(self) -> Channels:
        tls = Tls.load(cert=self.tls_cert, key=self.tls_key, ca=self.tls_ca, name=self.tls_name)
        return Channels(tls, ApiKeys.parse(self.api_key, "outrider.api_key").first)
