"""A worker's bytes through a real daemon: tensors as vLLM registers them, in host or GPU memory.

vLLM is not needed. "ring" takes a GPU's path, on a device that is the host. The pages of every
layout come back bit for bit, into other device blocks, and other blocks are not touched.
"""

from __future__ import annotations

import time
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from kvstore import Client, Group, KeyChain, Namespace, root_key  # noqa: E402
from kvstore.testing.daemon import Daemon  # noqa: E402
from kvstore.testing.wait import until  # noqa: E402
from kvstore_vllm.metadata import (  # noqa: E402
    LoadOrder,
    LoadSpan,
    SaveOrder,
    SaveSpan,
    StepMetadata,
)
from kvstore_vllm.opening import open_pages  # noqa: E402
from kvstore_vllm.pages import DeviceMemory  # noqa: E402
from kvstore_vllm.settings import Settings  # noqa: E402
from kvstore_vllm.shards import Shards  # noqa: E402
from kvstore_vllm.worker import WorkerSide  # noqa: E402
from tests.kernels.test_paged import LAYOUTS, make_layers, same_bytes  # noqa: E402

BLOCKS = 12
SAVED = (3, 0, 7, 5)
TARGETS = (1, 11, 4, 8)


@pytest.fixture(params=["cpu", "ring", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return request.param


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_come_back_through_a_daemon_into_other_blocks(layout, device):
    shapes = [(3, BLOCKS, 2, 16, 128), (2, BLOCKS, 1, 16, 576)]  # attention, MLA
    kind = device.replace("ring", "cpu")
    groups = [make_layers(layout, shape, torch.bfloat16, kind) for shape in shapes]
    before = [[layer.clone() for layer in group] for group in groups]
    with Daemon(file=False) as daemon, Client(daemon.start().target) as client:
        client.connect()
        make = DeviceMemory if device == "ring" else partial(open_pages, num_blocks=BLOCKS)
        pages = make(groups, extents=client.extents)
        if device != "cpu":
            registration = pages.registration
            until(lambda: registration.registered_nbytes or registration.failure, 20)
        namespace = Namespace(
            block_tokens=16,
            groups=tuple(Group(str(i), nbytes) for i, nbytes in enumerate(pages.record_nbytes)),
            identity=(("test", layout),),
        )
        keys = tuple(KeyChain(root_key(namespace.id), 16).update(range(16 * len(SAVED))))
        settings = Settings(daemon.target)
        side = WorkerSide(settings, client, pages, namespace, shards=Shards(0), writes=True)
        spans = tuple(SaveSpan(group, 0, SAVED) for group in range(len(groups)))
        side.begin_step(StepMetadata(saves=[SaveOrder(keys, 0, None, spans)]))
        assert side.saver.drain(20)

        side.begin_step(StepMetadata(handed_out=list(TARGETS)))
        side.start_loads(StepMetadata(loads=[order_for(client, namespace, keys)]))
        until(lambda: side.results(computed=False)[0] == {"request"}, 20)
        side.close()
    for group, saved in zip(groups, before, strict=True):
        for layer, expected in zip(group, saved, strict=True):
            expected[list(TARGETS)] = expected[list(SAVED)]
            assert same_bytes(layer, expected)


def order_for(client, namespace, keys) -> LoadOrder:
    grant = client.acquire(namespace.id, keys)
    assert grant.hit_blocks == len(keys)
    spans, begin = [], 0
    for part, first, last in grant.spans:
        end = begin + last - first
        slots, sums = grant.slots[begin:end], grant.checksums[begin:end]
        spans.append(LoadSpan(part.group, part.shard, keys, slots, sums, TARGETS))
        begin = end
    return LoadOrder(
        request_id="request",
        namespace_id=namespace.id,
        lease_id=grant.lease_id,
        instance=client.instance,
        deadline=time.monotonic() + grant.deadline_s,
        spans=tuple(spans),
        first_block=TARGETS[0],
        complete=True,
    )
