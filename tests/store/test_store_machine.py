"""Any sequence of puts, gets, deletes and restarts, held against a model."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvstore.model.block import BlockKey
from kvstore.model.hint import HintKind
from tests.store.node import SPEC, Node, chain

A, B = chain(1), chain(2)


class StoreMachine(RuleBasedStateMachine):
    """Any order of puts, gets, deletes, flushes and restarts serves right bytes or a miss."""

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.directory = tempfile.TemporaryDirectory()
        self.node = self._open()
        self.durable: set[BlockKey] = set()
        self.deleted: set[BlockKey] = set()

    def _open(self) -> Node:
        path = Path(self.directory.name) / "kv"
        node = Node(path, arena_bytes=512 << 10, segment_nbytes=256 << 10, file_bytes=8 << 20)
        return node.__enter__()

    @rule(name=st.integers(0, 2), begin=st.integers(0, 12), count=st.integers(1, 12))
    def put(self, name: int, begin: int, count: int) -> None:
        keys = chain(name)
        done = self.node.put(keys, begin, begin + count, durable=True, wait_s=2.0)
        if done.durable and not done.refused:
            self.durable |= set(keys[begin : begin + count])
            self.deleted -= set(keys[begin : begin + count])
        elif done.committed or done.existing:
            self.deleted -= set(keys[begin : begin + count])

    @rule(name=st.integers(0, 2))
    def get(self, name: int) -> None:
        keys = chain(name)
        hit = self.node.get(keys)
        assert not self.deleted & set(keys[:hit])

    @rule(name=st.integers(0, 2), begin=st.integers(0, 23))
    def delete(self, name: int, begin: int) -> None:
        keys = chain(name)[begin:]
        self.node.run(self.node.store.deletes.delete(SPEC.id, keys))
        self.durable -= set(keys)
        self.deleted |= set(keys)

    @rule(
        kind=st.sampled_from(HintKind),
        session=st.sampled_from(["", "s", "t"]),
        name=st.integers(0, 3),
        blocks=st.integers(0, 24),
        seconds=st.sampled_from([0.0, 0.001, 1e6]),
    )
    def hint(self, kind: HintKind, session: str, name: int, blocks: int, seconds: float) -> None:
        """Nothing of it need be true."""
        self.node.hint(kind, chain(name)[:blocks], session, seconds)
        stats = self.node.store.report.stats()["dram"]
        assert stats["pinned_bytes"] <= stats["pinned_bytes_max"]

    @precondition(lambda self: self.durable)
    @rule()
    def restart(self) -> None:
        self.node.__exit__()
        self.node = self._open()
        self.node.recall()
        stored = {item.key for item in self.node.run(self.node.store.report.scan(None, None, 1000))}
        assert self.durable <= stored
        assert not self.deleted & stored

    def teardown(self) -> None:
        pins = self.node.planner.pins
        pins.expire(float("inf"))
        self.node.run(self.node.store.deletes.clear(None))
        assert (pins.nbytes, self.node.arena.physical_nbytes) == (0, 0)
        self.node.__exit__()
        self.directory.cleanup()


TestStoreMachine = StoreMachine.TestCase


TestStoreMachine.settings = settings(
    max_examples=12,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
