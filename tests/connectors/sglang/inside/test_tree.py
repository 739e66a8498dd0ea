"""A prefix that one SGLang tree has written is loaded by another, through SGLang's own controller,
its threads and its prefetch; a daemon that dies costs a prefix, and never a wrong one."""

from __future__ import annotations

import signal
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from os import kill
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture, match_prefix

from kvstore.testing.daemon import Daemon
from kvstore.testing.wait import until
from tests.connectors.sglang.inside.tree import Steps

try:
    get_hash_str([1], page_size=1)
except RuntimeError as error:
    pytest.skip(f"SGLang cannot compile its hash here: {error.__cause__}", allow_module_level=True)

FULL = (ComponentType.FULL,)
CONFIGS = {
    "page of 1": CacheConfig(page_size=1, components=FULL, num_layers=4),
    "page of 16": CacheConfig(page_size=16, components=FULL, num_layers=4, kv_size=512),
    "page of 64": CacheConfig(page_size=64, components=FULL, num_layers=4, kv_size=2048),
    "sliding window": CacheConfig(
        page_size=4,
        components=(ComponentType.FULL, ComponentType.SWA),
        sliding_window_size=8,
        num_layers=6,
        full_attention_layer_ids=(2, 5),
        kv_size=512,
    ),
}
PAGES = 5


@contextmanager
def steps_of(daemon: Daemon, name: str, layout: str = "page_first") -> Iterator[Steps]:
    steps = Steps(CONFIGS[name], daemon.target, layout, f"{name} {layout}")
    try:
        yield steps
    finally:
        steps.doCleanups()


class Tree:
    """One engine's tree."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.cache, self.allocator, self.requests = build_fixture(steps.cfg)
        steps._init_hicache(self.cache)

    @property
    def storage(self) -> Any:
        return self.cache.cache_controller.storage_backend

    def write(self, tokens: list[int]) -> list[torch.Tensor]:
        """Compute a prefix, back it up to host memory and to storage; return its KV."""
        self.steps._insert(self.cache, self.allocator, self.requests, tokens)
        leaf = match_prefix(self.cache, tokens).last_device_node
        indices = self.cache.path_device_indices(leaf)
        self.steps.fill(self.allocator, indices)
        kv = self.steps.rows(self.allocator, indices)
        self.steps._backup_node(self.cache, leaf)
        self.steps._write_path_to_l3(self.cache, leaf)
        self.steps._flush_l3_backups(self.cache)
        return kv

    def prefetch(self, tokens: list[int], request: str = "r") -> int:
        """Prefetch a prefix to host memory; return how many tokens of it are there."""
        handle = CacheRequestHandle(request, 0)
        self.cache.prefetch_from_storage(
            handle, self.cache.root_node_handle(), array("q", tokens), None, None
        )
        self.steps._run_prefetch_to_completion(self.cache, handle, timeout=30)
        return int(match_prefix(self.cache, tokens).host_hit_length)

    def load_back(self, tokens: list[int]) -> list[torch.Tensor]:
        """Load what is in host memory to the device; return its KV."""
        self.steps._load_back_through_admission(self.cache, self.requests, tokens)
        self.steps._finish_pending_loads(self.cache)
        match = match_prefix(self.cache, tokens)
        return self.steps.rows(
            self.allocator, self.cache.path_device_indices(match.last_device_node)
        )


def same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_one_tree_wrote_another_loads(daemon: Daemon, name: str, layout: str) -> None:
    with steps_of(daemon, name, layout) as steps:
        tokens = steps._make_seq(1, PAGES)
        kv = Tree(steps).write(tokens)
        other = Tree(steps)
        assert other.prefetch(tokens) == len(tokens)
        if not steps.cfg.has_swa:
            assert same(other.load_back(tokens), kv)
        assert other.storage.counters.as_dict()["loaded"] >= PAGES


def test_a_longer_prompt_loads_the_prefix_it_shares(daemon: Daemon) -> None:
    with steps_of(daemon, "page of 16") as steps:
        tokens = steps._make_seq(1000, PAGES)
        kv = Tree(steps).write(tokens)
        longer = tokens[: 3 * 16] + steps._make_seq(9000, 2)
        other = Tree(steps)
        assert other.prefetch(longer) == 3 * 16
        assert same(other.load_back(longer[: 3 * 16]), [each[: 3 * 16] for each in kv])


@pytest.mark.fault
def test_a_daemon_killed_before_a_prefetch_costs_it_and_no_more(mortal: Daemon) -> None:
    with steps_of(mortal, "page of 16") as steps:
        tokens = steps._make_seq(2000, PAGES)
        writer = Tree(steps)
        kv = writer.write(tokens)
        assert writer.storage.flush()
        other = Tree(steps)
        mortal.kill()
        assert other.prefetch(tokens, "killed") == 0
        mortal.start()
        until(lambda: other.prefetch(tokens, "back") == len(tokens))
        assert same(other.load_back(tokens), kv)


@pytest.mark.fault
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_daemon_lost_between_lookup_and_load_costs_the_prefetch_at_most(
    mortal: Daemon, how: signal.Signals
) -> None:
    """The controller has been told that all pages are there. They were leased then: a client that
    has not noticed yet still reads them in the arena, and verifies them."""
    with steps_of(mortal, "page of 16") as steps:
        tokens = steps._make_seq(3000, PAGES)
        writer = Tree(steps)
        kv = writer.write(tokens)
        assert writer.storage.flush()
        other = Tree(steps)
        load = other.storage.batch_get_v1

        def lost(*given: Any) -> Any:
            kill(mortal.pid, how)
            return load(*given)

        other.cache.cache_controller.storage_backend.batch_get_v1 = lost
        found = other.prefetch(tokens, "lost")
        assert found in (0, len(tokens))
        if found:
            assert same(other.load_back(tokens), kv)
        other.cache.cache_controller.storage_backend.batch_get_v1 = load
        if how == signal.SIGSTOP:
            kill(mortal.pid, signal.SIGCONT)
        else:
            mortal.kill()
            mortal.start()
        third = Tree(steps)
        until(lambda: third.prefetch(tokens, "back") == len(tokens))
        assert same(third.load_back(tokens), kv)


@pytest.mark.fault
def test_a_daemon_killed_while_a_tree_writes_loses_what_was_not_stored(mortal: Daemon) -> None:
    with steps_of(mortal, "page of 16") as steps:
        first, second = steps._make_seq(4000, PAGES), steps._make_seq(5000, PAGES)
        writer = Tree(steps)
        kv = writer.write(first)
        assert writer.storage.flush()
        mortal.kill()
        writer.write(second)  # the tree goes on
        mortal.start()
        other = Tree(steps)
        until(lambda: other.prefetch(first, "first") == len(first))
        assert other.prefetch(second, "second") == 0
        assert same(other.load_back(first), kv)
