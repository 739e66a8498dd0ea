"""The `kvstore` command on a disk that fails when told to: `serve` and `gc` as users run them.

    python -m tests.torture.process DIRECTORY serve --set ...

DIRECTORY is where `control.Control` lives. Beside its disk, one thing is observed: which records
the file tier evicts, written down before their bytes can be given back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kvstore import objects
from kvstore.cli import main
from kvstore.object_upload import ObjectUpload
from kvstore.planner.ledger import Ledger
from kvstore.tier.file import devices, tier
from tests.torture.control import Steered
from tests.torture.disk import SteeredDisk


def note_evictions(steered: Steered) -> None:
    """Write down each record that leaves the file tier for room."""
    evict_file, detach, evicting = Ledger.evict_file, Ledger.detach, False

    def watched_evict(self: Ledger, nbytes: int, helps: Callable[[Any], bool]) -> int:
        nonlocal evicting
        evicting = True
        try:
            return evict_file(self, nbytes, helps)
        finally:
            evicting = False

    def watched_detach(self: Ledger, block: Any, record: Any) -> None:
        if evicting and record.frame is not None:
            names = (block.namespace_id.hex(), block.key.hex(), *record.frame.part)
            steered.note("evicted", *names)
        detach(self, block, record)

    Ledger.evict_file, Ledger.detach = watched_evict, watched_detach  # type: ignore[method-assign]


UPLOAD_REST_S = 0.2  # a life is short


if __name__ == "__main__":
    steered = Steered(Path(sys.argv.pop(1)))
    note_evictions(steered)
    devices.RealDisk = partial(SteeredDisk, steered)  # type: ignore[assignment,attr-defined]
    tier.RealDisk = devices.RealDisk  # type: ignore[attr-defined]
    objects.ObjectUpload = partial(ObjectUpload, rest_s=UPLOAD_REST_S)  # type: ignore[assignment,attr-defined,misc]
    main()
