"""Blocks that the engine had before a request came: encoded only if the daemon lacks them."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from kvstore import AsyncClient, Incompatible  # noqa: E402
from kvstore.testing.daemon import Daemon  # noqa: E402
from kvstore.testing.wait import until  # noqa: E402
from kvstore_kernels import native  # noqa: E402
from kvstore_vllm.metadata import StepMetadata  # noqa: E402
from tests.connectors.vllm.cpu_layers import import_vllm  # noqa: E402
from tests.connectors.vllm.lossy_engine import BLOCKS, WINDOW_BLOCKS, LossyEngine  # noqa: E402

pytestmark = pytest.mark.skipif(bool(native.reason()), reason=native.reason())

FULL = [*range(1, 1 + BLOCKS)]
"""Device blocks of the prompt in the group of full attention."""
WINDOW = [block + 50 for block in FULL[-WINDOW_BLOCKS:]]
"""And of its last window, in the other group."""


@pytest.fixture(scope="module", autouse=True)
def vllm():
    import_vllm()


@pytest.fixture
def engine():
    with Daemon() as daemon, LossyEngine(daemon.start().target, "exact") as engine:
        yield engine


def encoded(engine: LossyEngine, **turn) -> list[int]:
    """Return the device blocks that a turn encodes."""
    engine.encoded.clear()
    engine.compute(**turn)
    return sorted(engine.encoded)


def test_what_the_daemon_has_is_not_encoded_again(engine):
    assert encoded(engine) == FULL + WINDOW
    stored = engine.counts["saved_blocks"]
    assert encoded(engine, cached=BLOCKS) == []
    assert engine.counts["known_blocks"] == len(FULL + WINDOW)
    assert engine.counts["saved_blocks"] == stored
    assert engine.load()
    assert engine.errors() == [0] * BLOCKS


def test_what_the_daemon_has_dropped_since_is_offered_again(engine):
    engine.compute()
    engine.client.admin.clear()
    assert encoded(engine, cached=BLOCKS) == FULL + WINDOW
    assert engine.load()
    assert engine.errors() == engine.errors(group=1) + [0] * (BLOCKS - WINDOW_BLOCKS)


def test_only_what_is_missing_is_encoded(engine):
    engine.compute()
    engine.client.admin.delete(engine.namespace.id, [engine.keys[at] for at in (2, 3, 8)])
    assert encoded(engine, cached=BLOCKS) == [FULL[2], FULL[3], FULL[8], WINDOW[-2]]
    assert engine.load()
    assert engine.errors() == [0] * BLOCKS


def test_blocks_that_a_request_computes_are_not_asked_for(engine):
    """They are new, nearly always: the question would cost each block of an answer a call."""
    engine.compute()
    asked = engine.counts["known_blocks"]
    assert encoded(engine) == FULL + WINDOW
    assert engine.counts["known_blocks"] == asked == 0
    assert encoded(engine, cached=4) == [], "of one order, all are asked for"


def test_who_insists_on_fine_parts_encodes_what_lacks_them(tmp_path: Path):
    with Daemon(f"file.path={tmp_path / 'kv'}", "file.fidelity=base") as daemon:
        with LossyEngine(daemon.start().target) as engine:
            engine.compute()
            assert engine.client.admin.flush()
        daemon.kill()
        with LossyEngine(daemon.start().target) as engine:
            assert encoded(engine, cached=BLOCKS) == []
            # The first block is exact, and has no fine part.
            assert encoded(engine, cached=BLOCKS, fidelity="fine") == FULL[1:] + WINDOW
            assert encoded(engine, cached=BLOCKS, fidelity="fine") == []
            assert engine.load(fidelity="fine")


def test_blocks_that_are_known_may_be_reused_at_once(engine):
    """A save that reads only two blocks any more holds up no step that overwrites others."""
    engine.compute()
    engine.client.admin.delete(engine.namespace.id, engine.keys[8:9])
    pages = engine.worker.saver._pages
    encode, steps = pages.encode, []

    def overwritten_meanwhile(group, blocks, *rest):
        if not steps:
            for handed_out in (FULL[:8], FULL[8:9]):
                engine.worker.begin_step(StepMetadata(handed_out=handed_out))
                steps.append(engine.counts["saves_dropped_reuse"])
        return encode(group, blocks, *rest)

    pages.encode = overwritten_meanwhile
    engine.compute(cached=BLOCKS)
    until(lambda: steps)
    assert steps == [0, 1]
    assert engine.client.match(engine.namespace.id, engine.keys).hit_blocks < BLOCKS


def test_a_daemon_that_does_not_know_the_question_is_offered_all(engine, monkeypatch):
    engine.compute()
    engine.client.admin.clear()

    async def unknown(*args, **options):
        raise Incompatible("the daemon said of 16 blocks whether they are stored")

    monkeypatch.setattr(AsyncClient, "match", unknown)
    assert encoded(engine, cached=BLOCKS) == FULL + WINDOW
    assert engine.load()


def test_a_daemon_that_is_away_drops_the_save(tmp_path: Path):
    with (
        Daemon(f"file.path={tmp_path / 'kv'}") as daemon,
        LossyEngine(daemon.start().target, "exact") as engine,
    ):
        engine.compute()
        daemon.kill()
        assert encoded(engine, cached=BLOCKS) == []
        assert engine.counts["saves_dropped_down"] == 1
