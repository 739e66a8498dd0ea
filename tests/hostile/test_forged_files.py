"""Forged frames on disk: records changed so that every checksum still holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.model.block import Namespace
from kvstore.sealing import FileRoot, Sealing
from kvstore.testing.daemon import Daemon
from kvstore.testing.root_key import root_key_in_memory
from kvstore.testing.samples import sample_keys, sample_namespace, sample_record
from kvstore.tier.file import Audit, DirectoryKeys, RealDisk
from tests.hostile.forge import LEAF_NBYTES, forged

COUNT = 1000
ROUND = 100
KEYS = sample_keys("forged", COUNT)
SPACE: Namespace = sample_namespace("forged", LEAF_NBYTES)
POISON = b"POISON! " * 112


@pytest.fixture
def root_key() -> Iterator[Path]:
    with root_key_in_memory() as path:
        yield path


def fill(daemon: Daemon) -> None:
    with Client(daemon.target) as client:
        client.register(SPACE)
        records = [sample_record(key, LEAF_NBYTES) for key in KEYS]
        assert client.put(SPACE.id, KEYS, records, durable=True).durable


def forge_all(directory: Path, root_key: Path | None) -> int:
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


def served(daemon: Daemon) -> tuple[int, int]:
    """Return how many records were served forged, and how many as they were put."""
    poisoned = good = 0
    with Client(daemon.target) as client:
        client.register(SPACE)
        for key in KEYS:  # one by one: a miss must not hide what follows
            (found,) = client.get(SPACE.id, [key])
            if found is not None:
                good += found == sample_record(key, LEAF_NBYTES)
                poisoned += POISON[:64] in found
    return poisoned, good


@pytest.mark.parametrize("encrypted", [True, False])
def test_forged_records_are_served_of_plain_files_alone(encrypted: bool, root_key: Path) -> None:
    """The control is the same attack on files in clear: it is served, so it would be seen."""
    overrides = [f"security.root_key_file={root_key}"] if encrypted else []
    with Daemon(*overrides) as daemon:
        fill(daemon.start())
        daemon.kill()
        daemon.start()  # the tail is sealed: the start that follows reads no payload
        assert daemon.stop() == 0
        directory = daemon.directory / "file"
        assert forge_all(directory, root_key if encrypted else None) == COUNT
        daemon.start()
        poisoned, good = served(daemon)
        assert good == 0
        assert poisoned == (0 if encrypted else COUNT)
        if encrypted:
            with Client(daemon.target) as client:
                assert client.admin.stats()["blocks"] == 0  # each was dropped as it was met
