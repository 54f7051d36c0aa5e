"""Settings of the services of `outrider up`: read, merged, checked, and handed on as they were given."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import typer
from pydantic import SecretStr
from typer.testing import CliRunner

from outrider.base import config
from outrider.base.config import PREFIX, Settings
from outrider.launch import services
from outrider.launch.services import KINDS, ServiceSpec, make_services, merged, read_assignments, read_file
from outrider.protocol.errors import StartupError
from outrider.settings.verifier import VerifierSettings
from tests.cluster import ROOT


def values(overrides: services.Overrides) -> dict[str, dict[str, Any]]:
    return {name: {key: given.value for key, given in one.items()} for name, one in overrides.items()}


def written(folder: Path, text: str) -> Path:
    file = folder / "outrider.toml"
    file.write_text(text)
    return file


def test_assignments_name_a_service_and_its_setting() -> None:
    read = read_assignments(
        [
            "coordinator.max-sessions=64",
            "coordinator.served_model_name=a=b.c",
            "verifier-2.device=cuda:1",
            "coordinator.max-sessions=65",
            "drafter.blur=",
        ]
    )
    assert values(read) == {
        "coordinator": {"max_sessions": "65", "served_model_name": "a=b.c"},
        "verifier-2": {"device": "cuda:1"},
        "drafter": {"blur": ""},
    }


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        (
            "coordinator.max-sesions=3",
            "--set coordinator.max-sesions: max-sesions is not a setting of coordinator; did you mean max-sessions?",
        ),
        ("verifier.max_prefill=3", "is not a setting of verifier"),
        ("drafter.gamma-max=3", "gamma-max is a setting of coordinator, not of drafter"),
        ("verifer.engine=instant", "verifer is not a service.*did you mean verifier?"),
        ("verifier-0.engine=instant", "verifier-0 is not a service"),
        ("coordinator.port=1", "port is set for coordinators by --port"),
        ("coordinator.redis-url=redis://x", "by the variable REDIS_URL"),
        ("drafter.fleet-key=s3cret", "by --fleet-key"),
        ("verifier.tls-cert=x", "by --tls-cert"),
        ("verifier .engine=instant", "verifier  is not a service"),
        ("verifier=3", "must be SERVICE.SETTING=VALUE"),
        ("verifier.engine", "must be SERVICE.SETTING=VALUE"),
    ],
)
def test_what_cannot_be_assigned_is_refused_by_name(assignment: str, message: str) -> None:
    with pytest.raises(StartupError, match=message) as refused:
        read_assignments([assignment])
    assert "s3cret" not in str(refused.value)


def test_every_setting_can_be_assigned_or_is_decided() -> None:
    for kind, settings in KINDS.items():
        decided = services.SET_BY_UP[kind].keys() & settings.model_fields.keys()
        for field in settings.model_fields.keys() - decided:
            read = read_assignments([f"{kind}.{field.replace('_', '-')}=1"])
            assert values(read) == {kind: {field: "1"}}
        for field in decided:
            with pytest.raises(StartupError, match="is set for"):
                read_assignments([f"{kind}.{field}=1"])


def test_a_file_has_a_table_for_each_service_and_flags_beside_them(tmp_path: Path) -> None:
    text = """
        target = "./Big"
        http-port = 9000
        api-keys = ["one", "two"]
        [coordinator]
        max-sessions = 64
        cors-origins = ["http://a", "http://b"]
        [verifier-2]
        device = "cuda:1"
    """
    flags, overrides = read_file(written(tmp_path, text))
    assert flags == {"target": "./Big", "http_port": 9000, "api_keys": "one,two"}
    assert values(overrides) == {
        "coordinator": {"max_sessions": 64, "cors_origins": "http://a,http://b"},
        "verifier-2": {"device": "cuda:1"},
    }


def test_a_table_without_settings_is_for_no_service(tmp_path: Path) -> None:
    """Such as one whose settings are all commented out, of a service that is not started."""
    _, overrides = read_file(written(tmp_path, "[verifier-2]\n# device = 'cuda:1'\n[drafter]"))
    assert values(overrides) == {}
    assert len(make_services("verifier", [{}], overrides)) == 1


def test_the_example_of_the_documentation_is_taken(tmp_path: Path) -> None:
    (example,) = re.findall(
        r"^```toml$(.*?)^```", (ROOT / "docs" / "operating.md").read_text(), re.MULTILINE | re.DOTALL
    )
    flags, overrides = read_file(written(tmp_path, example))
    assert flags.keys() == {"target", "verifiers", "api_keys", "tls"}
    assert len(make_services("coordinator", [{}], overrides)) == 1
    one, two = make_services("verifier", [{}] * flags["verifiers"], overrides)
    assert one.settings.model_dump()["device"] == "cuda:0"
    assert two.settings.model_dump()["metrics_port"] == 9102


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[coordinator]\nmax-sesions = 1", r"outrider.toml: \[coordinator\] max-sesions.*did you mean max-sessions"),
        ("[cordinator]\nx = 1", "cordinator is not a service.*did you mean coordinator"),
        ("[coordinator", "outrider.toml cannot be read: Expected"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        read_file(written(tmp_path, text))
    with pytest.raises(StartupError, match="No such file"):
        read_file(tmp_path / "missing.toml")


def test_the_nearer_setting_holds(tmp_path: Path) -> None:
    """The command line before the file, both before the flags of `up`, one service before its kind."""
    file = read_file(written(tmp_path, "[verifier]\nmax-sessions = 5\nkv-tokens = 2000\n[verifier-2]\nthreads = 3\n"))[
        1
    ]
    line = read_assignments(["verifier.max-sessions=6", "verifier-1.kv-tokens=3000"])
    one, two = make_services("verifier", [{"threads": 1, "dtype": "float32"}] * 2, merged(file, line))
    assert one.settings == VerifierSettings(max_sessions=6, kv_tokens=3000, threads=1, dtype="float32")
    assert two.settings == VerifierSettings(max_sessions=6, kv_tokens=2000, threads=3, dtype="float32")
    assert (one.name, two.name) == ("verifier-1", "verifier-2")


@pytest.mark.parametrize(("given", "assignments"), [({}, ["verifier.kv-tokens=0"]), ({"kv_tokens": 0}, [])])
def test_the_size_of_the_cache_may_be_left_to_the_verifier(given: dict[str, Any], assignments: list[str]) -> None:
    (verifier,) = make_services("verifier", [given], read_assignments(assignments))
    assert verifier.settings == VerifierSettings()
    assert "--kv-tokens" not in verifier.command


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("verifier.max-sessions=many", "--set: verifier-1.max-sessions is 'many': .*valid integer"),
        ("verifier-2.kv-tokens=1", "--set: verifier-2.kv-tokens is '1': .*greater than or equal to 64"),
        ("verifier.engine=psychic", "verifier-1.engine is 'psychic'"),
        ("verifier-3.device=cpu", "verifier-3 is not among the 2 of its kind"),
    ],
)
def test_a_wrong_value_is_refused_by_name(assignment: str, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        make_services("verifier", [{}, {}], read_assignments([assignment]))


def test_another_kind_of_drafter_leaves_the_model_behind() -> None:
    given = [{"kind": "eagle", "model": "of-eagle"}] * 3
    line = read_assignments(["drafter-2.kind=ngram", "drafter-3.kind=model", "drafter-3.model=small"])
    made = [spec.settings.model_dump() for spec in make_services("drafter", given, line)]
    assert [(one["kind"], one["model"]) for one in made] == [("eagle", "of-eagle"), ("ngram", ""), ("model", "small")]


def test_secrets_are_on_no_command_line() -> None:
    own = {"fleet_key": "of-the-fleet", "redis_url": "redis://:of-redis@x", "otlp_endpoint": "http://of-otlp@x"}
    (spec,) = make_services("coordinator", [own], read_assignments(["coordinator.max-sessions=3"]))
    assert "of-" not in " ".join(spec.command) + repr(spec)
    assert spec.command[-2:] == ["--max-sessions", "3"]
    assert spec.variables == {
        "OUTRIDER_FLEET_KEY": "of-the-fleet",
        "OUTRIDER_REDIS_URL": "redis://:of-redis@x",
        "OUTRIDER_OTLP_ENDPOINT": "http://of-otlp@x",
    }
    (spec,) = make_services("verifier", [{}], read_assignments(["verifier.metrics-key=of-metrics"]))
    assert "of-" not in " ".join(spec.command)
    assert spec.variables == {"OUTRIDER_METRICS_KEY": "of-metrics"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_service_reads_what_was_meant(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(PREFIX):
            monkeypatch.delenv(name)
    fields = KINDS[kind].model_fields
    meant = {
        name: SecretStr("hidden") if field.annotation is SecretStr else other(field.default, field.annotation)
        for name, field in fields.items()
        if not field.metadata
    }  # fields with bounds keep their defaults
    assert len(meant) > 5
    spec = ServiceSpec(f"{kind}-1", kind, KINDS[kind](**meant))
    given: list[Settings] = []
    entry = typer.Typer()
    entry.command()(config.command(KINDS[kind], given.append, kind))
    result = CliRunner().invoke(entry, spec.command[spec.command.index(kind) + 1 :], env=spec.variables)
    assert result.exit_code == 0, result.output
    assert given == [spec.settings]


def other(default: Any, annotation: Any) -> Any:
    if get_origin(annotation) is Literal:
        return get_args(annotation)[-1]
    return not default if isinstance(default, bool) else f"other {default}"


def test_two_services_cannot_have_one_port() -> None:
    specs = make_services("verifier", [{}, {}], read_assignments(["verifier.metrics-port=9100"]))
    with pytest.raises(StartupError, match=r"verifier-2.metrics-port: 9100 is the port of verifier-1.metrics-port too"):
        services.check_services(specs)
    services.check_services(make_services("verifier", [{}, {}], read_assignments(["verifier-2.metrics-port=9100"])))


@pytest.mark.parametrize(("second", "free"), [(9101, False), (9102, True)])
def test_the_drafter_in_a_verifiers_process_has_the_next_port(second: int, free: bool) -> None:
    ports = ["verifier-1.metrics-port=9100", f"verifier-2.metrics-port={second}"]
    specs = make_services("verifier", [{"own_drafter": "suffix"}, {}], read_assignments(ports))
    taken = r"9101 is the port of verifier-1.own-drafter \(metrics-port \+ 1\) too"
    with contextlib.nullcontext() if free else pytest.raises(StartupError, match=taken):
        services.check_services(specs)


def test_keys_and_doors_are_checked_before_anything_starts(tmp_path: Path) -> None:
    for own, message in (
        ({"fleet_key": f"@{tmp_path}/missing"}, "fleet_key: cannot read"),
        ({"host": "0.0.0.0"}, "there are no keys"),
        ({"tls_cert": "/missing", "tls_key": "/missing"}, "tls_cert: cannot read"),
    ):
        with pytest.raises(StartupError, match=message):
            services.check_services(make_services("drafter", [own], {}))


def test_a_variable_that_is_not_read_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GAMMA_MAX", "HOST", "MAX_TOKENS", "REDIS_URL"):
        monkeypatch.setenv(PREFIX + name, "1")
    hints = services.ignored_variable_hints({"OUTRIDER_HOST"})
    assert hints == [
        "OUTRIDER_GAMMA_MAX is not read here: --set coordinator.gamma-max=...",
        "OUTRIDER_REDIS_URL is not read here: set by the variable REDIS_URL",
    ]
    monkeypatch.setenv("OUTRIDER_TARGETT", "x")
    with pytest.raises(StartupError, match="OUTRIDER_TARGETT is unknown; did you mean OUTRIDER_TARGET"):
        services.ignored_variable_hints({"OUTRIDER_HOST"})
