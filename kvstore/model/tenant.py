"""Who uses a daemon: tenants, and what each caller may do in its tenant.

    id = SHA-256("kvstore tenant" | 0 | name)[:16]; the tenant `default` has 16 zero bytes

Blocks at rest carry the id, so a name that was given away once means the same tenant for ever.
"""

from __future__ import annotations

import hashlib
import re
from enum import IntEnum
from typing import NamedTuple, NewType

from kvstore.model.errors import InvalidRequest

TENANT_ID_NBYTES = 16
TENANT_CHARS_MAX = 63
DEFAULT_TENANT = "default"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_TAG = b"kvstore tenant\0"

TenantId = NewType("TenantId", bytes)

NO_TENANT_ID = TenantId(bytes(TENANT_ID_NBYTES))


class Role(IntEnum):
    """What a caller may do; each may do what the one before it may."""

    READER = 1
    WRITER = 2
    OPERATOR = 3
    ADMIN = 4

    @property
    def word(self) -> str:
        """The role as people write it: reader, writer, operator or admin."""
        return self.name.lower()


class Principal(NamedTuple):
    """Who makes a call. tenant: whose blocks it is about. name: for the audit log; it is no
    secret."""

    tenant: str
    name: str
    role: Role


def check_tenant_name(name: str) -> str:
    """Return a tenant's name. Raises InvalidRequest for one that is none."""
    if _NAME.fullmatch(name) is None:
        raise InvalidRequest(
            f"{name[:80]!r} is no tenant's name: use 1 to {TENANT_CHARS_MAX} of a-z, 0-9 and -, "
            "not beginning with -"
        )
    return name


def tenant_id(name: str) -> TenantId:
    """Return the id of a tenant, 16 bytes. Raises InvalidRequest for a name that is none."""
    if check_tenant_name(name) == DEFAULT_TENANT:
        return NO_TENANT_ID
    return TenantId(hashlib.sha256(_TAG + name.encode()).digest()[:TENANT_ID_NBYTES])


def role_of(word: str) -> Role:
    """Return the role of a word such as "writer". Raises InvalidRequest."""
    found = next((role for role in Role if role.word == word), None)
    if found is None:
        words = ", ".join(role.word for role in Role)
        raise InvalidRequest(f"{word[:80]!r} is no role: choose one of {words}")
    return found
