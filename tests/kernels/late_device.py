"""A device on the processor that does everything as late as events allow, in any order they allow.

Work is kept until somebody waits for an event; then streams advance one piece at a time, by the
dice, until it has come. A wait that was forgotten shows as wrong bytes for some seed.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from kvstore_kernels.device import RegistrationError


class LateEvent:
    def __init__(self, device: LateDevice) -> None:
        self.come = False
        self._device = device

    def synchronize(self) -> None:
        self._device.advance_until(self)


class LateStream:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.queue: deque[Callable[[], None] | LateEvent | tuple[LateEvent]] = deque()

    def run(self, work: Callable[[], None]) -> None:
        self.queue.append(work)

    def wait(self, event: LateEvent) -> None:
        self.queue.append((event,))

    def record(self) -> LateEvent:
        event = LateEvent(self._device)
        self.queue.append(event)
        return event

    @property
    def stuck(self) -> bool:
        return not self.queue or (isinstance(self.queue[0], tuple) and not self.queue[0][0].come)

    def step(self) -> None:
        first = self.queue.popleft()
        if isinstance(first, LateEvent):
            first.come = True
        elif not isinstance(first, tuple):
            first()


class LateDevice:
    """engine: the stream of the caller's own work. registers: False for a low limit of memory."""

    torch_device = torch.device("cpu")
    pci_address = ""

    def __init__(self, seed: int, *, registers: bool = True) -> None:
        self._random = random.Random(seed)
        self._streams: list[LateStream] = []
        self._registers = registers
        self.engine = self.stream()
        self.registered: set[int] = set()

    @property
    def idle(self) -> bool:
        return not any(stream.queue for stream in self._streams)

    def enter_thread(self) -> None: ...

    def stream(self) -> LateStream:
        self._streams.append(LateStream(self))
        return self._streams[-1]

    def mark(self) -> LateEvent:
        return self.engine.record()

    def pinned(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), 0xAB, dtype=torch.uint8)

    def register(self, memory: Tensor, *, read_only: bool) -> None:
        if not self._registers:
            raise RegistrationError("not so much: raise the limit of locked memory")
        self.registered.add(memory.data_ptr())

    def unregister(self, memory: Tensor) -> None:
        self.registered.remove(memory.data_ptr())

    def advance_until(self, event: LateEvent) -> None:
        while not event.come:
            ready = [stream for stream in self._streams if not stream.stuck]
            assert ready, "an event that never comes"
            self._random.choice(ready).step()
