"""What a thief of the disk can read, and what one who writes to it can make the tier serve."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections import Counter
from pathlib import Path

import pytest

from kvstore.format.frame import encode_segment_header
from kvstore.model.block import PAGE_NBYTES, BlockKey, NamespaceId
from kvstore.model.errors import ConfigError, CorruptBlock
from kvstore.model.tenant import tenant_id
from kvstore.sealing import Erasure, FileRoot, Keyring, Sealing
from kvstore.testing.tier import pages
from kvstore.tier.file import Audit, RealDisk, WrongTag, destroy_keys
from kvstore.tier.file.devices.note import read_note, write_note
from kvstore.tier.file.keys import KEYS, LOCK_NAME, DirectoryKeys
from kvstore.tier.file.segment_file import parse_segment_name
from kvstore.tier.file.spec_files import read_spec_files, spec_files_in, write_spec_file
from tests.tier.file.frames import (
    MIB,
    NAMESPACE,
    ROOT,
    SEALING,
    expected,
    flip,
    key,
    killed,
    live,
    opened,
    put,
    run,
    segments,
    tombstone,
    unrecalled,
    verify,
)

OTHER_ROOT = FileRoot(b"another root key of 32 bytes, ok")
ACME = tenant_id("acme")
SPARE = PAGE_NBYTES


async def served(path: Path, sealing: Sealing | None = SEALING) -> dict[BlockKey, int]:
    """Return what a start finds and can read: keys and sequences."""
    found: dict[BlockKey, int] = {}
    async with opened(path, sealing=sealing) as (tier, recovered):
        for record in recovered.frames:
            try:
                await verify(tier, record)
            except CorruptBlock:
                continue
            found |= {record.header.blocks[at].key: record.header.sequence for at in record.live}
    return found


def fill(path: Path, sealing: Sealing | None = SEALING, *, end: object = opened) -> None:
    async def main() -> None:
        manager = killed if end is killed else opened
        async with manager(path, sealing=sealing) as (tier, _):
            await put(tier, 1, "ab")
            await put(tier, 2, "c", nbytes=20_000)
            await tier.frames.write_tombstone(tombstone(3, "b"))
            await put(tier, 4, "d")
            await tier.durability.sync()

    asyncio.run(main())


EXPECTED = expected({"a": 1, "c": 2, "d": 4})


@pytest.mark.parametrize("end", [opened, killed])
def test_encrypted_frames_come_back(tmp_path: Path, end: object) -> None:
    fill(tmp_path, end=end)
    assert asyncio.run(served(tmp_path)) == EXPECTED
    assert asyncio.run(served(tmp_path)) == EXPECTED


def test_nothing_that_was_put_is_readable_on_disk(tmp_path: Path) -> None:
    canary = b"canary of a prompt " * 1000

    async def main() -> None:
        async with opened(tmp_path, sealing=SEALING) as (tier, _):
            header, payload = run(1, "ab", nbytes=len(canary))
            for view in payload:
                view[: len(canary)] = canary
                view[len(canary) :] = b"\xee" * (len(view) - len(canary))
            extent = tier.frames.allocate(header.nbytes)
            assert extent is not None
            await tier.frames.write(extent, [tier.frames.encode(extent, header), *payload])
            write_note(RealDisk(), tmp_path, canary, tier.keys)

    asyncio.run(main())
    everything = b"".join(path.read_bytes() for path in sorted(tmp_path.iterdir()))
    names = "".join(path.name for path in tmp_path.iterdir())
    for secret in (canary[:16], NAMESPACE[:8], key("a")[:8], key("b")[:8], b"\xee" * 16):
        assert secret not in everything
        assert secret.hex() not in names
    (file,) = segments(tmp_path)
    data = file.read_bytes()
    for at in range(PAGE_NBYTES, len(data), PAGE_NBYTES):
        page = data[at : at + PAGE_NBYTES].rstrip(b"\0")
        if len(page) > 2048:
            assert _bits_a_byte(page) > 7.8


def _bits_a_byte(data: bytes) -> float:
    counts = Counter(data).values()
    return -sum(count / len(data) * math.log2(count / len(data)) for count in counts)


def test_every_changed_byte_is_a_miss_and_never_other_bytes(tmp_path: Path) -> None:
    """`verify` compares with checksums of what was put, so other bytes would be found out."""
    fill(tmp_path / "good")
    (file,) = segments(tmp_path / "good")
    nbytes = file.stat().st_size
    steps = [*range(136), *range(PAGE_NBYTES, nbytes, 509), *range(nbytes - 4200, nbytes, 97)]
    for at in steps:
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        flip(tmp_path / "bad" / file.name, at)
        found = asyncio.run(served(tmp_path / "bad"))
        assert found.items() <= (EXPECTED | expected({"b": 1})).items()
        shutil.rmtree(tmp_path / "bad")


@pytest.mark.parametrize("at", [8, 24, 32, 48, 56, 4090])
@pytest.mark.parametrize("end", [opened, killed])
def test_a_damaged_first_page_costs_nothing(tmp_path: Path, at: int, end: object) -> None:
    fill(tmp_path, end=end)
    flip(segments(tmp_path)[0], at)
    assert asyncio.run(served(tmp_path)) == EXPECTED


def test_a_read_tells_which_blocks_are_wrong_and_leaves_nothing_of_them(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path, sealing=SEALING) as (tier, _):
            extent = await put(tier, 1, "abc", nbytes=9000)
            flip(segments(tmp_path)[0], extent.offset + PAGE_NBYTES + 3 * PAGE_NBYTES + 77)
            targets, told = [pages(9000, seed=1) for _ in "abc"], list[slice]()
            with pytest.raises(WrongTag) as wrong:
                await tier.frames.read(extent, PAGE_NBYTES, targets, told.append)
            assert (wrong.value.positions, told) == ([1], [slice(0, 9 * PAGE_NBYTES)])
            _, payload = run(1, "abc")
            assert [bytes(each[:9000]) for each in targets] == [
                bytes(payload[0][:9000]),
                bytes(9000),
                bytes(payload[2][:9000]),
            ]
            assert not any(targets[0][9000:])

    asyncio.run(main())


@pytest.mark.parametrize("nbytes", [100, 300_000, 3 * MIB, 5 * MIB])
@pytest.mark.parametrize("parts", [1, 2])
def test_records_of_every_size_are_read_as_they_were_put(
    tmp_path: Path, nbytes: int, parts: int
) -> None:
    async def main() -> None:
        async with opened(tmp_path, sealing=SEALING, segment_nbytes=16 * MIB) as (tier, _):
            extent = await put(tier, 1, "ab", nbytes=nbytes)
            _, payload = run(1, "ab", nbytes=nbytes)
            for position, wanted in enumerate(payload):
                target, told = pages(nbytes), list[slice]()
                begin = PAGE_NBYTES + position * len(target)
                await tier.frames.read(extent, begin, [target], told.append, parts)
                assert target[:nbytes] == wanted[:nbytes]
                assert told == [slice(0, len(target))]

    asyncio.run(main())


def test_the_place_of_an_encrypted_frame_is_not_lent(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path / "sealed", sealing=SEALING) as (tier, _):
            assert tier.frames.path_of(await put(tier, 1, "a")) is None
        async with opened(tmp_path / "plain") as (tier, _):
            assert tier.frames.path_of(await put(tier, 1, "a")) is not None

    asyncio.run(main())


# ---- frames and segments that are put elsewhere --------------------------------------------------


def _pages_of(path: Path, count: int) -> dict[int, bytes]:
    """Return `count` pages from the first frame on, by offset."""
    data = path.read_bytes()
    starts = range(PAGE_NBYTES, PAGE_NBYTES * (count + 1), PAGE_NBYTES)
    return {at: data[at : at + PAGE_NBYTES] for at in starts}


def _overwrite(path: Path, content: dict[int, bytes]) -> None:
    with path.open("r+b") as file:
        for at, data in content.items():
            file.seek(at)
            file.write(data)


@pytest.mark.parametrize("sealing", [SEALING, None])
def test_frames_of_another_segment_or_directory_do_not_open(
    tmp_path: Path, sealing: Sealing | None
) -> None:
    """The same keys, places and numbers: only the key of the segment differs."""
    for name in ("mine", "theirs"):
        fill(tmp_path / name, sealing, end=killed)
    (mine,), (theirs,) = segments(tmp_path / "mine"), segments(tmp_path / "theirs")
    _overwrite(mine, _pages_of(theirs, 4))
    found = asyncio.run(served(tmp_path / "mine", sealing))
    assert found == expected({"c": 2, "d": 4})  # without the frame that is another's


def test_blocks_do_not_open_in_each_others_place(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path, sealing=SEALING) as (tier, _):
            extent = await put(tier, 1, "ab", nbytes=PAGE_NBYTES)
            (file,) = segments(tmp_path)
            first, second = list(_pages_of(file, 3).values())[1:]
            _overwrite(file, {2 * PAGE_NBYTES: second, 3 * PAGE_NBYTES: first})
            with pytest.raises(WrongTag) as wrong:
                await tier.frames.read(extent, PAGE_NBYTES, [pages(2 * PAGE_NBYTES)])
            assert sorted(wrong.value.positions) == [0, 1]

    asyncio.run(main())


def test_a_segment_of_another_tenant_is_none_of_this_one(tmp_path: Path) -> None:
    fill(tmp_path / "mine")
    fill(tmp_path / "acme", Sealing(ROOT, ACME))
    (theirs,) = segments(tmp_path / "acme")
    shutil.copy(theirs, tmp_path / "mine")
    assert asyncio.run(served(tmp_path / "mine")) == EXPECTED
    with pytest.raises(ConfigError, match="another tenant"):
        asyncio.run(served(tmp_path / "acme"))


@pytest.mark.parametrize("before", [Sealing(ROOT, ACME), None])
def test_a_delete_before_all_is_indexed_counts_for_what_was_found(
    tmp_path: Path, before: Sealing | None
) -> None:
    sealing = Sealing(ROOT, ACME, accept_plain=True)
    fill(tmp_path, before)

    async def main() -> None:
        async with unrecalled(tmp_path, sealing=sealing) as tier:
            deletes = [tombstone(5, "a"), tombstone(6, "d")]
            tier.recall.kill(deletes)
            found = tier.recall.take([key("a")]) + tier.recall.take_all()
            assert {record.header.sequence for record in found} == {2}
            for each in deletes:
                await tier.frames.write_tombstone(each)
        assert await served(tmp_path, sealing) == expected({"c": 2})

    asyncio.run(main())


def test_a_delete_counts_for_what_was_stored_in_clear_before(tmp_path: Path) -> None:
    sealing = Sealing(ROOT, ACME, accept_plain=True)
    fill(tmp_path, None)

    async def main() -> None:
        async with opened(tmp_path, sealing=sealing) as (tier, _):
            await put(tier, 5, "c")
            await tier.frames.write_tombstone(tombstone(6, "a"))
        assert await served(tmp_path, sealing) == expected({"c": 5, "d": 4})

    asyncio.run(main())


def test_a_plain_segment_planted_among_encrypted_ones_is_refused(tmp_path: Path) -> None:
    fill(tmp_path / "mine")
    fill(tmp_path / "forged", None)
    (forged,) = segments(tmp_path / "forged")
    shutil.copy(forged, tmp_path / "mine")
    with pytest.raises(ConfigError, match=r"not encrypted.*kvstore gc --seal.*accept_plain"):
        asyncio.run(served(tmp_path / "mine"))
    assert forged.exists()
    # The control: who accepts plain segments is served what is in them.
    accepting = SEALING._replace(accept_plain=True)
    assert asyncio.run(served(tmp_path / "mine", accepting)) == EXPECTED


def test_a_plain_header_on_an_encrypted_segment_serves_nothing(tmp_path: Path) -> None:
    fill(tmp_path, end=killed)
    (file,) = segments(tmp_path)
    tag = parse_segment_name(file.name)
    assert tag is not None
    _overwrite(file, {0: encode_segment_header(tag)})
    assert asyncio.run(served(tmp_path, SEALING._replace(accept_plain=True))) == {}


# ---- keys ----------------------------------------------------------------------------------------


def test_a_directory_opens_with_its_root_and_no_other(tmp_path: Path) -> None:
    fill(tmp_path)
    with pytest.raises(ConfigError, match="the root key does not open it"):
        asyncio.run(served(tmp_path, Sealing(OTHER_ROOT)))
    with pytest.raises(ConfigError, match=r"is encrypted: set security\.root_key_file"):
        asyncio.run(served(tmp_path, None))
    assert asyncio.run(served(tmp_path)) == EXPECTED  # nothing was thrown away


def test_lost_keys_are_said_and_nothing_is_thrown_away(tmp_path: Path) -> None:
    fill(tmp_path)
    kept = {
        name: (tmp_path / name).read_bytes() for name in KEYS.names if (tmp_path / name).exists()
    }
    for name in kept:
        (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match="has lost its keys"):
        asyncio.run(served(tmp_path))
    for name, data in kept.items():
        (tmp_path / name).write_bytes(data)
    assert asyncio.run(served(tmp_path)) == EXPECTED


def test_a_new_epoch_is_used_without_a_restart_and_the_old_one_leaves(tmp_path: Path) -> None:
    def keys() -> DirectoryKeys:
        found = DirectoryKeys(RealDisk(), tmp_path, SEALING)
        found.load(create=False)
        return found

    async def main() -> None:
        async with opened(tmp_path, sealing=SEALING, segment_nbytes=1 << 16) as (tier, _):
            first = [await put(tier, at, f"{at}", nbytes=20_000) for at in range(1, 4)]
            beside = keys()  # what `kvstore key rotate` does
            beside.change(lambda ring: ring.rotated(ROOT))
            assert beside.ring.epochs == [1, 2]
            second = [await put(tier, at, f"{at}", nbytes=20_000) for at in range(4, 7)]
            epochs = {segment.key.wrapped.epoch for segment in tier.space.segments if segment.key}
            assert epochs == {1, 2}
            for extent in first:
                tier.frames.free(extent)
            assert second
        assert keys().ring.epochs == [1, 2]
        async with opened(tmp_path, sealing=SEALING) as (_, recovered):
            assert live(recovered)
        names = {segment.name for segment in segments(tmp_path)}
        assert names

    asyncio.run(main())
    assert asyncio.run(served(tmp_path))
    found = DirectoryKeys(RealDisk(), tmp_path, SEALING)
    found.load(create=False)
    used = {
        report.needs_epoch
        for report in Audit(tmp_path, keys=found).segments
        if report.needs_epoch is not None
    }
    assert set(found.ring.epochs) == used | {2}


@pytest.mark.parametrize("name", KEYS.names)
def test_one_copy_of_the_keys_is_enough(tmp_path: Path, name: str) -> None:
    fill(tmp_path)
    flip(tmp_path / name, 100)
    assert asyncio.run(served(tmp_path)) == EXPECTED


def test_no_change_of_keys_undoes_another(tmp_path: Path) -> None:
    fill(tmp_path)

    def keys(root: FileRoot = ROOT) -> DirectoryKeys:
        found = DirectoryKeys(RealDisk(), tmp_path, Sealing(root))
        found.load(create=False)
        return found

    daemon, command = keys(), keys()
    keys().change(lambda ring: ring.rotated(ROOT))
    command.change(lambda ring: ring.rotated(ROOT))
    assert keys().ring.epochs == [1, 2, 3]
    daemon.change(lambda ring: ring.rotated(ROOT))
    daemon.retire({1, 4})
    assert keys().ring.epochs == [1, 4]

    daemon.change(lambda ring: ring.rotated(ROOT))
    keys().change(lambda ring: ring.rewrapped(OTHER_ROOT))
    daemon.retire(set())  # it has the old root: its keys must not replace those of the new one
    assert keys(OTHER_ROOT).ring.epochs == [1, 4, 5]
    assert daemon.open(daemon.new_key().wrapped) is not None

    lock = RealDisk().lock(tmp_path / LOCK_NAME)
    with pytest.raises(ConfigError, match="another process changes"):
        keys(OTHER_ROOT).change(lambda ring: ring.rotated(OTHER_ROOT))
    RealDisk().close(lock)


def test_keys_that_are_destroyed_open_nothing_put_back_or_not(tmp_path: Path) -> None:
    fill(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert destroy_keys(RealDisk(), tmp_path, ROOT, SEALING.tenant) is Erasure.BACKUPS
    assert not any((tmp_path / name).exists() for name in KEYS.names)
    with pytest.raises(ConfigError, match="has lost its keys"):
        asyncio.run(served(tmp_path))
    assert destroy_keys(RealDisk(), tmp_path, ROOT, SEALING.tenant) is Erasure.NONE
    # With a root file a backup of the keys opens them again: that is what BACKUPS says.
    for name in KEYS.names:
        if name in before:
            (tmp_path / name).write_bytes(before[name])
    assert asyncio.run(served(tmp_path)) == EXPECTED


def test_a_snapshot_put_back_does_not_open_when_the_service_forgot(tmp_path: Path) -> None:
    root = Forgetful()
    sealing = Sealing(root, ACME)
    fill(tmp_path / "disk", sealing)
    shutil.copytree(tmp_path / "disk", tmp_path / "snapshot")
    assert asyncio.run(served(tmp_path / "disk", sealing)) == EXPECTED
    assert destroy_keys(RealDisk(), tmp_path / "disk", root, ACME) is Erasure.FORGOTTEN
    with pytest.raises(ConfigError, match="forgotten"):
        asyncio.run(served(tmp_path / "snapshot", sealing))


def test_keys_are_still_there_when_the_service_is_told_to_forget_them(tmp_path: Path) -> None:
    class Crashes(Forgetful):
        def forget(self, tenant: bytes, stored: bytes) -> Erasure:
            raise KeyboardInterrupt

    fill(tmp_path, Sealing(Crashes(), ACME))
    with pytest.raises(KeyboardInterrupt):
        destroy_keys(RealDisk(), tmp_path, Crashes(), ACME)
    root = Forgetful()
    assert destroy_keys(RealDisk(), tmp_path, root, ACME) is Erasure.FORGOTTEN
    assert root.gone == {ACME}


class Forgetful(FileRoot):
    """A service that keeps a secret of each tenant, and forgets it when it is told to."""

    def __init__(self) -> None:
        super().__init__(bytes(range(32)))
        self.gone: set[bytes] = set()

    def secret(self, tenant: bytes, stored: bytes) -> object:  # type: ignore[override]
        if tenant in self.gone:
            raise ConfigError("this key was forgotten")
        return super().secret(tenant, stored)

    def forget(self, tenant: bytes, stored: bytes) -> Erasure:
        self.gone.add(tenant)
        return Erasure.FORGOTTEN


def test_notes_and_names_of_namespaces_are_sealed(tmp_path: Path) -> None:
    from kvstore.model.block import Group, Namespace

    namespace = Namespace(2, (Group("full", 4096),), (("model", "secret-model"),))
    keys = DirectoryKeys(RealDisk(), tmp_path, SEALING)
    keys.load()
    write_spec_file(RealDisk(), tmp_path, namespace, keys)
    write_note(RealDisk(), tmp_path, b"what policies know", keys)
    assert read_spec_files(RealDisk(), tmp_path, [namespace.id], keys) == [namespace]
    assert read_spec_files(RealDisk(), tmp_path, [NamespaceId(b"x" * 32)], keys) == []
    assert read_note(RealDisk(), tmp_path, keys).data == b"what policies know"
    assert namespace.id not in spec_files_in(RealDisk(), tmp_path)
    everything = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"secret-model" not in everything
    assert b"what policies" not in everything
    other = DirectoryKeys(RealDisk(), tmp_path, SEALING)
    other._ring = Keyring.create(ROOT, SEALING.tenant)  # of another directory
    assert read_note(RealDisk(), tmp_path, other).data == b""


# ---- without the daemon --------------------------------------------------------------------------


def test_an_audit_verifies_with_the_keys_and_counts_without(tmp_path: Path) -> None:
    fill(tmp_path)
    keys = DirectoryKeys(RealDisk(), tmp_path, SEALING)
    keys.load(create=False)
    audit = Audit(tmp_path, keys=keys)
    assert list(audit.verify()) == []
    assert [(s.live_records, s.records, s.needs_epoch, s.locked) for s in audit.segments] == [
        (3, 4, 1, False)
    ]
    blind = Audit(tmp_path)
    assert list(blind.verify()) == []
    assert [(s.sealed, s.runs, s.locked, s.unread) for s in blind.segments] == [(True, 0, True, 4)]
    (file,) = segments(tmp_path)
    flip(file, 2 * PAGE_NBYTES + 5)
    again = DirectoryKeys(RealDisk(), tmp_path, SEALING)
    again.load(create=False)
    damaged = list(Audit(tmp_path, keys=again).verify())
    assert [(damage.problem, damage.key, damage.live) for damage in damaged] == [
        ("payload", key("a"), True)
    ]
    flip(file, PAGE_NBYTES + 100)
    assert {damage.problem for damage in Audit(tmp_path, keys=again).verify()} == {
        "payload",
        "header",
    }
