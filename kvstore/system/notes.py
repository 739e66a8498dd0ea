"""Small files that a daemon keeps for its next start: replaced at once, and synced. They block."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

logger = logging.getLogger(__name__)


def read_note(path: Path, nbytes_max: int) -> bytes | None:
    """Return a file's bytes; None if there is none, or none that could be ours."""
    try:
        with path.open("rb") as file:
            data = file.read(nbytes_max + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("file=ignored path=%s error=%r", path, error.strerror)
        return None
    if len(data) > nbytes_max:
        logger.warning("file=ignored path=%s error='more than %d bytes'", path, nbytes_max)
        return None
    return data


def write_note(path: Path, data: bytes) -> None:
    """Replace a file. What keeps it from being written is logged."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        logger.warning("file=not_written path=%s error=%r", path, error.strerror)
