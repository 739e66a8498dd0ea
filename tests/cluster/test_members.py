"""What `kvstore members` and `kvstore status` say of a fleet: who is there, and who should be."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvstore.cli import main
from kvstore.membership import encode_member
from kvstore.testing.daemon import Daemon
from kvstore.testing.etcd import INSTALL, Etcd, has_etcd
from kvstore.testing.membership import new_member
from kvstore.testing.ports import free_ports
from tests.cluster.fleet import fleet, member_settings, met, wait_for
from tests.tls import Authority


def said(daemon: Daemon, command: str = "members") -> tuple[int, str]:
    done = CliRunner().invoke(main, [command, "--target", daemon.target])
    return done.exit_code, done.output


def findings(daemon: Daemon) -> dict[str, dict[str, str]]:
    done = CliRunner().invoke(main, ["status", "--json", "--target", daemon.target])
    return {each["about"]: each for each in json.loads(done.output)["findings"]}


def told(daemon: Daemon) -> dict[str, Any]:
    done = CliRunner().invoke(main, ["members", "--json", "--target", daemon.target])
    found: dict[str, Any] = json.loads(done.output)
    return found


def test_a_fleet_that_is_whole() -> None:
    with fleet() as (one, _):
        wait_for(lambda: "old" in said(one)[1])  # what it knows of the other one's prefixes
        code, text = said(one)
        assert code == 0
        head, row = text.splitlines()[-2:]
        assert row[head.index("BREAKER") :].split() == ["closed", "0"]
        assert 0 <= told(one)["members"][0]["view_age_s"] < 60
        assert findings(one)["fleet"]["level"] == "ok"
        assert "members" not in findings(one)


def secured(authority: Authority, name: str) -> list[str]:
    issued = authority.issue(name)
    return [
        f"cluster.cert={issued.cert}",
        f"cluster.key={issued.key}",
        f"cluster.ca={authority.ca}",
    ]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["cluster.fleet=another"], "fleet"),
        (["certificate"], "certificate"),
        (None, "cannot be reached"),
    ],
    ids=["another-fleet", "another-authority", "nobody"],
)
def test_a_listed_daemon_that_is_no_member_is_named(
    tmp_path: Path, options: list[str] | None, why: str
) -> None:
    one_port, two_port = free_ports(2)
    own, other = list[str](), options
    if options == ["certificate"]:
        own = secured(Authority(tmp_path / "a"), "one")
        other = secured(Authority(tmp_path / "b"), "two")
    one = Daemon(*member_settings(one_port, [two_port]), *own)
    two = Daemon(*member_settings(two_port, [one_port]), *(other or ()))
    with one, two:
        if other is not None:
            two.start()
        one.start()
        where = f"127.0.0.1:{two_port}"
        wait_for(lambda: where in told(one)["membership"]["errors"])
        code, text = said(one)
        assert code == 1
        assert "no other daemon is known" in text
        (line,) = [each for each in text.splitlines() if each.startswith(f"nobody at {where}: ")]
        assert why in line
        assert findings(one)["members"]["level"] == "note"
        assert "1 of the addresses" in findings(one)["members"]["found"]


def test_a_member_that_is_down_is_shown_with_its_breaker() -> None:
    with fleet() as (one, two):
        two.kill()
        wait_for(lambda: not met(one))

        def shows_breaker() -> bool:
            code, text = said(one)
            assert code == 1
            assert "nobody at" not in text  # it is known
            return any(word in text for word in ("  open  ", "  half open  "))

        wait_for(shows_breaker)
        assert findings(one)["fleet"]["level"] == "note"


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    if not has_etcd():
        pytest.skip(INSTALL)
    with Etcd() as etcd:
        yield etcd.start()


def test_a_daemon_whose_node_id_is_another_ones_says_so(etcd: Etcd) -> None:
    (port,) = free_ports(1)
    name = "members-" + secrets.token_hex(4)
    options = [
        "cluster.membership=etcd",
        f"cluster.fleet={name}",
        f"cluster.listen=127.0.0.1:{port}",
        f"cluster.etcd={json.dumps(list(etcd.endpoints))}",
        "cluster.etcd_ttl_s=2",
    ]
    with Daemon(*options) as one:
        one.start()
        assert "members" not in findings(one)
        node = told(one)["node"]
        other = new_member("10.0.0.9:7702", node=node)
        etcd.put(f"/kvstore/v1/{name}/nodes/{node}", encode_member(other))
        wait_for(lambda: "members" in findings(one))
        found = findings(one)["members"]
        assert found["level"] == "wrong"
        assert "10.0.0.9:7702 has the node id" in found["found"]
        code, text = said(one, "status")
        assert code == 1
        assert "not registered" in text
