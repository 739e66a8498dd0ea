"""An encrypted bucket: what a thief of it can read, and what one who writes to it can do."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstore.model.block import BlockKey, NamespaceId
from kvstore.model.errors import ConfigError
from kvstore.model.tenant import tenant_id
from kvstore.sealing import Erasure, FileRoot, Keyring, Sealing
from kvstore.tier.object import ObjectFailed, ObjectRefused, Outcome, seal
from kvstore.tier.object.names import TOMBSTONES, TombstoneName
from kvstore.tier.object.requests import Filled
from kvstore.tier.object.seal import SealedNames
from kvstore.tier.object.tombstones import encode_tombstone
from tests.hostile.forge import LEAF_NBYTES, forged
from tests.tier.file.frames import ROOT, SEALING
from tests.tier.file.test_sealed import Forgetful
from tests.tier.object import opened as opened_here
from tests.tier.object.opened import RUN_BLOCKS, Side, opened, run
from tests.tier.object.runs import NAMESPACE, PARTS, frames, prefix_of, reads_of, record

PREFIX = f"t/{bytes(16).hex()}"


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(opened_here, "sealing", SEALING)
    return {"url": f"file://{tmp_path}/bucket"}


def objects(tmp_path: Path, kind: str = "") -> list[Path]:
    """Return the files of runs; of another kind, those with the word in their path."""
    found = [path for path in (tmp_path / "bucket").rglob("*") if path.is_file()]
    return sorted(p for p in found if (kind in str(p) if kind else p.name.count("-") == 1))


async def found(side: Side, keys: Sequence[BlockKey]) -> int:
    """Return how many records are found and read as they were put."""
    return await side.read_all(await side.find(keys))


async def good_reads(side: Side, keys: Sequence[BlockKey], nbytes: int) -> tuple[int, int]:
    """Return, of what is found, how many records have a right tag, and how many of these are other
    bytes than were put. A record with a wrong tag leaves zeros."""
    reads, targets = reads_of(await side.find(keys))
    told: set[int] = set()

    def tell(at: int) -> None:
        if any(targets[at][2]):
            told.add(at)

    watched = [replace(each, then=partial(tell, at)) for at, each in enumerate(reads)]
    await side.tier.reads.read(watched, side.deadline())
    wrong = 0
    for at, (part, key, target) in enumerate(targets):
        if at in told:
            wrong += bytes(target[:nbytes]) != record(key, part, nbytes)
        else:
            assert not any(target)
    return len(told), wrong


def test_a_record_that_comes_again_with_a_wrong_tag_is_told_again(where: dict[str, Any]) -> None:
    """The first attempt brings it as it was put, and is cut behind it; the second one zeros."""

    async def test() -> None:
        keys = prefix_of("again", RUN_BLOCKS)
        async with opened(where) as side:
            await side.write(frames(keys))
        async with opened(where) as side:
            reads, targets = reads_of(await side.find(keys))
            last: dict[int, bytes] = {}
            get, attempts = side.bucket.get, itertools.count(1)

            async def spoilt(
                name: str, start: int, buffers: Sequence[memoryview], filled: Filled
            ) -> None:
                attempt = next(attempts)

                def note(index: int) -> None:
                    if attempt == 2 and index == 0:
                        buffers[0][5] ^= 1
                    if attempt > 1 or index == 0:
                        filled(index)

                await get(name, start, buffers, note)
                if attempt == 1:
                    raise ObjectFailed("cut", reason="connection")

            side.bucket.get = spoilt  # type: ignore[method-assign]

            def note(at: int) -> None:
                last[at] = bytes(reads[at].targets[0])

            watched = [replace(each, then=partial(note, at)) for at, each in enumerate(reads)]
            outcomes = await side.tier.reads.read(watched, side.deadline())
            assert set(outcomes) == {Outcome.READ}
            zeros = [at for at, each in enumerate(reads) if not any(each.targets[0])]
            assert len(zeros) == 1
            assert all(last[at] == bytes(each.targets[0]) for at, each in enumerate(reads))
            assert len(targets) == len(last)

    run(test)


def test_nothing_that_was_put_is_readable_in_the_bucket(
    where: dict[str, Any], tmp_path: Path
) -> None:
    async def test() -> None:
        keys = prefix_of("secret", 16)
        async with opened(where) as side:
            await side.write(frames(keys))
            await side.delete([keys[-1]])
            everything = b"".join(path.read_bytes() for path in objects(tmp_path, "/"))
            names = " ".join(map(str, objects(tmp_path, "/")))
            for key in (NAMESPACE, *keys):
                assert key[:8] not in everything
                assert key.hex()[:16] not in names
            for part in PARTS:
                assert record(keys[0], part)[:32] not in everything

    run(test)


def test_the_same_content_has_one_name_and_never_the_same_bytes(
    where: dict[str, Any], tmp_path: Path
) -> None:
    async def test() -> None:
        keys = prefix_of("twice", 16)
        async with opened(where) as side:
            name = (await side.write(frames(keys))).name
            (path,) = objects(tmp_path)
            before = path.read_bytes()
            path.unlink()
        async with opened(where) as side:
            assert (await side.write(frames(keys))).name == name
            assert path.read_bytes()[:64] != before[:64] or path.read_bytes() != before
            assert await found(side, keys) == 32

    run(test)


def test_every_changed_byte_is_a_miss_and_never_other_bytes(
    where: dict[str, Any], tmp_path: Path
) -> None:
    async def test() -> None:
        keys, draw = prefix_of("flipped", 2), random.Random(3)
        async with opened(where) as side:
            await side.write(frames(keys))
        (path,) = objects(tmp_path)
        data = path.read_bytes()
        places = [
            *range(40),
            *range(4000, len(data), 1999),
            *range(len(data) - 4096, len(data), 61),
        ]
        async with opened(where) as side:
            for at in places:
                changed = bytearray(data)
                changed[at] ^= draw.randrange(1, 256)
                path.write_bytes(changed)
                side.clock.ahead_s += 120.0  # what it believed is asked again
                for each in list(side.tier._catalog._footers):
                    side.tier._catalog.gone(each)
                _, wrong = await good_reads(side, keys, 20_000)
                assert not wrong

    run(test)


@pytest.mark.parametrize("encrypted", [True, False])
def test_forged_records_are_good_in_a_bucket_in_clear_alone(
    where: dict[str, Any], tmp_path: Path, encrypted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every checksum of a forgery holds: the control shows that it would be served."""
    monkeypatch.setattr(opened_here, "sealing", SEALING if encrypted else None)
    count = 0

    async def test() -> None:
        nonlocal count
        prefixes = [prefix_of(f"forged {i}", 16) for i in range(32)]
        poison = b"POISON! " * 100
        async with opened({**where, "grace_s": 60.0}) as writer:
            for keys in prefixes:
                stored = await writer.write(frames(keys, nbytes=LEAF_NBYTES))
                path = tmp_path / "bucket" / str(stored.name)
                data = bytearray(path.read_bytes())
                for offset, header in stored.frames:
                    for start, block in zip(header.offsets, header.blocks, strict=True):
                        at = offset + start
                        old = record(block.key, header.part, LEAF_NBYTES)
                        new = forged(old, poison)
                        change = zip(data[at : at + LEAF_NBYTES], old, new, strict=True)
                        data[at : at + LEAF_NBYTES] = bytes(s ^ o ^ n for s, o, n in change)
                        count += 1
                path.write_bytes(data)
        async with opened(where) as reader:
            served = 0
            for keys in prefixes:
                good, wrong = await good_reads(reader, keys, LEAF_NBYTES)
                assert good == wrong  # none is what was put
                served += wrong
            assert served == (0 if encrypted else count)

    run(test)
    assert count >= 1000


