"""Which host memory a device reaches: also read-only memory, and while graphs are captured."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from kvstore.system.shared_mapping import SharedMapping  # noqa: E402
from kvstore.testing.wait import until  # noqa: E402
from kvstore_kernels import device as devices  # noqa: E402
from kvstore_kernels import registration  # noqa: E402
from kvstore_kernels.device import (  # noqa: E402
    CaptureUnderWay,
    CudaDevice,
    HostDevice,
    RegistrationError,
    open_device,
)
from kvstore_kernels.lane import Lane, Transfer  # noqa: E402
from kvstore_kernels.packing import open_paged  # noqa: E402
from kvstore_kernels.reference import gather_reference  # noqa: E402
from kvstore_kernels.registration import Registration  # noqa: E402
from kvstore_kernels.views import tensor_of  # noqa: E402
from tests.kernels.late_device import LateDevice  # noqa: E402
from tests.kernels.test_lane import BATCH, SIZES, groups  # noqa: E402
from tests.kernels.test_paged import same_bytes  # noqa: E402

NBYTES = 1 << 16
F_SEAL_FUTURE_WRITE = 0x10
TEXTS = {0: "no error", 1: "invalid argument", 2: "out of memory", 304: "OS call failed",
         712: "already mapped", 801: "operation not supported", 900: "stream is capturing",
         901: "capture invalidated"}  # fmt: skip

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def look_often(monkeypatch):
    monkeypatch.setattr(registration, "LOOK_S", 0.01)


def extent() -> memoryview:
    return memoryview(mmap.mmap(-1, NBYTES))


def sealed_extent(content: bytes = b"") -> memoryview:
    """Return memory that only its writer may write to, as a client maps it."""
    fd = os.memfd_create("extent", os.MFD_ALLOW_SEALING)
    try:
        os.truncate(fd, NBYTES)
        os.pwrite(fd, content, 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE)
        return SharedMapping(fd, NBYTES, writable=False).view()
    finally:
        os.close(fd)


@contextlib.contextmanager
def registering(device, extents):
    """extents: a mapping of them, or what returns one."""
    look = extents if callable(extents) else lambda: extents
    found = Registration(device, look, lambda: None)
    found.start()
    try:
        yield found
    finally:
        found.close(10)


class Refusing(LateDevice):
    """Answers registrations with errors, one after the other; then with success."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__(0)
        self.errors = list(errors)
        self.tries: list[float] = []

    def register(self, memory, *, read_only):
        self.tries.append(time.monotonic())
        if self.errors:
            raise self.errors.pop(0)
        super().register(memory, read_only=read_only)


def test_an_extent_refused_during_a_capture_is_registered_later(caplog):
    device = Refusing(*[CaptureUnderWay("a graph is captured")] * 3)
    with registering(device, {1: extent()}) as registered:
        until(lambda: registered.registered_nbytes == NBYTES, 10)
        until(lambda: not registered.failure, 10)
    assert caplog.text.count("register=failed") == 1
    pauses = [after - before for before, after in pairwise(device.tries)]
    assert all(p >= wanted for p, wanted in zip(pauses, (0.02, 0.04, 0.08), strict=True)), pauses


def test_attempts_during_captures_come_to_an_end(monkeypatch):
    monkeypatch.setattr(registration, "LOOK_S", 0.001)
    monkeypatch.setattr(registration, "TRIES_MAX", 4)
    device, looks = Refusing(*[CaptureUnderWay("a graph is captured")] * 50), []
    extents = {1: extent()}
    with registering(device, lambda: looks.append(0) or extents) as registered:
        until(lambda: len(device.tries) == 4, 10)
        seen = len(looks)
        until(lambda: len(looks) > seen + 40, 10)
        assert len(device.tries) == 4
        assert registered.waiting_nbytes == NBYTES
        assert registered.failure == "a graph is captured"


def test_each_new_reason_is_logged_once(caplog):
    device = Refusing(*map(RegistrationError, ["one", "one", "two", "one"]))
    with registering(device, {number: extent() for number in range(5)}) as registered:
        until(lambda: registered.registered_nbytes == NBYTES, 10)
        assert registered.waiting_nbytes == 4 * NBYTES
        assert registered.failure == "one"
    assert caplog.text.count("register=failed") == 2


