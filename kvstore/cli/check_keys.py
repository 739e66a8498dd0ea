"""The root key of what is stored: who may read it, where it lies, and whether memory is swapped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from kvstore.model.errors import ConfigError
from kvstore.sealing import open_root
from kvstore.settings import Settings
from kvstore.store.findings import Finding, note, ok, wrong

ABOUT = "root key"
SWAPS = Path("/proc/swaps")


def check_keys(settings: Settings, *, swaps: Path = SWAPS) -> Iterator[Finding]:
    """Yield findings if what is stored is encrypted. Asks no command for a key."""
    security = settings.security
    if not security.encrypts:
        return
    try:
        open_root(settings)
    except ConfigError as error:
        yield wrong(ABOUT, str(error), "see the page on encryption: where a root key may be")
    else:
        yield _root(security.root_key_file, security.root_argv)
    yield _swap(swaps)
    if security.accept_plain:
        yield note(
            "blocks in clear",
            "are served, too: who can write to the disk can forge them",
            "kvstore gc --seal each directory, then --set security.accept_plain=false",
        )


def _root(file: str, argv: tuple[str, ...]) -> Finding:
    if not argv:
        return ok(ABOUT, f"{file} is its owner's alone, and not on a disk of the data")
    if not os.access(argv[0], os.X_OK):
        return wrong(ABOUT, f"{argv[0]} cannot be run", "correct security.root_command")
    return ok(ABOUT, f"from {argv[0]}, which is asked at the start")


def _swap(swaps: Path) -> Finding:
    """Say whether keys and blocks may be written to a disk as memory."""
    try:
        areas = [line.split()[0] for line in swaps.read_text().splitlines()[1:]]
    except OSError:
        areas = []
    if not areas:
        return ok("swap", "off")
    return wrong(
        "swap",
        f"{', '.join(areas)}: memory with keys and blocks may be written there in clear",
        "swapoff -a, and take it out of /etc/fstab; or swap to an encrypted device",
    )
