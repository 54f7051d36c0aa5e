"""Helm chart, rendered by Helm's own library without a cluster, as Kubernetes objects."""

from __future__ import annotations

import base64
import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from tests.cluster import ROOT

helm = pytest.importorskip("helm_python", reason="Helm's library comes as a wheel for Linux on x86-64 alone")

CHART = ROOT / "deploy" / "helm" / "outrider"
RELEASE = "outrider"
NAMESPACE = "llm"
ROLES = ("coordinator", "verifier", "drafter")

Object = dict[str, Any]


class _Loader(yaml.CSafeLoader):
    """YAML loader that rejects duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Object:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key comes twice: {keys}"
        return super().construct_mapping(node, deep)


@dataclass(frozen=True, slots=True)
class Rendered:
    """All objects of a release, and its notes."""

    objects: list[Object]
    notes: str

    def of(self, *kinds: str) -> list[Object]:
        return [thing for thing in self.objects if thing["kind"] in kinds]

    def get(self, kind: str, name: str) -> Object:
        (found,) = [thing for thing in self.of(kind) if thing["metadata"]["name"] == name]
        return found

    def workloads(self) -> dict[str, Object]:
        """Return the workloads by component; of a LeaderWorkerSet the leaders."""
        made = self.of("Deployment", "StatefulSet") + [stateful_set(thing) for thing in self.of("LeaderWorkerSet")]
        return {component_of(thing): thing for thing in made}

    def followers(self) -> dict[str, Object]:
        return {f"{component_of(thing)} follower": stateful_set(thing, 1) for thing in self.of("LeaderWorkerSet")}

    def pods(self) -> dict[str, Object]:
        """Return pods or pod templates by component."""
        made = {name: thing["spec"]["template"] for name, thing in (self.workloads() | self.followers()).items()}
        return made | {component_of(pod): pod for pod in self.of("Pod")}

    def container(self, component: str) -> Object:
        (found,) = self.pods()[component]["spec"]["containers"]
        return found

    def secrets(self) -> dict[str, dict[str, str]]:
        """Return the decoded values of all secrets."""
        return {
            secret["metadata"]["name"]: {
                key: base64.b64decode(value, validate=True).decode() for key, value in secret["data"].items()
            }
            for secret in self.of("Secret")
        }


@functools.cache
def chart() -> Any:
    return helm.Chart.load(CHART)


def render(values: Object | None = None, *, release: str = RELEASE, cluster: Any = None) -> Rendered:
    """Render the chart as `helm install` does. `lookup` uses the connection `cluster`."""
    by = {"name": release, "namespace": NAMESPACE}
    chart().validate_schema(values or {})
    files = cluster.render(chart(), values or {}, **by) if cluster else chart().render(values or {}, **by)
    (notes,) = [text for path, text in files.items() if path.endswith("NOTES.txt")]
    manifests = [text for path, text in sorted(files.items()) if path.endswith(".yaml")]
    return Rendered([thing for text in manifests for thing in yaml.load_all(text, _Loader) if thing], notes)


def stateful_set(group: Object, index: int = 0) -> Object:
    """Return the StatefulSet that LeaderWorkerSet's operator makes of leaders, or of the followers of the first leader.

    Read in version 0.9 of its source: its webhook adds variables to every container. Its own labels are left out.
    """
    name, template = group["metadata"]["name"], group["spec"]["leaderWorkerTemplate"]
    pod = copy.deepcopy(template["workerTemplate" if index else "leaderTemplate"])
    variables = {
        "LWS_LEADER_ADDRESS": f"{name}-0.{name}.{NAMESPACE}",
        "LWS_GROUP_SIZE": str(template["size"]),
        "LWS_WORKER_INDEX": str(index),
    }
    for container in pod["spec"]["containers"] + pod["spec"]["initContainers"]:
        added = [{"name": key, "value": value} for key, value in variables.items()]
        container["env"] = added + container.get("env", [])
    spec = {
        "serviceName": name,
        "selector": {"matchLabels": pod["metadata"]["labels"]},
        "template": pod,
        "volumeClaimTemplates": template.get("volumeClaimTemplates", []),
    }
    if index:
        name, spec["replicas"] = f"{name}-0", template["size"] - 1
    elif "replicas" in group["spec"]:
        spec["replicas"] = group["spec"]["replicas"]
    metadata = group["metadata"] | {"name": name}
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": metadata, "spec": spec}


def component_of(thing: Object) -> str:
    return str(thing["metadata"]["labels"]["app.kubernetes.io/component"])


def command_line(container: Object, **env: str) -> tuple[list[str], dict[str, str]]:
    """Return a container's command and environment; `env` replaces values that Kubernetes fills in."""
    variables = {entry["name"]: entry.get("value", env.get(entry["name"], "")) for entry in container.get("env", [])}
    line = [_expanded(argument, variables) for argument in container.get("command", []) + container.get("args", [])]
    return line, variables


def _expanded(argument: str, variables: dict[str, str]) -> str:
    for name, value in variables.items():
        argument = argument.replace(f"$({name})", value)
    return argument


def walk(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key of an object, at any depth, with its value."""
    if isinstance(thing, dict):
        for key, value in thing.items():
            yield key, value
            yield from walk(value)
    elif isinstance(thing, list):
        for value in thing:
            yield from walk(value)
