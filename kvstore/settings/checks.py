"""Which values cannot work on any machine."""

from __future__ import annotations

import os
import re
from dataclasses import fields
from typing import TYPE_CHECKING

from kvstore.model.errors import ConfigError
from kvstore.settings.cluster import VIEW_BYTES_MIN, check_cluster
from kvstore.settings.events import check_events
from kvstore.settings.pool import check_pool
from kvstore.settings.root_key import check_root_key
from kvstore.settings.security import check_security
from kvstore.settings.tenants import check_tenants
from kvstore.settings.values import is_path, is_size, size_text, toml_key

if TYPE_CHECKING:
    from kvstore.settings.sections import ObjectSettings, Settings
    from kvstore.settings.server import ServerSettings

SOCKET_PATH_NBYTES_MAX = 107 - len(".arena")
DIRECTORIES_MAX = 64
ADMISSIONS = ("all", "demotion", "second_use")
FIDELITIES = ("base", "fine")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
SHADOW_BLOCKS_MAX = 1 << 16
MIB = 1 << 20
_HOST_NAME = re.compile(r"[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]")  # as a header Host has it


def _check_object(settings: ObjectSettings, *, has_file_tier: bool) -> None:
    """Raise ConfigError on an address that is none. It is not quoted: it may hold a password."""
    for key, text, schemes in (
        ("object.url", settings.url, ("s3", "gs", "az", "file")),
        ("object.endpoint", settings.endpoint, ("https", "http")),
    ):
        scheme, separator, rest = text.partition("://")
        if text and not (scheme in schemes and separator and rest and is_path(rest)):
            raise ConfigError(f"{key} begins with one of {', '.join(f'{s}://' for s in schemes)}")
        if scheme == "file" and not rest.startswith("/"):
            raise ConfigError(f"{key} names a directory from the root on: write file:///srv/kv")
        if set(rest) & set("@?#"):
            raise ConfigError(f"{key}: credentials and parameters do not belong into the address")
    if settings.endpoint.startswith("http://") and not settings.allow_http:
        raise ConfigError("object.endpoint has no TLS: allow it by object.allow_http=true")
    if settings.endpoint and settings.url.startswith("file://"):
        raise ConfigError("object.endpoint goes with s3://, gs:// and az:// only")
    if settings.url and not has_file_tier:
        raise ConfigError(
            "object.url needs a file tier, because what was written there is uploaded: set "
            'file.path, or object.url=""'
        )


def _bounds(settings: Settings) -> list[tuple[str, float, float, float]]:
    """Return (key, value, lowest, highest) of each number."""
    server, dram, file, limits = settings.server, settings.dram, settings.file, settings.limits
    object_, pool, cluster = settings.object, settings.pool, settings.cluster
    return [
        ("server.drain_s", server.drain_s, 0, 3600),
        ("dram.capacity", dram.capacity_bytes, MIB, 1 << 50),
        ("dram.extent", dram.extent_bytes, MIB, 1 << 50),
        ("dram.fine_share", dram.fine_share, 0, 1),
        ("dram.shadow_blocks", dram.shadow_blocks, 0, SHADOW_BLOCKS_MAX),
        ("file.shadow_blocks", file.shadow_blocks, 0, SHADOW_BLOCKS_MAX),
        ("file.capacity", file.capacity_bytes, MIB, 1 << 60),
        ("file.free_min", file.free_bytes_min, 0, 1 << 60),
        ("file.write_per_day", file.write_bytes_per_day, 0, 1 << 60),
        ("file.hang_s", file.hang_s, 0.1, 3600),
        ("file.segment", file.segment_bytes, MIB, 1 << 40),
        ("file.threads", file.threads, 1, 256),
        ("file.scrub", file.scrub_bytes, 0, 1 << 40),
        ("file.scrub_every_s", file.scrub_every_s, 0, 10 * 365 * 86400),
        ("object.capacity", object_.capacity_bytes, MIB, 1 << 60),
        ("object.max_age_s", object_.max_age_s, 0, 100 * 365 * 86400),
        ("object.grace_s", object_.grace_s, 1, 30 * 86400),
        ("object.collect_every_s", object_.collect_every_s, 1, 30 * 86400),
        ("object.believed_s", object_.believed_s, 1, 86400),
        ("object.timeout_s", object_.timeout_s, 0.05, 3600),
        ("object.requests_max", object_.requests_max, 1, 1024),
        ("object.in_flight_max", object_.in_flight_bytes_max, MIB, 1 << 40),
        ("pool.segment", pool.segment_bytes, 0, 1 << 50),
        ("pool.buffer", pool.buffer_bytes, 4 * MIB, 1 << 40),
        ("limits.batch_keys_max", limits.batch_keys_max, 1, 1 << 16),
        ("limits.sessions_max", limits.sessions_max, 1, 1 << 20),
        ("limits.lease_s", limits.lease_s, 0.01, 86400),
        ("limits.wait_max_s", limits.wait_max_s, 0, 3600),
        ("limits.leased_fraction", limits.leased_fraction, 0.01, 1),
        ("limits.limbo_fraction", limits.limbo_fraction, 0, 1),
        ("limits.pinned_fraction", limits.pinned_fraction, 0, 0.9),
        ("limits.pin_ttl_max_s", limits.pin_ttl_max_s, 0, 30 * 86400),
        ("limits.group_commit", limits.group_commit_bytes, 4096, 1 << 40),
        ("limits.write_behind_max", limits.write_behind_bytes_max, MIB, 1 << 50),
        ("limits.outcomes_max", limits.outcomes_max, 1, 1 << 20),
        ("limits.departed_keys_max", limits.departed_keys_max, 1, 1 << 26),
        ("cluster.etcd_ttl_s", cluster.etcd_ttl_s, 2, 600),
        ("cluster.deletes_kept_days", cluster.deletes_kept_days, 0.01, 365),
        ("cluster.threads", cluster.threads, 1, 64),
        ("cluster.serve_reads", cluster.serve_reads, 1, 256),
        ("cluster.serve_bytes_per_s", cluster.serve_bytes, 0, 1 << 50),
        ("cluster.view_bytes", cluster.view_bytes, VIEW_BYTES_MIN, 1 << 40),
        ("events.dp_rank", settings.events.dp_rank, 0, (1 << 31) - 1),
        ("events.replay_batches", settings.events.replay_batches, 1, 1 << 20),
    ]


