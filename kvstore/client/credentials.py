"""What a client shows over TCP, and by what it knows its daemon.

Files are read again when they change. A token is never sent in the clear: without TLS a
client refuses to have one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio

from kvstore.model.errors import ConfigError, Unauthorized
from kvstore.system.file_watch import Watched
from kvstore.system.pem import read_authorities, read_pair

LOOK_S = 0.5  # between two looks at a file
TOKEN_NBYTES_MAX = 4096

Metadata = tuple[tuple[str, str], ...]
Told = str | Path | None


class ClientCredentials(NamedTuple):
    """Paths of the files, and the name that the daemon's certificate has to have, if not the
    target's. Without a file or name of TLS the connection is plaintext."""

    token_file: Path | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    server_name: str = ""

    @property
    def uses_tls(self) -> bool:
        return bool(self.tls_files or self.server_name)

    @property
    def tls_files(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.tls_ca, self.tls_cert, self.tls_key) if path)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return what a TLS channel needs, from the files as they are now. Raises Unauthorized."""
        try:
            authorities = read_authorities(self.tls_ca) if self.tls_ca else None
            pair = None
            if self.tls_cert is not None and self.tls_key is not None:
                pair = read_pair(self.tls_cert, self.tls_key)
        except ConfigError as error:
            raise Unauthorized(str(error)) from error
        return grpc.ssl_channel_credentials(
            authorities, pair.key if pair else None, pair.cert if pair else None
        )


NO_CREDENTIALS = ClientCredentials()


def client_credentials(
    target: str,
    *,
    token_file: Told = None,
    tls_ca: Told = None,
    tls_cert: Told = None,
    tls_key: Told = None,
    server_name: str = "",
) -> ClientCredentials:
    """Return what is shown to `target`: nothing over a unix socket, which says itself who calls.

    Raises ConfigError for a token without TLS, and for half a pair.
    """
    if target.startswith("unix:"):
        return NO_CREDENTIALS
    found = ClientCredentials(
        _path(token_file), _path(tls_ca), _path(tls_cert), _path(tls_key), server_name
    )
    if (found.tls_cert is None) != (found.tls_key is None):
        raise ConfigError("tls_cert and tls_key go together: give both")
    if found.token_file is not None and not found.uses_tls:
        raise ConfigError(
            f"a token is not sent to {target} in the clear: give tls_ca, or use a unix socket"
        )
    return found


def _path(told: Told) -> Path | None:
    return Path(told) if told else None


class TokenReader:
    """The token in a file, read again when the file changes. One that is gone, or half written,
    leaves the last token in use."""

    def __init__(self, path: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._now = now
        self._watched = Watched(path)
        self._looked = float("-inf")
        self._metadata: Metadata | None = None
        self._failed: Unauthorized | None = None  # of the last look

    def metadata(self) -> Metadata:
        """Return what a call carries. Raises Unauthorized if there never was a token."""
        now = self._now()
        if now - self._looked >= LOOK_S:
            self._looked = now
            if self._watched.changed() or self._failed is not None:
                self._look()
        if self._metadata is None:
            raise self._failed or Unauthorized(f"{self._path}: no token could be read")
        return self._metadata

    def _look(self) -> None:
        try:
            self._metadata = (("authorization", f"Bearer {self._read()}"),)
            self._failed = None
        except Unauthorized as error:
            self._failed = error

    def _read(self) -> str:
        try:
            with self._path.open("rb") as file:
                text = file.read(TOKEN_NBYTES_MAX).decode("ascii").strip()
        except OSError as error:
            raise Unauthorized(f"{self._path}: cannot be read: {error.strerror}") from error
        except UnicodeDecodeError:
            text = ""
        if not text or not text.isprintable() or " " in text:
            raise Unauthorized(f"{self._path}: there is no token in it")
        return text


class Certificates:
    """Tells when the files of TLS have changed since a connection was made with them."""

    def __init__(
        self, credentials: ClientCredentials, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._now = now
        self._watched = Watched(*credentials.tls_files)
        self._watched.changed()
        self._looked = now()

    def changed(self) -> bool:
        """Look now and then; tell whether they are others than at the last look."""
        now = self._now()
        if now - self._looked < LOOK_S:
            return False
        self._looked = now
        return self._watched.changed()


class AuthorizedChannel:
    """A channel for stubs, each of whose calls carries the token."""

    def __init__(self, channel: grpc.aio.Channel, token: TokenReader) -> None:
        self._channel = channel
        self._token = token

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._carrying(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._carrying(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._carrying(self._channel.stream_unary(*args, **kwargs))

    def _carrying(self, call: Any) -> Any:
        token = self._token
        return lambda *args, **kwargs: call(*args, metadata=token.metadata(), **kwargs)
