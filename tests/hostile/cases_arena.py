"""What whoever maps an arena can do to what others put there."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from kvstore import BlockKey, Client, KVStoreError, Part, Span, checksum
from kvstore.testing.daemon import Daemon
from kvstore.testing.holes import allow_holes, give_back, punch, shared_extents
from kvstore.testing.samples import sample_keys, sample_namespace
from kvstore.testing.wait import until
from tests.hostile.forgeries import SPACE, fill, poisoned, served
from tests.hostile.scene import SPACE as SMALL
from tests.hostile.scene import UIDS, Scene, client_of, put, target_of, wrong_among

LEASE_S = 1.0
BIG = sample_namespace("big", 1 << 20)
FILLED_MIN = 48 << 20  # of the 64 MiB that acme is guaranteed
WRITABLE = mmap.PROT_READ | mmap.PROT_WRITE
KEEPER = """
import sys
from kvstore import Client
with Client(sys.argv[1], daemon_uid=int(sys.argv[2])) as client:
    client.connect()
    kept = client.extents()
    print(len(kept), flush=True)
    for line in sys.stdin:
        gone = [view for id, view in kept.items() if id not in client.extents()]
        secret, seen = bytes.fromhex(line), 0
        for view in gone:
            for at in range(0, len(view), 4096):
                seen += bytes(view[at : at + len(secret)]) == secret
                view[at : at + 8] = b"POISON! "
        print(sum(map(len, gone)), seen, flush=True)
"""
STOPPED = """
import sys
from kvstore import Client, Part, Span, checksum
from kvstore.model.errors import KVStoreError
from kvstore.testing.samples import sample_keys, sample_namespace

space, keys = sample_namespace(), sample_keys("stopped", 64)
with Client(sys.argv[1], daemon_uid=int(sys.argv[2])) as client:
    client.register(space)
    grant = client.reserve(
        space.id, keys, first_block=0, parent=None, spans=[Span(Part(0, 0), 0, len(keys))]
    )
    views = [client.view(slot) for slot in grant.slots if slot is not None]
    print(len(views), flush=True)
    sys.stdin.readline()
    for view in views:
        view[:] = b"P" * len(view)
    sums = [checksum(view) for view in views]
    try:
        done = client.commit(grant.lease_id, sums).committed
    except KVStoreError:
        done = 0
    print(done, flush=True)
