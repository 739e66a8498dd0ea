"""Which host memory the device reaches by itself: extents of the arena, registered as they come.

Pinning a GiB takes a good part of a second, so a thread does it; until then, and for memory that
cannot be pinned, copies go through a buffer that is. The thread looks once a second which extents
there are, so that it learns of new ones, and lets go of those of a daemon that is gone.

A mapping must not end while it is registered: its pages stay pinned, and DMA to whatever is mapped
at the same addresses later would go to the old pages, unnoticed. So a view is kept of every
extent, and given up after it was unregistered, when no copy uses it any more. If it cannot be
unregistered, it stays mapped.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter

from torch import Tensor

from kvstore_kernels.device import CaptureUnderWay, Device, RegistrationError
from kvstore_kernels.views import tensor_of

logger = logging.getLogger(__name__)

LOOK_S = 1.0
POLL_S = 0.01
TRIES_MAX = 10
PAUSE_S_MAX = 60.0
"""Between attempts at one extent while graphs are captured; pauses double from LOOK_S on."""
REASONS_MAX = 32
"""That are logged, each once."""

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


@dataclass(slots=True, eq=False)
class _Waiting:
    """An extent that is not registered. next_at: a time.monotonic(); inf: it would fail again."""

    view: memoryview
    tries: int = 0
    next_at: float = 0.0

    def put_off(self) -> None:
        self.tries += 1
        pause_s = min(LOOK_S * 2**self.tries, PAUSE_S_MAX)
        self.next_at = time.monotonic() + pause_s if self.tries < TRIES_MAX else math.inf


class Registration:
    """Keeps extents registered with one device, from `start` to `close`; any thread may copy.

    waiting_nbytes: not registered (yet). failure: why, as far as something failed, or "".
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
        self._waiting: list[_Waiting] = []
        self._stuck: list[_Region] = []  # which could not be unregistered
        self._logged: set[str] = set()
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

    def wait(self, timeout_s: float) -> bool:
        """Wait until extents are there, and every one of them is registered. False: not yet, or one
        cannot be, and `failure` says why."""
        deadline = time.monotonic() + timeout_s
        while not self._reaches_all():
            if self.failure or time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def _reaches_all(self) -> bool:
        """Whether the extents that are there, and not those of a daemon before, are registered."""
        there = list(self._extents().values())
        with self._changed:
            views = [region.view for region in self._regions]
        return bool(there) and all(any(view is each for each in views) for view in there)

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
            try:
                self._look()
            except Exception as error:  # the next look may succeed
                self._fail(f"looking for extents failed: {error!r}", exc_info=True)
            with self._changed:
                self._changed.wait_for(lambda: self._closing, LOOK_S)
        self._leave(list(self._regions))

    def _look(self) -> None:
        there = list(self._extents().values())
        self._leave([r for r in self._regions if not any(r.view is view for view in there)])
        self._waiting = [w for w in self._waiting if any(w.view is view for view in there)]
        known = [r.view for r in self._regions] + [w.view for w in self._waiting]
        self._waiting += [
            _Waiting(view) for view in there if not any(view is each for each in known)
        ]
        self.waiting_nbytes = sum(len(each.view) for each in self._waiting)
        now = time.monotonic()
        for each in [each for each in self._waiting if each.next_at <= now]:
            if self._closing:
                return
            self._try(each)
        if not self._waiting:
            self.failure = ""

    def _try(self, extent: _Waiting) -> None:
        memory = tensor_of(extent.view)
        try:
            self._device.register(memory, read_only=extent.view.readonly)
        except CaptureUnderWay as error:
            extent.put_off()
            self._fail(str(error))
            return
        except RegistrationError as error:
            extent.next_at = math.inf
            self._fail(str(error))
            return
        region = _Region(extent.view, memory, memory.data_ptr(), memory.data_ptr() + memory.nbytes)
        self._waiting.remove(extent)
        with self._changed:
            insort(self._regions, region, key=attrgetter("begin"))
        self.waiting_nbytes -= memory.nbytes
        logger.info("register=done nbytes=%d all=%d", memory.nbytes, self.registered_nbytes)

    def _fail(self, reason: str, *, exc_info: bool = False) -> None:
        """Note why memory waits; a reason is logged once."""
        if reason not in self._logged and len(self._logged) < REASONS_MAX:
            self._logged.add(reason)
            logger.warning("register=failed reason=%r", reason, exc_info=exc_info)
        self.failure = reason

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
                self._stuck.append(region)
            else:
                region.bytes_ = None


def _place(region: _Region, record: Tensor) -> Place:
    assert region.bytes_ is not None
    return region.bytes_, record.data_ptr() - region.begin
