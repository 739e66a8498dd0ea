"""The chart, rendered and looked at: by Helm's own library, and by rules of our own."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest

yaml = pytest.importorskip("yaml")
helm = pytest.importorskip("helm_python")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "kvstore"
VALUES = sorted((ROOT / "helm" / "tests").glob("*.yaml"))
EXAMPLES = ROOT / "helm" / "examples"
VERSIONS = ("1.29", "1.33", "1.37")
# What operators define: kubernetes-validate knows Kubernetes' own kinds.
OTHERS = {"Certificate", "ServiceMonitor", "PrometheusRule"}
RELEASE, NAMESPACE = "demo", "prod"


class Rendered(NamedTuple):
    """What one install would make. notes: what it prints."""

    objects: list[dict[str, Any]]
    notes: str

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in self.objects if each["kind"] == kind]

    def one(self, kind: str) -> dict[str, Any]:
        (found,) = self.of(kind)
        return found

    @property
    def settings(self) -> str:
        """The TOML file of the daemon."""
        return next(
            each["data"]["kvstore.toml"]
            for each in self.of("ConfigMap")
            if "kvstore.toml" in each["data"]
        )

    @property
    def pod(self) -> dict[str, Any]:
        return self.one("DaemonSet")["spec"]["template"]["spec"]

    @property
    def daemon(self) -> dict[str, Any]:
        return self.pod["containers"][0]


def values_of(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text()) or {}


def render(values: Mapping[str, Any]) -> Rendered:
    """Render the chart. Raises helm's errors for values that are refused."""
    with helm.Chart.load(str(CHART)) as chart:
        files = chart.render(dict(values), name=RELEASE, namespace=NAMESPACE)
    objects: list[dict[str, Any]] = []
    notes = ""
    for name, text in files.items():
        if name.endswith("NOTES.txt"):
            notes = text
        else:
            objects += [each for each in yaml.safe_load_all(text) if each]
    return Rendered(objects, notes)


def lint(values: Mapping[str, Any]) -> list[str]:
    """Return what Helm's lint has against the chart with these values."""
    found = helm.lint(str(CHART), dict(values), strict=True, namespace=NAMESPACE)
    said = [each["error"] for each in found["messages"] if each["severity"] >= 2]
    return [*found["errors"], *said]


