"""Keys and certificates of one service: read at start, and again when a file changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import grpc
import structlog
from pydantic import SecretStr

from outrider.base.atomic_files import read_named
from outrider.base.config import Settings
from outrider.protocol.errors import StartupError
from outrider.security.api_keys import ApiKeys
from outrider.security.tls import SYSTEM, Tls

log = structlog.get_logger(__name__)

LOOK_S = 2.0
_Contents = tuple[bytes, ...]


@dataclass(slots=True)
class _Watched:
    """Files that belong together; `load` applies their content, or raises StartupError and changes nothing."""

    name: str
    paths: Sequence[str]
    load: Callable[[], None]
    used: _Contents = field(init=False)  # last content that was loaded or refused
    seen: _Contents = field(init=False)  # content at the last poll

    def __post_init__(self) -> None:
        self.used = self.seen = self._contents()

    def look(self) -> None:
        """Load a change once two polls have read the same content: files may be half written."""
        before, self.seen = self.seen, self._contents()
        if self.seen == self.used or self.seen != before:
            return
        self.used = self.seen
        try:
            self.load()
        except (StartupError, OSError) as error:
            message = error.message if isinstance(error, StartupError) else str(error)
            log.error("credentials not reloaded, previous values stay in force", setting=self.name, error=message)
        else:
            log.info("credentials reloaded", setting=self.name)

    def _contents(self) -> _Contents:
        contents = []
        for path in self.paths:
            with suppress(StartupError):  # it is missing
                contents.append(read_named("", path))
        return tuple(contents)


class Credentials:
    """Current keys and certificates. The `ApiKeys` in `keys` are updated in place."""

    def __init__(self, settings: Settings) -> None:
        """Raise StartupError for a file that cannot be used."""
        self._settings = settings
        self._watched: list[_Watched] = []
        self.keys: dict[str, ApiKeys] = {}  # by setting
        for name, value in settings:
            if isinstance(value, SecretStr):
                self.keys[name] = self._read_keys(name, value.get_secret_value().strip())
        files = [settings.tls_cert, settings.tls_key, "" if settings.tls_ca == SYSTEM else settings.tls_ca]
        self._load("tls_cert, tls_key, tls_ca", [file for file in files if file], self._load_tls)

    @property
    def own_keys(self) -> ApiKeys:
        """Return the keys that this service shares with the fleet."""
        return self.keys[self._settings.own_key[0]]

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Return credentials that answer each handshake with the certificate of that moment; None: plain text."""
        if (shown := self.tls) is None:
            return None

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """Return a changed configuration; None: keep the last one."""
            nonlocal shown
            if self.tls is None or self.tls == shown:
                return None
            shown = self.tls
            return shown.server_configuration()

        return grpc.dynamic_ssl_server_credentials(
            shown.server_configuration(),
            changed,  # type: ignore[arg-type]
            require_client_authentication=shown.client_auth,
        )

    async def follow(self) -> None:
        """Poll the files every few seconds."""
        while self._watched:
            await asyncio.sleep(LOOK_S)
            for watched in self._watched:
                with suppress(RuntimeError):  # the system allows no further thread now
                    await asyncio.to_thread(watched.look)

    def _read_keys(self, name: str, text: str) -> ApiKeys:
        keys = ApiKeys()
        self._load(name, [text[1:]] if text.startswith("@") else [], lambda: keys.replace_by(ApiKeys.parse(text, name)))
        return keys

    def _load(self, name: str, files: Sequence[str], load: Callable[[], None]) -> None:
        """Load a setting, and again when one of its files changes: they are read first, so that no change is missed."""
        if files:
            self._watched.append(_Watched(name, files, load))
        load()

    def _load_tls(self) -> None:
        self.tls = Tls.of(self._settings)
