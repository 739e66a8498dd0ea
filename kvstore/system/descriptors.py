"""How many files this process may have open, and what connections may take of that.

Every connection takes a descriptor, and so does every file that the file tier opens: without a
share of its own, clients that connect for ever would make the disk fail.
"""

from __future__ import annotations

import resource

WANTED = 1 << 16
SHARES = 4
"""Each of three kinds of links has one, and gRPC's connections half of the fourth: see
`connections_max`. The rest is for files and the arena."""
CONNECTIONS_MAX, CONNECTIONS_MIN = 4096, 8  # of one listener of gRPC


def raise_limit() -> int:
    """Allow as many open files as the hard limit does, up to `WANTED`; return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return WANTED if soft == resource.RLIM_INFINITY else soft


def links_max(most: int, descriptors: int = 1) -> int:
    """Return how many links of one kind to accept, at most `most`. descriptors: that each takes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else min(most, soft // SHARES // descriptors)


def connections_max(listeners: int) -> int:
    """Return how many connections gRPC may accept at one more listener, where there are so many
    with it.

    gRPC is told that once, when it begins to listen, so none is lent. Half of a share is in equal
    parts, one for each listener; the other half is for listeners that come later.
    """
    part = links_max(2 * listeners * CONNECTIONS_MAX) // (2 * listeners)
    return max(CONNECTIONS_MIN, min(CONNECTIONS_MAX, part))


class LinkPool:
    """The links of one kind, of all listeners of this process.

    Half of them is in equal parts, one for each listener, which nobody else takes. The other half
    is for whoever comes first.
    """

    def __init__(self, most: int, descriptors: int = 1) -> None:
        """most, descriptors: as for `links_max`."""
        self._most = most
        self._descriptors = descriptors
        self._listeners: set[LinkCount] = set()

    def listener(self) -> LinkCount:
        """Return the count of one more listener, until it is closed."""
        count = LinkCount(self)
        self._listeners.add(count)
        return count

    def has_room(self, listener: LinkCount) -> bool:
        """Say whether a listener may have one link more."""
        most = links_max(self._most, self._descriptors)
        free = most // 2
        part = max(1, (most - free) // max(1, len(self._listeners)))
        if listener.links < part:
            return True
        return sum(max(0, each.links - part) for each in self._listeners) < free

    def forget(self, listener: LinkCount) -> None:
        """Give a listener's part to the others."""
        self._listeners.discard(listener)


class LinkCount:
    """The links of one listener."""

    def __init__(self, pool: LinkPool) -> None:
        self.links = 0
        self._pool = pool

    def take(self) -> bool:
        """Count one link more; False: there may be no more now."""
        if not self._pool.has_room(self):
            return False
        self.links += 1
        return True

    def give_back(self) -> None:
        """Count one link less."""
        self.links -= 1

    def close(self) -> None:
        """Leave its part to others."""
        self._pool.forget(self)
