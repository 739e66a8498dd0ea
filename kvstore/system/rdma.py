"""The RDMA devices of this machine."""

from __future__ import annotations

from pathlib import Path

DEVICES = Path("/sys/class/infiniband")
_ACTIVE = "4:"  # as the kernel writes it: "4: ACTIVE"


def devices_up(root: Path = DEVICES) -> list[str]:
    """Return the names of the devices, InfiniBand or RoCE, with a port that is up."""
    found = set()
    for state in root.glob("*/ports/*/state"):
        try:
            if state.read_text().startswith(_ACTIVE):
                found.add(state.parents[2].name)
        except OSError:  # it was removed meanwhile
            continue
    return sorted(found)
