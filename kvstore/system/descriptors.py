"""How many files this process may have open, and what connections may take of that.

Every connection takes a descriptor, and so does every file that the file tier opens: without a
share of its own, clients that connect for ever would make the disk fail.
"""

from __future__ import annotations

import resource

WANTED = 1 << 16
SHARES = 4  # two kinds of links have one each; the rest is for gRPC, files and the arena


def raise_limit() -> int:
    """Allow as many open files as the hard limit does, up to `WANTED`; return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return WANTED if soft == resource.RLIM_INFINITY else soft


def links_max(most: int) -> int:
    """Return how many links of one kind to accept, at most `most`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else min(most, soft // SHARES)
