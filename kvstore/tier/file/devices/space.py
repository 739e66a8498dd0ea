"""The room on all devices in use, and the caps that are the same for each."""

from __future__ import annotations

from kvstore.model.errors import ConfigError
from kvstore.tier.file.devices.admission import Admission
from kvstore.tier.file.devices.device import Placed
from kvstore.tier.file.space import Space


class DeviceSpace:
    """caps: capacity_bytes and free_bytes_min of each directory.

    frame_nbytes_max: the largest frame that an empty device takes.
    """

    def __init__(
        self,
        admission: Admission,
        *,
        capacity_bytes: int,
        free_bytes_min: int,
        segment_nbytes: int,
    ) -> None:
        self.caps = (capacity_bytes, free_bytes_min)
        self.frame_nbytes_max = Space(capacity_bytes, segment_nbytes).frame_nbytes_max
        self._admission = admission
        self._segment_nbytes = segment_nbytes

    @property
    def capacity_bytes(self) -> int:
        """The cap of all directories together."""
        capacity_bytes, _ = self.caps
        return len(self._admission.devices) * capacity_bytes

    @property
    def available_nbytes(self) -> int:
        """What frames may still take on the device with most room for them."""
        writable = self._admission.writable
        return max((mount.tier.space.available_nbytes for mount in writable), default=0)

    @property
    def freeing_nbytes(self) -> int:
        """Freed bytes that become available without more frees."""
        return sum(mount.tier.space.freeing_nbytes for mount in self._admission.writable)

    def frees_room(self, place: Placed) -> bool:
        """Say whether freeing a frame makes room for another."""
        return place.mount in self._admission.writable

    def check_capacity(self, capacity_bytes: int) -> None:
        """Raise ConfigError on a cap below which frames that fit now would not."""
        frame_nbytes = Space(capacity_bytes, self._segment_nbytes).frame_nbytes_max
        if frame_nbytes < self.frame_nbytes_max:
            raise ConfigError(
                f"file.capacity={capacity_bytes} is too small for frames of "
                f"{self.frame_nbytes_max} bytes, which fit now: it can go so low at a restart"
            )

    def set_caps(self, capacity_bytes: int, free_bytes_min: int) -> None:
        """Change the caps of each directory, those that are out of use included.

        Frames over them are for the caller to evict.
        """
        self.caps = (capacity_bytes, free_bytes_min)
        for mount in self._admission.mounts:
            mount.tier.set_caps(capacity_bytes, free_bytes_min)
