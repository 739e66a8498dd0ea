"""Restores straight from the daemon's files into the model's memory, past its arena.

It is for records that only the file tier has: the daemon lends their places in its files instead
of bringing them up. Whether that is done is decided once, when this is opened, and logged. What
goes wrong on the way costs a detour by the arena, and stops the use of files for a while.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch

from kvstore import ConfigError, FilePlace, Unavailable
from kvstore.system.numa import cpus_near, pin_this_thread
from kvstore_kernels.device import open_device
from kvstore_kernels.file_lane import FileLane, FilePart, FileTransfer
from kvstore_kernels.packing import Leaves, kernels_work, open_paged
from kvstore_kernels.storage import FileReader
from kvstore_transformers.cache import Pages

logger = logging.getLogger(__name__)

DirectMode = Literal["auto", "always", "never"]
RETRY_S = 60.0
"""How long no file is read after one could not be; after a load that was slower than computing,
too."""


class DirectFailed(Unavailable):
    """Files could not be read, for whatever reason: what is in them is in the arena, or can be."""


class FilledFromFiles(NamedTuple):
    """Pages of which some blocks, at least one, come from places in files."""

    pages: Pages
    blocks: Sequence[int]
    places: Sequence[FilePlace]


class DirectStorage:
    """The files of one daemon and the memory of one device. Loads come one after the other.

    how: the way that bytes take: "gds", "compat" or "host"; "off": none.
    read_nbytes: restored so far. failures: loads that had to take the arena's way in the middle.
    """

    def __init__(
        self,
        device: torch.device,
        record_nbytes_max: int,
        mode: DirectMode,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """mode: "auto": where GPUDirect Storage works, and the GPU sums up what it has got;
        "always": in whatever way there is; "never". Raises ConfigError for another."""
        self.how = "off"
        self.failures = 0
        self._now = now
        self._off_until = 0.0
        self._s_per_byte = 0.0
        self._lane: FileLane | None = None
        if mode not in ("auto", "always", "never"):
            raise ConfigError(f"direct_storage={mode!r}: auto, always and never are known")
        if mode == "always" or (mode == "auto" and device.type == "cuda"):
            self._open(device, record_nbytes_max, mode)
        logger.info("direct_storage=%s mode=%s device=%s", self.how, mode, device)

    def _open(self, device: torch.device, record_nbytes_max: int, mode: DirectMode) -> None:
        reader = FileReader(device)
        if mode == "auto" and not (reader.how == "gds" and kernels_work(device)):
            return
        opened = open_device(device)
        near = partial(pin_this_thread, cpus_near(opened.pci_address))
        self._lane = FileLane(opened, reader, record_nbytes_max, on_thread=near)
        self.how = reader.how

    @property
    def read_nbytes(self) -> int:
        return self._lane.read_nbytes if self._lane is not None else 0

    def is_wanted(self, nbytes_per_block: int, recompute_s_per_block: float) -> bool:
        """Say whether to ask for places now: not while files fail, nor where recomputing (0: not
        known) has been faster than reading them was."""
        if self._lane is None or self._lane.stuck or self._now() < self._off_until:
            return False
        if recompute_s_per_block and nbytes_per_block * self._s_per_byte > recompute_s_per_block:
            self._s_per_byte = 0.0  # one load is tried again, later
            self._off_until = self._now() + RETRY_S
            logger.info("direct_storage=slower_than_recompute off_s=%.0f", RETRY_S)
            return False
        return True

    def write(
        self, filled: Sequence[FilledFromFiles], after: object, deadline: float
    ) -> Generator[Leaves]:
        """Read records into pages, in order, once the device has come to `after`; yields, when
        pages are done, what the records' leaves sum up to, as they came.

        deadline: a time.monotonic(). Raises DirectFailed."""
        assert self._lane is not None
        try:
            transfers = [
                FileTransfer(
                    open_paged([pages]),
                    [(0, block) for block in blocks],
                    [FilePart(*place) for place in places],
                )
                for pages, blocks, places in filled
            ]
            yield from self._lane.write(transfers, after, deadline)
        except Exception as error:  # whatever it is, the arena's way is another one
            self.failures += 1
            self.distrust(repr(error))
            raise DirectFailed(f"files cannot be read: {error!r}") from error

    def distrust(self, reason: str) -> None:
        """Read no files for a while."""
        self._off_until = self._now() + RETRY_S
        logger.warning("direct_storage=failed off_s=%.0f reason=%s", RETRY_S, reason)

    def note_pace(self, nbytes: int, seconds: float) -> None:
        """Learn how long a load from files alone took."""
        if nbytes:
            before = self._s_per_byte or seconds / nbytes
            self._s_per_byte = before + (seconds / nbytes - before) / 8

    def close(self) -> None:
        if self._lane is not None:
            self._lane.close()
