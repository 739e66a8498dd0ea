"""A few seeds of the simulation; `make sim` runs a thousand. And that it can fail at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvstore.decide.index import StoredFrame
from kvstore.decide.planner import Leases, Planner
from kvstore.decide.planner.reads import Reads
from kvstore.decide.planner.replaced import Replaced
from kvstore.model.tenant import NO_TENANT_ID
from kvstore.tier.file import FileExtent
from kvstore.tier.file.durability import Durability
from kvstore.tier.file.frames import Frames
from tests.sim.run import run_any
from tests.sim.world import World, run_seed


@pytest.mark.parametrize("seed", range(8))
def test_a_seed_keeps_every_promise(seed: int) -> None:
    outcome = run_seed(seed)
    assert outcome.violations == [], f"again: python -m tests.sim.run --seed {seed}"
    assert outcome.calls > 20


def test_a_nonce_that_is_used_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.sealing.aead.os.urandom", bytes)
    assert any("nonces were used again" in text for text in run_seed(3).violations)


def test_a_seed_takes_the_same_course_again() -> None:
    assert run_seed(3) == run_seed(3)
    encrypted = run_any(471)
    assert encrypted.encrypted
    assert run_any(471) == encrypted


def _found(seeds: range) -> set[str]:
    return {text.partition(":")[0] for seed in seeds for text in run_seed(seed).violations}


def test_what_another_tenant_has_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    start = World._start

    async def swapped(self: World) -> None:
        """Give each tenant the disks of the other one; without an owner, their keys open them."""
        first, second = self._sides
        first.platters, second.platters = second.platters, first.platters
        await start(self)

    assert run_seed(15).tenants == 2
    monkeypatch.setattr(World, "_start", swapped)
    monkeypatch.setattr("tests.sim.side.TenantId", lambda _: NO_TENANT_ID)
    assert any(text.startswith("foreign") for text in run_seed(15).violations)


def test_a_sync_that_lies_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def sync(self: Durability, extents: object = ()) -> None:
        """Say that all is durable."""

    monkeypatch.setattr(Durability, "sync", sync)
    assert "lost" in _found(range(10))


def test_a_delete_that_is_not_buried_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def write_tombstone(self: Frames, header: object) -> FileExtent:
        """Forget it."""
        return FileExtent(0, 0, 0)

    monkeypatch.setattr(Frames, "write_tombstone", write_tombstone)
    assert "resurrected" in _found(range(10))


def test_frames_that_leave_under_a_lease_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    grant = Leases.grant

    def not_held(self: Leases, *args: Any, frames: Sequence[StoredFrame] = (), **more: Any) -> Any:
        return grant(self, *args, **more)

    monkeypatch.setattr(Leases, "grant", not_held)
    # One seed in six finds it; the first that does is enough.
    violations = (text for seed in range(80) for text in run_seed(seed).violations)
    assert any(text.startswith("wrong") for text in violations)


def test_slots_reused_under_a_lease_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    unpin = Planner.unpin

    def too_early(self: Planner, held: object) -> None:
        held.pins = 0  # type: ignore[attr-defined]
        unpin(self, held)  # type: ignore[arg-type]

    monkeypatch.setattr(Planner, "unpin", too_early)
    assert _found(range(10)) & {"wrong", "leaked", "bug"}


def _lossy_violations(seeds: int) -> Iterator[str]:
    return (text for seed in range(2, seeds, 3) for text in run_seed(seed).violations)


def test_fine_parts_of_another_writer_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reads, "unpaired", lambda self, read, named: [])
    assert any("with another base" in text for text in _lossy_violations(150))


def test_a_durable_base_that_a_refined_put_frees_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replaced, "keep", lambda self, block, old: None)
    assert any(text.startswith("lost") for text in _lossy_violations(150))
