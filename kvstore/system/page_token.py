"""The token of the page, in a file of mode 0600 beside the daemon's socket.

A restart finds it again, so a page that is open goes on by itself. Whoever can read the file can
use the socket as well, and by it everything.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from kvstore.model.errors import ConfigError

SUFFIX = ".page"
RANDOM_NBYTES = 32
_TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")


def page_token_path(socket: Path) -> Path:
    """Return where the token of the daemon with this socket is."""
    return socket.with_name(socket.name + SUFFIX)


def read_page_token(path: Path) -> str:
    """Return the token, "" if there is none that its owner alone has known."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ""
    with os.fdopen(descriptor) as file:
        status = os.fstat(descriptor)
        if status.st_mode & 0o077 or status.st_uid != os.geteuid():
            return ""
        text = file.read(100).strip()
    return text if _TOKEN.fullmatch(text) else ""


def make_page_token(path: Path) -> str:
    """Return the token in the file; a new one, of 256 random bits, if there is none. Raises
    ConfigError."""
    if token := read_page_token(path):
        return token
    token = secrets.token_urlsafe(RANDOM_NBYTES)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, 0o600), "w") as file:
            file.write(token + "\n")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: the page's token cannot be written ({error.strerror}); server.page=false "
            "does without a page"
        ) from error
    return token
