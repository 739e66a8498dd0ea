"""A root key in memory alone: never on the disk of the data, and gone with the process."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def root_key_in_memory(key: bytes = b"") -> Iterator[Path]:
    """Yield the path of a root key, drawn at random unless given, that children can read, too."""
    fd = os.memfd_create("kvstore-root-key")
    try:
        os.write(fd, key or secrets.token_bytes(32))
        os.fchmod(fd, 0o400)
        yield Path(f"/proc/{os.getpid()}/fd/{fd}")
    finally:
        os.close(fd)
