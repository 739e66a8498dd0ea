"""Whether certificate, key and token files are as they should be; and whether memory is swapped."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from kvstore.model.errors import ConfigError
from kvstore.model.words import duration
from kvstore.server.audit import key_path_of
from kvstore.settings import Settings
from kvstore.store.findings import Finding, note, ok, wrong
from kvstore.system.pem import read_authorities, read_pair
from kvstore.system.private_files import is_open_to_others
from kvstore.system.token_file import read_tokens

ENDS_SOON_S = 7 * 86400.0
SWAPS = Path("/proc/swaps")


def check_security(settings: Settings, *, swaps: Path = SWAPS) -> Iterator[Finding]:
    """Yield findings; nothing for a daemon that has neither TLS, tokens nor tenants. The root key
    is the matter of `check_keys`."""
    tls, security = settings.tls, settings.security
    if tls.cert:
        yield _certificate(Path(tls.cert), Path(tls.key))
        yield _private("tls key", Path(tls.key))
    if tls.client_ca:
        yield _authorities(Path(tls.client_ca))
    if security.tokens:
        yield _tokens(Path(security.tokens))
    if security.audit and key_path_of(security).exists():
        yield _private("audit key", key_path_of(security))
    if (tls.cert or settings.tenants) and not security.encrypts:  # else `check_keys` says it
        yield _swap(swaps)


def check_shown(token_file: str | None, tls_key: str | None) -> Iterator[Finding]:
    """Yield findings about the secrets that this command shows a daemon."""
    for about, path in (("token file", token_file), ("own tls key", tls_key)):
        if path:
            yield _private(about, Path(path))


def _certificate(cert: Path, key: Path) -> Finding:
    about = "certificate"
    try:
        read_pair(cert, key)
        ends = _not_after(cert)
    except ConfigError as error:
        return wrong(about, str(error), "give tls.cert and tls.key of one pair")
    if ends is None:
        return note(
            about,
            f"{cert} and its key belong together; when it ends is not looked at",
            "pip install 'kvstore-tiers[security]'",
        )
    left_s = ends - time.time()
    if left_s <= 0:
        return wrong(about, f"{cert} has ended {duration(-left_s)} ago", "renew it; no restart")
    if left_s < ENDS_SOON_S:
        return wrong(about, f"{cert} ends in {duration(left_s)}", "renew it; no restart")
    return ok(about, f"{cert} ends in {duration(left_s)}")


def _not_after(cert: Path) -> float | None:
    """Return when the daemon's certificate ends, seconds since the epoch; None without the means
    to see it."""
    try:
        from cryptography import x509
    except ImportError:
        return None
    return x509.load_pem_x509_certificates(cert.read_bytes())[0].not_valid_after_utc.timestamp()


def _authorities(path: Path) -> Finding:
    try:
        read_authorities(path)
    except ConfigError as error:
        return wrong("client ca", str(error), "give tls.client_ca the authorities of clients")
    return ok("client ca", f"{path} can be read")


def _tokens(path: Path) -> Finding:
    about = "tokens"
    try:
        entries = read_tokens(path)
    except ConfigError as error:
        return wrong(about, str(error), f"chmod 600 {path}, or see `kvstore token list`")
    valid = sum(entry.is_valid(time.time()) for entry in entries)
    if not valid:
        return note(
            about,
            f"{path}: no token is valid, so that nobody is let in by one",
            f"kvstore token create --file {path} --role writer",
        )
    return ok(about, f"{path}: {valid} of {len(entries)} are valid")


def _private(about: str, path: Path) -> Finding:
    try:
        status = os.stat(path)
    except OSError as error:
        return wrong(about, f"{path}: {error.strerror}", "see the settings")
    mode = stat.S_IMODE(status.st_mode)
    if is_open_to_others(status):
        return wrong(about, f"{path}: mode {mode:04o}: others may read it", f"chmod 600 {path}")
    return ok(about, f"{path}: mode {mode:04o}")


def _swap(swaps: Path) -> Finding:
    try:
        used = swaps.read_text().splitlines()[1:]
    except OSError:
        used = []
    if used:
        return wrong(
            "swap",
            f"{len(used)} in use: keys and KV may be written to disk in the clear",
            "swapoff -a, or encrypt the swap with a key that a restart forgets",
        )
    return ok("swap", "off")
