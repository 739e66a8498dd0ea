"""The directory of sockets of one tenant: who may enter it, and who may use what is there.

The directory belongs to the daemon, so that nobody can put another socket, or a link, in place of
one of the daemon's. The sockets belong to the tenant's user and group.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from kvstore.model.errors import ConfigError, Unauthorized
from kvstore.settings import TenantSettings
from kvstore.settings.tenants import OTHERS_UID
from kvstore.transport.unix_sockets import groups_of, peer_of

logger = logging.getLogger(__name__)

ALL_PASS = 0o711  # of the directory above: everybody may pass, nobody may look


@dataclass(frozen=True, slots=True)
class Access:
    """Who may use a tenant's sockets beside the daemon's own user. uid, gid: -1 for nobody."""

    tenant: str
    uid: int
    gid: int
    directory_mode: int

    @classmethod
    def of(cls, tenant: TenantSettings) -> Access:
        return cls(tenant.name, tenant.unix_uid, tenant.unix_gid, tenant.directory_mode)

    @property
    def socket_mode(self) -> int:
        return 0o660 if self.gid >= 0 else 0o600

    def make_directory(self, path: Path) -> None:
        """Make the tenant's directory, or set its mode. Raises ConfigError."""
        try:
            if not path.parent.exists():
                path.parent.mkdir(parents=True)
                path.parent.chmod(ALL_PASS)
            path.mkdir(mode=0o700, exist_ok=True)
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                raise ConfigError(f"{path} is not a directory of the daemon's own user: remove it")
            os.chown(path, -1, self.gid)
            path.chmod(self.directory_mode)
        except OSError as error:
            raise ConfigError(
                f"tenants.{self.tenant}: {path} cannot be made for its user or group: "
                f"{error.strerror}"
            ) from error
        if self.directory_mode & 0o077 and not path.parent.stat().st_mode & 0o001:
            logger.warning(
                "tenant=%s sockets=unreachable reason='others may not pass %s: chmod 711 it, or "
                "mount %s where they are'",
                self.tenant,
                path.parent,
                path,
            )

    def give(self, path: Path) -> None:
        """Hand a socket that was just made to the tenant's user. Raises ConfigError."""
        try:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)
            path.chmod(self.socket_mode)
        except OSError as error:
            raise ConfigError(
                f"tenants.{self.tenant}.unix: {path} cannot be given to user {self.uid}, group "
                f"{self.gid} ({error.strerror}): run the daemon as root, or as that user"
            ) from error

    def check_peer(self, connection: socket.socket) -> int:
        """Return the peer's process id. Raises Unauthorized for a process of somebody else."""
        peer = peer_of(connection)
        if peer.uid == OTHERS_UID:
            raise Unauthorized(f"user {peer.uid} may be anybody: tenant {self.tenant} is not")
        if peer.uid in (os.getuid(), self.uid):
            return peer.pid
        if self.gid >= 0 and self.gid in (peer.gid, *groups_of(connection)):
            return peer.pid
        raise Unauthorized(f"user {peer.uid} may not map the arena of tenant {self.tenant}")
