"""Certificates and keys in PEM files, checked before anything is built on them."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import NamedTuple

from kvstore.model.errors import ConfigError

PEM_NBYTES_MAX = 1 << 20


class Pair(NamedTuple):
    """A certificate with those that signed it, and its key, as PEM."""

    cert: bytes
    key: bytes


def read_pem(path: Path) -> bytes:
    """Return a file's bytes. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read(PEM_NBYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > PEM_NBYTES_MAX or b"-----BEGIN " not in data:
        raise ConfigError(f"{path}: not a PEM file")
    return data


def read_pair(cert: Path, key: Path) -> Pair:
    """Return a certificate and its key. Raises ConfigError if they do not belong together."""
    pair = Pair(read_pem(cert), read_pem(key))
    load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), pair, f"{cert} and {key}")
    return pair


def load_pair(context: ssl.SSLContext, pair: Pair, name: str) -> None:
    """Give `context` a pair. Raises ConfigError."""
    memory = os.memfd_create("kvstore-pair", os.MFD_CLOEXEC)  # `ssl` takes paths only
    try:
        with os.fdopen(memory, "wb") as file:
            file.write(pair.key + b"\n" + pair.cert)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}", password=lambda: "")
    except (ssl.SSLError, ValueError, OSError) as error:
        why = error.reason if isinstance(error, ssl.SSLError) else str(error)
        raise ConfigError(f"{name}: no certificate with its key: {why}") from error


def read_authorities(path: Path) -> bytes:
    """Return the certificates of authorities. Raises ConfigError."""
    data = read_pem(path)
    load_authorities(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), data, str(path))
    return data


def load_authorities(context: ssl.SSLContext, data: bytes, name: str) -> None:
    """Let `context` believe these authorities. Raises ConfigError."""
    try:
        context.load_verify_locations(cadata=data.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{name}: no certificates of authorities: {error}") from error
