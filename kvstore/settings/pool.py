"""The pool: an engine that keeps blocks in the memory of many hosts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvstore.model.errors import ConfigError
from kvstore.settings.declare import MIB, setting
from kvstore.settings.values import is_loopback, size_text

if TYPE_CHECKING:
    from kvstore.settings.sections import Settings

SCHEME = "mooncake"
PORT = 50051  # of a mooncake_master, unless it is told another one
PROTOCOLS = ("tcp", "rdma")
SEGMENT_NBYTES_MIN = 16 * MIB  # Mooncake refuses less
HANDSHAKE = "P2PHANDSHAKE"
_METADATA_SCHEMES = ("http", "https", "etcd", "redis")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]", re.ASCII)
_DEVICES = re.compile(r"[A-Za-z0-9_.,:-]*", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Mooncake Store: blocks in the memory of many hosts, beyond what this one has."""

    url: str = setting(
        'Its master: mooncake://HOST:50051; "" switches the pool off. It needs the extra '
        "kvstore-tiers[pool]. Daemons with the same address share blocks.",
        "",
    )
    metadata: str = setting(
        "Where Mooncake's clients find each other: P2PHANDSHAKE asks them themselves; else an "
        "address, such as http://HOST:8080/metadata.",
        HANDSHAKE,
    )
    address: str = setting(
        "Name or IP address of this host for Mooncake's other clients; "
        '"" is the one from which the master is reached.',
        "",
    )
    protocol: str = setting("How records travel: tcp or rdma.", "tcp")
    device: str = setting(
        'RDMA devices of this host, separated by commas; "" lets Mooncake choose.', ""
    )
    segment_bytes: int = setting(
        "Memory of this host that is given to the pool, beside dram.capacity: 16MiB or more; 0 "
        "gives none. What is there is lost when the daemon ends.",
        0,
    )
    buffer_bytes: int = setting(
        "Memory through which records pass, beside dram.capacity. A record larger than a quarter "
        "of it is not kept in the pool.",
        80 * MIB,
    )
    insecure: bool = setting(
        "Allow a master beyond loopback: Mooncake has neither TLS nor credentials, so everybody on "
        "its network may read, change and delete what is in the pool.",
        False,
    )

    @property
    def on(self) -> bool:
        """Whether there is a pool."""
        return bool(self.url)

    @property
    def host_bytes(self) -> int:
        """What the pool takes of this host's memory, beside dram.capacity."""
        return self.segment_bytes + self.buffer_bytes if self.on else 0

    @property
    def master(self) -> str:
        """HOST:PORT of the master."""
        found = urlsplit(self.url)
        return f"{_bracketed(found.hostname or '')}:{found.port or PORT}"


def check_pool(settings: Settings) -> None:
    """Raise ConfigError on what cannot be a pool, or be used as one."""
    pool = settings.pool
    if not pool.on:
        return
    host = _host(pool.url)
    if host is None:
        raise ConfigError(f"pool.url={pool.url[:200]!r}: write {SCHEME}://HOST:{PORT}")
    if not is_loopback(host) and not pool.insecure:
        raise ConfigError(
            f"pool.url={pool.url[:200]!r} is not loopback, and Mooncake has neither TLS nor "
            "credentials: everybody on its network may read and change what is there. Allow it by "
            "pool.insecure=true"
        )
    scheme, separator, rest = pool.metadata.partition("://")
    if pool.metadata != HANDSHAKE and not (scheme in _METADATA_SCHEMES and separator and rest):
        raise ConfigError(
            f"pool.metadata={pool.metadata[:200]!r}: write {HANDSHAKE} or http://HOST:8080/metadata"
        )
    if 0 < pool.segment_bytes < SEGMENT_NBYTES_MIN:
        raise ConfigError(
            f"pool.segment={size_text(pool.segment_bytes)}: Mooncake takes no less than "
            f"{size_text(SEGMENT_NBYTES_MIN)}; 0 gives none"
        )
    if pool.protocol not in PROTOCOLS:
        raise ConfigError(f"pool.protocol={pool.protocol!r}: choose one of {', '.join(PROTOCOLS)}")
    if pool.address and not _HOST.fullmatch(pool.address):
        raise ConfigError(f"pool.address={pool.address[:200]!r} is no host name or IP address")
    if not _DEVICES.fullmatch(pool.device):
        raise ConfigError(f"pool.device={pool.device[:200]!r}: write mlx5_0 or mlx5_0,mlx5_1")
    if settings.tenants:
        raise ConfigError(
            "pool.url with [tenants.NAME]: tenants do not share a pool yet: leave one of them out"
        )
    if settings.security.encrypts:
        raise ConfigError(
            "pool.url with a root key: what is in the pool is not encrypted yet: leave one of them "
            "out"
        )


def _host(url: str) -> str | None:
    """Return the host of mooncake://HOST[:PORT], None for anything else."""
    try:
        found = urlsplit(url)
        port = found.port
    except ValueError:
        return None
    host = found.hostname or ""
    plain = not (found.path or found.query or found.fragment or "@" in found.netloc)
    if found.scheme != SCHEME or not plain or port == 0 or not _HOST.fullmatch(_bracketed(host)):
        return None
    return host


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
