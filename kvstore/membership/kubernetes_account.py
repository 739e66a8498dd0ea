"""What a pod has to ask its API server with: address, token, authorities, namespace."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvstore.model.errors import ConfigError, Unavailable

DIRECTORY = Path("/var/run/secrets/kubernetes.io/serviceaccount")
FILE_NBYTES_MAX = 64 << 10
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")  # what a header may carry (RFC 6750)
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_SETTING = "cluster.membership=kubernetes"


@dataclass(frozen=True, slots=True)
class Account:
    """The pod's service account. The files in `directory` are replaced while the pod runs, and so
    are read each time. tls: False is for tests alone."""

    host: str
    port: int
    namespace: str
    directory: Path = DIRECTORY
    tls: bool = True

    def token(self) -> str:
        """Return the token as it is now. Blocks; raises ConfigError."""
        text = _read(self.directory / "token")
        if not _TOKEN.fullmatch(text):
            raise ConfigError(f"{_SETTING}: {self.directory / 'token'} holds no token")
        return text

    def context(self) -> ssl.SSLContext:
        """Return what trusts the authorities of the cluster, as they are now, and them alone.

        Blocks; raises Unavailable, because they may be half written.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_verify_locations(self.directory / "ca.crt")
        except (OSError, ssl.SSLError) as error:
            raise Unavailable(f"{self.directory / 'ca.crt'}: {error}") from error
        return context


def own_account(
    environment: Mapping[str, str] = os.environ, directory: Path = DIRECTORY
) -> Account:
    """Return the account of the pod in which this runs. Blocks; raises ConfigError elsewhere."""
    host = environment.get("KUBERNETES_SERVICE_HOST", "")
    port = environment.get("KUBERNETES_SERVICE_PORT_HTTPS") or environment.get(
        "KUBERNETES_SERVICE_PORT", "443"
    )
    if not host:
        raise ConfigError(
            f"{_SETTING} works in a pod alone, and KUBERNETES_SERVICE_HOST is not set: elsewhere, "
            "use static or etcd"
        )
    if not (port.isascii() and port.isdigit() and 0 < int(port) <= 65535):
        raise ConfigError(f"{_SETTING}: KUBERNETES_SERVICE_PORT={port[:80]!r} is no port")
    namespace = _read(directory / "namespace")
    if not _NAMESPACE.fullmatch(namespace):
        raise ConfigError(f"{_SETTING}: {directory / 'namespace'} names no namespace")
    account = Account(host, int(port), namespace, directory)
    account.token()
    _read(directory / "ca.crt")
    return account


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(FILE_NBYTES_MAX).decode("ascii", "replace").strip()
    except OSError as error:
        raise ConfigError(
            f"{_SETTING}: {path}: {error.strerror}. Set automountServiceAccountToken: true in the "
            "pod's spec"
        ) from error
