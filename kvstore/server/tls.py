"""The daemon's certificate: read again when its files change, without a restart.

gRPC asks for it at every handshake; the HTTP port for every connection. Files that are unreadable
or do not belong together leave the last good pair in use.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import grpc

from kvstore.model.errors import ConfigError
from kvstore.settings import TlsSettings
from kvstore.system.file_watch import Watched
from kvstore.system.pem import Pair, load_authorities, load_pair, read_authorities, read_pair

logger = logging.getLogger(__name__)


class _Files(NamedTuple):
    """What the files held when they were good. authorities: of clients, None for none."""

    pair: Pair
    authorities: bytes | None


class Certificates:
    """The pair of a daemon that speaks TLS. Any thread may call it."""

    def __init__(self, settings: TlsSettings, reloaded: Callable[[str, str], None]) -> None:
        """reloaded: is told ("certificate", "ok" or what is wrong). Raises ConfigError."""
        self._settings = settings
        self._reloaded = reloaded
        names = (settings.cert, settings.key, settings.client_ca)
        self._watched = Watched(*(Path(name) for name in names if name))
        self._lock = threading.Lock()
        self._watched.changed()
        self._problem = ""
        self._files = self._read()
        self._told = self._files  # what gRPC has
        self._context = self._http_context(self._files)

    def grpc_credentials(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._files),
            self._fetch,  # type: ignore[arg-type]  # None is allowed, and says: no other
            require_client_authentication=self._settings.require_client_cert,
        )

    def http_context(self) -> ssl.SSLContext:
        """Return what one more HTTPS connection uses."""
        self.look()
        return self._context

    def look(self) -> None:
        """Read the files again if they have changed, until they are right."""
        with self._lock:
            if not self._watched.changed():
                return
            try:
                files = self._read()
                self._context = self._http_context(files)
                self._files = files
            except ConfigError as error:
                self._watched.again()
                before, self._problem = self._problem, str(error)
                if self._problem == before:
                    return
                logger.warning("certificate=not_reloaded reason=%r", self._problem)
            else:
                self._problem = ""
                logger.info("certificate=reloaded path=%s", self._settings.cert)
            told = self._problem or "ok"
        self._reloaded("certificate", told)

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Return what gRPC does not have yet, None if it has all."""
        self.look()
        files = self._files
        if files is self._told:
            return None
        self._told = files
        return _configuration(files)

    def _read(self) -> _Files:
        settings = self._settings
        authorities = read_authorities(Path(settings.client_ca)) if settings.client_ca else None
        return _Files(read_pair(Path(settings.cert), Path(settings.key)), authorities)

    def _http_context(self, files: _Files) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        load_pair(context, files.pair, self._settings.cert)
        if files.authorities is not None:
            load_authorities(context, files.authorities, self._settings.client_ca)
            context.verify_mode = ssl.CERT_OPTIONAL  # probes have none: each page asks for itself
        return context


def _configuration(files: _Files) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(files.pair.key, files.pair.cert)], root_certificates=files.authorities
    )
