"""What every tier holds, from half second to half second, and what exceeds a cap."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from kvstore import Client
from kvstore.model.errors import KVStoreError, Unavailable

EVERY_S = 0.5
CALL_S = 5.0

Stats = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Bytes of one moment. at_s: since the run began. over_cap_bytes: beyond DRAM's cap and the
    file tier's."""

    at_s: float
    phase: str
    dram_bytes: int
    dram_capacity_bytes: int
    leased_bytes: int
    dirty_bytes: int
    file_bytes: int
    over_cap_bytes: int


class Snapshots:
    """Watches one daemon after the other, in a thread of its own. Harmless while none runs."""

    def __init__(self) -> None:
        self.taken: list[Snapshot] = []
        self.phase = ""
        self._began = time.monotonic()
        self._target = ""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="snapshots", daemon=True)

    def __enter__(self) -> Snapshots:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def watch(self, target: str) -> None:
        """Watch the daemon at a target from now on; "": none."""
        self._target = target

    def await_moment(
        self, is_it: Callable[[Stats], bool], meanwhile: threading.Thread, timeout_s: float
    ) -> bool:
        """Wait for a moment in what the daemon does; False: what goes on meanwhile has ended before
        it was seen. Raises Unavailable if neither comes in time."""
        deadline = time.monotonic() + timeout_s
        with Client(self._target, timeout_s=CALL_S, arena=False) as client:
            while not is_it(client.admin.stats()):
                if not meanwhile.is_alive():
                    return False
                if time.monotonic() > deadline:
                    raise Unavailable(f"{self.phase}: the moment has not come in {timeout_s:.0f} s")
        return True

    @property
    def phases(self) -> set[str]:
        """Those of which there is a snapshot."""
        return {each.phase for each in list(self.taken)}

    def rows(self) -> list[dict[str, Any]]:
        """Return all snapshots as JSON takes them."""
        return [asdict(each) for each in self.taken]

    def _run(self) -> None:
        while not self._ending.wait(EVERY_S):
            target = self._target
            if not target:
                continue
            try:
                with Client(target, timeout_s=CALL_S, arena=False) as client:
                    while not self._ending.is_set() and target == self._target:
                        self.taken.append(self._snapshot(client.admin.stats()))
                        self._ending.wait(EVERY_S)
            except KVStoreError:
                continue  # it is being stopped, or has been killed

    def _snapshot(self, stats: Stats) -> Snapshot:
        dram, file = stats["dram"], stats["file"]
        caps = (
            (dram["used_bytes"], dram["capacity_bytes"]),
            (file["physical_bytes"], file["capacity_bytes"]),
        )
        return Snapshot(
            round(time.monotonic() - self._began, 2),
            self.phase,
            dram["used_bytes"],
            dram["capacity_bytes"],
            dram["leased_bytes"],
            stats["dirty_bytes"],
            file["physical_bytes"],
            sum(max(0, used - capacity) for used, capacity in caps),
        )
