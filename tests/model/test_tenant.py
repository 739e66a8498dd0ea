"""Tenants have names that fit into paths and prefixes, and ids that never change."""

from __future__ import annotations

import pytest

from kvstore.format.frame import NO_TENANT
from kvstore.model.errors import InvalidRequest
from kvstore.model.tenant import Role, check_tenant_name, role_of, tenant_id


def test_ids_are_golden() -> None:
    assert tenant_id("default") == NO_TENANT == bytes(16)
    assert tenant_id("acme").hex() == "ffa7a8bcf96fd76cf018f74a7fbc7ed8"


@pytest.mark.parametrize("name", ["a", "0", "acme", "team-7", "a" * 63])
def test_a_name_is_taken(name: str) -> None:
    assert check_tenant_name(name) == name
    assert len(tenant_id(name)) == 16


@pytest.mark.parametrize(
    "name", ["", "-a", "A", "a_b", "a/b", "..", "a\n", "é", "a" * 64, "a.b", " a"]
)
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="no tenant's name"):
        tenant_id(name)


def test_roles_are_ordered_and_have_words() -> None:
    assert Role.READER < Role.WRITER < Role.OPERATOR < Role.ADMIN
    assert [role_of(role.word) for role in Role] == list(Role)
    with pytest.raises(InvalidRequest, match="reader, writer, operator, admin"):
        role_of("root")
