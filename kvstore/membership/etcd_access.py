"""What etcd is shown, and how what it refuses reads: each refusal names the setting to change."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import grpc
import grpc.aio

from kvstore.model.errors import ConfigError, KVStoreError, Unavailable
from kvstore.settings import ClusterSettings, parse_address
from kvstore.settings.values import is_loopback
from kvstore.system.file_watch import Watched
from kvstore.system.pem import read_authorities, read_pair
from kvstore.system.private_files import is_open_to_others

PASSWORD_NBYTES_MAX = 4096
DETAILS_CHARS_MAX = 300

# Part of what etcd or gRPC says, and what to do about it. gRPC has no codes for these.
_REFUSALS = (
    ("user name is empty", "it asks for a user: set cluster.etcd_user and etcd_password_file"),
    ("user name not found", "it asks for a user: set cluster.etcd_user and etcd_password_file"),
    (
        "authentication failed",
        "the user cluster.etcd_user={user} or the password in cluster.etcd_password_file is wrong",
    ),
    (
        "authentication is not enabled",
        "it has no users: leave out cluster.etcd_user and etcd_password_file",
    ),
    (
        "permission denied",
        "the user cluster.etcd_user={user} may not read and write the keys from /kvstore/v1/ on: "
        "grant it a role that may",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "its certificate is not of the authorities in cluster.etcd_ca, or has expired",
    ),
    (
        "Hostname Verification",
        "its certificate has another name than the endpoint in cluster.etcd",
    ),
    ("Peer name", "its certificate has another name than the endpoint in cluster.etcd"),
    ("WRONG_VERSION_NUMBER", "it does not speak TLS: write http:// in cluster.etcd"),
    ("PACKET_LENGTH_TOO_LONG", "it does not speak TLS: write http:// in cluster.etcd"),
    ("CERTIFICATE_REQUIRED", "it asks for a certificate: set cluster.etcd_cert and etcd_key"),
    ("BAD_CERTIFICATE", "it refuses the certificate in cluster.etcd_cert"),
    ("UNKNOWN_CA", "it refuses the certificate in cluster.etcd_cert: another authority signed it"),
)
# gRPC tells these apart in no way.
_CUT_OFF = ("losed", "losing", "reset by peer", "roken pipe", "TSI_DATA_CORRUPTED")
_HINTS = {  # by: is it TLS, and is a certificate shown
    (False, False): "if it speaks TLS, write https:// in cluster.etcd",
    (True, False): "if it asks for a certificate, set cluster.etcd_cert and etcd_key; if it speaks "
    "no TLS, write http:// in cluster.etcd",
    (True, True): "if it refuses the certificate, change cluster.etcd_cert and etcd_key; if it "
    "speaks no TLS, write http:// in cluster.etcd",
}


class Access:
    """Certificates, and a user with a password. Raises ConfigError for what is not right."""

    def __init__(self, settings: ClusterSettings) -> None:
        self.user = settings.etcd_user
        self._password_file = settings.etcd_password_file
        self._ca, self._cert, self._key = settings.etcd_ca, settings.etcd_cert, settings.etcd_key
        self.has_certificate = bool(self._cert)
        self._watched = Watched(*(Path(each) for each in (self._ca, self._cert, self._key) if each))
        self._watched.changed()
        self._credentials: grpc.ChannelCredentials | None = None
        for endpoint in settings.endpoints:
            self._check(endpoint)
        if self.user:
            self.password()
        if any(_uses_tls(endpoint) for endpoint in settings.endpoints):
            self._credentials = self._read()

    def password(self) -> str:
        """Return the password, as its file is now. It blocks, and raises ConfigError."""
        path, key = Path(self._password_file), "cluster.etcd_password_file"
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                data = file.read(PASSWORD_NBYTES_MAX + 1)
        except OSError as error:
            raise ConfigError(f"{key}={path}: cannot be read: {error.strerror}") from error
        if is_open_to_others(status):
            raise ConfigError(f"{key}={path}: others may read or write it: chmod 600 {path}")
        if not 0 < len(data.strip()) <= PASSWORD_NBYTES_MAX:
            raise ConfigError(
                f"{key}={path}: it is empty, or has more than {PASSWORD_NBYTES_MAX} bytes"
            )
        return data.decode("utf-8", "surrogateescape").rstrip("\r\n")

    def files_changed(self) -> bool:
        """Tell whether there are other certificates. What cannot be read leaves the old in use."""
        if self._credentials is None or not self._watched.changed():
            return False
        try:
            self._credentials = self._read()
        except ConfigError:  # half written: the next look is at what it is then
            self._watched.again()
            return False
        return True

    def channel(self, endpoint: str, options: Sequence[tuple[str, int]]) -> grpc.aio.Channel:
        """Return a new channel to one endpoint."""
        target = endpoint.partition("://")[2]
        if not _uses_tls(endpoint):
            return grpc.aio.insecure_channel(target, options=options)
        assert self._credentials is not None
        return grpc.aio.secure_channel(target, self._credentials, options=options)

    def _check(self, endpoint: str) -> None:
        if _uses_tls(endpoint):
            return
        if self._ca or self._cert:
            raise ConfigError(
                f"cluster.etcd={endpoint} has no TLS, so cluster.etcd_ca and etcd_cert are of no "
                "use: write https://, or leave them out"
            )
        host, _ = parse_address("cluster.etcd", endpoint.partition("://")[2])
        if self.user and not is_loopback(host):
            raise ConfigError(
                f"cluster.etcd={endpoint} would send cluster.etcd_user's password in the clear: "
                "write https://"
            )

    def _read(self) -> grpc.ChannelCredentials:
        authorities = read_authorities(Path(self._ca)) if self._ca else None
        pair = read_pair(Path(self._cert), Path(self._key)) if self._cert else None
        return grpc.ssl_channel_credentials(
            authorities, pair.key if pair else None, pair.cert if pair else None
        )


def refusal_of(error: grpc.aio.AioRpcError, endpoint: str, access: Access) -> KVStoreError:
    """Return what a failed call means: ConfigError if a setting has to change, or Unavailable."""
    details = error.details() or ""
    for part, words in _REFUSALS:
        if part.lower() in details.lower():
            return ConfigError(f"etcd at {endpoint}: {words.format(user=access.user)}")
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Unavailable(f"etcd at {endpoint} did not answer in time")
    words = f"etcd at {endpoint}: {error.code().name}: {details[:DETAILS_CHARS_MAX]}"
    if error.code() is grpc.StatusCode.UNAVAILABLE and any(part in details for part in _CUT_OFF):
        words += f". It cuts connections off: {_HINTS[_uses_tls(endpoint), access.has_certificate]}"
    return Unavailable(words)


def _uses_tls(endpoint: str) -> bool:
    return endpoint.startswith("https://")
