"""Settings of the services that `outrider up` starts, from --set and --config, checked before the start.

Names are those of the services' own flags: `--set verifier.max-sessions=32` is `--max-sessions 32` of every verifier,
`--set verifier-2.device=cuda:1` is `--device cuda:1` of one.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import SecretStr, ValidationError

from outrider.base.atomic_files import read_named
from outrider.base.config import PREFIX, VARIABLES, Settings, flags, require_keys_or_insecure
from outrider.launch.targets import REPEATED
from outrider.models.hub import DEFAULT, DEFAULT_NAME, find_path
from outrider.protocol.errors import StartupError
from outrider.security.credentials import Credentials
from outrider.settings.coordinator import CoordinatorSettings
from outrider.settings.drafter import DrafterSettings
from outrider.settings.verifier import VerifierSettings

KINDS: dict[str, type[Settings]] = {
    "coordinator": CoordinatorSettings,
    "verifier": VerifierSettings,
    "drafter": DrafterSettings,
}
_NAME = re.compile(rf"({'|'.join(KINDS)})(?:-([1-9][0-9]*))?")
# Settings that `up` sets for its services, and their source.
_ALL_SERVICES = {name: "--" + name.replace("_", "-") for name in ("fleet_key", "drafter_key", "tls_cert", "tls_key")}
_ALL_SERVICES |= {"tls_ca": "--tls-ca", "tls_name": "the names in --tls-cert"}
_WORKERS = {"coordinators": "the coordinators that it starts", "target": "--target"}
SET_BY_UP: dict[str, dict[str, str]] = {
    "coordinator": {name: "--" + name.replace("_", "-") for name in ("host", "port", "http_port", "insecure")}
    | {"api_keys": "--api-keys", "redis_url": "the variable REDIS_URL"}
    | _ALL_SERVICES,
    **dict.fromkeys(("verifier", "drafter"), _WORKERS | _ALL_SERVICES),
}
_PRIVATE = ("redis_url", "otlp_endpoint")  # URLs that may contain a password
_PORTS = ("port", "http_port", "metrics_port")
_GPUS = ("/dev/nvidiactl", "/proc/driver/nvidia/gpus", "/dev/kfd", "/dev/dxg", "/dev/nvmap")


@dataclass(frozen=True, slots=True)
class GivenSetting:
    """Value of one setting, and its source."""

    value: Any = field(repr=False)
    where: str


Overrides = Mapping[str, Mapping[str, GivenSetting]]  # by "verifier" or "verifier-2", then by the setting


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """Name, kind and settings of one process to start."""

    name: str
    kind: str
    settings: Settings = field(repr=False)

    @property
    def command(self) -> list[str]:
        """Return the command line, which every user can read: secrets are in `variables`."""
        public = self.settings.model_copy(update=dict.fromkeys(_PRIVATE, "")) if self._private else self.settings
        return [sys.executable, "-P", "-m", self.kind, *flags(public)]

    @property
    def variables(self) -> dict[str, str]:
        secrets = {n: v.get_secret_value() for n, v in self.settings if isinstance(v, SecretStr)} | self._private
        return {PREFIX + name.upper(): value for name, value in secrets.items() if value}

    @property
    def _private(self) -> dict[str, str]:
        return {name: value for name in _PRIVATE if (value := getattr(self.settings, name, ""))}


def read_assignments(assignments: Iterable[str]) -> Overrides:
    """Read the values of `--set`, SERVICE.SETTING=VALUE; the last one of a setting wins."""
    found: dict[str, dict[str, GivenSetting]] = {}
    for assignment in assignments:
        left, equals, value = assignment.partition("=")
        name, dot, key = left.strip().partition(".")
        if not (equals and dot):
            raise _refused("--set", left, "must be SERVICE.SETTING=VALUE, such as verifier.max-sessions=32")
        found.setdefault(name, {})[_known(name, key, f"--set {left.strip()}")] = GivenSetting(value, "--set")
    return found


def read_file(path: Path) -> tuple[dict[str, Any], Overrides]:
    """Read a TOML file: flags of `up` by name, and a table per service."""
    try:
        content = tomllib.loads(read_named("--config", str(path)).decode())
    except ValueError as error:
        raise _refused("--config", str(path), f"cannot be read: {error}") from error
    flags_of_up: dict[str, Any] = {}
    tables: dict[str, dict[str, GivenSetting]] = {}
    for name, value in content.items():
        if not isinstance(value, dict):
            flags_of_up[name.replace("-", "_")] = value if name in REPEATED else _plain(value)
            continue
        for key, given in value.items():
            setting = _known(name, key, f"{path}: [{name}] {key}")
            tables.setdefault(name, {})[setting] = GivenSetting(_plain(given), str(path))
    return flags_of_up, tables


def merged(first: Overrides, then: Overrides) -> Overrides:
    """Return the union; for the same setting the second one wins."""
    return {name: {**first.get(name, {}), **then.get(name, {})} for name in {**first, **then}}


def make_services(kind: str, given: Sequence[Mapping[str, Any]], overrides: Overrides) -> list[ServiceSpec]:
    """Return a service for each element of `given`, the settings from `up`. Raise StartupError for invalid settings."""
    for name in overrides:
        if name.startswith(kind) and _parts(name)[1] > len(given):
            where = next(iter(overrides[name].values())).where
            raise _refused(where, name, f"is not among the {len(given)} of its kind that are started")
    return [_service(kind, f"{kind}-{number}", own, overrides) for number, own in enumerate(given, start=1)]


def check_services(services: Sequence[ServiceSpec]) -> None:
    """Raise StartupError for keys, certificates, ports, targets and devices that cannot work."""
    taken: dict[int, str] = {}
    for service in services:
        require_keys_or_insecure(service.settings)
        Credentials(service.settings)
        if (target := getattr(service.settings, "target", DEFAULT)) not in (DEFAULT, DEFAULT_NAME):
            find_path(target)
        if (device := getattr(service.settings, "device", "")).startswith("cuda") and not has_gpu():
            raise StartupError.of("device", device, "auto or cpu", f" for {service.name}: this machine has no GPU")
        ports = {key: getattr(service.settings, key, 0) for key in _PORTS}
        if ports["metrics_port"] > 0 and getattr(service.settings, "own_drafter", ""):
            ports["own_drafter (metrics_port + 1)"] = ports["metrics_port"] + 1
        for key, port in ports.items():
            here = f"{service.name}.{key.replace('_', '-')}"
            if port > 0 and taken.setdefault(port, here) != here:
                raise _refused(here, str(port), f"is the port of {taken[port]} too")


def has_gpu() -> bool:
    """Return whether this machine has a device file of a GPU, or a driver that makes it at the first use."""
    return any(map(os.path.exists, _GPUS))


def ignored_variable_hints(read: Iterable[object]) -> list[str]:
    """Return a hint for each OUTRIDER_ variable that `up` ignores and a service started by hand would read."""
    hints = []
    for name in sorted(name for name in os.environ if name.startswith(PREFIX) and name not in read):
        setting = name.removeprefix(PREFIX).lower()
        kinds = [kind for kind, settings in KINDS.items() if setting in settings.model_fields]
        if kinds:
            by_up = SET_BY_UP[kinds[0]].get(setting)
            instead = f"set by {by_up}" if by_up else f"--set {kinds[0]}.{_form(setting)}=..."
            hints.append(f"{name} is not read here: {instead}")
        elif name not in VARIABLES:
            raise _refused("environment", name, "is unknown", VARIABLES)
    return hints


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name."""
    by_form = {_form(one): one for one in known}
    near = difflib.get_close_matches(_form(name), by_form, n=1)
    return f"; did you mean {by_form[near[0]]}?" if near else ""


