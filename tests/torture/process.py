"""The `kvstore` command on a disk that fails when told to: `serve` and `gc` as users run them.

    python -m tests.torture.process DIRECTORY serve --set ...

DIRECTORY is where `control.Control` lives. Beside its disks, one thing is observed: which records
the file tier gives up, written down before their bytes can be given back.
"""

from __future__ import annotations

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
from kvstore.move import object_side
from kvstore.move.object_upload import ObjectUpload
from kvstore.tier.file import tier
from kvstore.tier.file.devices import admission, devices
from tests.torture.control import Steered
from tests.torture.disk import SteeredDisk


def note_losses(steered: Steered) -> None:
    """Write down each record that leaves the file tier for room, or because it cannot be read."""
    evict_file, detach, withdraw = Eviction.evict_file, Ledger.detach, Ledger.withdraw
    release_all = Replaced.release_all
    evicting = False

    def note(what: str, block: Any, part: Any) -> None:
        steered.note(what, block.namespace_id.hex(), block.key.hex(), *part)

    def watched_evict(self: Eviction, nbytes: int, helps: Callable[[Any], bool]) -> int:
        nonlocal evicting
        evicting = True
        try:
            return evict_file(self, nbytes, helps)
        finally:
            evicting = False

    def watched_detach(self: Ledger, block: Any, record: Any) -> None:
        if evicting and record.frame is not None:
            note("evicted", block, record.frame.part)
        detach(self, block, record)

    def watched_release_all(self: Replaced) -> int:
        for kept in self.kept:
            note("evicted", kept.block, kept.frame.part)
        return release_all(self)

    def watched_withdraw(self: Ledger, frame: Any) -> None:
        mount, extent = frame.extent
        if extent[:2] in {(tag.number, offset) for tag, offset in mount.tier.health.suspects}:
            for block in frame.blocks.values():
                note("unread", block, frame.part)
        withdraw(self, frame)

    Replaced.release_all = watched_release_all  # type: ignore[method-assign]
    Eviction.evict_file = watched_evict  # type: ignore[method-assign]
    Ledger.detach = watched_detach  # type: ignore[method-assign]
    Ledger.withdraw = watched_withdraw  # type: ignore[method-assign]


UPLOAD_REST_S = 0.2  # a life is short
TRY_AGAIN_S = 0.2


if __name__ == "__main__":
    steered = Steered(Path(sys.argv.pop(1)))
    note_losses(steered)
    numbers = count()  # one disk for each directory, in their order
    devices.RealDisk = lambda: SteeredDisk(steered, next(numbers))  # type: ignore[assignment,attr-defined]
    tier.RealDisk = devices.RealDisk  # type: ignore[attr-defined]
    admission.RETRY_S = TRY_AGAIN_S
    object_side.ObjectUpload = partial(ObjectUpload, rest_s=UPLOAD_REST_S)  # type: ignore[assignment,attr-defined,misc]
    main()
