"""`kvstore status` and `kvstore top` at the operator's socket: what each tenant has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.settings import load_settings
from kvstore.testing.daemon import Daemon
from tests.cli.run import kvstore


@pytest.fixture(scope="module")
def tenants() -> Iterator[Daemon]:
    with Daemon(
        "tenants.acme.dram.guaranteed=16MiB",
        "tenants.acme.file.guaranteed=64MiB",
        "tenants.beta.dram.guaranteed=8MiB",
        "tenants.beta.file.guaranteed=64MiB",
    ) as daemon:
        yield daemon.start()
        daemon.stop()


def test_status_says_what_each_tenant_has(tenants: Daemon) -> None:
    ran = kvstore("status", "--target", tenants.target)
    acme = next(line for line in ran.stdout.splitlines() if "acme: " in line)
    assert "dram 0 B used, 16 MiB guaranteed, cap " in acme
    assert "file 0 B used, 64 MiB guaranteed, cap " in acme
    assert "beta: dram 0 B used, 8 MiB guaranteed" in ran.stdout


def test_top_says_what_each_tenant_has(tenants: Daemon) -> None:
    options = ("--target", tenants.target, "--once", "--interval", "0.1")
    told = json.loads(kvstore("top", "--json", *options).stdout)["tenants"]
    share = told["acme"]["share"]["dram"]
    assert share["used_bytes"] == share["lent_bytes"] == 0
    assert share["guaranteed_bytes"] == 16 << 20
    assert "acme: dram 0 B used" in " ".join(kvstore("top", *options).stdout.split())


def test_a_tenants_own_socket_says_nothing_of_others(tenants: Daemon) -> None:
    own = f"unix:{tenants.socket.parent / 'acme' / 'kvstore.sock'}"
    assert "beta" not in kvstore("status", "--target", own).stdout
    told = json.loads(
        kvstore("top", "--target", own, "--once", "--interval", "0.1", "--json").stdout
    )
    assert told["tenants"] == {}


def test_what_is_to_be_kept_of_a_tenant_loads_to_the_same(tenants: Daemon, tmp_path: Path) -> None:
    options = ("dram.guaranteed=8MiB", "file.guaranteed=64MiB", "unix.mode=0750", "arena=sealed")
    names = 'certificates=["a.example", "b \\" c"]'
    ran = kvstore("tenant", "add", "gamma", *options, names, "--target", tenants.target)
    assert ran.exit_code == 0, ran.output
    file = tmp_path / "kvstore.toml"
    file.write_text(ran.stdout[ran.stdout.index("[tenants.gamma]") :])
    (gamma,) = load_settings(file).tenants
    assert (gamma.unix_mode, gamma.names) == ("0750", ("a.example", 'b " c'))
    assert gamma.dram_guaranteed_bytes == 8 << 20
    ran = kvstore("tenant", "set", "gamma", "weight=.5", "--target", tenants.target)
    assert ran.stdout.endswith("[tenants.gamma]\nweight = 0.5\n")
    kvstore("tenant", "delete", "gamma", "--yes", "--target", tenants.target)


def test_a_tenant_that_is_not_there_is_not_set(tenants: Daemon) -> None:
    ran = kvstore("tenant", "set", "nobody", "weight=0.5", "--target", tenants.target)
    assert ran.exit_code != 0
    assert "there is no tenant nobody here: see `kvstore tenant list`" in ran.output


def test_the_list_says_where_each_socket_is(tenants: Daemon) -> None:
    path = tenants.socket.parent / "acme/kvstore.sock"
    shown = kvstore("tenant", "list", "--target", tenants.target).stdout.splitlines()
    assert [line.startswith("acme: ") for line in shown] == [True, False]
    assert shown[0].endswith(f", unix:{path}")
    told = json.loads(kvstore("tenant", "list", "--json", "--target", tenants.target).stdout)
    assert told["acme"]["socket"] == str(path)


@pytest.mark.parametrize("answer", ["", "n\n"])
def test_a_delete_that_nobody_confirms_is_said_in_json_too(tenants: Daemon, answer: str) -> None:
    ran = kvstore("tenant", "delete", "acme", "--json", "--target", tenants.target, stdin=answer)
    assert json.loads(ran.stdout) == {
        "error": "nobody confirmed, so nothing was done: --yes does not ask",
        "exit_code": 1,
    }
    assert ran.exit_code == 1
    assert "Delete everything that is stored of acme?" in ran.stderr
