"""The `kvstore` command on a disk that fails when told to: `serve` and `gc` as users run them.

    python -m tests.torture.process DIRECTORY serve --set ...

DIRECTORY is where `control.Control` lives. Beside its disks, one thing is observed: which records
the file tier gives up, written down before their bytes can be given back.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from kvstore.cli import main
from kvstore.decide.planner.eviction import Eviction
from kvstore.decide.planner.ledger import Ledger
from kvstore.decide.planner.replaced import Replaced
from kvstore.model.block import Buffer
from kvstore.move import losses, object_side
from kvstore.move.object_upload import ObjectUpload
from kvstore.sealing import aead
from kvstore.tier.file import tier
from kvstore.tier.file.devices import admission, devices
from tests.torture.control import Steered
from tests.torture.disk import SteeredDisk


def note_losses(steered: Steered) -> None:
    """Write down each record that leaves the file tier for room, or because it cannot be read."""
    evict_file, detach, withdraw = Eviction.evict_file, Ledger.detach, Ledger.withdraw
    release_all = Replaced.release_all
    evicting = False

    def note(what: str, block: Any, frame: Any) -> None:
        path = frame.extent.mount.device.path  # it has no spaces
        steered.note(what, path, block.namespace_id.hex(), block.key.hex(), *frame.part)

    def watched_evict(self: Eviction, nbytes: int, helps: Callable[[Any], bool]) -> int:
        nonlocal evicting
        evicting = True
        try:
            return evict_file(self, nbytes, helps)
        finally:
            evicting = False

    def watched_detach(self: Ledger, block: Any, record: Any) -> None:
        if evicting and record.frame is not None:
            note("evicted", block, record.frame)
        detach(self, block, record)

    def watched_release_all(self: Replaced) -> int:
        for kept in self.kept:
            note("evicted", kept.block, kept.frame)
        return release_all(self)

    def watched_withdraw(self: Ledger, frame: Any) -> None:
        mount, extent = frame.extent
        if extent[:2] in {(tag.number, offset) for tag, offset in mount.tier.health.suspects}:
            for key in frame.blocks.values():
                note("unread", self._block(key), frame)
        withdraw(self, frame)

    Replaced.release_all = watched_release_all  # type: ignore[method-assign]
    Eviction.evict_file = watched_evict  # type: ignore[method-assign]
    Ledger.detach = watched_detach  # type: ignore[method-assign]
    Ledger.withdraw = watched_withdraw  # type: ignore[method-assign]


def note_nonces(file: Path) -> None:
    """Write down every nonce that seals something, with a digest of its key, before it is used."""
    fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    new_aead = aead.new_aead

    def noting(key: bytes) -> tuple[Any, type[Exception]]:
        cipher, wrong = new_aead(key)
        return Noting(cipher, hashlib.sha256(key).digest(), fd), wrong

    aead.new_aead = noting


class Noting:
    """A cipher that writes its nonces down."""

    def __init__(self, cipher: aead.Aead, digest: bytes, fd: int) -> None:
        self._cipher = cipher
        self._digest = digest
        self._fd = fd

    def encrypt_into(self, nonce: bytes, data: Buffer, aad: bytes, buf: memoryview) -> int:
        os.write(self._fd, self._digest + nonce)
        return self._cipher.encrypt_into(nonce, data, aad, buf)

    def decrypt_into(self, nonce: bytes, data: Buffer, aad: bytes, buf: memoryview) -> int:
        return self._cipher.decrypt_into(nonce, data, aad, buf)


def nonces(directory: Path) -> tuple[int, int]:
    """Return how many nonces were used, and how many of these by a key that had used them."""
    file = directory / NONCES
    data = file.read_bytes() if file.exists() else b""
    pairs = [data[at : at + NONCE_ENTRY] for at in range(0, len(data), NONCE_ENTRY)]
    return len(pairs), len(pairs) - len(set(pairs))


NONCES = "nonces"
NONCE_ENTRY = 32 + 12
UPLOAD_REST_S = 0.2  # a life is short
TRY_AGAIN_S = 0.2
TOLD_S = 1.0


if __name__ == "__main__":
    directory = Path(sys.argv.pop(1))
    steered = Steered(directory)
    note_losses(steered)
    note_nonces(directory / NONCES)
    numbers = count()  # one disk for each directory, in their order
    devices.RealDisk = lambda: SteeredDisk(steered, next(numbers))  # type: ignore[assignment,attr-defined]
    tier.RealDisk = devices.RealDisk  # type: ignore[attr-defined]
    admission.RETRY_S = TRY_AGAIN_S
    losses.TOLD_S = TOLD_S
    object_side.ObjectUpload = partial(ObjectUpload, rest_s=UPLOAD_REST_S)  # type: ignore[assignment,attr-defined,misc]
    main()
