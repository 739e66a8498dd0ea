"""A worker that knows its weights later than the others loses its shards until then: misses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore import Client, Group, KeyChain, Namespace, root_key
from kvstore.testing.wait import until
from kvstore_vllm.metadata import SaveOrder, SaveSpan, StepMetadata
from kvstore_vllm.settings import Settings
from kvstore_vllm.shards import Shards
from kvstore_vllm.worker import WorkerSide

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
from kvstore_vllm.opening import open_pages  # noqa: E402

BLOCK, BLOCKS = 16, 6
SHARDS = 2


@pytest.fixture
def make_worker(daemon):
    """Make workers that hold a KV cache of their own and differ in every block."""
    workers, clients = [], []

    def make(shard: int, namespace: Namespace | None) -> WorkerSide:
        client = Client(daemon.target, token="late workers of one engine", name=f"worker {shard}")
        clients.append(client)
        cache = torch.rand(BLOCKS + 1, 2, BLOCK, 8, generator=torch.Generator().manual_seed(shard))
        pages = open_pages([[cache]], BLOCKS + 1, client.extents)
        worker = WorkerSide(
            Settings(daemon.target), client, pages, namespace, shards=Shards(shard), writes=True
        )
        workers.append(worker)
        return worker

    yield make
    for each in (*workers, *clients):
        each.close()


def test_a_late_worker_only_misses(daemon, make_worker: Callable[..., WorkerSide]):
    nbytes = 2 * BLOCK * 8 * 4
    namespace = Namespace(BLOCK, (Group("0", nbytes, shards=SHARDS),), (("model", "test"),))
    keys = KeyChain(root_key(namespace.id), BLOCK).update(list(range(BLOCK * BLOCKS)))
    spans = (SaveSpan(0, 0, tuple(range(1, BLOCKS + 1))),)
    step = StepMetadata(saves=[SaveOrder(tuple(keys), 0, None, spans)])
    early, late = make_worker(0, namespace), make_worker(1, None)

    def save() -> int:
        """Have both save the same blocks; return how many are a hit then."""
        for worker in (early, late):
            worker.begin_step(step)
            assert worker.saver.drain(10)
        grant = client.acquire(namespace.id, keys)
        client.release(grant.lease_id)
        return grant.hit_blocks

    with Client(daemon.target) as client:
        client.register(namespace)
        assert save() == 0
        assert early.counters.totals["saved_blocks"] == BLOCKS
        assert late.counters.totals["saves_dropped_unknown_weights"] == 1
        late.use_namespace(namespace)
        assert save() == BLOCKS, "what was missing is stored with the next save"
        assert early.counters.totals["saved_blocks"] == BLOCKS, "the rest is not copied again"
        assert late.counters.totals["saved_blocks"] == BLOCKS
        until(lambda: client.admin.stats()["leases"] == 0)
