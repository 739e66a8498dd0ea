"""Lossy blocks between vLLM's pages and a real daemon: saved, loaded, damaged, insisted on."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from kvstore.testing.daemon import Daemon  # noqa: E402
from kvstore_kernels import native  # noqa: E402
from tests.connectors.vllm.cpu_layers import import_vllm  # noqa: E402
from tests.connectors.vllm.device_layers import SharedLateDevice, late_pages  # noqa: E402
from tests.connectors.vllm.lossy_engine import BLOCKS, WINDOW_BLOCKS, LossyEngine  # noqa: E402

pytestmark = pytest.mark.skipif(bool(native.reason()), reason=native.reason())

LOSSY = BLOCKS - 1 + WINDOW_BLOCKS
"""Records of a load that are not exact: all but the first block of full attention."""


@pytest.fixture(scope="module", autouse=True)
def vllm():
    import_vllm()


@pytest.fixture(params=["processor", "device"])
def engine(request, codec_library):
    """An engine on a processor; and one on a device that is late, which has the same values."""

    def on_a_device(layers, packings, client, fidelity):
        return late_pages(layers, codec_library, SharedLateDevice(1), client.extents, fidelity)

    how = {"opened": on_a_device} if request.param == "device" else {}
    with Daemon() as daemon, LossyEngine(daemon.start().target, **how) as engine:
        yield engine


def fine_records(engine: LossyEngine) -> int:
    """Return how many fine parts of full attention the daemon has."""
    grant = engine.client.acquire(engine.client.register(engine.namespace), engine.keys)
    slots = iter(grant.slots)
    found = [(part, next(slots)) for part, begin, end in grant.spans for _ in range(begin, end)]
    engine.client.release(grant.lease_id)
    return sum(part.group == 2 and slot is not None for part, slot in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_prompt_comes_back_nearly_and_its_first_block_exactly(dtype):
    with Daemon() as daemon, LossyEngine(daemon.start().target, dtype=dtype) as engine:
        assert engine.compute() == 0
        assert engine.load()
        first, *others = engine.errors()
        assert first == 0
        assert 0 < max(others) < 0.02
        assert 0 < max(engine.errors(group=1)) < 0.02
        counts = engine.counts
        assert counts["saved_blocks"] == BLOCKS + WINDOW_BLOCKS + LOSSY
        assert counts["loaded_blocks"] == BLOCKS + WINDOW_BLOCKS
        assert counts["loaded_lossy_blocks"] == LOSSY
        assert counts["loaded_base_blocks"] == counts["corrupt_fine_blocks"] == 0
        assert counts["loaded_bytes"] == counts["saved_bytes"]
        assert counts["saved_raw_bytes"] == (BLOCKS + WINDOW_BLOCKS) * engine.raw_nbytes
        assert 0 < counts["saved_fine_bytes"] < counts["saved_bytes"] < counts["saved_raw_bytes"]
        assert counts["saved_uncoded_blocks"] == (dtype is torch.float16), "the first block"


def test_base_parts_alone_are_a_hit_unless_a_request_insists(tmp_path: Path):
    with Daemon(f"file.path={tmp_path / 'kv'}", "file.fidelity=base") as daemon:
        with LossyEngine(daemon.start().target) as engine:
            engine.compute()
            assert engine.load()
            finer = max(engine.errors())
            assert engine.client.admin.flush()
        daemon.kill()
        with LossyEngine(daemon.start().target) as engine:
            assert engine.load()
            assert engine.errors()[0] == 0
            assert finer * 3 < max(engine.errors()) < 0.2
            assert engine.counts["loaded_lossy_blocks"] == LOSSY
            assert engine.counts["loaded_base_blocks"] == LOSSY
            # Who insists gets nothing, not even the first block: the window before its end is not
            # stored. What is computed instead is stored with its fine parts.
            assert engine.compute(fidelity="fine") == 0
            assert engine.load(fidelity="fine")
            assert max(engine.errors()) == finer
            assert engine.counts["loaded_base_blocks"] == LOSSY


def test_what_was_loaded_without_fine_parts_is_never_stored_as_fine(tmp_path: Path):
    """The engine's own prefix cache lends it to a request that insists."""
    with Daemon(f"file.path={tmp_path / 'kv'}", "file.fidelity=base") as daemon:
        with LossyEngine(daemon.start().target) as engine:
            engine.compute()
            assert engine.client.admin.flush()
        daemon.kill()
        with LossyEngine(daemon.start().target) as engine:
            assert engine.load()
            engine.compute("fine", cached=BLOCKS, where_loaded=True)
            assert fine_records(engine) == 0
            assert engine.encoded == [], "the daemon has the first block, which is exact"
            assert engine.compute("fine") == 0, "nothing is fine enough"


