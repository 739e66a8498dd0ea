"""Which host memory the device reaches by itself: extents of the arena, registered as they come.

Pinning a GiB takes a good part of a second, so a thread does it; until then, and for memory that
cannot be pinned, copies go through a buffer that is. The thread looks once a second which extents
there are, so that it learns of new ones, and lets go of those of a daemon that is gone.

A mapping must not end while it is registered: its pages stay pinned, and DMA to whatever is mapped
at the same addresses later would go to the old pages, unnoticed. So a view is kept of every
extent, and given up after it was unregistered, when no copy uses it any more.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter

from torch import Tensor

from kvstore_kernels.device import Device, RegistrationError
from kvstore_kernels.views import tensor_of

logger = logging.getLogger(__name__)

LOOK_S = 1.0

Extents = Callable[[], Mapping[int, memoryview]]
Place = tuple[Tensor, int]
"""Host memory that the device reaches, and an offset in it."""


@dataclass(slots=True, eq=False)
class _Region:
    """One extent. `bytes_` is None once it was given up; `users` are copies under way."""

    view: memoryview
    bytes_: Tensor | None
    begin: int
    end: int
    users: int = 0


class Registration:
    """Keeps extents registered with one device, from `start` to `close`; any thread may copy.

    failure: why the last registration failed, or "". waiting_nbytes: not registered (yet).
    """

    def __init__(self, device: Device, extents: Extents, on_thread: Callable[[], object]) -> None:
        """extents: returns those mapped now, by id, the same view of one each time.
        on_thread: called in the thread first, to pin it, say."""
        self.failure = ""
        self.waiting_nbytes = 0
        self._device = device
        self._extents = extents
        self._on_thread = on_thread
        self._changed = threading.Condition()
        self._regions: list[_Region] = []
        self._failed: list[memoryview] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvstore-register", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, wait_s: float) -> None:
        """Unregister everything; copies under way end first. No copies after it."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout=wait_s)

    @property
    def registered_nbytes(self) -> int:
        with self._changed:
            return sum(region.end - region.begin for region in self._regions)

    @contextmanager
    def held(self, records: Sequence[Tensor]) -> Iterator[list[Place | None]]:
        """Yield where in a registered extent each record is, or None; they stay registered."""
        with self._changed:
            regions = [self._region_of(record) for record in records]
            used = {id(region): region for region in regions if region is not None}
            for region in used.values():
                region.users += 1
        try:
            yield [
                None if region is None else _place(region, record)
                for region, record in zip(regions, records, strict=True)
            ]
        finally:
            with self._changed:
                for region in used.values():
                    region.users -= 1
                self._changed.notify_all()

    def _region_of(self, record: Tensor) -> _Region | None:
        begin, end = record.data_ptr(), record.data_ptr() + record.nbytes
        index = bisect_right(self._regions, begin, key=attrgetter("begin")) - 1
        region = self._regions[index] if index >= 0 else None
        return region if region is not None and end <= region.end else None

    # The thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        self._device.enter_thread()
        self._on_thread()
        while not self._closing:
            self._look()
            with self._changed:
                self._changed.wait_for(lambda: self._closing, LOOK_S)
        self._leave(list(self._regions))

    def _look(self) -> None:
        there = list(self._extents().values())
        self._leave([r for r in self._regions if not any(r.view is view for view in there)])
        self._failed = [view for view in self._failed if any(view is each for each in there)]
        known = [region.view for region in self._regions] + self._failed
        new = [view for view in there if not any(view is each for each in known)]
        self.waiting_nbytes = sum(map(len, new)) + sum(map(len, self._failed))
        for view in new:
            if self._closing:
                return
            self._add(view)

    def _add(self, view: memoryview) -> None:
        memory = tensor_of(view)
        try:
            self._device.register(memory)
        except RegistrationError as error:
            self._failed.append(view)  # not tried again: it would fail again
            if not self.failure:
                logger.warning("register=failed reason=%r", str(error))
            self.failure = str(error)
            return
        region = _Region(view, memory, memory.data_ptr(), memory.data_ptr() + memory.nbytes)
        with self._changed:
            insort(self._regions, region, key=attrgetter("begin"))
        self.waiting_nbytes -= memory.nbytes
        logger.info("register=done nbytes=%d all=%d", memory.nbytes, self.registered_nbytes)

    def _leave(self, regions: Sequence[_Region]) -> None:
        """Unregister regions whose copies have ended; they are not lent any more."""
        if not regions:
            return
        with self._changed:
            self._regions = [each for each in self._regions if each not in regions]
            self._changed.wait_for(lambda: not any(region.users for region in regions))
        for region in regions:
            assert region.bytes_ is not None
            try:
                self._device.unregister(region.bytes_)
            except RegistrationError as error:
                logger.warning("unregister=failed reason=%r", str(error))
            region.bytes_ = None


def _place(region: _Region, record: Tensor) -> Place:
    assert region.bytes_ is not None
    return region.bytes_, record.data_ptr() - region.begin
