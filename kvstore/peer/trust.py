"""Which certificates daemons of a fleet show each other, and whose they are.

Both ends show one, signed by the fleet's authority, with the name <node id>.<fleet>.kvstore or
*.<fleet>.kvstore. Files are read again when they change; if they are wrong then, the last good ones
stay in use. Links that are open go on until their time is over (`tcp.LINK_S_MAX`).
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstore.model.errors import ConfigError
from kvstore.model.member import NodeId
from kvstore.peer.base import PeerIncompatible
from kvstore.system.file_watch import Watched
from kvstore.system.pem import load_authorities, load_pair, read_authorities, read_pair

logger = logging.getLogger(__name__)


class Trust:
    """The certificate of this daemon, and the authority it believes."""

    def __init__(
        self,
        cert: Path,
        key: Path,
        authority: Path,
        reloaded: Callable[[str, str], None] = lambda what, result: None,
    ) -> None:
        """reloaded: is told ("peer_certificate", "ok" or what is wrong). Raises ConfigError."""
        self._cert, self._key, self._authority = cert, key, authority
        self._reloaded = reloaded
        self._watched = Watched(cert, key, authority)
        self._watched.changed()
        self._lock = threading.Lock()
        self._problem = ""
        self._accepting, self._dialing = self._contexts()

    def accepting(self) -> ssl.SSLContext:
        """Return what one more accepted connection uses."""
        self.look()
        return self._accepting

    def dialing(self) -> ssl.SSLContext:
        """Return what one more connection of ours uses."""
        self.look()
        return self._dialing

    def look(self) -> None:
        """Read the files again if they have changed, until they are right."""
        with self._lock:
            if not self._watched.changed():
                return
            try:
                self._accepting, self._dialing = self._contexts()
            except ConfigError as error:
                self._watched.again()
                before, self._problem = self._problem, str(error)
                if self._problem == before:
                    return
                logger.warning("peer_certificate=not_reloaded reason=%r", self._problem)
            else:
                self._problem = ""
                logger.info("peer_certificate=reloaded path=%s", self._cert)
            told = self._problem or "ok"
        self._reloaded("peer_certificate", told)

    def _contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        pair = read_pair(self._cert, self._key)
        authorities = read_authorities(self._authority)
        contexts = []
        for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
            context = ssl.SSLContext(protocol)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False  # names are of nodes: `check_names`
            context.verify_mode = ssl.CERT_REQUIRED
            load_pair(context, pair, str(self._cert))
            load_authorities(context, authorities, str(self._authority))
            contexts.append(context)
        return contexts[0], contexts[1]


def names_of(tls: ssl.SSLObject) -> tuple[str, ...]:
    """Return the DNS names of the certificate that the other end has shown."""
    found = tls.getpeercert() or {}
    pairs = found.get("subjectAltName", ())
    assert isinstance(pairs, tuple)
    return tuple(str(pair[1]) for pair in pairs if pair[0] == "DNS")


def check_names(names: Sequence[str], node: NodeId, fleet: str) -> None:
    """Raise PeerIncompatible unless one of the names of a certificate is a node's of a fleet."""
    wanted = {f"{node}.{fleet}.kvstore".lower(), f"*.{fleet}.kvstore".lower()}
    if not wanted & {name.lower() for name in names}:
        raise PeerIncompatible(
            f"the certificate of node {node[:8]} has neither its name, {node}.{fleet}.kvstore, "
            f"nor *.{fleet}.kvstore",
            reason="certificate",
        )


def certificate_error(error: ssl.SSLError, who: str) -> PeerIncompatible:
    """Return what a failed handshake means, as far as OpenSSL tells it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return PeerIncompatible(
            f"{who} shows a certificate that is not believed: {error.verify_message}",
            reason="certificate",
        )
    word = (error.reason or "").lower()
    if "certificate" in word or "unknown_ca" in word:
        return PeerIncompatible(
            f"{who} does not believe our certificate: {word}", reason="certificate"
        )
    return PeerIncompatible(
        f"no TLS with {who}: {word or 'it speaks none'}. Give all daemons of the fleet "
        "certificates, or none",
        reason="tls",
    )
