"""Prefixes of a lossy namespace, example by example: what is listed, and what there is room for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvstore.decide.ask import Ask
from kvstore.decide.index import StoredFrame
from kvstore.model.block import Match
from kvstore.model.outcome import Reason
from kvstore.move.load_race import Ended
from kvstore.move.promote import Promoted
from kvstore.move.source import Source
from tests.store.lossy_node import BASE, BASES, BLOCKS, FINE, FINES, SPEC, LossyNode, chain


def test_a_fine_part_without_its_base_is_no_block() -> None:
    """The daemon may be killed between the two, or the base lie on a disk that is missing."""
    with LossyNode(None) as node:
        key = chain(1)[1]
        for part, nbytes, listed in ((FINES[0], FINE, []), (BASES[0], BASE, [key])):
            frame = StoredFrame(object(), part, 0, (nbytes,), 1)
            node.planner.recovery.add(
                SPEC.id, frame, [(0, key, nbytes, 7)], first_block=1, parent=None
            )
            assert [item.key for item in node.run(node.store.report.scan(None, None, 10))] == listed
            assert [
                item.key for item in node.run(node.store.report.scan(SPEC.id, None, 10))
            ] == listed


@pytest.mark.parametrize("share", [0.25, 0.05])
@pytest.mark.parametrize("arena_kib", [100, 160, 200, 256])
def test_a_reader_that_insists_on_fine_parts_gets_the_prefix_that_there_is_room_for(
    arena_kib: int, share: float, tmp_path: Path
) -> None:
    """Base and fine parts of a prefix take 284 KiB, its fine parts alone 120 KiB."""
    names = range(4)
    with LossyNode(tmp_path, arena_bytes=8 << 20, fine=True) as node:
        for name in names:
            node.store_blocks(chain(name), durable=True)
        assert node.flush()
    with LossyNode(tmp_path, arena_bytes=arena_kib << 10, fine=True, leased_fraction=0.9) as node:
        node.recall()
        node.planner.eviction.fine_parts.share = share
        node.store.caps.set_bounds()
        for name in names:
            hit, _ = node.read(chain(name))
            assert hit > 0
            hit, fine = node.read(chain(name), refined=True)
            assert 1 < hit < BLOCKS
            assert fine >= hit - 2  # blocks that are exact have none


@pytest.mark.parametrize("refined", [True, False])
def test_what_leaves_while_a_bucket_is_asked_is_no_hit(
    refined: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arena's part of a prefix is found first; nobody holds it while the bucket answers."""
    keys, gone = chain(1, 20), 9
    with LossyNode(tmp_path / "file", bucket=tmp_path / "bucket") as node:
        node.store_blocks(keys, 0, BLOCKS)
        fetch = node.store._fetch

        async def evicts_meanwhile(source: Source, ask: Ask, match: Match, until: float) -> Ended:
            await asyncio.sleep(0.05)
            block = node.planner.index.by_key(keys[gone])
            assert block is not None
            for part in FINES if refined else BASES + FINES:
                if (record := block.record(part)) is not None:
                    node.planner._ledger.forget_part(block, record, Reason.EVICTED)
            return Ended.DONE

        monkeypatch.setattr(fetch, "promote", evicts_meanwhile)
        assert node.flush()
        hit, _ = node.read(keys, refined=refined)
        assert 0 < hit <= gone


def test_what_is_deleted_while_fine_parts_come_up_is_a_shorter_hit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of the hit came from the bucket, and was counted as such."""
    keys, bucket = chain(1), tmp_path / "bucket"
    bucket.mkdir()
    with LossyNode(tmp_path / "1", bucket=bucket, fine=True) as node:
        node.store_blocks(keys, durable=True)
    with LossyNode(tmp_path / "2", bucket=bucket, fine=True) as node:
        node.store_blocks(keys, 0, 4)
        promote = node.store._promotion.promote

        async def deletes_meanwhile(*asked: Any, **options: Any) -> Promoted:
            promoted = await promote(*asked, **options)
            if any(span.part in FINES for span in asked[2]):
                await node.store.deletes.delete(SPEC.id, keys[10:])
            return promoted

        monkeypatch.setattr(node.store._promotion, "promote", deletes_meanwhile)
        assert node.read(keys)[0] == 4, "the window before the tenth block did not come"
        hits = node.metrics.totals()["hit_blocks"]
        assert (hits["dram"], hits["file"], hits["object"]) == (4, 0, 0)
