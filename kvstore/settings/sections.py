"""Each setting, declared once: its default, its unit, and what it trades off.

`kvstore serve --print-config` prints the same words as comments. A field `x_bytes` is written
`x = "4GiB"` in TOML.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field, fields
from typing import Any

from kvstore.settings.checks import check
from kvstore.settings.cluster import ClusterSettings
from kvstore.settings.declare import GIB, LIVE, MIB, setting
from kvstore.settings.events import EventSettings
from kvstore.settings.places import default_directory
from kvstore.settings.pool import PoolSettings
from kvstore.settings.security import SecuritySettings, TlsSettings
from kvstore.settings.server import ServerSettings
from kvstore.settings.tenants import TenantSettings
from kvstore.settings.values import declared, toml_key, toml_value


@dataclass(frozen=True, slots=True, kw_only=True)
class DramSettings:
    """The arena: shared memory that clients of this host map."""

    capacity_bytes: int = setting(
        "Size of the arena. This memory is committed: leave enough for the engines and "
        "the page cache.",
        4 * GIB,
        live=True,
    )
    extent_bytes: int = setting(
        "The arena grows in extents of this size, each one memfd. More than `capacity` "
        "means one extent. Larger: fewer mappings. Smaller: the first slots are ready "
        "sooner.",
        GIB,
    )
    eviction_policy: str = setting(
        "Chooses which blocks to evict when the arena is full. hz learns which blocks "
        "are used again, and when, and goes by last use alone while that hits more. lru"
        " evicts the end of the least recently used prefix. Other packages may add "
        "policies. `kvstore replay` compares them on recorded traffic.",
        "hz",
    )
    shadow_blocks: int = setting(
        "Blocks in each of the two small models by which hz finds out which order hits "
        "more. More: it finds out sooner, with more CPU and about 600 bytes each. 0: it"
        " never goes by last use alone.",
        4096,
    )
    cost_aware: bool = setting(
        "Keep blocks longer that took more prefill seconds per byte, as engines tell "
        "it: where several models share the daemon.",
        True,
    )
    fine_share: float = setting(
        "Fraction of the arena that the fine parts of lossy blocks keep while blocks "
        "need room. With more, fine parts leave before any block does. 0 keeps the most"
        " blocks; 1 keeps the most fidelity.",
        0.25,
        live=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSettings:
    """The file tier: it survives restarts."""

    path: str | tuple[str, ...] = setting(
        'Directory of the file tier, best on NVMe; "" switches the file tier off. For '
        'several disks, name one directory on each: path = ["/nvme0/kvstore", '
        '"/nvme1/kvstore"]. Each block is stored on one of them. When a disk fails, is '
        "full or not mounted, the other disks keep serving.",
        factory=default_directory,
    )
    capacity_bytes: int = setting(
        "Cap on the physical bytes of each directory, headers and padding included.",
        16 * GIB,
        live=True,
    )
    free_bytes_min: int = setting(
        "Free bytes to leave on each disk for its other users. With less, the daemon "
        "writes nothing and evicts blocks until that much is free. 0 applies `capacity`"
        " alone.",
        0,
        live=True,
    )
    hang_s: float = setting(
        "Seconds without an answer after which a disk is taken out of use. Longer "
        "tolerates a busier disk. Shorter limits how long requests wait for a disk that"
        " hangs.",
        10.0,
    )
    segment_bytes: int = setting(
        "Size of one append-only segment file. Larger: fewer files. Smaller: a restart "
        "scans a shorter tail. Where the file system cannot punch holes, smaller files "
        "also free their space sooner.",
        256 * MIB,
    )
    eviction_policy: str = setting(
        "Chooses which blocks to evict when the file tier is full; the choices are "
        "those of dram.eviction_policy.",
        "lru",
    )
    shadow_blocks: int = setting("The same as dram.shadow_blocks, of the file tier.", 4096)
    codec: str = setting(
        "Lossless codec of written records: raw, lz4 or zstd. Compression costs one "
        "core and saves bytes; real KV in BF16 shrinks by about a quarter at best.",
        "raw",
    )
    direct: bool = setting(
        "Use O_DIRECT where the file system supports it. Off keeps copies in the page "
        "cache: faster rereads, less memory for the arena.",
        True,
    )
    threads: int = setting(
        "Threads that block in file I/O, for each directory; also the queue depth of its device.", 8
    )
    admission: str = setting(
        "Which blocks are written, and when. all: every block, at once; eviction from "
        "the arena costs nothing, and a crash loses little. demotion: blocks that the "
        "arena is about to evict, except those of ended sessions; this spares flash, "
        "but a crash loses the arena. second_use: blocks that are used again or were "
        "computed before; this spares most flash, but blocks evicted from the arena "
        "before that are lost.",
        "all",
    )
    fidelity: str = setting(
        "What is written of lossy blocks. base: the base part alone, a third of the "
        "bytes. fine: the fine part as well. Exact blocks are written whole.",
        "base",
    )
    write_bytes_per_day: int = setting(
        "Bytes per day that may be written to the file tier, to spare flash; 0 is no "
        "limit. The budget goes to the prefixes most likely to be used again, judged by"
        " how similar prefixes were used. At most half an hour of it is saved up or "
        "overdrawn. Other blocks stay in DRAM alone. Tenants share it by weight.",
        0,
        live=True,
    )
    scrub_bytes: int = setting(
        "Bytes per second of stored frames that the daemon reads again and verifies "
        "while no request waits for the disk; 0 is off. Faster finds a failing disk "
        "sooner; slower wears the disk less.",
        8 * MIB,
        live=True,
    )
    scrub_every_s: float = setting(
        "Seconds after which a frame is verified again.", 86400.0, live=True
    )

    @property
    def paths(self) -> tuple[str, ...]:
        """The directories; none if there is no file tier."""
        return tuple(filter(None, (self.path,) if isinstance(self.path, str) else self.path))


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSettings:
    """The object tier: a bucket or folder that several daemons share."""

    url: str = setting(
        'Bucket and prefix: s3://, gs:// or az://bucket/prefix, or file:///folder; "" '
        "switches the object tier off. It needs a file tier and the extra kvstore-"
        "tiers[object]. Credentials come from the provider's environment variables or "
        "the machine's role, never from these settings.",
        "",
    )
    endpoint: str = setting(
        "URL of a store that speaks the protocol of object.url, e.g. "
        'https://minio.internal:9000 for s3://; "" is the provider itself.',
        "",
    )
    region: str = setting('Region of an s3:// bucket; "" takes it from the environment.', "")
    allow_http: bool = setting(
        "Allow an endpoint without TLS: anyone on that network can then read every prompt's KV.",
        False,
    )
    capacity_bytes: int = setting(
        "Cap on the bytes under that prefix, for all daemons together. Each daemon adds"
        " what it has written to its last count of the bucket. Tenants have parts of it.",
        1024 * GIB,
        live=True,
    )
    max_age_s: float = setting(
        "Seconds after which a run is deleted, used or not; 0 is never.", 30 * 86400.0
    )
    grace_s: float = setting(
        "Seconds for which no daemon deletes a new object. An upload may take half of "
        "it. Shorter frees room sooner; longer suits slow links. All daemons of a "
        "bucket need the same value.",
        600.0,
    )
    collect_every_s: float = setting(
        "Seconds between two garbage collections of the bucket: the daemon lists it, counts its "
        "bytes, and deletes what is too old or over the cap. One takes a request per thousand "
        "objects.",
        3600.0,
    )
    believed_s: float = setting(
        "Seconds for which the daemon trusts a listing of the bucket. It trusts for 5 s"
        " at most that an object is missing. Longer costs fewer requests; shorter sees "
        "sooner what other daemons stored and deleted.",
        60.0,
    )
    timeout_s: float = setting("Seconds that one request may take before it is tried again.", 10.0)
    requests_max: int = setting("Requests in flight at once.", 32)
    in_flight_bytes_max: int = setting(
        "Bytes being uploaded at once; a write beyond it waits.", 256 * MIB
    )
    fidelity: str = setting(
        "What is uploaded of lossy blocks, as for file.fidelity. fine needs file.fidelity=fine.",
        "base",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSettings:
    """Bounds on what clients may hold, ask and wait for."""

    batch_keys_max: int = setting(
        "Most keys in one call. Bounds the work between two awaits.", 8192
    )
    sessions_max: int = setting("Sessions open at once; one engine has one.", 1024, live=True)
    lease_s: float = setting(
        "Seconds until a lease expires. Shorter frees slots of stuck readers sooner; "
        "longer tolerates longer queues in the engine.",
        30.0,
        live=True,
    )
    wait_max_s: float = setting(
        "Longest time in seconds that a call may wait for room, or for bytes from a slower tier.",
        30.0,
        live=True,
    )
    leased_fraction: float = setting(
        "Fraction of the arena that may be leased at once; beyond it, calls get shorter"
        " hits. Eviction works with the rest. The same fraction of the file tier may be"
        " leased to clients that read its files themselves; beyond it, records are "
        "promoted to the arena instead.",
        0.5,
        live=True,
    )
    limbo_fraction: float = setting(
        "Fraction of the arena that one connected client may hold by expired leases "
        "that it has not released. Such slots are not reused. Beyond it, the client "
        "gets no new leases.",
        0.25,
        live=True,
    )
    pinned_fraction: float = setting(
        "Fraction of the arena that all hints together may pin. Larger keeps more "
        "announced prefixes; smaller leaves more room for all others.",
        0.25,
        live=True,
    )
    pin_ttl_max_s: float = setting(
        "Longest time in seconds for which a hint may pin blocks.", 3600.0, live=True
    )
    group_commit_bytes: int = setting(
        "Most written bytes that one fdatasync covers. Larger: fewer syncs. Smaller: "
        "durable commits are acknowledged sooner.",
        32 * MIB,
        live=True,
    )
    write_behind_bytes_max: int = setting(
        "Committed bytes that may wait to be written to the file tier. A put beyond it "
        "waits, then is refused. Bounds what a crash loses.",
        GIB,
        live=True,
    )
    outcomes_max: int = setting(
        "Requests whose outcome the daemon remembers for `kvstore explain`; about 1 KiB each.", 1024
    )
    departed_keys_max: int = setting(
        "Evicted, deleted or dropped blocks whose reason the daemon remembers for "
        "`kvstore explain`; about 300 bytes each.",
        1 << 16,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything one daemon is told. Equal settings, equal daemon."""

    server: ServerSettings = field(default_factory=ServerSettings)
    dram: DramSettings = field(default_factory=DramSettings)
    file: FileSettings = field(default_factory=FileSettings)
    object: ObjectSettings = field(default_factory=ObjectSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    tls: TlsSettings = field(default_factory=TlsSettings)
    security: SecuritySettings = field(default_factory=SecuritySettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    pool: PoolSettings = field(default_factory=PoolSettings)
    events: EventSettings = field(default_factory=EventSettings)
    tenants: tuple[TenantSettings, ...] = ()  # by name

    def __post_init__(self) -> None:
        check(self)

    def sections(self) -> list[tuple[str, Any]]:
        """Return every section by its name, such as "server" or "tenants.acme"."""
        plain = [each.name for each in fields(self) if each.name != "tenants"]
        named = [(name, getattr(self, name)) for name in plain]
        return named + [(f"tenants.{each.name}", each) for each in self.tenants]

    def to_toml(self) -> str:
        """Return TOML that loads back to equal settings, each with its documentation."""
        lines: list[str] = []
        for name, values in self.sections():
            lines += [f"[{name}]  # {type(values).__doc__}"]
            for item in declared(values):
                doc = item.metadata["doc"] + (LIVE if item.metadata["live"] else "")
                lines += textwrap.wrap(doc, 100, initial_indent="# ", subsequent_indent="# ")
                lines.append(f"{toml_key(item)} = {toml_value(item, getattr(values, item.name))}")
            lines.append("")
        return "\n".join(lines)