def test_what_is_stored_without_fine_parts_is_left_alone_by_who_does_not_insist(tmp_path: Path):
    with Daemon(f"file.path={tmp_path / 'kv'}", "file.fidelity=base") as daemon:
        with LossyEngine(daemon.start().target) as engine:
            engine.compute()
            assert engine.client.admin.flush()
        daemon.kill()
        with LossyEngine(daemon.start().target) as engine:
            engine.compute()
            assert fine_records(engine) == 0
            assert engine.counts["saved_blocks"] == 0


@pytest.mark.parametrize("by_another", [False, True], ids=["flipped bit", "of another block"])
def test_a_wrong_fine_part_costs_its_precision_and_is_dropped(engine, by_another):
    engine.compute()
    assert engine.load()
    finer = engine.errors()
    engine.damage_fine_part(4, by_another=by_another)
    assert engine.load()
    errors = engine.errors()
    assert finer[4] * 3 < errors[4] < 0.2
    assert [*errors[:4], *errors[5:]] == [*finer[:4], *finer[5:]]
    assert engine.counts["corrupt_fine_blocks"] == 1
    assert engine.counts["corrupt_blocks"] == 0
    assert engine.counts["loaded_base_blocks"] == 1
    assert engine.counts["loads_failed"] == 0
    assert fine_records(engine) == BLOCKS - 2, "the daemon has verified it, and kept the base"
    assert engine.load()
    assert engine.counts["corrupt_fine_blocks"] == 1


def test_a_wrong_fine_part_fails_the_load_of_who_insists(engine):
    engine.compute()
    engine.damage_fine_part(4)
    assert not engine.load(fidelity="fine")
    assert engine.counts["loads_failed"] == 1
    assert engine.counts["loaded_blocks"] == 0
    assert engine.counts["corrupt_fine_blocks"] == 1
    # It is a miss from now on, until who insists has stored it again.
    assert engine.compute(fidelity="fine") == 0
    assert engine.load(fidelity="fine")
    assert fine_records(engine) == BLOCKS - 1


def test_an_exact_engine_and_a_lossy_one_share_nothing(engine):
    engine.compute()
    with LossyEngine(engine.client.target, fidelity="exact") as exact:
        assert exact.compute() == 0
        assert exact.load()
        assert exact.errors() == [0] * BLOCKS
        assert exact.errors(group=1) == [0] * WINDOW_BLOCKS
        assert exact.load(fidelity="fine"), "what is exact lacks nothing"
        assert exact.counts["loaded_lossy_blocks"] == 0
        assert exact.counts["saved_fine_bytes"] == 0
    assert fine_records(engine) == BLOCKS - 1


def test_values_that_ep_cannot_hold_are_stored_exactly(engine):
    engine.layers[0][0][3] = float("inf")  # the third block
    engine.compute()
    assert fine_records(engine) == BLOCKS - 2
    assert engine.load()
    first, _, third, *_ = engine.errors()
    assert first == 0
    assert math.isnan(third), "infinity less infinity"
    assert torch.equal(engine.layers[0][0][3], engine.layers[0][0][103])
    assert engine.load(fidelity="fine")
