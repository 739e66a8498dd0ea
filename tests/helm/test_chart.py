"""What the chart renders is valid, and what we want: for every file of helm/tests."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvstore.settings import Settings, load_settings
from tests.helm import chart
from tests.helm.chart import CHART, EXAMPLES, ROOT, VALUES, helm, render, values_of, yaml

OPERATIONS = ROOT / "docs" / "operations.md"


def settings_of(rendered: chart.Rendered, tmp_path: Path) -> Settings:
    path = tmp_path / "kvstore.toml"
    path.write_text(rendered.settings)
    given = [each.removeprefix("--set=") for each in rendered.daemon["args"] if "--set" in each]
    ip = "[fd00::7]" if any("[$(POD_IP)]" in each for each in given) else "10.0.0.7"
    plain = [re.sub(r"\[?\$\(POD_IP\)\]?", ip, each) for each in given]
    return load_settings(path, plain)


def test_what_is_rendered_is_valid_and_safe(tmp_path: Path) -> None:
    for path in VALUES:  # in one test: the schemas of Kubernetes are large
        values = values_of(path)
        rendered = render(values)
        assert chart.lint(values) == [], path.stem
        assert list(chart.invalid(rendered.objects)) == [], path.stem
        assert list(chart.problems(rendered)) == [], path.stem
        fits_its_settings(rendered, settings_of(rendered, tmp_path))


def fits_its_settings(rendered: chart.Rendered, settings: Settings) -> None:
    """What the TOML file says is there in the pod, and the other way round."""
    limit = rendered.daemon["resources"]["limits"]["memory"].removesuffix("Mi")
    assert int(limit) << 20 == settings.dram.capacity_bytes + (1 << 30)
    grace, drain_s = rendered.pod["terminationGracePeriodSeconds"], settings.server.drain_s
    assert 5 * drain_s + 10 <= grace < 5 * drain_s + 11
    assert not settings.server.page  # the chart has neither its extra nor its port open
    mounts = [each["mountPath"] for each in rendered.daemon["volumeMounts"]]
    cluster = settings.cluster
    needed = [*settings.file.paths, settings.server.socket, settings.security.root_key_file]
    needed += [cluster.cert, cluster.key, cluster.ca, cluster.etcd_ca, cluster.etcd_password_file]
    for each in filter(None, needed):
        assert any(Path(each).is_relative_to(mount) for mount in mounts), each
    assert cluster.on == any(each["name"] == "peer" for each in rendered.daemon["ports"])
    assert bool(rendered.of("Role")) == (cluster.membership == "kubernetes")
    if cluster.membership == "kubernetes":
        assert rendered.one("Service")["metadata"]["name"] == cluster.kubernetes_service


def test_the_values_files_are_what_they_are_called(tmp_path: Path) -> None:
    found = {path.stem: settings_of(render(values_of(path)), tmp_path) for path in VALUES}
    assert found["defaults"].cluster.membership == "kubernetes"
    assert found["defaults"].cluster.cert  # peers show certificates unless somebody says otherwise
    assert found["etcd"].cluster.membership == "etcd"
    assert found["etcd"].cluster.address.startswith("[fd00")
    assert len(found["several-disks"].file.paths) == 3
    assert found["no-files"].file.paths == ()
    assert found["gpu-pool"].cluster.insecure
    tls = render(values_of(ROOT / "helm/tests/tls.yaml"))
    assert tls.one("Certificate")["spec"]["dnsNames"] == ["*.default.kvstore"]
    gpu = render(values_of(ROOT / "helm/tests/gpu-pool.yaml")).daemon
    assert gpu["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert gpu["resources"]["limits"]["rdma/hca"] == 1


def test_the_control_finds_what_is_wrong() -> None:
    rendered = render({})
    rendered.daemon["volumeMounts"].pop(0)
    rendered.daemon["securityContext"]["privileged"] = True
    rendered.daemon["resources"]["limits"]["memory"] = "1Gi"
    rendered.one("Service")["spec"]["selector"]["app.kubernetes.io/name"] = "x"
    assert len(list(chart.problems(rendered))) == 4
    rendered.daemon["imag"] = "x"
    assert len(list(chart.invalid(rendered.objects))) == len(chart.VERSIONS)


def test_no_key_can_be_misspelt() -> None:
    accepted, tried = chart.accepted_typos()
    assert accepted == []
    assert tried > 150


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"cluster": {"tls": {"source": "none"}}}, "cluster.insecure=true"),
        ({"cluster": {"insecure": True}}, "leave one of them out"),
        ({"cluster": {"tls": {"source": "secret"}}}, "cluster.tls.secretName"),
        ({"cluster": {"tls": {"source": "certManager"}}}, "cluster.tls.issuer.name"),
        ({"cluster": {"membership": "etcd"}}, "cluster.etcd.endpoints"),
        ({"cluster": {"etcd": {"user": "x"}}}, "go together"),
        ({"disks": [{"name": "a", "hostPath": "/a"}, {"name": "a", "claim": "b"}]}, "same name"),
        ({"disks": [{"name": "a"}]}, "disks"),
        ({"disks": [{"name": "a", "claim": "b", "create": False}]}, "disks"),
        ({"config": {"dram": {"capacity": 17}}}, "capacity"),
        ({"config": {"server": {"socket": "/x"}}}, "socket"),
        ({"cluster": {"port": "7702"}}, "port"),
        ({"rdma": {"enabled": True}}, "config.cluster.bulk=clear"),
        ({"config": {"server": {"page": True}}}, "page"),
        ({"networkPolicy": {"eventsFrom": [{}]}}, "config.events.publish"),
        (
            {"config": {"pool": {"url": "mooncake://m:50051", "segment": "1GiB"}}},
            "set memory.beside=1616MiB",
        ),
    ],
)
def test_what_could_not_work_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(helm.HelmError, match=re.escape(words)):
        render(values)


def test_the_memory_beside_the_arena_can_be_raised(tmp_path: Path) -> None:
    pool = {"url": "mooncake://m:50051", "segment": 1 << 30, "insecure": True}
    config = {"dram": {"capacity": "2GiB"}, "pool": pool}
    rendered = render({"config": config, "memory": {"beside": "1616MiB"}})
    assert rendered.daemon["resources"]["limits"]["memory"] == "3664Mi"
    assert settings_of(rendered, tmp_path).pool.segment_bytes == 1 << 30


def test_a_pod_that_need_not_drain_has_time_to_end() -> None:
    rendered = render({"config": {"server": {"drain_s": 0}}})
    assert rendered.pod["terminationGracePeriodSeconds"] == 10


def test_those_who_are_named_reach_the_events_and_nobody_else() -> None:
    events = {"publish": "tcp://0.0.0.0:6001", "replay": "tcp://0.0.0.0:6002", "open": True}
    values = {"config": {"events": events}}
    (peers, metrics) = render(values).one("NetworkPolicy")["spec"]["ingress"]
    assert [rule["ports"][0]["port"] for rule in (peers, metrics)] == ["peer", "metrics"]
    routers = {"namespaceLabels": {"team": "routers"}, "podLabels": {"app": "router"}}
    rendered = render(values | {"networkPolicy": {"eventsFrom": [routers]}})
    assert list(chart.problems(rendered)) == []
    assert list(chart.invalid(rendered.objects)) == []
    rule = rendered.one("NetworkPolicy")["spec"]["ingress"][-1]
    assert [each["port"] for each in rule["ports"]] == ["events", "replay"]
    assert rule["from"][0]["podSelector"] == {"matchLabels": {"app": "router"}}
    ports = {each["name"]: each["containerPort"] for each in rendered.daemon["ports"]}
    assert (ports["events"], ports["replay"]) == (6001, 6002)


def test_every_setting_can_be_given_as_it_is_printed() -> None:
    """Those that the chart decides itself are refused instead: see above."""
    generate = generator()
    printed = tomllib.loads(Settings().to_toml())
    taken = {
        section: {key: each for key, each in values.items() if key not in owned}
        for section, values in printed.items()
        if section not in generate.LEFT_OUT
        for owned in [generate.OWNED.get(section, ())]
    }
    assert taken["cluster"]["view_bytes"] == "256MiB"
    with helm.Chart.load(str(CHART)) as loaded:
        loaded.validate_schema(chart.merged(loaded.values, {"config": taken}))


def test_the_settings_restart_the_pods_and_nothing_else_does() -> None:
    def checksum(values: dict[str, Any]) -> str:
        template = render(values).one("DaemonSet")["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/config"])

    assert checksum({}) == checksum({})  # although each has certificates of its own
    assert checksum({}) != checksum({"config": {"file": {"capacity": "9GiB"}}})


def generator() -> Any:
    """Return the module that writes the schema."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("helm_generate", ROOT / "helm" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = module_from_spec(spec)
    spec.loader.exec_module(generate)
    return generate


