"""How long each call to a disk has taken so far: this tells a disk that hangs from a slow queue."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import get_ident
from typing import Any, cast

from kvstore.tier.file.disk import Disk


class Watch:
    """Times single calls, not jobs: a recovery may read for minutes, an fdatasync must not.

    disk: use this one; it passes every call on to the one given.
    """

    def __init__(self, disk: Disk) -> None:
        self._began: dict[int, float] = {}  # by thread
        self.disk = cast(Disk, _Timed(disk, self._began))

    @property
    def oldest_s(self) -> float:
        """For how long the oldest call has been under way; 0 if none is."""
        began = list(self._began.values())
        return time.monotonic() - min(began) if began else 0.0


class _Timed:
    def __init__(self, disk: Disk, began: dict[int, float]) -> None:
        self._disk = disk
        self._began = began

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._disk, name)

        def timed(*args: Any, **options: Any) -> Any:
            thread = get_ident()
            self._began[thread] = time.monotonic()
            try:
                return call(*args, **options)
            finally:
                del self._began[thread]

        return timed
