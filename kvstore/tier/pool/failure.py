"""Errors of the pool, and what Mooncake's codes mean."""

from __future__ import annotations

from kvstore.model.errors import Unavailable

# From Mooncake's ErrorCode (mooncake-store/include/types.h), tried against 0.3.13.
NO_ROOM = -200
TOO_LARGE = -600  # for the place it was to be read into
MISSING = -704
_RPC = range(-999, -899)
_TRANSFER = range(-899, -799)


class PoolFailed(Unavailable):
    """The pool did not do it.

    reason: gone (its process, its master or the host that has a record is), slow (no answer in
    time), busy (our own bounds), refused (it has no room), missing, corrupt (bytes that are not
    what was put).
    """


def is_master_gone(code: int) -> bool:
    """Say whether a code tells that the master does not answer."""
    return code in _RPC


def is_host_gone(code: int) -> bool:
    """Say whether a code tells that a host which has, or should take, a value does not."""
    return code in _TRANSFER