def _check_names(server: ServerSettings) -> None:
    for name in server.page_names:
        if not _HOST_NAME.fullmatch(name):
            raise ConfigError(
                f"server.page_hosts has {name!r}, which is no name of a host: write kv.example, "
                'without https:// and port; several are ["kv.example", "[fd00::7]"]'
            )


def check(settings: Settings) -> None:
    """Raise ConfigError on values that cannot work on any machine."""
    server, dram, file = settings.server, settings.dram, settings.file
    _check_object(settings.object, has_file_tier=bool(file.path))
    for key, path in (("server.socket", server.socket), *(("file.path", p) for p in file.paths)):
        if not is_path(path):
            raise ConfigError(f"{key}={path!r} is not a path")
        if path.startswith("~"):
            raise ConfigError(f"{key}={path!r}: no shell replaces ~ here: write the directory out")
    if (not isinstance(file.path, str) and "" in file.path) or len(file.paths) > DIRECTORIES_MAX:
        raise ConfigError(f"file.path names 1 to {DIRECTORIES_MAX} directories; none is empty")
    socket_nbytes = len(os.fsencode(server.socket_path)) if server.socket else 0
    if not 0 < socket_nbytes <= SOCKET_PATH_NBYTES_MAX:
        raise ConfigError(
            f"server.socket has {socket_nbytes} bytes; unix sockets allow {SOCKET_PATH_NBYTES_MAX} "
            "here: choose a shorter path"
        )
    _check_names(server)
    check_security(settings)
    check_root_key(settings.security)
    check_cluster(settings)
    check_pool(settings)
    check_events(settings)
    for key, value, low, high in _bounds(settings):
        if not low <= value <= high:
            sized = _is_size_key(settings, key)
            said = [size_text(int(each)) if sized else f"{each}" for each in (value, low, high)]
            raise ConfigError(f"{key}={said[0]} is not in {said[1]}..{said[2]}")
    for key, word, choices in (
        ("file.admission", file.admission, ADMISSIONS),
        ("file.fidelity", file.fidelity, FIDELITIES),
        ("object.fidelity", settings.object.fidelity, FIDELITIES),
        ("server.log_level", server.log_level, LOG_LEVELS),
        ("server.log_format", server.log_format, LOG_FORMATS),
    ):
        if word not in choices:
            raise ConfigError(f"{key}={word!r}: choose one of {', '.join(choices)}")
    for key, nbytes in (("capacity", dram.capacity_bytes), ("extent", dram.extent_bytes)):
        if nbytes % 4096:
            raise ConfigError(f"dram.{key}={nbytes} is not a multiple of 4096")
    _check_sockets(settings)
    check_tenants(settings)


def _check_sockets(settings: Settings) -> None:
    server = settings.server
    for tenant in settings.tenants:
        path = server.tenant_socket_path(tenant.name)
        if not is_path(server.sockets) or len(os.fsencode(path)) > SOCKET_PATH_NBYTES_MAX:
            raise ConfigError(
                f"server.sockets={server.sockets!r}: unix sockets allow {SOCKET_PATH_NBYTES_MAX} "
                f"bytes, and {path} has more: choose a shorter path"
            )


def _is_size_key(settings: Settings, key: str) -> bool:
    section, _, name = key.partition(".")
    items = fields(getattr(settings, section))
    return any(toml_key(item) == name and is_size(item) for item in items)