def test_the_schema_is_what_its_generator_writes() -> None:
    written = json.loads((CHART / "values.schema.json").read_text())
    assert written == generator().values(), "run python helm/generate.py"


def test_alerts_and_dashboard_are_those_of_the_project() -> None:
    rendered = render(values_of(ROOT / "helm/tests/tls.yaml"))
    block = re.search(r"```yaml\n(groups:.*?)```", OPERATIONS.read_text(), re.DOTALL)
    assert block is not None
    assert yaml.safe_load((CHART / "files/alerts.yaml").read_text()) == yaml.safe_load(block[1])
    (down, *_) = rendered.one("PrometheusRule")["spec"]["groups"][0]["rules"]
    assert down["expr"] == 'up{job="kvstore",namespace="prod"} == 0'
    (board,) = [each for each in rendered.of("ConfigMap") if "kvstore.json" in each["data"]]
    ours = (ROOT / "dashboards/kvstore.json").read_text()
    assert json.loads(board["data"]["kvstore.json"]) == json.loads(ours)


def test_the_chart_is_of_this_release() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert about["appVersion"] == about["version"] == project["version"]


def transfer_config(words: str) -> dict[str, Any]:
    found = re.search(r"--kv-transfer-config[ =]'?(\{.*\})'?", words)
    assert found is not None
    loaded: dict[str, Any] = json.loads(found[1])
    return loaded


def test_what_engines_are_told_is_what_the_connector_takes() -> None:
    from kvstore_vllm.settings import parse_settings

    notes = render({}).notes
    assert "path: /run/kvstore, type: DirectoryOrCreate}" in notes
    shown = [transfer_config(notes)]
    for path in sorted(EXAMPLES.glob("*.yaml")):
        text = path.read_text()
        shown += [transfer_config(line) for line in text.splitlines() if "transfer-config" in line]
        assert "runAsUser: 10001" in text
        assert "path: /run/kvstore" in text
        assert "type: DirectoryOrCreate}" in text  # no daemon may have run on this node yet
    assert len(shown) == 1 + len(list(EXAMPLES.glob("*.yaml")))
    for each in shown:
        parse_settings(each["kv_connector_extra_config"])
        assert each["kv_connector_extra_config"]["target"] == "unix:/run/kvstore/kvstore.sock"
        assert each == shown[0]


def test_the_example_of_a_deployment_is_valid() -> None:
    objects = list(yaml.safe_load_all((EXAMPLES / "vllm-deployment.yaml").read_text()))
    assert list(chart.invalid(objects)) == []
