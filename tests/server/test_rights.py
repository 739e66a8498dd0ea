"""Each method has a role, and no role may do more than the table says."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore import Client
from kvstore.model.errors import Unauthorized
from kvstore.model.tenant import Principal, Role
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.server import rights
from kvstore.testing.daemon import Daemon

METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["KVStore"].methods]


def may(method: str, role: Role) -> bool:
    try:
        rights.check(method, Principal("acme", "test", role))
    except Unauthorized as error:
        return error.reason != "role"
    return True


def test_every_method_of_the_proto_has_a_right_and_no_other() -> None:
    assert set(rights.RIGHTS) == set(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_a_higher_role_may_do_what_a_lower_one_may(method: str) -> None:
    allowed = [may(method, role) for role in Role]
    assert allowed == sorted(allowed)
    assert allowed[-1]


def test_a_method_without_an_entry_is_nobodys() -> None:
    assert not any(may("Invented", role) for role in Role)


def test_what_readers_and_writers_may_do_is_spelt_out() -> None:
    readers = {method for method in METHODS if may(method, Role.READER)}
    writers = {method for method in METHODS if may(method, Role.WRITER)}
    assert not readers & {"Reserve", "Commit", "Put", "Delete", "Clear", "Scan", "Record"}
    assert writers - readers == {"Reserve", "Commit", "Put", "Delete"}
    admins_only = {method for method in METHODS if not may(method, Role.OPERATOR)}
    assert admins_only == {"GetConfig", "SetConfig", "LogLines", "AddTenant", "DeleteTenant"}


@pytest.mark.parametrize(
    ("corrupt", "role", "allowed"),
    [
        (True, Role.WRITER, True),
        (False, Role.WRITER, False),
        (False, Role.OPERATOR, True),
    ],
)
def test_a_writer_reports_wrong_blocks_but_deletes_none(
    corrupt: bool, role: Role, allowed: bool
) -> None:
    request: Any = pb.DeleteRequest(corrupt=corrupt)
    principal = Principal("acme", "test", role)
    if allowed:
        rights.check_request("Delete", principal, request)
        return
    with pytest.raises(Unauthorized, match="takes the role operator; test has writer"):
        rights.check_request("Delete", principal, request)


def test_the_socket_of_the_only_tenant_is_its_admin() -> None:
    with Daemon(file=False, tcp=True) as daemon:
        daemon.start()
        with Client(daemon.target) as client:
            assert client.admin.whoami() == Principal("default", "unix socket", Role.ADMIN)
            client.admin.settings()
        with Client(daemon.address) as client:
            assert client.admin.whoami().role is Role.OPERATOR
            with pytest.raises(Unauthorized, match="takes the role admin"):
                client.admin.configure(["dram.capacity=64MiB"])
            refused = client.admin.stats()["totals"]["rpc_errors"]
            assert refused["SetConfig/Unauthorized/role"] == 1
