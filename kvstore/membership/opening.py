"""The driver that the settings name."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.membership.base import Hello, Membership, Ping
from kvstore.membership.state_files import LastMembers, state_directory
from kvstore.model.errors import ConfigError
from kvstore.settings import Settings


def open_membership(
    settings: Settings,
    *,
    hello: Hello,
    ping: Ping,
    failed: Callable[[str], None] = lambda _: None,
) -> Membership:
    """Return the driver of cluster.membership, to be joined. Raises ConfigError.

    hello and ping: how this daemon asks others. failed: told the name of
    a background task that met a bug.
    """
    cluster = settings.cluster
    directory = state_directory(settings)
    last = LastMembers(directory, cluster.fleet) if directory is not None else None
    if cluster.membership == "static":
        from kvstore.membership.static import StaticMembership

        return StaticMembership(cluster.addresses, hello=hello, last=last, failed=failed)
    if cluster.membership == "etcd":
        from kvstore.membership.etcd import EtcdMembership

        return EtcdMembership(cluster, ping=ping, last=last, failed=failed)
    if cluster.membership == "kubernetes":
        from kvstore.membership.kubernetes import KubernetesMembership
        from kvstore.membership.kubernetes_account import own_account

        return KubernetesMembership(
            own_account(),
            cluster.kubernetes_service,
            hello=hello,
            ping=ping,
            last=last,
            failed=failed,
        )
    raise ConfigError(f"cluster.membership={cluster.membership}: there is no driver for it")