def test_extents_that_cannot_be_looked_up_once_are_registered_later(caplog):
    asked, extents = [], {1: extent()}

    def look():
        asked.append(time.monotonic())
        if len(asked) in (1, 4):
            raise AttributeError("'NoneType' object has no attribute 'extents'")
        return extents

    with registering(LateDevice(0), look) as registered:
        until(lambda: registered.registered_nbytes == NBYTES, 10)
        until(lambda: len(asked) > 4, 10)
        extents[2] = extent()
        until(lambda: registered.registered_nbytes == 2 * NBYTES, 10)
        until(lambda: not registered.failure, 10)
        pauses = [b - a for a, b in pairwise(asked)]
        assert min(pauses) >= 0.01
    assert caplog.text.count("register=failed") == 1


def test_an_extent_that_cannot_be_unregistered_stays_mapped(caplog):
    class Keeping(LateDevice):
        def unregister(self, memory):
            raise RegistrationError("a graph is captured")

    extents = {1: extent()}
    mapped = extents[1].obj
    with registering(Keeping(0), extents) as registered:
        until(lambda: registered.registered_nbytes == NBYTES, 10)
        extents.clear()
        until(lambda: "unregister=failed" in caplog.text, 10)
        with pytest.raises(BufferError):
            mapped.close()


# CUDA's answers -----------------------------------------------------------------------------------


class Answer(int):
    def __str__(self) -> str:
        return "cudaError.???"


class Runtime:
    """CUDA's runtime: wants flag 8 for memory that is mapped read-only. `answers` go first."""

    def __init__(self, *answers: int, unregisters: int = 0) -> None:
        self.flags: list[int] = []
        self._answers = list(answers)
        self._unregisters = unregisters

    def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802
        self.flags.append(flags)
        if self._answers:
            return Answer(self._answers.pop(0))
        return Answer(0 if flags & 8 or is_writable(address) else 1)

    def cudaHostUnregister(self, address):  # noqa: N802
        return Answer(self._unregisters)

    def cudaGetErrorString(self, error):  # noqa: N802
        return TEXTS[int(error)]


def is_writable(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, access, *_ = line.split()
            begin, end = (int(part, 16) for part in span.split("-"))
            if begin <= address < end:
                return "w" in access
    raise AssertionError("not mapped")


@pytest.fixture
def cuda(monkeypatch):
    """Return what makes a CUDA device of a runtime."""

    def make(runtime) -> CudaDevice:
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace())
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        return CudaDevice(torch.device("cuda"))

    return make


def test_read_only_memory_is_registered_as_such(cuda):
    runtime = Runtime()
    with registering(cuda(runtime), {1: sealed_extent(), 2: extent()}) as registered:
        until(lambda: registered.failure or registered.registered_nbytes == 2 * NBYTES, 10)
        assert not registered.failure
    assert runtime.flags == [1 | 8, 1]


def test_where_read_only_memory_cannot_be_registered_that_is_said_once(cuda, caplog):
    runtime = Runtime(801, 1, 801, 1)
    with registering(cuda(runtime), {1: sealed_extent(), 2: sealed_extent()}) as registered:
        until(lambda: len(runtime.flags) == 4, 10)
        until(lambda: registered.failure, 10)
        assert "this GPU cannot pin read-only memory" in registered.failure
        assert "sealed arena" in registered.failure
        assert "ulimit" not in registered.failure
    assert runtime.flags == [1 | 8, 1] * 2
    assert caplog.text.count("register=failed") == 1


def test_the_flag_is_left_out_where_the_gpu_needs_none(cuda):
    runtime = Runtime(801, 0)
    cuda(runtime).register(tensor_of(sealed_extent()), read_only=True)
    assert runtime.flags == [1 | 8, 1]


@pytest.mark.parametrize(
    ("code", "read_only", "advised"),
    [
        (1, False, True),
        (1, True, False),
        (2, False, True),
        (2, True, True),
        (304, False, True),
        (712, False, False),
    ],
)
def test_a_failure_has_its_reason_and_advice_that_fits(cuda, code, read_only, advised):
    memory = tensor_of(extent())
    with pytest.raises(RegistrationError) as raised:
        cuda(Runtime(code)).register(memory, read_only=read_only)
    assert not isinstance(raised.value, CaptureUnderWay)
    assert f"error {code} ({TEXTS[code]})" in str(raised.value)
    assert ("ulimit" in str(raised.value)) == advised