"""
_libc = ctypes.CDLL(None, use_errno=True)


def scribbling_on_the_arena(scene: Scene) -> None:
    """An engine of the tenant writes forgeries over what another one has put."""
    count = 100 if scene.quick else 1000
    for arena in ("sealed", "direct"):
        sizes = ("dram.capacity=384MiB", "tenants.acme.dram.guaranteed=192MiB")
        with (
            scene.daemon(f"tenants.acme.arena={arena}", *sizes) as daemon,
            client_of(daemon, "acme") as victim,
            client_of(daemon, "acme") as thief,
        ):
            fill(victim, count)
            ways = _scribble(daemon, thief, count)
            forgeries, good, other = served(victim, count)
        scene.details[f"{arena}_served"] = {"forged": forgeries, "right": good, "ways": ways}
        if arena == "sealed":
            scene.count("forged_served", forgeries)
            scene.count("wrong_served", other)
            scene.count("wrote_other", count - good - forgeries - other)
        else:
            scene.controls["on a direct arena it works"] = forgeries == count
            scene.controls["in every way"] = set(ways.values()) == {count}


def _scribble(daemon: Daemon, thief: Client, count: int) -> dict[str, int]:
    """Write a forgery to the place of every record, in whatever way the kernel lets pass; return
    how often each way did."""
    keys = sample_keys("forged", count)
    thief.register(SPACE)
    passed = {attempt.__name__.removeprefix("_by_"): 0 for attempt in ATTEMPTS}
    with shared_extents(daemon.pid) as received:
        for key in keys:
            grant = thief.acquire(SPACE.id, [key])
            poison = poisoned(key)
            for slot in grant.slots:
                if slot is None:
                    continue
                view = thief.view(slot)
                for attempt in ATTEMPTS:
                    with contextlib.suppress(OSError, TypeError, ValueError):
                        attempt(view, poison, received)
                        passed[attempt.__name__.removeprefix("_by_")] += 1
                del view
            thief.release(grant.lease_id)
    return passed


def _by_the_view(view: memoryview, data: bytes, received: Sequence[int]) -> None:
    view[:] = data


def _by_mprotect(view: memoryview, data: bytes, received: Sequence[int]) -> None:
    address = np.frombuffer(view, np.uint8).ctypes.data
    page = address % mmap.PAGESIZE
    if _libc.mprotect(ctypes.c_void_p(address - page), len(view) + page, WRITABLE):
        raise OSError(ctypes.get_errno(), "mprotect")
    ctypes.memmove(address, data, len(data))


def _by_a_descriptor(view: memoryview, data: bytes, received: Sequence[int]) -> None:
    fd, at = _place_of(view, received)
    os.pwrite(fd, data, at)


def _by_a_mapping(view: memoryview, data: bytes, received: Sequence[int]) -> None:
    fd, at = _place_of(view, received)
    _write_mapped(fd, at, data)


def _by_opening_it_anew(view: memoryview, data: bytes, received: Sequence[int]) -> None:
    fd, at = _place_of(view, received)
    allow_holes(fd)  # what is immutable cannot be opened to be written to
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    try:
        with contextlib.suppress(OSError):
            os.pwrite(again, data, at)
        _write_mapped(again, at, data)
    finally:
        os.close(again)


ATTEMPTS = (_by_the_view, _by_mprotect, _by_a_descriptor, _by_a_mapping, _by_opening_it_anew)


def _write_mapped(fd: int, at: int, data: bytes) -> None:
    page = at % mmap.PAGESIZE
    with mmap.mmap(fd, len(data) + page, offset=at - page) as mapped:
        mapped[page : page + len(data)] = data


def _place_of(view: memoryview, received: Sequence[int]) -> tuple[int, int]:
    """Return the descriptor, of those that clients are sent, of what is mapped where a view is, and
    where the view is in it."""
    inodes = {os.fstat(fd).st_ino: fd for fd in received}
    address = np.frombuffer(view, np.uint8).ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, inode, *_ = line.split()
        begin, end = (int(each, 16) for each in span.split("-"))
        if begin <= address < end:
            return inodes[int(inode)], int(offset, 16) + address - begin
    raise OSError("the view is not mapped")


def holes_in_the_arena(scene: Scene) -> None:
    """An engine of the tenant gives the memory of what another one has put to the system."""
    count = 50 if scene.quick else 400
    for arena in ("sealed", "direct"):
        with (
            scene.daemon(f"tenants.acme.arena={arena}", "file.path=") as daemon,
            client_of(daemon, "acme") as victim,
            client_of(daemon, "acme") as thief,
        ):
            keys = put(victim, "victim", count)
            _punch_everywhere(daemon, thief, keys)
            found = victim.get(SMALL.id, keys)
            missing = sum(each is None for each in found)
            scene.count("wrong_served", wrong_among(keys, found))
        scene.details[f"{arena}_holes"] = missing
        if arena == "sealed":
            scene.count("wrote_other", missing)
        else:
            scene.controls["on a direct arena it makes misses"] = missing > 0


def _punch_everywhere(daemon: Daemon, thief: Client, keys: Sequence[BlockKey]) -> None:
    thief.register(SMALL)
    grant = thief.acquire(SMALL.id, keys)
    for slot in grant.slots:
        if slot is not None:
            with contextlib.suppress(OSError, TypeError):
                give_back(thief.view(slot))
    with shared_extents(daemon.pid) as received:
        for fd in received:
            allow_holes(fd)
            with contextlib.suppress(OSError):
                punch(fd, 0, os.fstat(fd).st_size)
    thief.release(grant.lease_id)


def memory_that_others_pay_for(scene: Scene) -> None:
    """Beside a sealed arena, a client commits what it never wrote, or takes away again, ends its
    session and keeps its mapping: the daemon may have made the pages, and must not keep any."""
    kept: list[memoryview] = []
    with scene.daemon("tenants.beta.arena=sealed", "file.path=") as daemon:
        for round_ in range(4 if scene.quick else 40):
            with client_of(daemon, "beta") as thief:
                thief.register(SMALL)
                keys = sample_keys(f"unwritten {round_}", 128)
                span = [Span(Part(0, 0), 0, len(keys))]
                grant = thief.reserve(SMALL.id, keys, first_block=0, parent=None, spans=span)
                views = [thief.view(slot) for slot in grant.slots if slot is not None]
                sums = [checksum(bytes(len(view))) for view in views]
                punched = views if round_ % 2 else []
                with _punching(punched), contextlib.suppress(KVStoreError):
                    thief.commit(grant.lease_id, sums)
                if round_ == 0:
                    scene.count("charged", _staged_nbytes())
                    views[0][:] = b"x" * len(views[0])
                    scene.controls["memory that is taken is seen"] = _staged_nbytes() > 0
                kept += views
        with contextlib.suppress(TimeoutError):
            until(lambda: not _staged_nbytes(), 5)
        scene.count("charged", _staged_nbytes())


@contextlib.contextmanager
def _punching(views: Sequence[memoryview]) -> Iterator[None]:
    """Take the pages behind views away again and again, from a thread; they are there before."""
    over = threading.Event()

    def work() -> None:
        while views and not over.is_set():
            for view in views:
                give_back(view)
                view[0] = 0

    for view in views:
        view[:] = bytes(len(view))
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _staged_nbytes() -> int:
    """Return what there is of the staging memory that this process maps."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    spans = {line.split()[4]: line.split()[0] for line in maps if "memfd:kvstore-staging" in line}
    places = (Path("/proc/self/map_files", span) for span in spans.values())
    return sum(place.stat().st_blocks * 512 for place in places)