def test_a_forged_tombstone_kills_nothing(where: dict[str, Any], tmp_path: Path) -> None:
    async def test() -> None:
        keys = prefix_of("doomed", 16)
        async with opened(where) as side:
            await side.write(frames(keys))
            name = next(iter(side.tier._catalog._footers))
            forged_name = TombstoneName(name.namespace_id, 7, f"{PREFIX}/")
            for data in (encode_tombstone(forged_name, None, NAMESPACE), b"rot", bytes(8192)):
                await side.bucket.put(str(forged_name), [data], len(data))
                async with opened(where) as other:
                    assert await found(other, keys) == 32
                    assert other.counted("corrupt_blocks") == {"object": 1}

    run(test)


def test_a_tombstone_of_another_tenant_or_place_kills_nothing(
    where: dict[str, Any], tmp_path: Path
) -> None:
    async def test() -> None:
        keys = prefix_of("doomed", 16)
        async with opened(where) as side:
            await side.write(frames(keys))
            other = NamespaceId(b"o" * 32)
            await side.tier.deletes.delete(other, None, side.deadline())
            (path,) = objects(tmp_path, TOMBSTONES)
            name = next(iter(side.tier._catalog._footers))
            stolen = TombstoneName(name.namespace_id, 1, f"{PREFIX}/")
            data = path.read_bytes()
            await side.bucket.put(str(stolen), [data], len(data))
        async with opened(where) as side:
            assert await found(side, keys) == 32

    run(test)