@pytest.mark.parametrize("answers", [(900,), (901,), (801, 900)])
def test_a_capture_is_told_from_what_would_fail_again(cuda, answers):
    with pytest.raises(CaptureUnderWay, match="captured"):
        cuda(Runtime(*answers)).register(tensor_of(sealed_extent()), read_only=True)
    with pytest.raises(RegistrationError, match=r"error 900 \(stream is capturing\)"):
        cuda(Runtime(unregisters=900)).unregister(tensor_of(extent()))


@pytest.mark.parametrize("code", [0, 3, None])
def test_threads_that_enter_do_not_mind_captures_of_others(cuda, monkeypatch, caplog, code):
    modes = []

    class Driver:
        def cuThreadExchangeStreamCaptureMode(self, mode):  # noqa: N802
            modes.append(mode._obj.value)
            return code

    def load(name):
        if code is None:
            raise OSError(f"{name}: no such file")
        return Driver()

    monkeypatch.setattr(devices.ctypes, "CDLL", load)
    cuda(Runtime()).enter_thread()
    assert modes == ([] if code is None else [2])
    assert ("capture_mode=unchanged" in caplog.text) == (code != 0)
    HostDevice().enter_thread()
    assert len(modes) <= 1


# On a GPU -----------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_extents_come_and_go_while_a_graph_is_captured(caplog):
    known: dict[int, memoryview] = {}
    source = torch.ones(1024, device="cuda")
    target = torch.zeros_like(source)
    torch.add(source, 1, out=target).mul_(2)  # loads the kernels
    target.zero_()
    with registering(open_device(torch.device("cuda")), known) as registered:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # in the mode "global", as engines capture
            torch.add(source, 1, out=target)
            known.update({1: extent(), 2: extent()})
            until(lambda: registered.failure or registered.registered_nbytes == 2 * NBYTES, 20)
            failure = registered.failure
            registered.close(20)  # unregisters them
            target.mul_(2)
    assert not failure
    graph.replay()
    torch.cuda.synchronize()
    assert bool((target == 4).all())
    assert "=failed" not in caplog.text
    assert "capture_mode=unchanged" not in caplog.text


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_read_only_memory_is_registered_or_the_reason_is_given(capsys):
    kv, empty = groups("cuda"), [[torch.zeros_like(x) for x in g] for g in groups("cuda")]
    records = [bytes(gather_reference(kv[g], [block])[0].cpu().numpy()) for g, block in BATCH]
    sealed = sealed_extent(b"".join(records))
    assert sealed.readonly
    views, at = [], 0
    for group, _ in BATCH:
        views.append(sealed[at : at + SIZES[group]])
        at += SIZES[group]
    device = open_device(torch.device("cuda"))
    with registering(device, {1: sealed}) as registered:
        until(lambda: registered.failure or registered.registered_nbytes, 20)
        with capsys.disabled():
            print(f"\na sealed extent: {registered.failure or 'registered'}")
        if registered.failure:
            assert registered.failure.startswith("cudaHostRegister failed with error")
        lane = Lane(device, max(SIZES), registered)
        list(lane.write([Transfer(open_paged(empty), BATCH, views)], device.mark()))
        for group, block in BATCH:
            for old, new in zip(kv[group], empty[group], strict=True):
                assert same_bytes(old[block], new[block])
        assert bool(lane.bounced_nbytes) == bool(registered.failure)


def test_one_may_wait_until_all_extents_are_registered():
    extents = {1: extent()}
    with registering(LateDevice(0), extents) as registered:
        assert registered.wait(10)
        extents[2] = extent()
        assert registered.wait(10)
        assert registered.registered_nbytes == 2 * NBYTES
        extents.clear()
        assert not registered.wait(0.05)  # nothing is mapped any more
    with registering(LateDevice(0, registers=False), {1: extent()}) as registered:
        asked_at = time.monotonic()
        assert not registered.wait(60)
        assert time.monotonic() - asked_at < 30
        assert "locked memory" in registered.failure
    waiting = Registration(LateDevice(0), lambda: {1: extent()}, lambda: None)  # never started
    assert not waiting.wait(0.05)


def test_extents_of_a_daemon_before_do_not_count(monkeypatch):
    monkeypatch.setattr(registration, "LOOK_S", 60)  # it looks once
    extents = {1: extent()}
    with registering(LateDevice(0), extents) as registered:
        assert registered.wait(10)
        extents[1] = extent()
        assert registered.registered_nbytes == NBYTES
        assert not registered.wait(0.05)
