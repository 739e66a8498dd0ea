"""What whoever maps the arena, or has the disk, the bucket or a core dump, can read and plant."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import resource
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvstore import Client
from kvstore.model.block import Namespace
from kvstore.sealing import FileRoot, Sealing
from kvstore.testing.daemon import Daemon
from kvstore.testing.root_key import root_key_in_memory
from kvstore.testing.samples import sample_keys, sample_namespace, sample_record
from kvstore.tier.file import Audit, DirectoryKeys, RealDisk
from tests.hostile.forge import LEAF_NBYTES, forged
from tests.hostile.scene import Scene, client_of

SPACE: Namespace = sample_namespace("forged", LEAF_NBYTES)
POISON = b"POISON! " * 112
CANARY = b"kvstore-canary-at-rest-77ab"


def fill(client: Client, count: int) -> None:
    """Store records durably."""
    keys = sample_keys("forged", count)
    client.register(SPACE)
    records = [sample_record(key, LEAF_NBYTES) for key in keys]
    assert client.put(SPACE.id, keys, records, durable=True).durable


def served(client: Client, count: int) -> tuple[int, int, int]:
    """Return how many records are served forged, as they were put, and wrong in another way."""
    poisoned = good = other = 0
    client.register(SPACE)
    for key in sample_keys("forged", count):  # one by one: a miss must not hide what follows
        (found,) = client.get(SPACE.id, [key])
        if found is not None:
            good += found == sample_record(key, LEAF_NBYTES)
            poisoned += POISON[:64] in found
            other += found != sample_record(key, LEAF_NBYTES) and POISON[:64] not in found
    return poisoned, good, other


# ---- the arena -----------------------------------------------------------------------------------


def scribbling_on_the_arena(scene: Scene) -> None:
    """An engine of the tenant writes forgeries over what another one has put."""
    count = 100 if scene.quick else 300
    for arena in ("sealed", "direct"):
        sizes = ("dram.capacity=192MiB", "tenants.acme.dram.guaranteed=64MiB")
        with (
            scene.daemon(f"tenants.acme.arena={arena}", *sizes) as daemon,
            client_of(daemon, "acme") as victim,
            client_of(daemon, "acme") as thief,
        ):
            fill(victim, count)
            _scribble(thief, count)
            poisoned, good, other = served(victim, count)
        scene.details[f"{arena}_served"] = {"forged": poisoned, "right": good}
        if arena == "sealed":
            scene.count("forged_served", poisoned)
            scene.count("wrong_served", other)
            scene.count("wrote_other", count - good - poisoned - other)
        else:
            scene.controls["on a direct arena it works"] = poisoned == count


def _scribble(thief: Client, count: int) -> None:
    """Write a forgery to the place of every record, in whatever way the kernel lets pass."""
    keys = sample_keys("forged", count)
    thief.register(SPACE)
    for key in keys:
        grant = thief.acquire(SPACE.id, [key])
        for slot in grant.slots:
            if slot is None:
                continue
            view = thief.view(slot)
            poison = forged(sample_record(key, LEAF_NBYTES), POISON)
            for attempt in (_by_the_view, _by_a_descriptor, _by_a_mapping):
                with contextlib.suppress(OSError, TypeError, ValueError):
                    attempt(view, poison)
            del view
        thief.release(grant.lease_id)


def _by_the_view(view: memoryview, data: bytes) -> None:
    view[:] = data


@contextlib.contextmanager
def _reopened(view: memoryview) -> Iterator[tuple[int, int]]:
    """Open the file behind a mapping for writing; yield it, and where the view is in it."""
    address = np.frombuffer(view, np.uint8).ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, *_ = line.split()
        begin, end = (int(each, 16) for each in span.split("-"))
        if begin <= address < end:
            fd = os.open(f"/proc/self/map_files/{span}", os.O_RDWR)
            try:
                yield fd, int(offset, 16) + address - begin
            finally:
                os.close(fd)


def _by_a_descriptor(view: memoryview, data: bytes) -> None:
    with _reopened(view) as (fd, at):
        os.pwrite(fd, data, at)


def _by_a_mapping(view: memoryview, data: bytes) -> None:
    with _reopened(view) as (fd, at):
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        page = at % mmap.PAGESIZE
        with mmap.mmap(fd, len(data) + page, offset=at - page) as mapped:
            mapped[page : page + len(data)] = data


# ---- the disk ------------------------------------------------------------------------------------


def forged_files(scene: Scene) -> None:
    """Records on disk are changed so that every checksum still holds."""
    count = 200 if scene.quick else 1000
    for encrypted in (True, False):
        with _root_key(encrypted) as (root_key, overrides), Daemon(*overrides) as daemon:
            with Client(daemon.start().target) as client:
                fill(client, count)
            daemon.kill()
            daemon.start()  # the tail is sealed: the start that follows reads no payload
            daemon.stop()
            changed = _forge_all(daemon.directory / "file", root_key)
            daemon.start()
            with Client(daemon.target) as client:
                poisoned, good, other = served(client, count)
                left = client.admin.stats()["blocks"]
        if encrypted:
            scene.count("forged_served", poisoned)
            scene.count("wrong_served", other + good + left)  # each was dropped as it was met
        else:
            scene.controls["files in clear serve them"] = poisoned == count == changed


@contextlib.contextmanager
def _root_key(encrypted: bool) -> Iterator[tuple[Path | None, list[str]]]:
    if not encrypted:
        yield None, []
        return
    with root_key_in_memory() as path:
        yield path, [f"security.root_key_file={path}"]


def _forge_all(directory: Path, root_key: Path | None) -> int:
    """Change every record on disk to its forgery, as one who knows what was stored can: where a
    stream cipher hides it, the difference of two known texts is all it takes."""
    keys = None
    if root_key is not None:
        keys = DirectoryKeys(RealDisk(), directory, Sealing(FileRoot.read(root_key)))
        keys.load(create=False)
    count = 0
    for path, at, header in Audit(directory, keys=keys).runs:
        with path.open("r+b") as file:
            for start, block in zip(header.offsets, header.blocks, strict=True):
                record = sample_record(block.key, LEAF_NBYTES)
                file.seek(at + start)
                stored = file.read(LEAF_NBYTES)
                change = zip(stored, record, forged(record, POISON), strict=True)
                file.seek(at + start)
                file.write(bytes(s ^ old ^ new for s, old, new in change))
                count += 1
    return count


def canaries_at_rest(scene: Scene) -> None:
    """A thief has disk, bucket, logs, /proc and a core dump of the daemon."""
    keys = sample_keys("canary", 64)
    record = (CANARY * LEAF_NBYTES)[:LEAF_NBYTES]
    for encrypted in (True, False):
        with tempfile.TemporaryDirectory() as place, _root_key(encrypted) as (root_key, overrides):
            secret = root_key.read_bytes() if root_key else b""
            canaries = {"payload": CANARY, "space": SPACE.id, "key": keys[5]}
            canaries |= {"root": secret, "root in hex": secret.hex().encode()} if secret else {}
            words = [*overrides, f"object.url=file://{place}/bucket", "server.log_level=debug"]
            with Daemon(*words) as daemon, _dumping_core_to(Path(place)):
                with Client(daemon.start().target) as client:
                    client.register(SPACE)
                    client.put(SPACE.id, keys, [record] * len(keys), durable=True)
                process = Path(f"/proc/{daemon.pid}")
                seen = [(process / name).read_bytes() for name in ("environ", "cmdline")]
                daemon.stop()  # uploads
                daemon.start()
                with Client(daemon.target) as client:
                    client.register(SPACE)
                    client.get(SPACE.id, keys)
                os.kill(daemon.pid, signal.SIGABRT)
                daemon.wait()
                files = [*Path(place).rglob("*"), *daemon.directory.rglob("*")]
                found = _found_in(files, canaries)
                found |= {name for name, each in canaries.items() if any(each in s for s in seen)}
                cores = [path for path in files if path.name.startswith("core")]
        if encrypted:
            scene.count("canaries_found", len(found) + len(cores))
            scene.details["found"] = sorted(found)
        else:
            scene.controls["without a key they are found"] = {"payload", "space", "key"} <= found
            scene.controls["a core is dumped without a key"] = bool(cores)


def _found_in(files: list[Path], canaries: dict[str, bytes]) -> set[str]:
    """Return which canaries are in a file, or, in hex, in a file's name."""
    found = set()
    for path in files:
        data = path.read_bytes() if path.is_file() else b""
        for name, canary in canaries.items():
            if canary in data or canary.hex() in str(path) or canary.hex().encode() in data:
                found.add(name)
    return found


@contextlib.contextmanager
def _dumping_core_to(place: Path) -> Iterator[None]:
    """Let processes that are started now dump core into a directory, as far as they allow it."""
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (before[1], before[1]))
    try:
        with contextlib.chdir(place):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)
