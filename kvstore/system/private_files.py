"""Whether the mode of a file keeps its secret."""

from __future__ import annotations

import os
import stat


def is_open_to_others(status: os.stat_result) -> bool:
    """Tell whether more than this process's user and root may use a file with a secret.

    A group may read a file of root's if this process reads it by that group: so Kubernetes mounts a
    Secret, and only pods that it was given to have it.
    """
    mode = stat.S_IMODE(status.st_mode)
    if not mode & 0o077:
        return False
    by_group = status.st_uid == 0 and os.geteuid() != 0 and _is_own_group(status.st_gid)
    return not (by_group and not mode & 0o037)


def _is_own_group(group: int) -> bool:
    return group == os.getegid() or group in os.getgroups()
