"""Settings from flags and their environment twins."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
import typer
from pydantic import Field, SecretStr, ValidationError
from typer.testing import CliRunner, Result

from outrider.base import config
from outrider.base.config import PREFIX, Settings
from outrider.protocol.errors import StartupError
from outrider.settings.coordinator import CoordinatorSettings
from outrider.settings.drafter import DrafterSettings
from outrider.settings.verifier import VerifierSettings


class Example(Settings):
    """Serve examples."""

    gamma_max: int = Field(4, ge=0, le=64, description="How far.")
    patience_s: float = Field(0.5, gt=0, description="How long.")
    kind: str = Field("ngram", pattern="^(ngram|model)$", description="Which.")
    keep: bool = Field(True, description="Whether to keep.")


EVERY_KIND = [Example, DrafterSettings, VerifierSettings, CoordinatorSettings]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(PREFIX):
            monkeypatch.delenv(name)


def invoke(
    *line: str, kind: type[Settings] = Example, env: dict[str, str] | None = None
) -> tuple[Result, list[Settings]]:
    """Run a command line; the result, and the settings that came out of it."""
    given: list[Settings] = []
    app = typer.Typer()
    app.command()(config.command(kind, given.append, "example"))
    result = CliRunner().invoke(app, list(line), env={"COLUMNS": "400", "TERM": "dumb", "NO_COLOR": "1"} | (env or {}))
    return result, given


def said(result: Result) -> str:
    """All that was printed, without frames and line breaks."""
    return " ".join(result.output.replace("│", " ").split())


def test_without_flags_the_defaults_hold() -> None:
    result, given = invoke()
    assert result.exit_code == 0, result.output
    assert given == [Example()]


def test_flags_are_named_like_fields() -> None:
    _, given = invoke("--gamma-max", "7", "--patience-s", "0.25", "--kind", "model", "--host", "::1")
    assert given == [Example(gamma_max=7, patience_s=0.25, kind="model", host="::1")]


@pytest.mark.parametrize(("flag", "value"), [("--keep", True), ("--no-keep", False)])
def test_switches_have_both_forms(flag: str, value: bool) -> None:
    _, given = invoke(flag)
    assert given == [Example(keep=value)]


def test_every_flag_has_an_environment_twin() -> None:
    _, given = invoke(env={"OUTRIDER_GAMMA_MAX": "9", "OUTRIDER_KEEP": "false", "OUTRIDER_LOG_JSON": "1"})
    assert given == [Example(gamma_max=9, keep=False, log_json=True)]


def test_a_flag_goes_before_its_twin() -> None:
    _, given = invoke("--gamma-max", "3", env={"OUTRIDER_GAMMA_MAX": "9"})
    assert given == [Example(gamma_max=3)]


@pytest.mark.parametrize(
    ("line", "flag", "why"),
    [
        (["--gamma-max", "65"], "--gamma-max", "65"),
        (["--gamma-max", "-1"], "--gamma-max", "-1"),
        (["--gamma-max", "many"], "--gamma-max", "integer"),
        (["--gamma-max", "1.5"], "--gamma-max", "integer"),
        (["--patience-s", "0"], "--patience-s", "0"),
        (["--patience-s", "nan"], "--patience-s", "nan"),
        (["--kind", "psychic"], "--kind", "psychic"),
        (["--port", "65536"], "--port", "65536"),
        (["--log-level", "loud"], "--log-level", "loud"),
    ],
)
def test_a_bad_value_names_its_flag(line: list[str], flag: str, why: str) -> None:
    result, given = invoke(*line)
    assert result.exit_code == 2
    assert given == []
    assert flag in said(result)
    assert why in said(result)
    assert "Traceback" not in result.output


@pytest.mark.parametrize("value", ["65", "many"])
def test_a_bad_variable_names_its_flag_or_itself(value: str) -> None:
    result, given = invoke(env={"OUTRIDER_GAMMA_MAX": value})
    assert result.exit_code == 2
    assert given == []
    assert "--gamma-max" in said(result) or "OUTRIDER_GAMMA_MAX" in said(result)


def test_an_unknown_flag_is_refused() -> None:
    result, given = invoke("--gama-max", "3")
    assert result.exit_code == 2
    assert given == []
    assert "--gama-max" in said(result)


def test_an_unknown_variable_is_refused_by_name() -> None:
    result, given = invoke(env={"OUTRIDER_GAMA_MAX": "3"})
    assert result.exit_code == 2
    assert given == []
    assert "OUTRIDER_GAMA_MAX" in said(result)


def test_another_services_variables_do_no_harm() -> None:
    """All services of a machine may share one environment."""
    result, given = invoke(
        kind=DrafterSettings, env={"OUTRIDER_GAMMA_MAX": "3", "OUTRIDER_HOME": "/x", "OUTRIDER_ENDPOINT": "h:1"}
    )
    assert result.exit_code == 0, result.output
    assert given == [DrafterSettings()]


def test_another_services_variables_do_no_harm_where_that_service_is_not_loaded() -> None:
    """As it is in a real process: a drafter never imports the coordinator's settings."""
    imports = "import typer; from outrider.settings.drafter import DrafterSettings as S; "
    script = imports + "from outrider.base.config import main; "
    done = subprocess.run(
        [sys.executable, "-c", script + "main(S, lambda made: typer.echo(made.kind), 'drafter')"],
        env=os.environ | {"OUTRIDER_GAMMA_MAX": "3", "OUTRIDER_REDIS_URL": "redis://x"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "auto"), done.stderr


def test_help_shows_descriptions_defaults_and_variables() -> None:
    text = said(invoke("--help")[0])
    for part in ("Serve examples.", "--gamma-max", "How far.", "OUTRIDER_GAMMA_MAX", "default: 4", "--no-keep"):
        assert part in text


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (StartupError("port 1 is taken"), "port 1 is taken"),
        (OSError(errno.EROFS, "Read-only file system", "/models"), "Read-only file system: '/models'"),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"), "temporary directory"),
    ],
)
def test_an_error_of_the_start_ends_the_command_with_a_sentence(error: Exception, said: str) -> None:
    def fail(_: Settings) -> None:
        raise error

    app = typer.Typer()
    app.command()(config.command(Example, fail, "example"))
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 1
    assert result.output.startswith("example: ")
    assert said in result.output


