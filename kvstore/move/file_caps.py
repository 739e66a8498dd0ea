"""The caps of the file tier, as far as they concern the rest of the node."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.model.block import PAGE_NBYTES
from kvstore.model.outcome import Reason
from kvstore.tier.file import Devices


class FileCaps:
    """Caps of at most one file tier. wake: called when something has to be evicted soon."""

    def __init__(self, file: Devices | None, wake: Callable[[], None]) -> None:
        self._file = file
        self._wake = wake
        self._gives_back = False  # to other tenants: the cap was not lowered by settings

    @property
    def record_nbytes_max(self) -> int | None:
        """The largest record that can be written behind; None: there is no file tier."""
        return self._file.space.frame_nbytes_max - PAGE_NBYTES if self._file is not None else None

    @property
    def capacity_bytes(self) -> int:
        """The cap of the file tier; 0: there is none."""
        return self._file.space.capacity_bytes if self._file is not None else 0

    def check(self, capacity_bytes: int) -> None:
        """Raise ConfigError on a cap that the file tier cannot go to while it runs."""
        if self._file is not None:
            self._file.space.check_capacity(capacity_bytes)

    def set(self, capacity_bytes: int, free_bytes_min: int) -> None:
        """Change the caps of each directory; what is over them is evicted soon."""
        if self._file is not None:
            if capacity_bytes != self._file.space.caps[0]:
                self._gives_back = False
            self._file.space.set_caps(capacity_bytes, free_bytes_min)
            self._wake()

    @property
    def used_bytes(self) -> int:
        """Physical bytes, over all directories."""
        return self._file.frames.physical_nbytes if self._file is not None else 0

    def set_all(self, capacity_bytes: int) -> None:
        """Change the cap over all directories, between tenants: as much in each."""
        if self._file is not None:
            _, free_bytes_min = self._file.space.caps
            self.set(capacity_bytes // len(self._file.devices), free_bytes_min)
            self._gives_back = True

    @property
    def reason(self) -> Reason | None:
        """Why something is over the caps, if it is because a tenant gives room back."""
        over = self.used_bytes > self.capacity_bytes
        return Reason.OVER_SHARE if self._gives_back and over else None

    def over(self) -> str:
        """Say by how much the file tier is over its cap, "" if it is not."""
        excess = 0
        if self._file is not None:
            excess = self._file.frames.physical_nbytes - self._file.space.capacity_bytes
        return f"the file tier is {excess} bytes over file.capacity" if excess > 0 else ""
