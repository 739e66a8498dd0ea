"""Settings of one tenant: a section `[tenants.NAME]` for each, none for a daemon of one user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.model.errors import ConfigError, InvalidRequest
from kvstore.model.tenant import check_tenant_name
from kvstore.settings.declare import MIB, setting
from kvstore.settings.values import size_text

if TYPE_CHECKING:
    from kvstore.settings.sections import Settings

TENANTS_MAX = 256
ARENAS = ("direct", "sealed")
SOCKET_NAME = "kvstore.sock"
OTHERS_UID = 65534  # what the kernel calls every user that it cannot name: nobody in particular


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSettings:
    """One tenant: what it is guaranteed, what it may use beyond that, and who it is."""

    name: str
    weight: float = setting(
        "What this tenant counts beside the others: for room beyond what is guaranteed, for turns "
        "at disks and network, and for calls at once.",
        1.0,
        live=True,
    )
    dram_guaranteed_bytes: int = setting(
        "Bytes of dram.capacity that no other tenant can take while this one fills them. Those it "
        "does not use are lent to others.",
        64 * MIB,
        live=True,
        key="dram.guaranteed",
    )
    dram_max_bytes: int = setting(
        "Bytes of dram.capacity that it may use when others leave them; 0 is all of it.",
        0,
        live=True,
        key="dram.max",
    )
    file_guaranteed_bytes: int = setting(
        "The same of the file tier, over all directories of file.path.",
        256 * MIB,
        live=True,
        key="file.guaranteed",
    )
    file_max_bytes: int = setting(
        "Bytes of the file tier that it may use; 0 is all of it.", 0, live=True, key="file.max"
    )
    object_guaranteed_bytes: int = setting(
        "Bytes of object.capacity that no other tenant can take while this one fills them. What is "
        "free is lent; what more tenants want than there is, they share by weight.",
        0,
        live=True,
        key="object.guaranteed",
    )
    object_max_bytes: int = setting(
        "Bytes of object.capacity that it may have when others leave them; 0 is all of it.",
        0,
        live=True,
        key="object.max",
    )
    write_bytes_per_day: int = setting(
        "Bytes per day that may be written to the file tier for it at most; 0 is no limit of its "
        "own. All tenants share file.write_per_day by weight; what one leaves of its share, others "
        "may write.",
        0,
        live=True,
    )
    bandwidth_file_read_bytes: int = setting(
        "Bytes a second that are read for it from the file tier; 0 is by weight alone.",
        0,
        live=True,
        key="bandwidth.file_read",
    )
    bandwidth_object_bytes: int = setting(
        "The same of the bucket, in each direction together.",
        0,
        live=True,
        key="bandwidth.object",
    )
    bandwidth_tcp_bytes: int = setting(
        "The same of records in byte streams over gRPC.", 0, live=True, key="bandwidth.tcp"
    )
    leased_fraction: float = setting(
        "Fraction of its own arena that its leases may hold; 0 is limits.leased_fraction.",
        0.0,
        live=True,
    )
    arena: str = setting(
        "direct: engines of this tenant write into its arena, without a copy; they trust one "
        "another. sealed: nobody but the daemon can write there; engines fill staging memory and "
        "the daemon copies what they commit.",
        "direct",
    )
    shared: bool = setting(
        "Let every tenant read its blocks, for prefixes that are public. Only its own engines "
        'write. It needs arena="sealed". At most one tenant is shared.',
        False,
    )
    unix_uid: int = setting(
        "User who may use its sockets; -1 is the daemon's own.", -1, key="unix.uid"
    )
    unix_gid: int = setting(
        "Group whose members may use its sockets; -1 is none.", -1, key="unix.gid"
    )
    unix_mode: str = setting(
        'Mode of its directory of sockets, such as "0750"; "" is the narrowest that lets that user '
        "and group in.",
        "",
        key="unix.mode",
    )
    certificates: str | tuple[str, ...] = setting(
        "Names in client certificates that stand for this tenant: exactly the DNS name or URI of "
        "the certificate. Calls of a name that is taken out end within two seconds.",
        "",
        live=True,
    )
    require_salt: bool = setting(
        "Refuse namespaces of connectors that do not salt their keys by user: see TenantSalt.",
        False,
    )

    def dram_max(self, settings: Settings) -> int:
        """Return the most DRAM it may use, in bytes."""
        return min(
            self.dram_max_bytes or settings.dram.capacity_bytes, settings.dram.capacity_bytes
        )

    def file_max(self, settings: Settings) -> int:
        """Return the most it may use of the file tier, in bytes over all directories."""
        whole = settings.file.capacity_bytes * len(settings.file.paths)
        return min(self.file_max_bytes or whole, whole)

    def object_max(self, settings: Settings) -> int:
        """Return the most it may have in the bucket, in bytes."""
        whole = settings.object.capacity_bytes
        return min(self.object_max_bytes or whole, whole)

    @property
    def names(self) -> tuple[str, ...]:
        """The names in certificates that stand for it."""
        given = (self.certificates,) if isinstance(self.certificates, str) else self.certificates
        return tuple(filter(None, given))

    @property
    def directory_mode(self) -> int:
        """Mode of its directory of sockets."""
        if self.unix_mode:
            return int(self.unix_mode, 8)
        if self.unix_gid >= 0:
            return 0o750
        return 0o711 if self.unix_uid >= 0 else 0o700


def check_tenants(settings: Settings) -> None:
    """Raise ConfigError on tenants that cannot be had, one by one or together."""
    tenants = settings.tenants
    if len(tenants) > TENANTS_MAX:
        raise ConfigError(f"{len(tenants)} tenants; a daemon has at most {TENANTS_MAX}")
    for tenant in tenants:
        _check_tenant(tenant, settings)
    if sum(each.shared for each in tenants) > 1:
        raise ConfigError("two tenants are shared: lookups read one beside their own")
    if not tenants:
        return
    dram = settings.dram.capacity_bytes
    _check_sum("dram", [each.dram_guaranteed_bytes for each in tenants], dram, "dram.capacity")
    if settings.file.paths:
        whole = settings.file.capacity_bytes * len(settings.file.paths)
        guaranteed = [each.file_guaranteed_bytes for each in tenants]
        _check_sum("file", guaranteed, whole, "file.capacity of all directories")
    if settings.object.url:
        whole = settings.object.capacity_bytes
        guaranteed = [each.object_guaranteed_bytes for each in tenants]
        _check_sum("the bucket", guaranteed, whole, "object.capacity")


def _check_tenant(tenant: TenantSettings, settings: Settings) -> None:
    key = f"tenants.{tenant.name}"
    try:
        check_tenant_name(tenant.name)
    except InvalidRequest as error:
        raise ConfigError(f"{key}: {error}") from error
    for name, value, low, high in (
        ("weight", tenant.weight, 0.01, 1000),
        ("leased_fraction", tenant.leased_fraction, 0, 1),
        ("unix.uid", tenant.unix_uid, -1, (1 << 32) - 2),
        ("unix.gid", tenant.unix_gid, -1, (1 << 32) - 2),
    ):
        if not low <= value <= high:
            raise ConfigError(f"{key}.{name}={value} is not in {low}..{high}")
    for name, nbytes, low in (
        ("dram.guaranteed", tenant.dram_guaranteed_bytes, MIB),
        ("file.guaranteed", tenant.file_guaranteed_bytes, MIB * max(1, len(settings.file.paths))),
    ):
        if nbytes < low or nbytes % 4096:
            raise ConfigError(
                f"{key}.{name}={size_text(nbytes)}: at least {size_text(low)}, in pages of 4 KiB"
            )
    for name, nbytes in (
        ("file_read", tenant.bandwidth_file_read_bytes),
        ("object", tenant.bandwidth_object_bytes),
        ("tcp", tenant.bandwidth_tcp_bytes),
    ):
        if nbytes and nbytes < MIB:
            raise ConfigError(
                f"{key}.bandwidth.{name}={size_text(nbytes)}: at least 1MiB a second; 0 is no bound"
            )
    _check_parts(key, tenant)
    _check_max(f"{key}.dram", tenant.dram_guaranteed_bytes, tenant.dram_max_bytes)
    _check_max(f"{key}.file", tenant.file_guaranteed_bytes, tenant.file_max_bytes)
    _check_max(f"{key}.object", tenant.object_guaranteed_bytes, tenant.object_max_bytes)
    if tenant.arena not in ARENAS:
        raise ConfigError(f"{key}.arena={tenant.arena!r}: choose one of {', '.join(ARENAS)}")
    if tenant.shared and tenant.arena != "sealed":
        raise ConfigError(f'{key} is shared, so others map its arena: set {key}.arena="sealed"')
    if OTHERS_UID in (tenant.unix_uid, tenant.unix_gid):
        raise ConfigError(f"{key}.unix: {OTHERS_UID} is what every unknown user is called")
    _check_mode(key, tenant)


def _check_parts(key: str, tenant: TenantSettings) -> None:
    if tenant.write_bytes_per_day < 0:
        raise ConfigError(
            f"{key}.write_per_day={tenant.write_bytes_per_day}: 0 is its part of file.write_per_day"
        )
    for name, nbytes in (
        ("guaranteed", tenant.object_guaranteed_bytes),
        ("max", tenant.object_max_bytes),
    ):
        if nbytes < 0:
            raise ConfigError(f"{key}.object.{name}={nbytes} is less than 0")


def _check_max(key: str, guaranteed: int, most: int) -> None:
    if most and most < guaranteed:
        raise ConfigError(
            f"{key}.max={size_text(most)} is less than {key}.guaranteed={size_text(guaranteed)}"
        )


def _check_mode(key: str, tenant: TenantSettings) -> None:
    try:
        mode = tenant.directory_mode
    except ValueError as error:
        raise ConfigError(f'{key}.unix.mode={tenant.unix_mode!r}: write "0750"') from error
    if mode & ~0o777 or mode & 0o022 or mode & 0o700 != 0o700:
        raise ConfigError(
            f"{key}.unix.mode={tenant.unix_mode}: the daemon needs 7, and whoever else may write "
            'there could put sockets of theirs in place of the daemon\'s: write "0750"'
        )


def _check_sum(kind: str, guaranteed: Sequence[int], capacity: int, of: str) -> None:
    if sum(guaranteed) > capacity:
        raise ConfigError(
            f"all tenants together are guaranteed {size_text(sum(guaranteed))} of {kind}; {of} is "
            f"{size_text(capacity)}"
        )
