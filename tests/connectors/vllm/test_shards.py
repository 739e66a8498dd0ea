"""Workers of different degrees of tensor parallelism store the same records."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvstore.model.block import Part  # noqa: E402
from kvstore.model.errors import Incompatible  # noqa: E402
from kvstore_vllm.metadata import SaveOrder, SaveSpan  # noqa: E402
from kvstore_vllm.opening import open_pages  # noqa: E402
from kvstore_vllm.packings import Packing  # noqa: E402
from kvstore_vllm.shards import Shards, cut_heads, held_shards  # noqa: E402
from tests.connectors.vllm.cpu_layers import BLOCKS, import_vllm  # noqa: E402

HEADS, TOKENS, HEAD = 4, 32, 64


@pytest.mark.parametrize(
    ("workers", "held"),
    [
        (1, [Shards(0, 4)]),
        (2, [Shards(0, 2), Shards(2, 2)]),
        (4, [Shards(0), Shards(1), Shards(2), Shards(3)]),
    ],
)
def test_the_workers_hold_each_shard_once(workers, held) -> None:
    assert [held_shards(rank, workers, 4) for rank in range(workers)] == held
    assert [s for shards in held for s in range(4) if Part(0, s) in shards] == [0, 1, 2, 3]


def test_by_default_a_worker_holds_one_shard() -> None:
    assert [held_shards(rank, 3, 0) for rank in range(3)] == [Shards(0), Shards(1), Shards(2)]


def test_shards_that_cannot_be_dealt_out_are_refused() -> None:
    with pytest.raises(Incompatible, match="multiple of 3"):
        held_shards(0, 3, 4)
    with pytest.raises(Incompatible, match=r"\[4\] heads in a layer cannot cut them into 3"):
        cut_heads([torch.zeros(2, 4, 8, 8)], 3)


def test_parts_and_groups_of_pages_are_each_other_s_inverse() -> None:
    shards = Shards(2, 2)
    parts = [Part(group, shard) for group in (0, 1) for shard in (2, 3)]
    assert [shards.pages_of(part) for part in parts] == [0, 1, 2, 3]
    assert [shards.part_of(pages) for pages in range(4)] == parts


def test_an_order_is_one_for_every_shard() -> None:
    order = SaveOrder((), 0, None, (SaveSpan(0, 0, (7, 8)), SaveSpan(1, 1, (9,))))
    assert Shards(1).of_pages(order) is order
    assert Shards(0, 2).of_pages(order).spans == (
        SaveSpan(0, 0, (7, 8)),
        SaveSpan(1, 0, (7, 8)),
        SaveSpan(2, 1, (9,)),
        SaveSpan(3, 1, (9,)),
    )


def layers_of(keys_and_values, heads: slice):
    """Return layers with some of the heads, packed by vLLM's own function, and how."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(torch.bfloat16, TOKENS, HEAD)
    slots = torch.arange(BLOCKS * TOKENS)
    layers = []
    for kv in keys_and_values:
        mine = [each[:, heads].contiguous() for each in kv]
        count = mine[0].shape[1]
        layer = torch.zeros((BLOCKS, count, TOKENS, 2 * HEAD), dtype=torch.bfloat16)
        key_cache, value_cache = layer.view(BLOCKS, count, 2 * TOKENS, -1).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(*mine, key_cache, value_cache, slots, isa)
        layers.append(layer)
    return layers, [Packing(isa=isa)] * len(layers)


@pytest.fixture(scope="module")
def keys_and_values():
    import_vllm()
    torch.manual_seed(3)
    return [
        [torch.randn(BLOCKS * TOKENS, HEADS, HEAD).to(torch.bfloat16) for _ in "kv"]
        for _ in range(3)
    ]


def records_of(pages, group: int, blocks) -> list[bytes]:
    if pages.coded:
        return [bytes(each.base) for each in pages.encode(group, blocks, None)]
    records = [bytearray(pages.record_nbytes[group]) for _ in blocks]
    list(pages.read(group, blocks, [memoryview(each) for each in records], None))
    return [bytes(each) for each in records]


@pytest.mark.vllm
@pytest.mark.parametrize("record", ["raw", "l3"])
def test_what_one_worker_stores_four_workers_load(keys_and_values, record) -> None:
    layers, packings = layers_of(keys_and_values, slice(None))
    blocks = [4, 0, 3]
    whole = open_pages([layers], BLOCKS, record=record, packings=[packings], shards=4)
    for rank in range(4):
        theirs, packings = layers_of(keys_and_values, slice(rank, rank + 1))
        was = [layer.clone() for layer in theirs]
        worker = open_pages([theirs], BLOCKS, record=record, packings=[packings])
        assert worker.form == whole.form
        assert worker.record_nbytes[0] == whole.record_nbytes[rank]
        records = records_of(whole, rank, blocks)
        assert records_of(worker, 0, blocks) == records
        for layer in theirs:
            layer.zero_()
        worker.write(0, blocks, [memoryview(each) for each in records], None)
        for layer, before in zip(theirs, was, strict=True):
            assert torch.equal(layer[blocks], before[blocks])


@pytest.mark.vllm
@pytest.mark.parametrize("record", ["raw", "l3"])
def test_what_two_workers_store_one_worker_loads(keys_and_values, record) -> None:
    layers, packings = layers_of(keys_and_values, slice(None))
    was = [layer.clone() for layer in layers]
    for layer in layers:
        layer.zero_()
    blocks = [1, 5]
    whole = open_pages([layers], BLOCKS, record=record, packings=[packings], shards=4)
    for rank in range(2):
        theirs, packings = layers_of(keys_and_values, slice(2 * rank, 2 * rank + 2))
        worker = open_pages([theirs], BLOCKS, record=record, packings=[packings], shards=2)
        assert worker.form == whole.form
        for shard in range(2):
            records = records_of(worker, shard, blocks)
            whole.write(2 * rank + shard, blocks, [memoryview(each) for each in records], None)
    for layer, before in zip(layers, was, strict=True):
        assert torch.equal(layer[blocks], before[blocks])
        assert not layer[[0, 2, 3, 4]].any()
