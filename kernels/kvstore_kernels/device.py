"""What copies need of a device: streams, events, pinned memory, and host memory it can reach.

Three implementations: CUDA by way of torch; the host, where everything is done when it is asked
for; and, in the tests, one that does it as late and in as odd an order as events allow.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# Flags of cudaHostRegister, and errors that it returns.
PORTABLE = 1  # pinned for every context of this process
READ_ONLY = 8  # needed for memory that is mapped read-only
NOT_SUPPORTED = 801
CAPTURE_ERRORS = (900, 901)  # not permitted during a capture; the capture was invalidated
MEMORY_ERRORS = (1, 2, 304)  # invalid value, out of memory, operating system: pages not locked


class RegistrationError(Exception):
    """Host memory could not be pinned for the device; the text says what to do."""


class CaptureUnderWay(RegistrationError):
    """The same, because a CUDA graph was being captured: a later attempt may succeed."""


class Event(Protocol):
    """A point that a stream comes to."""

    def synchronize(self) -> None:
        """Wait until the stream has come to it."""


class Stream(Protocol):
    """Work that the device does in order, beside other streams."""

    def run(self, work: Callable[[], None]) -> None:
        """Put on this stream what `work` puts on torch's current one.

        What it reads and writes must stay as it is until an event recorded later has come."""

    def wait(self, event: Any) -> None:
        """Let what comes next on this stream wait for `event`; the host does not."""

    def record(self) -> Event:
        """Return the point after everything that was put on this stream so far."""


class Device(Protocol):
    """One device. `torch_device` is where its tensors are. `pci_address`: as in sysfs, or ""."""

    torch_device: torch.device
    pci_address: str

    def enter_thread(self) -> None:
        """Make this the calling thread's current device, before it uses it.

        From then on its calls are allowed, and do no harm, while another thread captures a graph.
        Only for threads that capture none themselves."""

    def stream(self) -> Stream: ...

    def mark(self) -> Event:
        """Return the point the caller's own work on the device has come to."""

    def pinned(self, nbytes: int) -> Tensor:
        """Return (nbytes,) uint8 in host memory that the device copies at full speed."""

    def register(self, memory: Tensor, *, read_only: bool) -> None:
        """Let the device reach host memory that others have mapped: pin it.

        read_only: the mapping does not allow writes. Raises RegistrationError. May take a second
        per GiB; does not keep the interpreter lock."""

    def unregister(self, memory: Tensor) -> None:
        """The reverse; before `memory` is unmapped, and when no copy of it is under way."""


def open_device(device: torch.device) -> Device:
    """Return the implementation for tensors on `device`. Raises ValueError for other kinds."""
    if device.type == "cuda":
        return CudaDevice(device)
    if device.type == "cpu":
        return HostDevice()
    raise ValueError(f"layers on {device}; CUDA or the CPU is wanted")


def memory_on(device: torch.device, nbytes: int) -> Tensor:
    """Return (nbytes,) uint8 on `device` that any thread may write to.

    What is made under `torch.inference_mode` can only be written under it."""
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


class CudaDevice:
    """CUDA through torch: no other package is needed."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.torch_device = torch.device("cuda", index)
        self.pci_address = _pci_address(torch.cuda.get_device_properties(index))

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.torch_device)  # a thread begins with the first one
        _relax_capture_mode()

    def stream(self) -> Stream:
        return _CudaStream(self.torch_device)

    def mark(self) -> Event:
        event: Event = torch.cuda.current_stream(self.torch_device).record_event()
        return event

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def register(self, memory: Tensor, *, read_only: bool) -> None:
        code, text = self._pin(memory, PORTABLE | READ_ONLY if read_only else PORTABLE)
        refused = read_only and code == NOT_SUPPORTED
        if refused:  # not needed where the GPU uses the page tables of the host
            code, text = self._pin(memory, PORTABLE)
        if not code:
            return
        failed = f"cudaHostRegister failed with error {code} ({text})"
        if code in CAPTURE_ERRORS:
            raise CaptureUnderWay(f"{failed}: a CUDA graph was being captured; tried again later")
        if refused:
            failed += ": this GPU cannot pin read-only memory, which a sealed arena is"
        elif code == 2 or (code in MEMORY_ERRORS and not read_only):
            failed += (
                ": raise the limit of locked memory (ulimit -l unlimited; docker: --ulimit "
                "memlock=-1) or lower dram.capacity"
            )
        raise RegistrationError(f"{failed}; copies go through a pinned buffer")

    def _pin(self, memory: Tensor, flags: int) -> tuple[int, str]:
        """Return CUDA's answer, 0 for success, and what it means."""
        with torch.cuda.device(self.torch_device):
            runtime: Any = torch.cuda.cudart()
            error = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, flags)
            return int(error), runtime.cudaGetErrorString(error)

    def unregister(self, memory: Tensor) -> None:
        with torch.cuda.device(self.torch_device):
            runtime: Any = torch.cuda.cudart()
            error = runtime.cudaHostUnregister(memory.data_ptr())
        if int(error):
            text = runtime.cudaGetErrorString(error)
            raise RegistrationError(f"cudaHostUnregister failed with error {int(error)} ({text})")


def _relax_capture_mode() -> None:
    """Allow the calling thread what CUDA forbids while any other thread captures a graph.

    Engines capture in the mode "global": an allocation or a registration elsewhere then fails, and
    ends the capture. In this thread nothing is captured, so nothing of it can be missing there.
    """
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED, of this thread alone
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        code = driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    except (OSError, AttributeError) as error:
        logger.warning("capture_mode=unchanged reason=%r", str(error))
        return
    if code:
        logger.warning("capture_mode=unchanged reason='error %d of the CUDA driver'", code)


def _pci_address(properties: Any) -> str:
    """Return where the device sits, or "" where this torch does not tell."""
    try:
        domain, bus = properties.pci_domain_id, properties.pci_bus_id
        return f"{domain:04x}:{bus:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        return ""


class _CudaStream:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def wait(self, event: torch.cuda.Event) -> None:
        self._stream.wait_event(event)

    def record(self) -> torch.cuda.Event:
        return self._stream.record_event()


class HostDevice:
    """Host memory in the place of a device: nothing is ever in flight."""

    torch_device = torch.device("cpu")
    pci_address = ""

    def enter_thread(self) -> None: ...

    def stream(self) -> Stream:
        return _HostStream()

    def mark(self) -> Event:
        return _HostEvent()

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def register(self, memory: Tensor, *, read_only: bool) -> None: ...

    def unregister(self, memory: Tensor) -> None: ...


class _HostStream:
    def run(self, work: Callable[[], None]) -> None:
        work()

    def wait(self, event: Any) -> None: ...

    def record(self) -> Event:
        return _HostEvent()


class _HostEvent:
    def synchronize(self) -> None: ...
