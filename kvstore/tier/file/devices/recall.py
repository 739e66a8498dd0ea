"""The runs that were found on all devices in use, and are not indexed yet."""

from __future__ import annotations

from collections.abc import Sequence, Set

from kvstore.model.block import BlockKey, NamespaceId
from kvstore.tier.file.devices.admission import Admission
from kvstore.tier.file.found import FrameRecord


class DeviceRecall:
    """As `Recall` of one directory; the records are at places of devices."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    @property
    def unrecalled_runs(self) -> int:
        """How many of the runs found are not recalled yet."""
        return sum(mount.tier.recall.unrecalled_runs for mount in self._admission.mounts)

    @property
    def found_namespaces(self) -> Set[NamespaceId]:
        """The namespaces of all runs found, recalled or not."""
        mounts = self._admission.mounts
        return frozenset().union(*(mount.tier.recall.found_namespaces for mount in mounts))

    def take(self, keys: Sequence[BlockKey]) -> list[FrameRecord]:
        """Return the runs left that hold any of `keys`, on whichever device, each once ever.

        They are the caller's to index, and to free. Costs next to nothing when all are recalled.
        """
        mounts = self._admission.mounts
        return [each for mount in mounts for each in mount.placed(mount.tier.recall.take(keys))]

    def take_oldest(self, count: int) -> list[FrameRecord]:
        """Return up to `count` runs of the device that has the oldest one, by age: see `take`.

        Runs of one device come exactly by age, runs of different devices approximately.
        """
        left = [mount for mount in self._admission.mounts if mount.tier.recall.unrecalled_runs]
        if not left:
            return []
        mount = min(left, key=lambda mount: mount.tier.recall.oldest_sequence)
        return mount.placed(mount.tier.recall.take_oldest(count))
