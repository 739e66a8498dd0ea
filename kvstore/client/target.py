"""Which daemon is meant when nobody says."""

from __future__ import annotations

from kvstore.client.trust import check_socket
from kvstore.model.errors import Unauthorized, Unavailable
from kvstore.settings import default_socket, default_sockets, default_target_text
from kvstore.transport.unix_sockets import target_of


def default_target(daemon_uid: int | None = None) -> str:
    """Return KVSTORE_TARGET if it is set, else the first default socket that this user may use.

    Without any, the one that this user may not use, which then says why; or else where a daemon of
    this user would listen.
    """
    if told := default_target_text():
        return target_of(told)
    denied = ""
    for path in default_sockets():
        try:
            check_socket(path, daemon_uid)
        except Unavailable:
            continue
        except Unauthorized:
            denied = denied or f"unix:{path}"
            continue
        return f"unix:{path}"
    return denied or f"unix:{default_socket()}"