def test_an_object_under_another_name_or_tenant_is_no_object(
    where: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        mine, theirs = prefix_of("mine", 16), prefix_of("theirs", 16)
        async with opened(where) as side:
            await side.write(frames(mine))
            (own,) = objects(tmp_path)
            await side.write(frames(theirs))
            (other,) = set(objects(tmp_path)) - {own}
            own.write_bytes(other.read_bytes())
        async with opened(where) as side:
            assert (await side.find(mine)).blocks == 0
            assert await found(side, theirs) == 32
        monkeypatch.setattr(opened_here, "sealing", Sealing(ROOT, tenant_id("acme")))
        async with opened(where) as acme:
            assert (await acme.find(theirs)).blocks == 0
            await acme.write(frames(mine))
            (acmes,) = set(objects(tmp_path)) - {own, other}
            acmes.write_bytes(other.read_bytes())
        async with opened(where) as acme:
            assert (await acme.find(mine)).blocks == 0

    run(test)


def test_daemons_that_start_at_once_agree_on_the_keys(where: dict[str, Any]) -> None:
    async def test() -> None:
        keys = prefix_of("agreed", 16)
        async with (
            opened(where, ready=False) as one,
            opened(where, ready=False) as two,
            opened(where, ready=False) as three,
        ):
            sides = (one, two, three)
            await asyncio.gather(*(side.tier.ready(side.deadline()) for side in sides))
            await one.write(frames(keys))
            assert [await found(side, keys) for side in sides] == [32, 32, 32]

    run(test)


def test_the_namespaces_of_a_bucket_are_known_by_their_own_ids(where: dict[str, Any]) -> None:
    async def test() -> None:
        async with opened(where) as side:
            await side.write(frames(prefix_of("named", 16)))
        async with opened(where) as side:  # it has not stored anything itself
            assert side.tier.found_namespaces == {NAMESPACE}
            await side.delete(None)
        async with opened(where) as side:
            assert (await side.find(prefix_of("named", 16))).blocks == 0

    run(test)


def test_another_root_is_refused_and_said(
    where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with opened(where) as side:
            await side.write(frames(prefix_of("locked", 16)))
        monkeypatch.setattr(opened_here, "sealing", Sealing(FileRoot(b"another root " + bytes(19))))
        async with opened(where, ready=False) as side:
            with pytest.raises(ObjectRefused, match="the root key does not open it"):
                await side.tier.ready(side.deadline())
            assert "the root key does not open it" in side.tier.stats()["reason"]

    run(test)


def test_lost_keys_of_a_bucket_are_said_and_no_others_are_made(
    where: dict[str, Any], tmp_path: Path
) -> None:
    async def test() -> None:
        keys = prefix_of("lost", 16)
        async with opened(where) as side:
            await side.write(frames(keys))
        (lost,) = objects(tmp_path, "/keys/")
        data = lost.read_bytes()
        lost.unlink()
        async with opened(where, ready=False) as side:
            with pytest.raises(ObjectRefused, match="lost its keys"):
                await side.tier.ready(side.deadline())
        assert objects(tmp_path, "/keys/") == []
        lost.write_bytes(data)
        async with opened(where) as side:
            assert await found(side, keys) == 32

    run(test)


def test_no_change_of_a_buckets_keys_undoes_another(where: dict[str, Any], tmp_path: Path) -> None:
    async def test() -> None:
        keys = prefix_of("between", 16)
        async with opened(where) as one, opened(where) as two:
            assert await one.tier.keys.rotate(one.deadline()) == 2
            await one.write(frames(keys))
            assert await two.tier.keys.rotate(two.deadline()) == 3
        async with opened(where) as side:
            assert await found(side, keys) == 32
            keys_there = objects(tmp_path, "/keys/")
            foreign = keys_there[0].with_name(f"{99:016x}")
            foreign.write_bytes(Keyring.create(FileRoot(b"z" * 31 + b"y"), bytes(16)).encode())
            with pytest.raises(ObjectRefused):
                await side.tier.keys.rotate(side.deadline())
            assert objects(tmp_path, "/keys/") == [*keys_there, foreign]

    run(test)


def test_keys_that_are_destroyed_open_nothing_even_from_a_snapshot(
    where: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Forgetful()
    monkeypatch.setattr(opened_here, "sealing", Sealing(root, tenant_id("acme")))

    async def test() -> None:
        keys = prefix_of("erased", 16)
        async with opened(where) as side:
            await side.write(frames(keys))
            snapshot = {path: path.read_bytes() for path in objects(tmp_path, "/")}
            assert await side.tier.erase(30.0) is Erasure.FORGOTTEN
            assert objects(tmp_path, "/keys/") == objects(tmp_path) == []
            with pytest.raises(ObjectRefused, match="destroyed"):
                await side.tier.collect()  # makes no new ones
        for path, data in snapshot.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        async with opened(where, ready=False) as side:
            with pytest.raises(ObjectRefused, match="forgotten"):
                await side.tier.ready(side.deadline())

    run(test)


def test_the_prefix_of_a_tenant_is_not_said_twice(tmp_path: Path) -> None:
    from kvstore.tier.object.keys import names_of

    acme = tenant_id("acme")
    assert names_of(None, "s3://bucket/x").prefix == ""
    assert names_of(SEALING, "s3://bucket/x").prefix == f"{PREFIX}/"
    assert names_of(Sealing(ROOT, acme), f"s3://bucket/x/t/{acme.hex()}").prefix == ""
    assert names_of(Sealing(ROOT, acme), f"s3://bucket/t/{bytes(16).hex()}").prefix != ""


def test_no_more_namespaces_are_remembered_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal, "REMEMBERED_MAX", 3)
    names = SealedNames(SEALING.tenant, "")
    names.ring = Keyring.create(ROOT, SEALING.tenant)
    ids = [NamespaceId(bytes([at]) * 32) for at in range(5)]
    named = [names.namespace(each) for each in (*ids[:3], ids[0], *ids[3:])]
    assert [names.real(each) for each in dict.fromkeys(named)] == [ids[0], None, None, *ids[3:]]


def test_a_bucket_in_clear_has_no_keys_to_rotate(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened({"url": f"file://{tmp_path}/plain"}) as side:
            with pytest.raises(ConfigError, match="not encrypted"):
                await side.tier.keys.rotate(side.deadline())
            await side.write(frames(prefix_of("plain", 16)))
            assert (await side.find(prefix_of("plain", 16))).blocks == RUN_BLOCKS
            assert await side.tier.keys.destroy(side.deadline()) is Erasure.NONE

    run(test)
