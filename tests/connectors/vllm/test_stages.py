"""The stages of a pipeline each store their layers; a block is a hit once all of them have."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvstore import Client, Group, KeyChain, Namespace, Part, root_key  # noqa: E402
from kvstore.model.errors import Incompatible  # noqa: E402
from kvstore.testing.daemon import Daemon  # noqa: E402
from kvstore.testing.wait import until  # noqa: E402
from kvstore_vllm.load_orders import load_order  # noqa: E402
from kvstore_vllm.lookup import Lookup  # noqa: E402
from kvstore_vllm.metadata import (  # noqa: E402
    PIPELINE,
    LossySizes,
    SaveOrder,
    SaveSpan,
    StepMetadata,
    engine_groups,
    tables_of,
)
from kvstore_vllm.opening import open_pages  # noqa: E402
from kvstore_vllm.settings import Settings  # noqa: E402
from kvstore_vllm.shards import Shards  # noqa: E402
from kvstore_vllm.stages import Stage, groups_of, stored_groups  # noqa: E402
from kvstore_vllm.tracked import Tracked  # noqa: E402
from kvstore_vllm.worker import WorkerSide  # noqa: E402
from tests.connectors.vllm.scheduler_engine import make_request  # noqa: E402

HYBRID = [
    Stage(layers=(("full.0",), ("window.0", "window.1"), ()), record_nbytes=(8192, 16384)),
    Stage(layers=(("full.2", "full.3"), (), ("window.4",)), record_nbytes=(16384, 8192)),
]
"""A model of five layers in three groups; each stage lacks one of the groups with a window."""


def test_without_a_pipeline_the_groups_are_those_of_the_engine() -> None:
    alone = Stage(layers=(("a",), ("b",)), record_nbytes=(4096, 8192))
    assert [each.name for each in stored_groups([alone])] == ["0", "1"]
    assert groups_of([alone], 0) == (0, 1)


def test_each_stage_stores_the_layers_that_it_has() -> None:
    found = stored_groups(HYBRID)
    assert [each.name for each in found] == ["0@0", "0@1", "1@0", "2@1"]
    assert [HYBRID[each.stage].record_nbytes[each.at] for each in found] == [
        8192,
        16384,
        16384,
        8192,
    ]
    assert [groups_of(HYBRID, stage) for stage in (0, 1)] == [(0, 2), (1, 3)]
    assert [stage.tables for stage in HYBRID] == [(0, 1), (0, 2)]


def test_what_a_stage_tells_is_read_back_or_refused() -> None:
    lossy = Stage((("a",),), (4096,), ("CPU_ATTN/amx",), "ep/1 12", (LossySizes(1000, 500),))
    for stage in (*HYBRID, lossy):
        assert Stage.from_json(stage.to_json()) == stage
    assert isinstance(Stage.from_json(lossy.to_json()).lossy[0], LossySizes)
    for text in (b"", b"[]", b'{"layers": 1}', b'{"layers": [["a"]], "record_nbytes": []}'):
        with pytest.raises(Incompatible, match="stage of this engine"):
            Stage.from_json(text)
    with pytest.raises(Incompatible, match="different KV cache groups"):
        stored_groups([HYBRID[0], lossy])


def test_a_worker_holds_the_parts_of_its_stage() -> None:
    shards = Shards(2, 2, tables=(0, 2), groups=groups_of(HYBRID, 1))
    parts = [Part(group, shard) for group in (1, 3) for shard in (2, 3)]
    assert [shards.pages_of(part) for part in parts] == [0, 1, 2, 3]
    assert [shards.part_of(pages) for pages in range(4)] == parts
    assert all(part in shards for part in parts)
    assert not any(part in shards for part in (Part(0, 2), Part(1, 1), Part(2, 3), Part(3, 4)))
    spans = SaveSpan(0, 0, (7, 8)), SaveSpan(1, 0, (9,)), SaveSpan(2, 1, (5,))
    assert shards.of_pages(SaveOrder((), 0, None, spans)).spans == (
        SaveSpan(0, 0, (7, 8)),
        SaveSpan(1, 0, (7, 8)),
        SaveSpan(2, 1, (5,)),
        SaveSpan(3, 1, (5,)),
    )


def test_the_first_stage_of_one_group_is_not_the_second() -> None:
    """Its only group has the same number in the engine, in its pages and in the namespace."""
    stages = [Stage(((name,),), (4096,)) for name in ("a", "b")]
    first = Shards(0, tables=(0,), groups=groups_of(stages, 0))
    assert Part(0, 0) in first
    assert Part(1, 0) not in first


TOKENS, BLOCKS, WINDOW = 16, 12, 40
SAVED, TARGETS = (3, 0, 7, 5), (1, 11, 4, 8)
LAYERS = {"full.0": 2, "full.1": 1, "full.2": 1, "window.3": 2}
"""Layers, and the heads of each: the second stage has all of the window, and more of the rest."""


class Pipeline:
    """Two workers, each with its layers, and the namespace that both agree on."""

    def __init__(self, target: str) -> None:
        self.client = Client(target)
        self.client.connect()
        names = [(("full.0",), ()), (("full.1", "full.2"), ("window.3",))]
        self.layers = {
            name: torch.randn(BLOCKS, heads, TOKENS, 64, dtype=torch.float32)
            for name, heads in LAYERS.items()
        }
        opened = [
            open_pages([[self.layers[name] for name in group] for group in groups if group], BLOCKS)
            for groups in names
        ]
        stages = [
            Stage(layers=groups, record_nbytes=tuple(pages.record_nbytes))
            for groups, pages in zip(names, opened, strict=True)
        ]
        self.namespace = Namespace(
            TOKENS,
            tuple(
                Group(
                    each.name,
                    stages[each.stage].record_nbytes[each.at],
                    window_tokens=WINDOW * each.table,
                )
                for each in stored_groups(stages)
            ),
            ((PIPELINE, "1+3"),),
        )
        self.workers = [
            WorkerSide(
                Settings(target),
                self.client,
                pages,
                self.namespace,
                shards=Shards(0, tables=stage.tables, groups=groups_of(stages, index)),
                writes=True,
            )
            for index, (stage, pages) in enumerate(zip(stages, opened, strict=True))
        ]

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.client.close()

    def request(self) -> Tracked:
        request = make_request(TOKENS * len(SAVED) + 1)
        return Tracked(request, root_key(self.namespace.id), self.namespace)

    def save(self, stage: int) -> None:
        keys = tuple(self.request().keys())
        spans = SaveSpan(0, 0, SAVED), SaveSpan(1, 1, SAVED[1:])
        worker = self.workers[stage]
        worker.begin_step(StepMetadata(saves=[SaveOrder(keys, 0, None, spans)]))
        assert worker.saver.drain(10)

    def hit(self) -> int:
        keys = self.request().keys()
        return self.client.match(self.client.register(self.namespace), keys).hit_blocks

    def load(self) -> list[set[str]]:
        """Load the blocks by both workers; return what each says."""
        tracked = self.request()
        tracked.lookup = Lookup(
            self.client,
            self.namespace,
            tracked.keys(),
            skip_blocks=0,
            readers=2,
            wait_s=1,
            request_id="r",
            recompute_s_per_block=0,
        )
        until(lambda: tracked.lookup.answered)
        tables = [*TARGETS], [0, *TARGETS[1:]]
        order = load_order(tracked, tables, TOKENS * len(SAVED), self.namespace)
        assert order.complete
        for worker in self.workers:
            worker.start_loads(StepMetadata(loads=[order]))
        until(lambda: not any(worker.loader.pending for worker in self.workers))
        return [worker.results(computed=True)[0] for worker in self.workers]


@pytest.fixture
def pipeline():
    with Daemon(file=False) as daemon:
        pipeline = Pipeline(daemon.start().target)
        yield pipeline
        pipeline.close()


def test_blocks_are_a_hit_when_all_stages_have_stored_them(pipeline) -> None:
    assert [group.name for group in pipeline.namespace.groups] == ["0@0", "0@1", "1@1"]
    assert tables_of(pipeline.namespace) == (0, 0, 1)
    assert [group.window_tokens for group in engine_groups(pipeline.namespace)] == [0, WINDOW]
    pipeline.save(0)
    assert pipeline.hit() == 0
    pipeline.save(1)
    assert pipeline.hit() == len(SAVED)


def test_each_stage_loads_its_own_layers(pipeline) -> None:
    pipeline.save(1)
    pipeline.save(0)
    before = {name: layer.clone() for name, layer in pipeline.layers.items()}
    for layer in pipeline.layers.values():
        layer[list(TARGETS)] = 7
    assert pipeline.load() == [{"r"}, {"r"}]
    for name, layer in pipeline.layers.items():
        saved, targets = (SAVED[1:], TARGETS[1:]) if "window" in name else (SAVED, TARGETS)
        assert torch.equal(layer[list(targets)], before[name][list(saved)])
    assert [worker.counters.totals["loaded_blocks"] for worker in pipeline.workers] == [4, 7]
    until(lambda: pipeline.client.admin.stats()["leases"] == 0, 5)


def test_a_stage_without_layers_of_a_group_saves_nothing_of_it(pipeline) -> None:
    keys = tuple(KeyChain(root_key(pipeline.namespace.id), TOKENS).update(range(TOKENS)))
    order = SaveOrder(keys, 0, None, (SaveSpan(1, 0, (3,)),))
    first, second = pipeline.workers
    for worker in (first, second):
        worker.begin_step(StepMetadata(saves=[order]))
        assert worker.saver.drain(10)
    saved = [worker.counters.totals["saved_blocks"] for worker in (first, second)]
    dropped = [worker.counters.totals["saves_dropped_down"] for worker in (first, second)]
    assert (saved, dropped) == ([0, 1], [0, 0])
