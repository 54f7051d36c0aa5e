"""The Helm chart: rendered by Helm, held strictly against Kubernetes' schemas, and against our own settings."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate as validation
import pytest
import typer
import yaml
from typer.testing import CliRunner

from outrider.base import config
from outrider.base.config import PREFIX, Settings
from outrider.engine.vllm.core import node_rank
from outrider.settings.coordinator import CoordinatorSettings
from outrider.settings.drafter import DrafterSettings
from outrider.settings.verifier import VerifierSettings
from tests.chart import (
    CHART,
    NAMESPACE,
    RELEASE,
    ROLES,
    Object,
    Rendered,
    chart,
    command_line,
    component_of,
    helm,
    render,
    walk,
)
from tests.cluster import ROOT

SETTINGS: dict[str, type[Settings]] = {
    "coordinator": CoordinatorSettings,
    "verifier": VerifierSettings,
    "drafter": DrafterSettings,
}
HEALTH = {"coordinator": "outrider.v1.Outrider", "verifier": "outrider.v1.Verifier", "drafter": "outrider.v1.Drafter"}

TLS = {"tls": {"secretName": "outrider-tls", "clientAuth": True}}
KEYS = {"auth": {"apiKeys": {"keys": ["sk-first-0123456789", "sk-second-987654321"]}}}
OWN_REDIS = {"redis": {"bundled": False, "existingSecret": "my-redis", "secretKey": "address"}}
REDIS_URL = {"redis": {"bundled": False, "url": "rediss://:of-the-house@redis.example.com:6380/1"}}
SCALED = {"enabled": True, "minReplicas": 2, "maxReplicas": 9, "waiting": "2500m", "metricLabels": {"release": "a"}}
INGRESS = {"enabled": True, "className": "nginx", "hosts": ["llm.example.com"], "annotations": {"a/b": "c"}}
POD = {
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "dedicated", "operator": "Exists"}],
    "podAnnotations": {"note": "yes"},
    "podLabels": {"team": "llm"},
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy.example.com:3128"}],
    "extraVolumes": [{"name": "more", "configMap": {"name": "more"}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
}
EVERYTHING: Object = {
    "target": "some/hub-model",
    "settings": {"log-json": False, "log-level": "debug", "max-streams": 2_000_000},
    "drainSeconds": 30,
    "image": {"pullSecrets": ["pull"], "worker": {"repository": "r.example.com/w", "digest": "sha256:" + "0" * 64}},
    "models": {"volume": {"hostPath": {"path": "/srv/models", "type": "Directory"}}},
    "hub": {"existingSecret": "hub", "offline": True},
    "auth": KEYS["auth"],
    "tls": TLS["tls"],
    "redis": {"persistent": False, "nodeSelector": {"disk": "fast"}, "priorityClassName": "high"},
    "coordinator": {
        **POD,
        "settings": {"max-sessions": 1024, "drafters-per-session": 2, "worker-wait-s": 7.5},
        "service": {"type": "LoadBalancer", "annotations": {"a/b": "c"}},
        "autoscaling": SCALED,
    },
    "verifier": {
        **POD,
        "autoscaling": SCALED,
        "gpu": {"count": 4},
        "resources": {"limits": {"cpu": "6", "memory": "64Gi"}},
        "sharedMemory": "8Gi",
        "settings": {"kv-tokens": 1_000_000, "prefill-stretch": 2.5, "dtype": "bfloat16"},
        "cache": {"persistent": True, "storageClass": "fast", "size": "200Gi"},
    },
    "drafter": {
        **POD,
        "replicas": 3,
        "kind": "suffix+model",
        "model": "/models/small",
        "apart": "required",
        "gpu": {"count": 1},
        "settings": {"threads": 3},
        "cache": {"volume": {"persistentVolumeClaim": {"claimName": "shared"}}},
    },
    "ingress": {"http": INGRESS, "grpc": INGRESS | {"tls": [{"secretName": "web", "hosts": ["llm.example.com"]}]}},
    "networkPolicy": {
        "clients": [{"namespaceSelector": {"matchLabels": {"llm": "yes"}}}],
        "scrapers": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
    },
    "metrics": {"podMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "existingSecret": "prometheus"}},
    "tracing": {"otlpEndpoint": "http://collector.example.com:4318"},
    "serviceAccount": {"annotations": {"a/b": "c"}},
}
NOTHING: Object = {
    "auth": {"fleetKey": {"enabled": False}},
    "redis": OWN_REDIS["redis"],
    "drafter": {"replicas": 0, "apart": "off", "spread": []},
    "networkPolicy": {"enabled": False},
    "podDisruptionBudget": False,
    "metrics": {"annotations": False},
    "serviceAccount": {"create": False},
}
SCENARIOS: dict[str, Object] = {
    "default": {},
    "gpu": yaml.safe_load((CHART / "values-gpu.yaml").read_text()),
    "tls and keys": TLS | KEYS,
    "keys of one's own": {
        "auth": {"fleetKey": {"existingSecret": "fleet", "secretKey": "k"}, "apiKeys": {"existingSecret": "api"}}
    },
    "redis of one's own": OWN_REDIS,
    "redis by url": REDIS_URL,
    "scaled": {"coordinator": {"autoscaling": SCALED}, "verifier": {"autoscaling": SCALED}},
    "ingress": {"ingress": {"http": INGRESS}},
    "everything": EVERYTHING,
    "vllm on a node": {"verifier": {"vllm": {"enabled": True}, "gpu": {"count": 4}, "sharedMemory": "8Gi"}},
    "vllm on two nodes": yaml.safe_load((CHART / "values-vllm.yaml").read_text()),
    "vllm and everything": EVERYTHING | {"verifier": EVERYTHING["verifier"] | {"vllm": {"enabled": True, "nodes": 3}}},
    "nothing": NOTHING,
}


@pytest.fixture(scope="module", params=SCENARIOS)
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return render(SCENARIOS[request.param])


# Against Kubernetes.

OLDEST = "1.27"


def test_the_oldest_kubernetes_is_the_one_that_the_chart_asks_for() -> None:
    assert chart().metadata["kubeVersion"] == f">={OLDEST}.0-0"


@pytest.mark.parametrize("version", [OLDEST, validation.latest_version()])
def test_kubernetes_takes_every_object(rendered: Rendered, version: str) -> None:
    made = [*rendered.workloads().values(), *rendered.followers().values()]
    for thing in rendered.objects + [workload for workload in made if workload not in rendered.objects]:
        if thing["kind"] not in ("PodMonitor", "LeaderWorkerSet"):
            validation.validate(thing, version, strict=True)


@pytest.mark.parametrize("spoil", [{"replica": 1}, {"replicas": "one"}, {"template": {"spec": {}}}])
def test_the_validation_is_strict(spoil: Object) -> None:
    thing = render().get("StatefulSet", "outrider-verifier")
    with pytest.raises(validation.ValidationError):
        validation.validate(thing | {"spec": thing["spec"] | spoil}, OLDEST, strict=True)


# Of the operator's definition of a PodMonitor, what the chart makes use of.
POD_MONITOR = {
    *("podTargetLabels", "selector.matchLabels", "selector.matchExpressions"),
    *(f"podMetricsEndpoints.{name}" for name in ("port", "path", "interval", "scheme", "tlsConfig.serverName")),
    *(f"podMetricsEndpoints.authorization.{name}" for name in ("type", "credentials")),
    *(f"podMetricsEndpoints.tlsConfig.{name}" for name in ("ca.secret", "cert.secret", "keySecret")),
    *(f"podMetricsEndpoints.relabelings.{name}" for name in ("sourceLabels", "targetLabel", "replacement")),
}


def test_the_pod_monitor_keeps_to_the_fields_that_there_are() -> None:
    (monitor,) = render(EVERYTHING).of("PodMonitor")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert set(_paths(monitor["spec"], POD_MONITOR)) == POD_MONITOR
    ports = {port["name"] for role in ROLES for port in render(EVERYTHING).container(role)["ports"]}
    endpoints = monitor["spec"]["podMetricsEndpoints"]
    assert {endpoint["port"] for endpoint in endpoints} < ports
    jobs = {endpoint["port"]: [rule["replacement"] for rule in endpoint["relabelings"]] for endpoint in endpoints}
    assert jobs["http"] == ["outrider-coordinator"]
    assert jobs["metrics"] == ["outrider-$1"]
    assert all(rule["targetLabel"] == "job" for endpoint in endpoints for rule in endpoint["relabelings"])


@pytest.mark.parametrize(("encrypted", "scheme"), [(True, "https"), (False, "http")])
def test_annotations_tell_how_to_scrape_a_worker(encrypted: bool, scheme: str) -> None:
    values = {"metrics": {"annotations": True}, "verifier": {"settings": {"metrics-tls": encrypted}}}
    pod = render(values).get("StatefulSet", "outrider-verifier")["spec"]["template"]
    assert pod["metadata"]["annotations"]["prometheus.io/scheme"] == scheme


# Of the definition of LeaderWorkerSet 0.9, the same.
GROUP = {
    *("replicas", "startupPolicy", "leaderWorkerTemplate.size", "leaderWorkerTemplate.restartPolicy"),
    *(f"leaderWorkerTemplate.{name}" for name in ("leaderTemplate", "workerTemplate", "volumeClaimTemplates")),
}


def test_the_group_of_pods_keeps_to_the_fields_that_there_are() -> None:
    (group,) = render(SCENARIOS["vllm on two nodes"]).of("LeaderWorkerSet")
    assert group["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert set(_paths(group["spec"], GROUP)) == GROUP - {"leaderWorkerTemplate.volumeClaimTemplates"}
    assert group["spec"]["startupPolicy"] == "LeaderCreated", "leaders are ready only with their followers"
    assert group["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    (group,) = render(SCENARIOS["vllm and everything"]).of("LeaderWorkerSet")
    assert set(_paths(group["spec"], GROUP)) == GROUP - {"replicas"}, "it is scaled"


def _paths(thing: Any, known: set[str], at: str = "") -> Iterator[str]:
    """Of all fields, no deeper than what is known."""
    if at in known or not isinstance(thing, dict | list):
        yield at
    elif isinstance(thing, list):
        for value in thing:
            yield from _paths(value, known, at)
    else:
        for key, value in thing.items():
            yield from _paths(value, known, f"{at}.{key}".lstrip("."))


def test_helm_finds_nothing_to_complain_about() -> None:
    for values in SCENARIOS.values():
        report = helm.lint(CHART, values, strict=True)
        assert [message for message in report["messages"] if message["severity"] > 1] == [], report
        assert not report["errors"]


# What refers to what.


def test_every_selector_finds_the_pods_of_one_component(rendered: Rendered) -> None:
    pods = rendered.pods()
    for thing in rendered.of("Service", "Deployment", "StatefulSet", "PodDisruptionBudget", "NetworkPolicy"):
        spec = thing["spec"]
        selector = spec.get("podSelector") or spec["selector"]
        wanted = selector.get("matchLabels", selector)
        found = {component_of(pod) for pod in pods.values() if wanted.items() <= pod["metadata"]["labels"].items()}
        assert found == {component_of(thing)}, thing["metadata"]["name"]


def test_peers_of_policies_and_neighbours_of_pods_are_pods_of_ours(rendered: Rendered) -> None:
    labels = [pod["metadata"]["labels"].items() for pod in rendered.pods().values()]
    selectors = [
        selector["matchLabels"]
        for thing in rendered.objects
        for key, selector in walk(thing)
        if key in ("podSelector", "labelSelector") and "app.kubernetes.io/component" in selector.get("matchLabels", {})
    ]
    assert selectors
    for selector in selectors:
        assert any(selector.items() <= pod for pod in labels), selector


def test_services_and_ingresses_lead_to_ports_that_are_listened_at(rendered: Rendered) -> None:
    for service in rendered.of("Service"):
        ports = {port["name"] for port in rendered.container(component_of(service))["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for ingress in rendered.of("Ingress"):
        for rule in ingress["spec"]["rules"]:
            for path in rule["http"]["paths"]:
                backend = path["backend"]["service"]
                service = rendered.get("Service", backend["name"])
                assert backend["port"]["name"] in {port["name"] for port in service["spec"]["ports"]}


def test_ports_are_the_ones_that_the_services_are_told(rendered: Rendered) -> None:
    for role in ROLES:
        container = rendered.container(role)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        told = {line.split("=")[0]: line.partition("=")[2] for line in container["args"]}
        assert told["--port"] == str(ports["grpc"])
        other = "http" if role == "coordinator" else "metrics"
        assert told[f"--{other}-port"] == str(ports[other])
        annotations = rendered.pods()[role]["metadata"]["annotations"]
        assert annotations.get("prometheus.io/port", str(ports[other])) == str(ports[other])


def test_policies_open_ports_that_there_are(rendered: Rendered) -> None:
    for policy in rendered.of("NetworkPolicy"):
        ports = {port["containerPort"] for port in rendered.container(component_of(policy))["ports"]}
        opened = [port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", [])]
        assert set(opened) == ports, policy["metadata"]["name"]


def test_probes_ask_for_services_that_there_are(rendered: Rendered) -> None:
    for role in ROLES:
        container = rendered.container(role)
        port = next(port["containerPort"] for port in container["ports"] if port["name"] == "grpc")
        encrypted = any(entry["name"] == "OUTRIDER_TLS_CERT" for entry in container.get("env", []))
        for name, service in (("startup", ""), ("liveness", ""), ("readiness", HEALTH[role])):
            probe = container[f"{name}Probe"]
            if encrypted:
                assert "grpc" not in probe, "Kubernetes cannot speak TLS there"
                script = ["python", "/opt/healthcheck.py", f"127.0.0.1:{port}", service]
                assert probe["exec"]["command"] == script
            else:
                assert probe["grpc"] == {"port": port} | ({"service": service} if service else {})


def test_scalers_and_budgets_are_of_workloads_that_there_are(rendered: Rendered) -> None:
    for scaler in rendered.of("HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        workload = rendered.get(target["kind"], target["name"])
        assert "replicas" not in workload["spec"], "an upgrade would undo what was scaled"
        assert component_of(workload) == component_of(scaler)
    scaled = {component_of(scaler) for scaler in rendered.of("HorizontalPodAutoscaler")}
    for component, workload in rendered.workloads().items():
        assert ("replicas" in workload["spec"]) == (component not in scaled)


def test_volumes_are_mounted_and_mounts_have_volumes(rendered: Rendered) -> None:
    for component, pod in rendered.pods().items():
        spec = pod["spec"]
        workload = (rendered.workloads() | rendered.followers()).get(component, {"spec": {}})
        claims = workload["spec"].get("volumeClaimTemplates", [])
        volumes = [volume["name"] for volume in spec["volumes"]] + [claim["metadata"]["name"] for claim in claims]
        assert len(volumes) == len(set(volumes)), f"{component}: a volume comes twice"
        mounts = [
            mount
            for container in spec["containers"] + spec.get("initContainers", [])
            for mount in container["volumeMounts"]
        ]
        assert {mount["name"] for mount in mounts} == set(volumes), component


def test_secrets_that_are_asked_for_are_made_or_named_by_the_user(rendered: Rendered, request: Any) -> None:
    values = request.node.callspec.params["rendered"]
    given = {value for key, value in walk(SCENARIOS[values]) if key in ("existingSecret", "secretName")} | {"pull"}
    made = rendered.secrets()
    for pod in rendered.pods().values():
        for name, key in _secrets_of(pod["spec"]):
            assert name in given or key in made[name], (name, key)


def _secrets_of(spec: Object) -> Iterator[tuple[str, str]]:
    for key, value in walk(spec):
        if key == "secretKeyRef":
            yield value["name"], value["key"]
        elif key == "secret":
            for item in value.get("items", [{"key": ""}]):
                yield value.get("name") or value["secretName"], item["key"]


def test_service_accounts_are_there_and_hold_no_token(rendered: Rendered) -> None:
    accounts = {account["metadata"]["name"]: account for account in rendered.of("ServiceAccount")}
    assert all(account["automountServiceAccountToken"] is False for account in accounts.values())
    for pod in rendered.pods().values():
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["serviceAccountName"] in accounts or not accounts


def test_workers_tell_names_by_which_they_are_found(rendered: Rendered) -> None:
    for role in ("verifier", "drafter"):
        workload = rendered.workloads()[role]
        service = rendered.get("Service", workload["spec"]["serviceName"])
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"], "it reports before its probe has succeeded"
        line, _ = command_line(rendered.container(role), POD_NAME=f"{workload['metadata']['name']}-0")
        (port,) = [port["port"] for port in service["spec"]["ports"] if port["name"] == "grpc"]
        name = f"{workload['metadata']['name']}-0.{service['metadata']['name']}.{NAMESPACE}.svc"
        assert f"--advertise={name}:{port}" in line


def test_workers_report_where_coordinators_are_found_before_they_are_ready(rendered: Rendered) -> None:
    """A coordinator without a verifier is not ready: were only ready ones found, there would never be one."""
    for role in ("verifier", "drafter"):
        (line,) = [line for line in rendered.container(role)["args"] if line.startswith("--coordinators=")]
        name, _, port = line.removeprefix("--coordinators=").rpartition(":")
        service = rendered.get("Service", name)
        assert service["spec"]["publishNotReadyAddresses"]
        assert component_of(service) == "coordinator"
        assert int(port) in {port["port"] for port in service["spec"]["ports"]}


def test_clients_are_led_to_coordinators_that_can_answer() -> None:
    assert "publishNotReadyAddresses" not in render().get("Service", "outrider-coordinator")["spec"]


def test_the_test_pod_asks_where_clients_do(rendered: Rendered) -> None:
    (pod,) = rendered.of("Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    _, script, address, service = rendered.container("test")["command"]
    name, _, port = address.rpartition(":")
    assert script == "/opt/healthcheck.py"
    assert int(port) in {port["port"] for port in rendered.get("Service", name)["spec"]["ports"]}
    assert service == HEALTH["coordinator"]
    names = {entry["name"] for entry in rendered.container("test").get("env", ())}
    assert not any(name.endswith(("_KEY", "_KEYS")) for name in names - {"OUTRIDER_TLS_KEY"}), "health needs no key"
    assert "keys" not in {volume["name"] for volume in rendered.pods()["test"]["spec"]["volumes"]}


# Against our services.


@pytest.fixture
def etc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the pods find in /etc/outrider; and an environment without variables of ours."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    for path in ("keys/fleet-key", "keys/drafter-key", "keys/api-keys", "tls/tls.crt", "tls/tls.key", "tls/ca.crt"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("a-key-of-more-than-32-characters-0123456789")
    return tmp_path


def parsed(rendered: Rendered, role: str, etc: Path) -> Settings:
    """What the service makes of its flags and variables."""
    container, pod_name = rendered.container(role), f"{role.replace(' ', '-')}-0"
    role = role.partition(" ")[0]
    kind = SETTINGS[role]
    line, env = command_line(container, POD_NAME=pod_name, OUTRIDER_THREADS="6")
    assert line.pop(0) == role, "the module that the image's `python -m` runs"
    given: list[Settings] = []
    app = typer.Typer()
    app.command()(config.command(kind, given.append, role))
    env = {name: value.replace("/etc/outrider", str(etc)) for name, value in env.items()}
    result = CliRunner().invoke(app, line, env=env)
    assert result.exit_code == 0, result.output
    return given[0]


@pytest.mark.parametrize("role", ROLES)
def test_services_take_their_flags_and_variables(rendered: Rendered, role: str, etc: Path) -> None:
    settings = parsed(rendered, role, etc)
    assert settings.host == "0.0.0.0"
    grace = rendered.pods()[role]["spec"]["terminationGracePeriodSeconds"]
    # Besides streams: 5 s before the signal, 3 s for the last writes, 1 s for the last calls.
    assert settings.drain_s + 10 < grace


def test_a_flag_that_no_service_has_is_noticed(etc: Path) -> None:
    rendered = render()
    rendered.container("verifier")["args"].append("--guess-row=3")
    with pytest.raises(AssertionError, match="guess-row"):
        parsed(rendered, "verifier", etc)


def test_a_variable_that_no_service_has_is_noticed(etc: Path) -> None:
    rendered = render()
    rendered.container("verifier")["env"].append({"name": "OUTRIDER_VERIFIER_SERVICE_HOST", "value": "10.0.0.1"})
    with pytest.raises(AssertionError, match="OUTRIDER_VERIFIER_SERVICE_HOST"):
        parsed(rendered, "verifier", etc)


def test_values_reach_the_services(etc: Path) -> None:
    rendered = render(EVERYTHING)
    coordinator, verifier, drafter = (parsed(rendered, role, etc) for role in ROLES)
    assert isinstance(coordinator, CoordinatorSettings)
    assert isinstance(verifier, VerifierSettings)
    assert isinstance(drafter, DrafterSettings)
    assert (coordinator.max_sessions, coordinator.drafters_per_session, coordinator.worker_wait_s) == (1024, 2, 7.5)
    assert all(settings.max_streams == 2_000_000 for settings in (coordinator, verifier, drafter))
    assert all(settings.log_level == "debug" and not settings.log_json for settings in (coordinator, verifier, drafter))
    assert (verifier.kv_tokens, verifier.prefill_stretch, verifier.dtype) == (1_000_000, 2.5, "bfloat16")
    assert verifier.tensor_parallel == 4, "a process for each GPU"
    assert (verifier.threads, drafter.threads) == (6, 3), "as many as the CPU limit allows, or as it is told"
    assert verifier.target == drafter.target == "some/hub-model"
    assert (drafter.kind, drafter.model) == ("suffix+model", "/models/small")
    assert all(settings.drain_s == 30 for settings in (coordinator, verifier, drafter))
    assert parsed(render(), "verifier", etc).log_json
    assert {parsed(render(), role, etc).host for role in ROLES} == {"0.0.0.0"}
    assert {parsed(render({"host": "::"}), role, etc).host for role in ROLES} == {"::"}, "pods may have IPv6 alone"


# What the chart sets by itself, from other values.
BY_CHART = {
    *("host", "port", "drain_s", "fleet_key", "otlp_endpoint", "tls_ca", "tls_cert", "tls_client_auth", "tls_key"),
    *(
        "insecure",
        "metrics_key",
        "drafter_key",
        "advertise",
        "api_keys",
        "coordinators",
        "http_port",
        "kind",
        "metrics_port",
        "model",
        "redis_url",
        "target",
    ),
}


@pytest.mark.parametrize("role", ROLES)
def test_every_setting_can_be_set_in_the_values(role: str) -> None:
    """And no other: the schema's list is held against the service's."""
    properties = chart().schema["properties"]
    for part, kind in ((properties[role]["properties"], SETTINGS[role]), (properties, Settings)):
        wanted = sorted(name.replace("_", "-") for name in set(kind.model_fields) - BY_CHART)
        assert part["settings"]["allOf"][1]["propertyNames"]["enum"] == wanted


def test_models_of_the_image_are_linked_into_an_empty_volume(tmp_path: Path) -> None:
    """And into one that holds some already, of which none is touched."""
    image, volume = tmp_path / "opt", tmp_path / "volume"
    for model in ("first", "second"):
        (image / model).mkdir(parents=True)
    (volume / "models" / "second").mkdir(parents=True)
    (container,) = render().pods()["verifier"]["spec"]["initContainers"]
    command = [part.replace("/opt/models", str(image)) for part in container["command"]]
    for _ in range(2):
        subprocess.run(command, env={"OUTRIDER_HOME": str(volume), "PATH": os.environ["PATH"]}, check=True, timeout=10)
    assert (volume / "models" / "first").readlink() == image / "first"
    assert sorted(path.name for path in (volume / "models").iterdir()) == ["first", "second"]
    assert list((volume / "models" / "second").iterdir()) == []
    assert list((image / "first").iterdir()) == []


def test_redis_is_where_the_coordinator_looks_for_it() -> None:
    rendered = render()
    (entry,) = [entry for entry in rendered.container("coordinator")["env"] if entry["name"] == "REDIS_URL"]
    reference = entry["valueFrom"]["secretKeyRef"]
    secret = rendered.secrets()[reference["name"]]
    service = rendered.get("Service", "outrider-redis")
    (port,) = service["spec"]["ports"]
    assert secret[reference["key"]] == f"redis://:{secret['password']}@{service['metadata']['name']}:{port['port']}/0"
    assert secret["auth.conf"] == f"requirepass {secret['password']}\n"
    assert len(secret["password"]) >= 32


@pytest.mark.parametrize(
    ("values", "secret", "key"), [(OWN_REDIS, "my-redis", "address"), (REDIS_URL, "outrider-redis", "url")]
)
def test_a_redis_of_ones_own_takes_the_place_of_the_bundled_one(values: Object, secret: str, key: str) -> None:
    rendered = render(values)
    assert "redis" not in rendered.pods()
    (entry,) = [entry for entry in rendered.container("coordinator")["env"] if entry["name"] == "REDIS_URL"]
    assert entry["valueFrom"]["secretKeyRef"] == {"name": secret, "key": key}
    if values is REDIS_URL:
        assert rendered.secrets()[secret][key] == REDIS_URL["redis"]["url"]


# Safety.


def test_no_secret_is_written_anywhere_but_in_secrets(rendered: Rendered) -> None:
    secret = {value for values in rendered.secrets().values() for value in values.values()}
    secret |= set(KEYS["auth"]["apiKeys"]["keys"])
    rest = json.dumps([thing for thing in rendered.objects if thing["kind"] != "Secret"]) + rendered.notes
    assert [value for value in secret if value.strip() in rest] == []


def test_keys_and_certificates_are_read_from_files() -> None:
    rendered = render(TLS | KEYS)
    for role in ROLES:
        env = {entry["name"]: entry.get("value") for entry in rendered.container(role)["env"]}
        mounts = {mount["mountPath"] for mount in rendered.container(role)["volumeMounts"]}
        assert {"/etc/outrider/keys", "/etc/outrider/tls"} <= mounts
        fleet, drafters = env.get("OUTRIDER_FLEET_KEY"), env.get("OUTRIDER_DRAFTER_KEY")
        assert fleet == (None if role == "drafter" else "@/etc/outrider/keys/fleet-key")
        assert drafters == (None if role == "verifier" else "@/etc/outrider/keys/drafter-key")
        volumes = rendered.pods()[role]["spec"]["volumes"]
        (keys,) = [volume["projected"]["sources"] for volume in volumes if volume["name"] == "keys"]
        held = {source["secret"]["name"] for source in keys}
        assert ("outrider-fleet" in held, "outrider-drafter" in held) == (bool(fleet), bool(drafters))
        assert env.get("OUTRIDER_API_KEYS") == ("@/etc/outrider/keys/api-keys" if role == "coordinator" else None)
        assert [env[f"OUTRIDER_TLS_{name}"] for name in ("CERT", "KEY", "CA", "CLIENT_AUTH")] == [
            "/etc/outrider/tls/tls.crt", "/etc/outrider/tls/tls.key", "/etc/outrider/tls/ca.crt", "true"
        ]  # fmt: skip
    assert rendered.secrets()["outrider-api-keys"]["api-keys"].splitlines() == KEYS["auth"]["apiKeys"]["keys"]
    assert len(rendered.secrets()["outrider-fleet"]["fleet-key"]) >= 32
    assert len(rendered.secrets()["outrider-drafter"]["drafter-key"]) >= 32


def test_a_verifier_with_its_own_drafter_has_the_drafter_key_too() -> None:
    values = {"verifier": {"settings": {"own-drafter": "suffix+eagle"}}, "metrics": {"podMonitor": {"enabled": True}}}
    rendered = render({**values, "drafter": {"replicas": 0}})
    container = rendered.container("verifier")
    assert "--own-drafter=suffix+eagle" in container["args"]
    assert {"OUTRIDER_FLEET_KEY", "OUTRIDER_DRAFTER_KEY"} <= {entry["name"] for entry in container["env"]}
    (keys,) = [
        each["projected"]["sources"]
        for each in rendered.pods()["verifier"]["spec"]["volumes"]
        if each["name"] == "keys"
    ]
    assert [source["secret"]["name"] for source in keys] == ["outrider-fleet", "outrider-drafter"]
    assert {"name": "drafter-metrics", "containerPort": 9102} in container["ports"]
    for role, ports in (("verifier", [9101, 9102]), ("drafter", [9102])):
        (policy,) = [each for each in rendered.of("NetworkPolicy") if each["metadata"]["name"] == f"outrider-{role}"]
        assert [port["port"] for port in policy["spec"]["ingress"][1]["ports"]] == ports
    (monitor,) = rendered.of("PodMonitor")
    assert "drafter-metrics" in [each["port"] for each in monitor["spec"]["podMetricsEndpoints"]]


def test_drafters_have_the_fleet_key_where_they_are_told_to() -> None:
    rendered = render({"auth": {"drafterKey": {"enabled": False}}})
    for role in ROLES:
        names = {entry["name"] for entry in rendered.container(role)["env"]}
        assert "OUTRIDER_FLEET_KEY" in names
        assert "OUTRIDER_DRAFTER_KEY" not in names
    assert "outrider-drafter" not in rendered.secrets()


def test_pods_keep_to_the_restricted_standard(rendered: Rendered) -> None:
    for component, pod in rendered.pods().items():
        spec = pod["spec"]
        assert spec["enableServiceLinks"] is False, "its variables begin with the release's name"
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == (999 if component == "redis" else 10001)
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"] + spec.get("initContainers", []):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"]


def test_the_user_is_the_one_of_the_images() -> None:
    for role in ("coordinator", "worker"):
        assert "useradd --uid 10001 " in (ROOT / "deploy" / f"Dockerfile.{role}").read_text()


def test_images_have_versions(rendered: Rendered) -> None:
    for pod in rendered.pods().values():
        for container in pod["spec"]["containers"] + pod["spec"].get("initContainers", []):
            name, _, version = container["image"].rpartition("@" if "@" in container["image"] else ":")
            assert name
            assert version not in ("", "latest")


def test_only_coordinators_reach_workers_and_redis(rendered: Rendered) -> None:
    for policy in rendered.of("NetworkPolicy"):
        component = component_of(policy)
        for rule in policy["spec"]["ingress"]:
            if "ports" not in rule:
                (peer,) = rule["from"]
                assert component_of({"metadata": {"labels": peer["podSelector"]["matchLabels"]}}) == component
                assert component_of(rendered.of("LeaderWorkerSet")[0]) == component
                continue
            if component != "coordinator" and {port["port"] for port in rule["ports"]} & {50051, 50052, 6379}:
                (peer,) = rule["from"]
                assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "coordinator"
                assert set(peer) == {"podSelector"}, "of this namespace"


def test_when_clients_are_chosen_workers_still_reach_coordinators() -> None:
    policy = render(EVERYTHING).get("NetworkPolicy", "outrider-coordinator")
    peers = [peer for rule in policy["spec"]["ingress"] for peer in rule["from"]]
    assert {
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in peers if "podSelector" in peer
    } == {"verifier", "drafter", "test"}
    assert all("from" in rule for rule in policy["spec"]["ingress"])


def test_drafters_leave_the_nodes_of_verifiers_alone() -> None:
    for apart, word in (("preferred", "preferred"), ("required", "required")):
        affinity = render({"drafter": {"apart": apart}}).pods()["drafter"]["spec"]["affinity"]["podAntiAffinity"]
        assert [key.startswith(word) for key in affinity] == [True]
    assert "affinity" not in render({"drafter": {"apart": "off"}}).pods()["drafter"]["spec"]


def test_gpus_are_asked_for() -> None:
    rendered = render(SCENARIOS["gpu"])
    limits = {role: rendered.container(role)["resources"]["limits"] for role in ROLES}
    assert limits["verifier"]["nvidia.com/gpu"] == 2
    assert limits["drafter"]["nvidia.com/gpu"] == 1
    assert "nvidia.com/gpu" not in limits["coordinator"]
    assert "nvidia.com/gpu" not in render().container("verifier")["resources"]["limits"]
    assert "--tensor-parallel=2" in rendered.container("verifier")["args"]


# Verifiers on vLLM.


def vllm(gpus: int, nodes: int, **settings: int) -> Object:
    return {
        "verifier": {
            "vllm": {"enabled": True, "nodes": nodes},
            "gpu": {"count": gpus},
            "settings": {name.replace("_", "-"): value for name, value in settings.items()},
            "sharedMemory": "8Gi",
        }
    }


@pytest.mark.parametrize(
    ("values", "processes"),
    [
        (vllm(4, 1), 4),
        (vllm(8, 2), 16),
        (vllm(8, 2, tensor_parallel=16, pipeline_parallel=1), 16),
        (vllm(0, 1), 1),
        (vllm(0, 2), 2),
        (vllm(0, 2, tensor_parallel=4), 4),
    ],
    ids=str,
)
def test_a_model_is_split_over_the_gpus_of_all_nodes(values: Object, processes: int, etc: Path) -> None:
    rendered = render(values)
    settings = parsed(rendered, "verifier", etc)
    assert isinstance(settings, VerifierSettings)
    assert (settings.engine, settings.tensor_parallel, settings.pipeline_parallel) == ("vllm", processes, 1)
    nodes = values["verifier"]["vllm"]["nodes"]
    assert len(rendered.of("LeaderWorkerSet")) == len(rendered.followers()) == int(nodes > 1)
    assert node_rank(settings.vllm_args) == 0, "it serves"
    for pod in rendered.pods().values():
        if component_of(pod) == "verifier":
            images = {part["image"] for part in pod["spec"]["containers"] + pod["spec"]["initContainers"]}
            assert images == {"outrider-verifier-vllm:0.1.0"}


def test_followers_run_the_leaders_command_line_with_a_rank_of_their_own(etc: Path) -> None:
    rendered = render(SCENARIOS["vllm on two nodes"])
    leader, follower = parsed(rendered, "verifier", etc), parsed(rendered, "verifier follower", etc)
    assert isinstance(leader, VerifierSettings)
    assert isinstance(follower, VerifierSettings)
    assert [node_rank(settings.vllm_args) for settings in (leader, follower)] == [0, 1]
    assert follower.vllm_args == leader.vllm_args.replace("--node-rank=0", "--node-rank=1")
    known = argparse.ArgumentParser()
    known.add_argument("--enable-expert-parallel", action="store_true")
    for name in ("--nnodes", "--node-rank", "--master-addr"):
        known.add_argument(name)
    given = known.parse_args(shlex.split(leader.vllm_args))
    assert (given.nnodes, given.master_addr) == ("2", f"outrider-verifier-0.outrider-verifier.{NAMESPACE}")
    differing = {name for name, value in leader if value != getattr(follower, name)}
    assert differing == {"vllm_args", "advertise"}


def test_followers_serve_nothing() -> None:
    rendered = render(SCENARIOS["vllm on two nodes"])
    pod, container = rendered.pods()["verifier follower"], rendered.container("verifier follower")
    assert not [key for key in container if key == "ports" or key.endswith("Probe")]
    assert not [key for key in pod["metadata"]["annotations"] if key.startswith("prometheus.io")]
    assert container["resources"] == rendered.container("verifier")["resources"]


# Releases.


@contextmanager
def api_server(secrets: dict[str, dict[str, str]]) -> Iterator[Any]:
    """As much of Kubernetes as `lookup` of a Secret asks for."""
    path = f"/api/v1/namespaces/{NAMESPACE}/secrets/"
    resource = {"name": "secrets", "singularName": "secret", "namespaced": True, "kind": "Secret", "verbs": ["get"]}

    def answer(asked: str) -> Object | None:
        name = asked.removeprefix(path)
        if asked.startswith(path) and name in secrets:
            return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": secrets[name]}
        known: dict[str, Object] = {
            "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": [resource]},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
        }
        return known.get(asked)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answer(self.path.partition("?")[0])
            missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(found or missing).encode())

        def log_message(self, *_: Any) -> None:
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield helm.Config(kube_apiserver=f"http://127.0.0.1:{server.server_port}", namespace=NAMESPACE)
        finally:
            server.shutdown()
            thread.join()


def test_an_upgrade_keeps_the_keys_that_were_made() -> None:
    with api_server({}) as empty:
        first = render(cluster=empty)
        assert first.secrets() != render(cluster=empty).secrets(), "keys are drawn at random"
    held = {secret["metadata"]["name"]: secret["data"] for secret in first.of("Secret")}
    assert set(held) == {"outrider-drafter", "outrider-fleet", "outrider-redis"}
    with api_server(held) as cluster:
        assert render(cluster=cluster).secrets() == first.secrets()
        assert render({"target": "other"}, cluster=cluster).secrets() == first.secrets()


@pytest.mark.parametrize(
    "release", ["a", "outrider", "my-outrider-2", "release-with-a-name-as-long-as-helm-lets-it-be-x-53"]
)
def test_names_stay_within_bounds(release: str) -> None:
    rendered = render(EVERYTHING, release=release)
    for thing in rendered.objects:
        assert len(thing["metadata"]["name"]) <= 63
        assert all(len(value) <= 63 for value in thing["metadata"]["labels"].values())
    for workload in rendered.of("StatefulSet"):
        assert len(workload["metadata"]["name"]) + len("-0123456789") <= 63, "a label with its revision"
    for group in render(SCENARIOS["vllm and everything"], release=release).of("LeaderWorkerSet"):
        assert len(group["metadata"]["name"]) + len("-99-0123456789") <= 63, "the same, of a group's followers"
    names = [(thing["kind"], thing["metadata"]["name"]) for thing in rendered.objects]
    assert len(names) == len(set(names))


def test_two_releases_of_a_namespace_leave_each_other_alone() -> None:
    one, other = render(release="one"), render(release="other")
    assert {thing["metadata"]["name"] for thing in one.objects}.isdisjoint(
        thing["metadata"]["name"] for thing in other.objects
    )
    for pod in other.pods().values():
        for service in one.of("Service"):
            assert not service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()


def test_versions_are_the_projects() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert chart().metadata["appVersion"] == chart().version == version


def test_notes_name_what_there_is(rendered: Rendered) -> None:
    names = {thing["metadata"]["name"] for thing in rendered.objects}
    words = rendered.notes.replace("/", " ").split()
    assert {word for word in words if word.startswith(f"{RELEASE}-") and "." not in word} <= names
    assert "{{" not in rendered.notes


@pytest.mark.parametrize("client_auth", [False, True])
def test_notes_show_a_clients_certificate_where_it_needs_one(client_auth: bool) -> None:
    notes = render({"tls": {"secretName": "outrider-tls", "clientAuth": client_auth}}).notes
    assert ("curl --cacert ca.crt --cert tls.crt --key tls.key https:" in notes) == client_auth
    assert ("curl --cacert ca.crt https:" in notes) != client_auth


WRONG: list[tuple[Object, str]] = [
    ({"verifer": {}}, "verifer"),
    ({"verifier": {"replica": 2}}, "replica"),
    ({"verifier": {"replicas": -1}}, "replicas"),
    ({"verifier": {"replicas": "2"}}, "replicas"),
    ({"coordinator": {"replicas": 0}}, "replicas"),
    ({"verifier": {"settings": {"kv-token": 5}}}, "kv-token"),
    ({"verifier": {"settings": {"gamma-max": 5}}}, "gamma-max"),
    ({"verifier": {"settings": {"own-drafter": True}}}, "own-drafter"),
    ({"drafter": {"settings": {"threads": [1]}}}, "threads"),
    ({"settings": {"port": 1}}, "port"),
    ({"host": "localhost"}, "host"),
    ({"drafter": {"apart": "never"}}, "apart"),
    ({"verifier": {"gpu": {"count": 0.5}}}, "count"),
    ({"verifier": {"vllm": {"nodes": 0}}}, "nodes"),
    ({"verifier": {"gpu": {"resource": "gpu"}}}, "resource"),
    ({"verifier": {"resources": {"limit": {}}}}, "limit"),
    ({"verifier": {"resources": {"limits": {"memory": "8 GB"}}}}, "memory"),
    ({"verifier": {"cache": {"size": "20GB"}}}, "size"),
    ({"models": {"volume": {"hostPath": {}, "emptyDir": {}}}}, "volume"),
    ({"image": {"worker": {"tag": "latest"}}}, "tag"),
    ({"image": {"worker": {"digest": "sha256:12"}}}, "digest"),
    ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
    ({"auth": {"apiKeys": {"keys": "one"}}}, "keys"),
    ({"auth": {"apiKeys": {"keys": ["with,comma-in-it"]}}}, "keys"),
    ({"tls": {"secretName": "Has Space"}}, "secretName"),
    ({"redis": {"url": "http://x"}}, "url"),
    ({"ingress": {"http": {"hosts": ["http://x"]}}}, "hosts"),
    ({"coordinator": {"autoscaling": {"metricType": "Resource"}}}, "metricType"),
    ({"networkPolicy": {"clients": ["everybody"]}}, "clients"),
    ({"tracing": {"otlpEndpoint": "collector:4317"}}, "otlpEndpoint"),
]


@pytest.mark.parametrize(("values", "named"), WRONG, ids=lambda value: str(value))
def test_helm_refuses_wrong_values_by_name(values: Object, named: str) -> None:
    with pytest.raises(helm.HelmValuesError, match=named):
        chart().render(values, name=RELEASE, namespace=NAMESPACE)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (vllm(8, 2, tensor_parallel=8), "tensor-parallel 8, but gpu.count 8 x vllm.nodes 2 = 16 GPUs"),
        (vllm(2, 1, tensor_parallel=4), "tensor-parallel 4, but gpu.count 2 x vllm.nodes 1 = 2 GPUs"),
        (vllm(0, 2, tensor_parallel=3), "tensor-parallel 3 cannot be divided over vllm.nodes 2"),
        (vllm(4, 2, tensor_parallel=4, pipeline_parallel=2), "pipeline-parallel: only 1, since texts differed"),
        ({"verifier": {"vllm": {"nodes": 2}}}, "several nodes need verifier.vllm.enabled"),
        ({"verifier": {"settings": {"pipeline-parallel": 2}}}, "pipeline-parallel: only 1, since texts differed"),
        ({"verifier": {"settings": {"pipeline-parallel": 2, "engine": "vllm"}}}, "pipeline-parallel: only 1"),
        ({"verifier": {"vllm": {"enabled": True}, "settings": {"engine": "cuda"}}}, "engine is cuda, but"),
        ({"verifier": {"vllm": {"enabled": True}, "gpu": {"count": 2}}}, "set verifier.sharedMemory"),
        ({"redis": {"bundled": False}}, "name your own Redis"),
        ({"redis": {"url": "redis://mine"}}, "redis.bundled=false"),
        ({"redis": {"existingSecret": "mine"}}, "redis.bundled=false"),
        ({"tls": {"clientAuth": True}}, "tls.clientAuth needs tls.secretName"),
        ({"ingress": {"grpc": {"enabled": True}}}, "name at least one host"),
        ({"auth": {"fleetKey": {"enabled": False}, "apiKeys": {"existingSecret": "api"}}}, "without auth.fleetKey"),
    ],
)
def test_helm_refuses_values_that_lack_something(values: Object, why: str) -> None:
    with pytest.raises(helm.HelmRenderError, match=why):
        render(values)


@pytest.mark.parametrize(
    "where", ["", "image", "auth", "tls", "redis", "coordinator", "verifier", "drafter", "ingress"]
)
def test_every_value_is_in_the_schema_and_has_a_default(where: str) -> None:
    schema = chart().schema
    part = schema["properties"][where] if where else schema
    values = chart().values[where] if where else chart().values
    assert set(part["properties"]) == set(values)
    assert part["additionalProperties"] is False