@pytest.mark.parametrize("kind", [TimeoutError, ConnectionResetError, BrokenPipeError])
def test_an_error_of_a_connection_keeps_its_trace(kind: type[OSError]) -> None:
    """A connection that times out hours later is a defect to find: its text alone is empty."""

    def fail(_: Settings) -> None:
        raise kind

    app = typer.Typer()
    app.command()(config.command(Example, fail, "example"))
    assert isinstance(CliRunner().invoke(app, []).exception, kind)


def test_settings_are_frozen_and_know_their_fields() -> None:
    with pytest.raises(ValidationError):
        Example(gama_max=3)
    with pytest.raises(ValidationError):
        Example().gamma_max = 5


CHANGED = [
    Example(),
    Example(
        gamma_max=0, patience_s=1e-3, kind="model", keep=False, log_json=True, host="0.0.0.0", insecure=True, port=5
    ),
    DrafterSettings(kind="model", model="a path with spaces", coordinators="a:1,b:2"),
    VerifierSettings(max_sessions=3),
    CoordinatorSettings(redis_url="redis://:pass@host:1/0", gamma_max=0),
]


@pytest.mark.parametrize("settings", CHANGED, ids=lambda settings: type(settings).__name__)
def test_flags_make_the_settings_that_they_come_from(settings: Settings) -> None:
    result, given = invoke(*config.flags(settings), kind=type(settings))
    assert result.exit_code == 0, result.output
    assert given == [settings]


def test_defaults_need_no_flags() -> None:
    for kind in EVERY_KIND:
        assert config.flags(kind()) == []


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_every_field_is_described(kind: type[Settings]) -> None:
    assert all(field.description for field in kind.model_fields.values())
    assert kind.__doc__


@pytest.mark.parametrize("kind", EVERY_KIND[1:])
def test_every_number_has_a_bound_that_messages_and_timers_can_hold(kind: type[Settings]) -> None:
    """No timer waits for infinity, and gRPC counts milliseconds in 32 bits."""
    numbers = {name: field.annotation for name, field in kind.model_fields.items() if field.annotation in (int, float)}
    assert {"max_sessions", "open_timeout_s"} <= numbers.keys()
    for name, number in numbers.items():
        for huge in ("1" + 30 * "0", "inf") if number is float else ("1" + 30 * "0", str(2**31)):
            with pytest.raises(ValidationError, match="less than"):
                kind(**{name: huge})


def test_home_and_redis_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", "~/there")
    assert config.home().name == "there"
    assert "~" not in str(config.home())
    monkeypatch.delenv("REDIS_URL", raising=False)
    assert config.redis_url() is None
    monkeypatch.setenv("REDIS_URL", "redis://x")
    assert config.redis_url() == "redis://x"


@pytest.mark.parametrize("kind", [CoordinatorSettings, VerifierSettings, DrafterSettings])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "bigbox"])
def test_a_door_to_others_needs_keys_or_a_word(kind: type[config.Settings], host: str) -> None:
    key = {CoordinatorSettings: "api_keys", DrafterSettings: "drafter_key"}.get(kind, "fleet_key")
    with pytest.raises(StartupError, match=f"{host}.*--{key.replace('_', '-')}.*--insecure"):
        config.require_keys_or_insecure(kind(host=host))
    with pytest.raises(StartupError, match="there are no keys"):  # as of a variable that nothing has filled
        config.require_keys_or_insecure(kind(**{"host": host, key: " \n"}))
    for more in (
        {key: "secret"},
        {"insecure": True},
        {"tls_client_auth": True},
        {"host": "127.0.0.1"},
        {"host": "::1"},
    ):
        config.require_keys_or_insecure(kind(**{"host": host} | more))


def test_a_drafter_with_the_fleet_key_alone_uses_it() -> None:
    alone = DrafterSettings(host="0.0.0.0", fleet_key=SecretStr("fleet"))
    config.require_keys_or_insecure(alone)
    assert alone.own_key == ("fleet_key", SecretStr("fleet"))
    both = DrafterSettings(fleet_key=SecretStr("fleet"), drafter_key=SecretStr("drafter"))
    assert both.own_key == ("drafter_key", SecretStr("drafter"))
    assert both.model_copy(update={"drafter_key": SecretStr("\n")}).own_key == ("fleet_key", SecretStr("fleet"))


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("OUTRIDER_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", nowhere)
    with pytest.raises(StartupError, match="set OUTRIDER_HOME"):
        config.home()
