"""The tenant's keys in one directory: `KEYS.a` and `KEYS.b`, two copies.

They are durable before the first segment that needs them. A key that is not the newest leaves with
the last segment whose key it wraps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path

from kvstore.format.frame import WrappedKey, blob_key, open_blob, seal_blob
from kvstore.model.block import Buffer
from kvstore.model.errors import ConfigError, KVStoreError
from kvstore.model.tenant import TenantId
from kvstore.sealing import AeadKey, Erasure, Keyring, Root, Sealing
from kvstore.sealing.keyring import stored_root
from kvstore.tier.file.disk import Disk
from kvstore.tier.file.failure import disk_errors
from kvstore.tier.file.twin_files import Twins, destroy_twins, read_twins, write_twins

KEYS = Twins("keys", "KEYS", b"kvkeys\0\1", 1 << 20, padded=True)  # the last byte: version
LOCK_NAME = "KEYS.lock"  # held while keys are changed: a daemon and a command may both want to
_log = logging.getLogger(__name__)


class DirectoryKeys:
    """Blocking: called in the tier's threads. Raises ConfigError, DiskFull, DiskFailed."""

    def __init__(self, disk: Disk, path: Path, sealing: Sealing) -> None:
        self.sealing = sealing
        self._disk = disk
        self._path = path
        self._number = 0
        self._ring: Keyring | None = None

    @property
    def ring(self) -> Keyring:
        """The keys as they were read last; `load` has to be called before."""
        assert self._ring is not None
        return self._ring

    def load(self, *, create: bool = True, find_sealed: Callable[[], bool] = lambda: False) -> None:
        """Read the keys; create: make them where there are none.

        find_sealed: says whether the directory has segments that other keys would never open. Then,
        and if there are none and are not to be made, raises ConfigError.
        """
        found = read_twins(self._disk, self._path, KEYS)
        root, tenant = self.sealing.root, self.sealing.tenant
        if found.number:
            self._ring = Keyring.load(root, tenant, found.data, str(self._path / KEYS.name))
            self._number = found.number
        elif not create or find_sealed():
            raise ConfigError(
                f"{self._path} has lost its keys: put {' and '.join(KEYS.names)} back from a "
                "backup, or remove its *.segment files to start with an empty tier"
            )
        else:
            self.save(Keyring.create(root, tenant))

    def save(self, ring: Keyring) -> None:
        """Replace both copies of the keys, durably, one after the other: a page that rots must not
        take a directory with it, nor may an old root open what is left of older keys."""
        for _ in KEYS.names:
            write_twins(self._disk, self._path, KEYS, ring.encode())
        self._number = read_twins(self._disk, self._path, KEYS).number
        self._ring = ring

    def change(self, change: Callable[[Keyring], Keyring]) -> None:
        """Replace the keys by what `change` makes of those that are in the directory now.

        Raises ConfigError also while another process changes them.
        """
        with self._locked():
            self._look()
            self.save(change(self.ring))

    def _look(self) -> None:
        """Read the keys again if they are others than those in memory."""
        if read_twins(self._disk, self._path, KEYS).number != self._number:
            self.load(create=False)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with disk_errors(f"lock the keys in {self._path}"):
            try:
                lock = self._disk.lock(self._path / LOCK_NAME)
            except BlockingIOError as error:
                raise ConfigError(
                    f"{self._path}: another process changes its keys: try again"
                ) from error
        try:
            yield
        finally:
            self._disk.close(lock)

    def new_key(self) -> AeadKey:
        """Return the key of a new segment, of the newest epoch in the directory: `kvstore key
        rotate` may have begun one since."""
        try:
            self._look()
        except KVStoreError as error:  # say, of another root: what is in memory is still good
            _log.warning("keys=not_read path=%s reason=%r", self._path, str(error))
        return self.ring.new_key()

    def open(self, wrapped: WrappedKey) -> AeadKey | None:
        """Return the key of a segment; None if no key of this directory opens it."""
        return self.ring.open(wrapped)

    def retire(self, used: Set[int]) -> None:
        """Drop the epochs that no segment uses any more."""
        old = set(self.ring.epochs) - used - {self.ring.current}
        if not old:
            return
        try:
            self.change(lambda ring: ring.without(old))
        except ConfigError as error:  # say, they were wrapped by another root meanwhile
            _log.warning("keys=not_retired path=%s reason=%r", self._path, str(error))
        else:
            _log.info("keys=retired path=%s epochs=%r", self._path, sorted(old))

    def seal_note(self, data: bytes, label: bytes) -> bytes:
        """Return what to store of a note. label: what it is."""
        return seal_blob(data, label, self.ring.new_key())

    def open_note(self, blob: Buffer, label: bytes) -> bytes | None:
        """Return what `seal_note` was given; None for anything else."""
        wrapped = blob_key(blob)
        key = self.open(wrapped) if wrapped is not None else None
        return open_blob(blob, label, key) if key is not None else None


def destroy_keys(disk: Disk, path: Path, root: Root, tenant: TenantId) -> Erasure:
    """Destroy the keys of a directory, durably: nothing that they opened can be read again.

    Returns how far that holds. The daemon must not be using the directory. Raises DiskFailed.
    """
    found = read_twins(disk, path, KEYS)
    stored = stored_root(found.data) if found.number else None
    # First, because it takes what is stored: after a crash between the two it can be tried again.
    erasure = root.forget(tenant, stored) if stored is not None else Erasure.NONE
    destroy_twins(disk, path, KEYS)
    return erasure
