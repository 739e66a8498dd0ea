"""How a setting is declared: its default, its words, and whether it can change live."""

from __future__ import annotations

from dataclasses import field
from typing import Any

LIVE = " Live: it can change while the daemon runs."
MIB = 1 << 20
GIB = 1 << 30


def setting(
    doc: str, default: Any = None, factory: Any = None, *, live: bool = False, key: str = ""
) -> Any:
    """Declare a setting: its default, and the words --print-config prints above it.

    live: it can change while the daemon runs. key: as people write it, if it is not the name.
    """
    metadata = {"doc": doc, "live": live, "key": key}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)
