"""Where a daemon listens and keeps its blocks unless told otherwise."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path


def default_target_text(environ: Mapping[str, str] | None = None) -> str:
    """Return what KVSTORE_TARGET says: which daemon clients ask unless told otherwise."""
    return _environment(environ).get("KVSTORE_TARGET", "")


def default_sockets(environ: Mapping[str, str] | None = None) -> tuple[Path, ...]:
    """Return where a daemon may listen unless told otherwise, in the order that daemons try and
    clients look: the directories /run/kvstore, /run/kvstore-USER, then kvstore in
    $XDG_RUNTIME_DIR, /run/user/UID and ~/.local/state."""
    own = _environment(environ).get("XDG_RUNTIME_DIR", "")
    runtime = [own] if own.startswith("/") else []
    home = _home()
    state = [str(home / ".local/state")] if home is not None else []
    homes = [*runtime, f"/run/user/{os.getuid()}", *state]
    directories = ["/run/kvstore", *_unit_directory(), *(f"{home}/kvstore" for home in homes)]
    return tuple(Path(each) / "kvstore.sock" for each in dict.fromkeys(directories))


def _unit_directory() -> list[str]:
    """Return what systemd makes for one daemon of each user; nothing for a user without a name."""
    try:
        return [f"/run/kvstore-{pwd.getpwuid(os.getuid()).pw_name}"]
    except KeyError:
        return []


def default_socket(environ: Mapping[str, str] | None = None) -> str:
    """Return the first of `default_sockets` that a daemon of this user may make, else the last."""
    *first, last = default_sockets(environ)
    return str(next((path for path in first if _may_make(path.parent)), last))


def default_digest_memory(environ: Mapping[str, str] | None = None) -> Path:
    """Return where digests of weights are remembered: in $XDG_CACHE_HOME/kvstore, else
    ~/.cache/kvstore."""
    own = _environment(environ).get("XDG_CACHE_HOME", "")
    home = _home()
    cache = home / ".cache" if home is not None else Path("/var/cache")
    return (Path(own) if own.startswith("/") else cache) / "kvstore/file-digests.json"


def default_directory(environ: Mapping[str, str] | None = None) -> str:
    """Return where blocks are kept unless told otherwise.

    /var/lib/kvstore if this user may write there, else $XDG_STATE_HOME/kvstore, else
    ~/.local/state/kvstore; there in `blocks`.
    """
    return f"{_default_place('/var/lib', 'XDG_STATE_HOME', environ)}/blocks"


def _default_place(system: str, variable: str, environ: Mapping[str, str] | None) -> Path:
    place = Path(system) / "kvstore"
    if _may_make(place):
        return place
    own = _environment(environ).get(variable)
    if own:
        return Path(own) / "kvstore"
    home = _home()
    return home / ".local/state/kvstore" if home is not None else place


def _home() -> Path | None:
    """Return this user's home; None for a bare user id, as containers have, without $HOME."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def _may_make(place: Path) -> bool:
    try:
        return os.access(place if place.is_dir() else place.parent, os.W_OK | os.X_OK)
    except PermissionError:
        return False


def _environment(environ: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return the process's environment, or what stands in for it. Nothing else here reads it."""
    return os.environ if environ is None else environ
