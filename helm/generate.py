"""Write kvstore/values.schema.json, which refuses unknown values: `python helm/generate.py`.

The settings under `config` are those of the daemon, from where it declares them. A test checks that
the file is what this writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias, get_type_hints

from kvstore.settings import Settings
from kvstore.settings.values import declared, is_size, toml_key

OUTPUT = Path(__file__).with_name("kvstore") / "values.schema.json"

# What the chart decides itself: where things are in the container, and how pods reach each other.
OWNED: dict[str, tuple[str, ...]] = {
    "server": (
        "socket",
        "sockets",
        "listen",
        "listen_open",
        "metrics_listen",
        "metrics_open",
        "page",
        "page_hosts",
    ),
    "file": ("path",),
    "cluster": (
        "membership",
        "fleet",
        "listen",
        "address",
        "static",
        "kubernetes_service",
        "etcd",
        "etcd_ca",
        "etcd_cert",
        "etcd_key",
        "etcd_user",
        "etcd_password_file",
        "cert",
        "key",
        "ca",
        "insecure",
        "state",
    ),
}
LEFT_OUT = ("tls", "tenants")  # clients over TCP, and tenants: not in the chart yet

Schema: TypeAlias = dict[str, Any]

TEXT: Schema = {"type": "string"}
YES_OR_NO: Schema = {"type": "boolean"}
SIZE: Schema = {"type": "string", "pattern": "^[1-9][0-9]*(MiB|GiB|TiB)$"}
PORT: Schema = {"type": "integer", "minimum": 1024, "maximum": 65535}
LABELS: Schema = {"type": "object", "additionalProperties": TEXT}
DURATION: Schema = {"type": "string", "pattern": "^([0-9]+(h|m|s))+$"}
QUANTITY: Schema = {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"}
PATH: Schema = {"type": "string", "pattern": "^/[^\\s]+$"}
NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$"}
CREATE = {"enum": ["auto", "always", "never"]}


def keys(required: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    """Return the schema of an object with these keys and no other."""
    found: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    if required:
        found["required"] = list(required)
    return found


def each(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def one_of(*words: str) -> Schema:
    return {"enum": list(words)}


def config() -> Schema:
    """Return the schema of the daemon's settings, without those that the chart decides."""
    types = get_type_hints(Settings)
    sections = {
        name: _section(values, OWNED.get(name, ()))
        for name, values in Settings().sections()
        if name not in LEFT_OUT and name in types
    }
    sections["dram"]["properties"]["capacity"] = SIZE  # the pod's memory follows from it
    sections["dram"]["required"] = ["capacity"]
    return keys(("dram",), **sections)


def _section(values: Any, owned: tuple[str, ...]) -> Schema:
    types = get_type_hints(type(values))
    names = {toml_key(item): item for item in declared(values)}
    unknown = set(owned) - names.keys()
    if unknown:
        raise ValueError(f"there is no setting {', '.join(sorted(unknown))}")
    return keys(
        **{key: _value(item, types[item.name]) for key, item in names.items() if key not in owned}
    )


def _value(item: Any, kind: Any) -> Schema:
    if kind is bool:
        found = YES_OR_NO
    elif kind is float:
        found = {"type": "number"}
    elif is_size(item):  # such as 4GiB
        found = {"type": ["string", "integer"], "pattern": "^[0-9]+(B|KiB|MiB|GiB|TiB)?$"}
    elif kind is int:
        found = {"type": "integer"}
    elif kind is str:
        found = TEXT
    else:
        found = {"anyOf": [TEXT, each(TEXT)]}
    return {**found, "description": item.metadata["doc"]}


def disk() -> Schema:
    """Return the schema of a disk: a name, and where it is."""
    ephemeral = keys(
        ("size",),
        size=QUANTITY,
        storageClassName=TEXT,
        accessMode=one_of("ReadWriteOnce", "ReadWriteOncePod"),
    )
    found = keys(
        ("name",), name=NAME, hostPath=PATH, create=YES_OR_NO, ephemeral=ephemeral, claim=NAME
    )
    found["oneOf"] = [{"required": [each]} for each in ("hostPath", "ephemeral", "claim")]
    found["dependentRequired"] = {"create": ["hostPath"]}
    return found


def cluster() -> Schema:
    return keys(
        membership=one_of("none", "kubernetes", "etcd"),
        fleet={"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$"},
        port=PORT,
        tls=keys(
            source=one_of("generated", "secret", "certManager", "none"),
            secretName=TEXT,
            issuer=keys(name=TEXT, kind=TEXT, group=TEXT),
            duration=DURATION,
            renewBefore=DURATION,
        ),
        insecure=YES_OR_NO,
        etcd=keys(
            endpoints=each({"type": "string", "pattern": "^https?://[^/\\s]+:[0-9]+$"}),
            tlsSecretName=TEXT,
            clientCertificate=YES_OR_NO,
            user=TEXT,
            passwordSecretName=TEXT,
        ),
    )


def toleration() -> Schema:
    return keys(
        key=TEXT,
        operator=one_of("Exists", "Equal"),
        value=TEXT,
        effect=one_of("NoSchedule", "PreferNoSchedule", "NoExecute"),
        tolerationSeconds={"type": "integer", "minimum": 0},
    )


def values() -> Schema:
    """Return the schema of all values."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Values of the chart kvstore",
        **keys(
            ("config",),
            **{"global": keys()},  # Helm adds it
            image=keys(
                repository={**TEXT, "minLength": 1},
                tag=TEXT,
                pullPolicy=one_of("Always", "IfNotPresent", "Never"),
                pullSecrets=each(TEXT),
            ),
            nameOverride=TEXT,
            fullnameOverride=TEXT,
            config=config(),
            sockets=keys(("hostPath",), hostPath=PATH),
            disks=each(disk()),
            hostPaths=keys(prepare=YES_OR_NO),
            cluster=cluster(),
            metrics=keys(
                port=PORT,
                serviceMonitor=keys(create=CREATE, interval=DURATION, labels=LABELS),
                rules=keys(create=CREATE, labels=LABELS),
                dashboard=keys(create=YES_OR_NO, labels=LABELS),
            ),
            networkPolicy=keys(
                enabled=YES_OR_NO,
                metricsFrom=each(keys(namespaceLabels=LABELS, podLabels=LABELS)),
                eventsFrom=each(keys(namespaceLabels=LABELS, podLabels=LABELS)),
            ),
            podDisruptionBudget=keys(
                enabled=YES_OR_NO, minAvailable={"type": "integer", "minimum": 0}
            ),
            serviceAccount=keys(create=YES_OR_NO, name=TEXT, annotations=LABELS),
            ipFamily=one_of("IPv4", "IPv6"),
            rdma=keys(enabled=YES_OR_NO, resource=TEXT, count={"type": "integer", "minimum": 1}),
            memory=keys(beside=SIZE),
            cpu=keys(request=QUANTITY, limit={"anyOf": [QUANTITY, {"const": ""}]}),
            bucket=keys(secretName=TEXT),
            secretMounts=each(keys(("secretName", "mountPath"), secretName=TEXT, mountPath=PATH)),
            nodeSelector=LABELS,
            tolerations=each(toleration()),
            priorityClassName=TEXT,
            podLabels=LABELS,
            podAnnotations=LABELS,
        ),
    }


def main() -> None:
    OUTPUT.write_text(json.dumps(values(), indent=2) + "\n")


if __name__ == "__main__":
    main()
