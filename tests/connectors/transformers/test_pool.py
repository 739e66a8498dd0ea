"""The pool in GPU memory by itself: what is kept, what leaves, and who waits for whom."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kvstore import Group, KeyChain, Namespace, root_key  # noqa: E402
from kvstore_transformers.namespace import LayerGroup, Layout  # noqa: E402
from kvstore_transformers.pool import HbmPool, HeldPages  # noqa: E402
from tests.kernels.late_device import LateDevice  # noqa: E402

TOKENS = 16
RECORD = 2 * 2 * TOKENS * 64 * 4  # K and V, 2 heads, 64 floats: 4 pages of 4 KiB
NAMESPACE = Namespace(TOKENS, (Group("all", RECORD),), (("test", "pool"),))


def pool_of(blocks: int, device: LateDevice, policy: str = "lru") -> HbmPool:
    one = torch.zeros(1, 2, 1, 64)
    layout = Layout((LayerGroup(0, (0,), (one,), (one,)),), torch.device("cpu"), torch.float32)
    return HbmPool(device, layout, NAMESPACE, nbytes=blocks * RECORD, policy=policy)


def keys_of(blocks: int, name: int = 0):
    tokens = [name] * TOKENS + [1] * (TOKENS * (blocks - 1))
    return list(KeyChain(root_key(NAMESPACE.id), TOKENS).update(tokens))


def pages_of(blocks: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(blocks, 2, TOKENS, 64, generator=generator) for _ in range(2)]


def keep(pool, device, blocks, name=0, after=None):
    keys, pages = keys_of(blocks, name), pages_of(blocks, name)
    pool.asked(keys)
    pool.store(keys, [HeldPages(0, pages)], after or device.mark())
    return keys, pages


class Counted(dict):
    """The records of a block; counts how often somebody looks for one."""

    looks = 0

    def __contains__(self, group):
        Counted.looks += 1
        return super().__contains__(group)

    def __iter__(self):
        Counted.looks += len(self)
        return super().__iter__()


def matching(windows, held) -> int:
    """Return how many blocks a pool matches that has these groups of each block."""
    groups = tuple(Group(f"g{i}", 64, window_tokens=w) for i, w in enumerate(windows))
    pool = pool_of(1, LateDevice(0))
    pool._namespace = Namespace(TOKENS, groups, (("test", "pool"),))
    keys = keys_of(len(held))
    pool._records = {key: Counted.fromkeys(here) for key, here in zip(keys, held, strict=True)}
    return pool._match(keys)


def brute_force(windows, held) -> int:
    for hit in range(len(held), 0, -1):
        begins = [max(0, (hit * TOKENS - (w - 1)) // TOKENS) if w else 0 for w in windows]
        if all(g in held[at] for g, begin in enumerate(begins) for at in range(begin, hit)):
            return hit
    return 0


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_longest_prefix_that_is_whole_is_matched(data):
    windows = data.draw(st.lists(st.sampled_from([0, 1, 16, 17, 40, 100]), min_size=1, max_size=3))
    most = st.sampled_from([True] * 7 + [False])
    some = st.builds(
        lambda there: {g for g, is_there in enumerate(there) if is_there},
        st.lists(most, min_size=len(windows), max_size=len(windows)),
    )
    held = data.draw(st.lists(some, min_size=1, max_size=30))
    assert matching(windows, held) == brute_force(windows, held)


@pytest.mark.parametrize("windows", [(0, 1024), (1024,), (0, 1024, 4096)])
def test_a_match_looks_once_at_each_block(windows):
    """With holes in the windows, so that no prefix is whole, the longest look there is."""
    groups = set(range(len(windows)))
    hole = {g for g, window in enumerate(windows) if not window}
    held = [hole if at % 50 == 49 else groups for at in range(3000)]
    held[:50] = [hole] * 50
    Counted.looks = 0
    assert matching(windows, held) == 0
    assert Counted.looks <= 3000 * len(windows)


def test_what_is_restored_is_what_was_kept():
    device = LateDevice(0)
    pool = pool_of(12, device)
    keys, pages = keep(pool, device, 10)
    load = pool.restore(keys)
    ((_, found),) = load.pages
    load.finish()
    assert load.blocks == 10
    assert all(map(torch.equal, found, pages))
    assert pool.restore(keys, more_than=10) is None
    assert pool.restore(keys_of(3, name=7)) is None


@pytest.mark.parametrize("policy", ["lru", "hz"])
def test_a_prefix_that_does_not_fit_is_kept_from_its_start(policy):
    device = LateDevice(0)
    pool = pool_of(12, device, policy)
    keep(pool, device, 10)
    keys, _ = keep(pool, device, 20)
    assert pool.restore(keys).blocks == 12, "its own start did not leave for its end"
    keep(pool, device, 12, name=1)
    assert pool.restore(keys_of(12, name=1)).blocks == 12
    assert pool.restore(keys) is None
    assert pool.blocks == 12


@pytest.mark.parametrize("seed", range(5))
def test_a_slot_is_used_again_only_when_what_was_restored_from_it_is_there(seed):
    device = LateDevice(seed)
    pool = pool_of(4, device)
    keys, _ = keep(pool, device, 4)
    done, computed = [], device.mark()
    for step in range(20):  # the model's stream is far behind
        device.engine.run(lambda step=step: done.append(step))
    assert pool.restore(keys).blocks == 4
    assert not done
    keep(pool, device, 4, name=1, after=computed)
    assert len(done) == 20


@pytest.mark.parametrize("seed", range(5))
def test_pages_are_read_only_when_the_model_has_computed_them(seed):
    device = LateDevice(seed)
    pool = pool_of(4, device)
    keys, pages = keys_of(4), pages_of(4)
    right = [part.clone() for part in pages]
    for part in pages:
        part.zero_()
    for _ in range(20):
        device.engine.run(lambda: None)
    device.engine.run(lambda: [a.copy_(b) for a, b in zip(pages, right, strict=True)])
    pool.store(keys, [HeldPages(0, pages)], device.mark())
    ((_, found),) = pool.restore(keys).pages
    assert all(map(torch.equal, found, right))
