"""Tell the service manager how a daemon is, by sd_notify(3): a datagram to $NOTIFY_SOCKET."""

from __future__ import annotations

import logging
import os
import socket

_log = logging.getLogger(__name__)


def notify(state: str) -> bool:
    """Send `READY=1` or `STOPPING=1`. False: nobody asked for it, or the manager does not read.

    Never waits and never fails: a service manager must not be able to hold a daemon up.
    """
    # By the protocol an environment variable, so not a setting. `@` begins an abstract address.
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return False
    address = path.replace("@", "\0", 1) if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.setblocking(False)
        try:
            sender.sendto(state.encode(), address)
        except OSError as error:
            _log.warning("notify=failed state=%s error=%s", state, error.strerror)
            return False
    return True
