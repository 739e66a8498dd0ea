"""What each role may do: one table from the methods of the .proto to the least role.

A method that is not in it is refused to everybody.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from kvstore.model.errors import Unauthorized
from kvstore.model.tenant import Principal, Role

NO_RIGHT = "role"  # the reason under which such refusals are counted

# Requests of these methods may take more: see `check_request`.
RIGHTS: Final[Mapping[str, Role]] = MappingProxyType(
    {
        "WhoAmI": Role.READER,
        "OpenSession": Role.READER,
        "RegisterNamespace": Role.READER,
        "Match": Role.READER,
        "Acquire": Role.READER,
        "Await": Role.READER,
        "Release": Role.READER,
        "Get": Role.READER,
        "Explain": Role.READER,
        "Outcomes": Role.READER,
        "Hint": Role.READER,
        "Reserve": Role.WRITER,
        "Commit": Role.WRITER,
        "Put": Role.WRITER,
        "Delete": Role.WRITER,
        "Clear": Role.OPERATOR,
        "Flush": Role.OPERATOR,
        "Stats": Role.OPERATOR,
        "Scan": Role.OPERATOR,
        "ListNamespaces": Role.OPERATOR,
        "Record": Role.OPERATOR,
        "History": Role.OPERATOR,
        "Tree": Role.OPERATOR,
        "Conversations": Role.OPERATOR,
        "Slow": Role.OPERATOR,
        "Monitor": Role.OPERATOR,
        "GetConfig": Role.ADMIN,
        "SetConfig": Role.ADMIN,
        "LogLines": Role.ADMIN,
        "AddTenant": Role.ADMIN,
        "DeleteTenant": Role.ADMIN,
    }
)


def check(method: str, principal: Principal) -> None:
    """Raise Unauthorized for a method that the principal may not call at all."""
    needed = RIGHTS.get(method)
    if needed is None or principal.role < needed:
        raise _refused(method, principal, needed or Role.ADMIN)


def check_request(method: str, principal: Principal, request: Any) -> None:
    """Raise Unauthorized for a request that takes more than its method.

    A writer may report blocks that it read and found wrong: the daemon drops only what it finds
    wrong itself. It may not delete others.
    """
    if method == "Delete" and not request.corrupt and principal.role < Role.OPERATOR:
        raise _refused(method, principal, Role.OPERATOR)


def _refused(method: str, principal: Principal, needed: Role) -> Unauthorized:
    words = f"{method} takes the role {needed.word}; {principal.name} has {principal.role.word}"
    if needed is Role.ADMIN:
        words += ": ask over the daemon's own unix socket only, or with an admin's token"
    return Unauthorized(words, reason=NO_RIGHT)