def memory_kept_past_its_end(scene: Scene) -> None:
    """A client keeps its mapping of extents that its tenant has given back to another one, reads
    and writes there."""
    sizes = ["dram.capacity=256MiB", "file.path="]
    sizes += [f"tenants.{name}.dram.guaranteed=64MiB" for name in UIDS]
    with scene.daemon(*sizes) as daemon, _process(KEEPER, daemon, "beta", _borrow) as keeper:
        extents = keeper.told()[0]
        with client_of(daemon, "acme") as victim:
            until(lambda: _filled(victim) > FILLED_MIN, 20)
            keys = sample_keys("acme 0", 8)
            first = _big_record(keys[0])[:64]
            touched = seen = 0

            def touch() -> bool:
                nonlocal touched, seen
                keeper.tell(first.hex())
                touched, found = keeper.told()
                seen += found
                return touched > 0

            until(touch, 20)
            until(lambda: _sees(keeper, b"POISON! "), 20)  # what it wrote a moment ago
            until(lambda: _touched_again(daemon) > 0, 20)
            for _ in range(5):
                touch()
                found = victim.get(BIG.id, keys)
                wrong = [
                    each for key, each in zip(keys, found, strict=True) if each != _big_record(key)
                ]
                scene.count("wrong_served", sum(each is not None for each in wrong))
                scene.count("wrote_other", sum(each is None for each in wrong))
        scene.count("read_other", seen)
        scene.details["kept_bytes"] = touched
        scene.controls["the client kept memory"] = extents > 1 and touched > 0


def _big_record(key: BlockKey) -> bytes:
    return hashlib.shake_128(b"big" + key).digest(64) * ((1 << 20) // 64)


def _sees(keeper: _Process, data: bytes) -> bool:
    keeper.tell(data.hex())
    return keeper.told()[1] > 0


def _borrow(daemon: Daemon) -> None:
    """Let beta take what acme leaves."""
    with client_of(daemon, "beta") as thief:
        until(lambda: _fill_more(thief, "beta", 24) > 128 << 20, 20)


def _filled(client: Client) -> int:
    return _fill_more(client, "acme", 8)


def _fill_more(client: Client, name: str, groups: int) -> int:
    """Put what fills a tenant's share; return the bytes that it has of DRAM."""
    client.register(BIG)
    for group in range(groups):
        keys = sample_keys(f"{name} {group}", 8)
        client.put(BIG.id, keys, [_big_record(key) for key in keys], wait_s=2.0)
    return int(client.admin.stats()["dram"]["used_bytes"])


def _touched_again(daemon: Daemon) -> float:
    with client_of(daemon, "beta") as client:
        return float(client.admin.stats()["totals"]["touched_again_bytes"])


def a_client_that_stands_still(scene: Scene) -> None:
    """A client is stopped while it holds a reservation, and goes on when others have long been
    served; then it writes there, and commits."""
    late = 4 * LEASE_S
    with (
        scene.daemon(f"limits.lease_s={LEASE_S}", "file.path=") as daemon,
        _process(STOPPED, daemon, "beta") as stopped,
        client_of(daemon, "beta") as victim,
    ):
        slots = stopped.told()[0]
        os.kill(stopped.pid, signal.SIGSTOP)
        keys = put(victim, "victim", 200)
        time.sleep(late)  # its lease is over
        keys += put(victim, "later", 200)
        os.kill(stopped.pid, signal.SIGCONT)
        stopped.tell("")
        committed = stopped.told()[0]
        found = victim.get(SMALL.id, keys)
        scene.count("wrong_served", wrong_among(keys, found))
        scene.count("wrote_other", committed + sum(each is None for each in found))
        scene.controls["it held memory"] = slots > 0
    with scene.daemon("file.path=") as daemon, _process(STOPPED, daemon, "beta") as prompt:
        prompt.told()
        prompt.tell("")
        scene.controls["who is not late commits"] = prompt.told()[0] > 0


class _Process:
    """A client in a process of its own that answers lines with numbers."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.pid = process.pid
        self._stdin, self._stdout = process.stdin, process.stdout

    def tell(self, line: str) -> None:
        print(line, file=self._stdin, flush=True)

    def told(self) -> list[int]:
        return [int(each) for each in self._stdout.readline().split()]


@contextlib.contextmanager
def _process(
    script: str, daemon: Daemon, tenant: str, before: Callable[[Daemon], None] | None = None
) -> Iterator[_Process]:
    if before is not None:
        before(daemon)
    command = [sys.executable, "-c", script, target_of(daemon, tenant), str(UIDS[tenant])]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield _Process(process)
        finally:
            process.kill()
