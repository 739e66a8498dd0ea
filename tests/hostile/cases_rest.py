"""What whoever has the disk, the bucket, their backups or a core dump can read and plant."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvstore import Client
from kvstore.format.frame import RUN_BLOCKS_MAX
from kvstore.model.block import PAGE_NBYTES
from kvstore.sealing import FileRoot, Sealing
from kvstore.testing.daemon import Daemon
from kvstore.testing.root_key import root_key_in_memory
from kvstore.testing.samples import sample_keys, sample_record
from kvstore.testing.wait import until
from kvstore.tier.file import Audit, DirectoryKeys, RealDisk
from tests.hostile.forge import LEAF_NBYTES
from tests.hostile.forgeries import SPACE, fill, poisoned, served
from tests.hostile.scene import Scene
from tests.sealing.test_keys import SERVICE as KEY_SERVICE

CANARY = b"kvstore-canary-at-rest-77ab"
# It is asked once for the files and once for the bucket, and forgets well both times.
SERVICE = KEY_SERVICE.replace("os.unlink(pad)", "os.path.exists(pad) and os.unlink(pad)")
TIERS = ("dram.guaranteed=24MiB", "file.guaranteed=128MiB")


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
                forgeries, good, other = served(client, count)
                left = client.admin.stats()["blocks"]
        if encrypted:
            scene.count("forged_served", forgeries)
            scene.count("wrong_served", other + good + left)  # each was dropped as it was met
        else:
            scene.controls["files in clear serve them"] = forgeries == count == changed


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
                change = zip(stored, record, poisoned(block.key), strict=True)
                file.seek(at + start)
                file.write(bytes(s ^ old ^ new for s, old, new in change))
                count += 1
    return count


# ---- the bucket ----------------------------------------------------------------------------------


def forged_objects(scene: Scene) -> None:
    """Records in the bucket are changed so that every checksum still holds."""
    count = 64 if scene.quick else 256  # one object
    for encrypted in (True, False):
        with tempfile.TemporaryDirectory() as place, _root_key(encrypted) as (_, overrides):
            bucket = Path(place, "bucket")
            shared = (*overrides, f"object.url=file://{bucket}")
            with Daemon(*shared) as daemon:
                with Client(daemon.start().target) as client:
                    fill(client, count)
                assert daemon.stop() == 0  # uploads
            honest = _served_from(shared, count)
            changed = _forge_objects(bucket, count)
            forgeries, good, other = _served_from(shared, count)
        scene.controls["what is honest is served"] = honest == (0, count, 0)
        if encrypted:
            scene.count("forged_served", forgeries)
            scene.count("wrong_served", other + good)  # each was changed
        else:
            scene.controls["objects in clear serve them"] = forgeries == count == changed


def _served_from(shared: Sequence[str], count: int) -> tuple[int, int, int]:
    """Return what a daemon serves that has nothing but the bucket, as `served` does."""
    keys = sample_keys("forged", count)
    with Daemon(*shared) as daemon, Client(daemon.start().target) as client:
        client.register(SPACE)
        until(lambda: client.admin.stats()["object"]["state"] == "ok")
        client.acquire(SPACE.id, keys, wait_s=10.0)  # fetches them
        found = client.get(SPACE.id, keys, wait_s=10.0)
        forgeries = sum(data == poisoned(key) for key, data in zip(keys, found, strict=True))
        pairs = list(zip(keys, found, strict=True))
        good = sum(data == sample_record(key, LEAF_NBYTES) for key, data in pairs)
        return forgeries, good, sum(each is not None for each in found) - forgeries - good


def _forge_objects(bucket: Path, count: int) -> int:
    """Change every record in the largest object to its forgery. Its frames are back to back: a page
    and the records of 16 blocks each, encrypted or not."""
    path = max((each for each in bucket.rglob("*") if each.is_file()), key=_size_of)
    with path.open("r+b") as file:
        for number, key in enumerate(sample_keys("forged", count)):
            record = sample_record(key, LEAF_NBYTES)
            at = (number // RUN_BLOCKS_MAX + 1) * PAGE_NBYTES + number * LEAF_NBYTES
            file.seek(at)
            change = zip(file.read(LEAF_NBYTES), record, poisoned(key), strict=True)
            file.seek(at)
            file.write(bytes(stored ^ old ^ new for stored, old, new in change))
    return count


def _size_of(path: Path) -> int:
    return path.stat().st_size


# ---- what was erased -----------------------------------------------------------------------------


def erased_and_put_back(scene: Scene) -> None:
    """Disk and bucket are copied, the tenant is deleted, and a thief puts the copies back. Its key
    service has forgotten the tenant's key."""
    for forgets in (True, False):
        with tempfile.TemporaryDirectory() as place:
            served_blocks, erased = _put_back(Path(place), forgets=forgets)
        scene.details["erased" if forgets else "not_erased"] = erased
        if forgets:
            scene.count("read_other", served_blocks)
            scene.controls["it is said to be forgotten"] = erased == "forgotten"
        else:
            scene.controls["what was not deleted is served"] = served_blocks > 0


def _put_back(place: Path, *, forgets: bool) -> tuple[int, str]:
    """Return how many records a daemon serves to which copies of disk and bucket were put back, and
    how far the tenant was erased. forgets: it was deleted meanwhile."""
    (place / "service.py").write_text(SERVICE)
    (place / "pads").mkdir()
    command = json.dumps([sys.executable, str(place / "service.py"), str(place / "pads")])
    tenants = [f"tenants.{name}.{tier}" for name in ("acme", "beta") for tier in TIERS]
    words = (f"security.root_command={command}", f"object.url=file://{place}/bucket", *tenants)
    keys = sample_keys("forged", 32)
    with Daemon("dram.capacity=64MiB", *words) as daemon:
        acme = f"unix:{daemon.socket.parent / 'acme' / 'kvstore.sock'}"
        with Client(daemon.start().target, arena=False) as operator:
            with Client(acme) as client:
                fill(client, len(keys))
            daemon.stop()  # uploads
            parts = (daemon.directory / "file", place / "bucket")
            for at, part in enumerate(parts):
                shutil.copytree(part, place / f"copy{at}")
            daemon.start()
            erased = operator.admin.delete_tenant("acme")[1] if forgets else "no"
        daemon.stop()
        for at, part in enumerate(parts):
            shutil.rmtree(part)
            shutil.copytree(place / f"copy{at}", part)
        try:
            daemon.start()
        except RuntimeError:  # it cannot open what it finds, and says so
            return 0, erased
        with Client(acme) as client:
            client.register(SPACE)
            client.acquire(SPACE.id, keys, wait_s=2.0)  # fetches what only the bucket has
            found = client.get(SPACE.id, keys, wait_s=2.0)
        return sum(each is not None for each in found), erased


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
