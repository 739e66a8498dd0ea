"""Settings of the fleet: what cannot work, or would be open by mistake, is refused by name."""

from __future__ import annotations

import pytest

from kvstore.model.errors import ConfigError
from kvstore.settings import Settings, load_settings

CERTIFICATES = ["cluster.cert=/c", "cluster.key=/k", "cluster.ca=/a"]
FLEET = ["cluster.listen=127.0.0.1:7702", "cluster.static=10.0.0.8:7702"]
STATIC = [*FLEET, "cluster.membership=static"]


LONGEST = f"{'a' * 63}." + "a." * 94 + "a"  # 253 characters


def test_a_daemon_is_alone_by_default() -> None:
    assert not Settings().cluster.on


def test_a_fleet_of_addresses() -> None:
    more = f'cluster.static=["dns:kvstore-peers:7702", "[::1]:7702", "{LONGEST}:7702"]'
    cluster = load_settings(None, [*STATIC, more]).cluster
    assert cluster.on
    assert cluster.addresses == ("dns:kvstore-peers:7702", "[::1]:7702", f"{LONGEST}:7702")
    assert load_settings(None, STATIC).cluster.addresses == ("10.0.0.8:7702",)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["cluster.membership=gossip"], "choose one of none, static, etcd, kubernetes"),
        (["cluster.membership=static"], "set cluster.static"),
        (["cluster.membership=etcd"], "set cluster.etcd"),
        (["cluster.membership=kubernetes", FLEET[0]], "set cluster.kubernetes_service"),
        (["cluster.kubernetes_service=a/b"], "cluster.kubernetes_service='a/b' is no name"),
        (["cluster.membership=static", FLEET[1]], "set cluster.listen"),
        (["cluster.fleet=a/b"], "'a/b' is no name"),
        (["cluster.zone=a b"], "'a b' is no name"),
        (["cluster.links=verbs"], "choose one of auto, tcp, ucx, nixl"),
        (["cluster.links=ucx", *CERTIFICATES], "set cluster.bulk=clear"),
        (["cluster.bulk=plain"], "choose one of sealed, clear"),
        (["cluster.listen=0.0.0.0:7702"], "cluster.insecure=true"),
        (["cluster.listen=nowhere"], "is not an address"),
        (["cluster.address=nowhere"], "cluster.address='nowhere' is not an address"),
        (["cluster.static=10.0.0.8"], "cluster.static='10.0.0.8' is not an address"),
        ([f"cluster.static={'a' * 64}.example:7702"], "is not an address"),
        (["cluster.static=a..b:7702"], "is not an address"),
        ([f"cluster.static={'a.' * 126}bc:7702"], "is not an address"),
        (["cluster.static=10.0.0.8:0"], "ports are 1 to 65535"),
        (["cluster.static=10.0.0.8:70000"], "ports are 1 to 65535"),
        (["cluster.etcd=etcd-0:2379"], "write https://etcd-0:2379"),
        (["cluster.cert=/c"], "set all three"),
        (["cluster.etcd_user=kvstore"], "set both"),
        (["cluster.view_bytes=1000"], "cluster.view_bytes=1000 is not in 1MiB"),
        (["cluster.threads=0"], "cluster.threads=0 is not in"),
        (
            [*STATIC, "cluster.listen=0.0.0.0:7702", "cluster.insecure=true"],
            "set cluster.address as well",
        ),
        ([*STATIC, "tenants.acme.weight=1"], "read every tenant's blocks: set cluster.cert"),
    ],
)
def test_what_cannot_work_is_refused(overrides: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings(None, overrides)
    assert named in str(refused.value)


def test_a_network_of_ones_own_may_be_open_in_words() -> None:
    words = ["cluster.listen=0.0.0.0:7702", "cluster.insecure=true", "cluster.address=h1:7702"]
    assert load_settings(None, [*STATIC, *words]).cluster.insecure