def _form(name: str) -> str:
    return name.lower().replace("_", "-")


def _service(kind: str, name: str, own: Mapping[str, Any], overrides: Overrides) -> ServiceSpec:
    more = {**overrides.get(kind, {}), **overrides.get(name, {})}
    # Another kind of drafter does not use the model of the one that it replaces.
    own = {key: value for key, value in own.items() if key != "model" or "kind" not in more}
    try:
        settings = KINDS[kind](**{**own, **{key: given.value for key, given in more.items()}})
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        where = f"{more[key].where}: " if key in more else ""
        secret = KINDS[kind].model_fields[key].annotation is SecretStr
        value = "" if secret else first["input"]
        message = f"{where}{name}.{key.replace('_', '-')}{'' if secret else f' is {value!r}'}: {first['msg']}"
        raise StartupError(message, field=key, value=value) from error
    return ServiceSpec(name, kind, settings)


def _known(name: str, key: str, where: str) -> str:
    """Return the field name of a setting, or raise StartupError."""
    kind, _ = _parts(name)
    if not kind:
        raise _refused(where, name, f"is not a service: {', '.join(KINDS)}, or one of several as in verifier-2", KINDS)
    setting = key.strip().replace("-", "_")
    if setting in SET_BY_UP[kind]:
        raise _refused(where, key, f"is set for {kind}s by {SET_BY_UP[kind][setting]}")
    if setting not in KINDS[kind].model_fields:
        others = [other for other in KINDS if setting in KINDS[other].model_fields]
        if others:
            raise _refused(where, key, f"is a setting of {' and '.join(others)}, not of {kind}")
        known = [field.replace("_", "-") for field in KINDS[kind].model_fields if field not in SET_BY_UP[kind]]
        raise _refused(where, key, f"is not a setting of {kind}", known)
    return setting


def _parts(name: str) -> tuple[str, int]:
    """Return a service's kind and its number, 0 for all; an unknown service has no kind."""
    match = _NAME.fullmatch(name)
    return (match[1], int(match[2] or 0)) if match else ("", 0)


def _refused(where: str, value: str, why: str, known: Iterable[str] = ()) -> StartupError:
    """Return the error, with a suggestion from `known`."""
    return StartupError(f"{where}: {value} {why}{suggestion(value, known)}", field=where, value=value, limit=why)


def _plain(value: Any) -> Any:
    """Return a list as the text with commas that flags take."""
    return ",".join(str(one) for one in value) if isinstance(value, list) else value