def invalid(objects: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what Kubernetes would refuse, in any of the versions."""
    for each in objects:
        if each["kind"] in OTHERS:
            continue
        for version in VERSIONS:
            try:
                kubernetes_validate.validate(each, version, strict=True)
            except Exception as error:  # of jsonschema, and of kinds that it does not know
                yield f"{version} {each['kind']} {each['metadata']['name']}: {str(error)[:300]}"


# ---- rules of our own ----------------------------------------------------------------------------


def problems(rendered: Rendered) -> Iterator[str]:
    """Yield what is valid and wrong."""
    pods = [(each["kind"], each) for each in rendered.of("Pod")]
    daemons = rendered.one("DaemonSet")
    pods.append(("DaemonSet", daemons["spec"]["template"]))
    labels = daemons["spec"]["template"]["metadata"]["labels"]
    for kind, pod in pods:
        yield from (f"{kind}: {each}" for each in _problems_of_pod(pod["spec"]))
    for what, selector in _selectors(rendered):
        if not selector.items() <= labels.items():
            yield f"{what} selects no daemon: {selector}"
        if any(
            selector.items() <= each["metadata"]["labels"].items() for each in rendered.of("Pod")
        ):
            yield f"{what} selects the pod of the test"
    yield from _problems_of_ports(rendered)
    for each in rendered.of("ConfigMap"):
        if "PRIVATE KEY" in json.dumps(each) or "password =" in json.dumps(each):
            yield f"ConfigMap {each['metadata']['name']} holds a secret"
    for each in rendered.objects:
        if each["metadata"].get("namespace") != NAMESPACE:
            yield f"{each['kind']} {each['metadata']['name']} names no namespace"


def _selectors(rendered: Rendered) -> Iterator[tuple[str, dict[str, str]]]:
    yield "DaemonSet", rendered.one("DaemonSet")["spec"]["selector"]["matchLabels"]
    yield "Service", rendered.one("Service")["spec"]["selector"]
    for each in rendered.of("NetworkPolicy"):
        yield "NetworkPolicy", each["spec"]["podSelector"]["matchLabels"]
    for each in rendered.of("PodDisruptionBudget"):
        yield "PodDisruptionBudget", each["spec"]["selector"]["matchLabels"]


def _problems_of_ports(rendered: Rendered) -> Iterator[str]:
    ports = rendered.daemon["ports"]
    named = {each["name"]: each["containerPort"] for each in ports if each.get("name")}
    if len(named) != len(ports):
        yield "a port of the daemon has no name"
    for each in rendered.one("Service")["spec"]["ports"]:
        if named.get(each["targetPort"]) != each["port"]:
            yield f"Service: port {each} is not one of the daemon's"
    used = [rendered.daemon[f"{name}Probe"]["httpGet"]["port"] for name in ("startup", "liveness")]
    for each in rendered.of("NetworkPolicy"):
        used += [port["port"] for rule in each["spec"].get("ingress", []) for port in rule["ports"]]
    for each in rendered.of("ServiceMonitor"):
        used += [endpoint["port"] for endpoint in each["spec"]["endpoints"]]
        if not each["spec"]["selector"]["matchLabels"].items() <= (
            rendered.one("Service")["metadata"]["labels"].items()
        ):
            yield "ServiceMonitor selects no Service"
    yield from (f"port {each} is none of the daemon's" for each in used if each not in named)


def _problems_of_pod(pod: dict[str, Any]) -> Iterator[str]:
    volumes = [each["name"] for each in pod["volumes"]]
    containers = [*pod.get("initContainers", []), *pod["containers"]]
    mounted: set[str] = set()
    for each in containers:
        paths = [mount["mountPath"] for mount in each["volumeMounts"]]
        if len(paths) != len(set(paths)):
            yield f"{each['name']}: two mounts at one path"
        mounted |= {mount["name"] for mount in each["volumeMounts"]}
        yield from (f"{each['name']}: {told}" for told in _problems_of_container(each))
    if mounted != set(volumes) or len(volumes) != len(set(volumes)):
        yield f"volumes {sorted(volumes)} and mounts {sorted(mounted)}"
    security = pod["securityContext"]
    if security["seccompProfile"] != {"type": "RuntimeDefault"} or not security["runAsNonRoot"]:
        yield "the pod is not restricted"
    if security["runAsUser"] != 10001 or any(
        pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace")
    ):
        yield "the pod is another user's, or in a namespace of the node"


def _problems_of_container(container: dict[str, Any]) -> Iterator[str]:
    resources, security = container["resources"], container["securityContext"]
    memory = resources["requests"].get("memory")
    if not memory or memory != resources["limits"].get("memory"):
        yield "memory: what is requested is not what is the limit"
    if security.get("privileged") or security["allowPrivilegeEscalation"]:
        yield "privileged"
    if not security["readOnlyRootFilesystem"]:
        yield "its root file system can be written"
    added = security["capabilities"].get("add", [])
    if security["capabilities"]["drop"] != ["ALL"] or set(added) - {"IPC_LOCK", "CHOWN"}:
        yield f"capabilities {security['capabilities']}"
    as_root = security.get("runAsUser") == 0 or not security.get("runAsNonRoot")
    if (as_root or "CHOWN" in added) and container["name"] != "prepare":
        yield "root"


# ---- typos ---------------------------------------------------------------------------------------

# What is right about an item of each list of objects, so that only the typo is wrong.
ITEMS: dict[str, dict[str, Any]] = {
    "disks": {"name": "x", "hostPath": "/x"},
    "disks.ephemeral": {"name": "x", "ephemeral": {"size": "1Gi"}},
    "networkPolicy.metricsFrom": {},
    "networkPolicy.eventsFrom": {},
    "secretMounts": {"secretName": "x", "mountPath": "/x"},
    "tolerations": {},
}
Around: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]


def typos(schema: Mapping[str, Any], path: str = "", around: Around = dict) -> Iterator[Typo]:
    """Yield one key misspelt after the other: every key, at every level."""
    for key, found in schema.get("properties", {}).items():
        below = f"{path}.{key}".lstrip(".")
        misspelt = {f"{key[:-1]}_{key[-1]}": _any_value(found)}
        yield Typo(below, around(misspelt), around({}))
        if found.get("type") == "object":
            yield from typos(found, below, _inside(key, around, below))
        elif found.get("items", {}).get("type") == "object":
            yield from typos(found["items"], below, _in_item(key, around, below))


class Typo(NamedTuple):
    """Values with a key that is misspelt, and the same without it."""

    key: str
    values: dict[str, Any]
    without: dict[str, Any]


def _inside(key: str, around: Around, path: str) -> Around:
    if path == "disks.ephemeral":  # a disk is one thing: this one is no directory of the node
        return lambda inner: {"disks": [merged(ITEMS[path], {"ephemeral": inner})]}
    return lambda inner: around({key: inner})


def _in_item(key: str, around: Around, path: str) -> Around:
    return lambda inner: around({key: [ITEMS[path] | inner]})


def _any_value(schema: Mapping[str, Any]) -> Any:
    kind = schema.get("type")
    examples = {"object": {}, "array": [], "boolean": True, "integer": 4096, "number": 1.5}
    return examples.get(kind if isinstance(kind, str) else "", "1GiB")


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as Helm merges them."""
    found = copy.deepcopy(dict(below))
    for key, value in above.items():
        inner = found.get(key)
        both = isinstance(inner, dict) and isinstance(value, dict)
        found[key] = merged(inner, value) if both else value
    return found


def accepted_typos() -> tuple[list[str], int]:
    """Return which typos the schema takes, and how many there were.

    Raises helm's error if it refuses what is right.
    """
    with helm.Chart.load(str(CHART)) as chart:
        tried = list(typos(chart.schema))
        found = []
        defaults = chart.values
        for right in {json.dumps(each.without): each.without for each in tried}.values():
            chart.validate_schema(merged(defaults, right))
        for each in tried:
            try:
                chart.validate_schema(merged(defaults, each.values))
            except helm.HelmError:
                continue
            found.append(each.key)
        return found, len(tried)
