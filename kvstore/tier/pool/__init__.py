"""The pool: records in the memory of many hosts, kept by Mooncake Store.

    PoolTier       what a node asks of the pool: is it there, get, put, remove
     `- PoolClient     calls with deadlines, the breaker, the restarts
         `- PoolProcess    one process that runs Mooncake's client, and the memory shared with it
             `- worker         the program of that process: the only file that imports mooncake

Mooncake's client is native code whose calls block for up to 30 s and cannot be ended. So it runs in
a process of its own: when a call hangs, that process is killed, and with it ends whatever might
still have written into memory. It sees the buffer that records pass through, never the arena.
"""

from kvstore.tier.pool.failure import PoolFailed
from kvstore.tier.pool.names import EVERYTHING, keys_pattern, namespace_pattern, record_name
from kvstore.tier.pool.tier import PoolRecord, PoolTier, PoolWrite

__all__ = [
    "EVERYTHING",
    "PoolFailed",
    "PoolRecord",
    "PoolTier",
    "PoolWrite",
    "keys_pattern",
    "namespace_pattern",
    "record_name",
]
