"""Any sequence of puts by two writers, gets, deletes and restarts, with fine parts, held against a
model: as test_store_machine.py, for a lossy namespace."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvstore.decide.planner import DAEMON_SESSION
from kvstore.model.block import BlockKey
from tests.store.lossy_node import BLOCKS, SPEC, WRITERS, LossyNode, chain

names = st.integers(0, 2)
begins = st.integers(0, BLOCKS - 1)
counts = st.integers(1, BLOCKS)
writers = st.sampled_from(WRITERS)


class FineMachine(RuleBasedStateMachine):
    """Served are bytes that somebody wrote, base and fine part of one writer, or a miss."""

    fine = True
    codec = "raw"
    write_on_demotion = False

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.node = self._open()
        self.durable: set[BlockKey] = set()
        self.deleted: set[BlockKey] = set()

    def _open(self) -> LossyNode:
        node = LossyNode(
            Path(self.directory.name) / "kv",
            arena_bytes=512 << 10,
            segment_nbytes=256 << 10,
            file_bytes=16 << 20,
            fine=self.fine,
            codec=self.codec,
            write_on_demotion=self.write_on_demotion,
        )
        return node.__enter__()

    @rule(
        name=names,
        begin=begins,
        count=counts,
        writer=writers,
        fine=st.booleans(),
        refined=st.booleans(),
        adds=st.booleans(),
        durable=st.booleans(),
    )
    def put(
        self,
        *,
        name: int,
        begin: int,
        count: int,
        writer: str,
        fine: bool,
        refined: bool,
        adds: bool,
        durable: bool,
    ) -> None:
        keys, end = chain(name), begin + count
        how = {"fine": fine, "refined": refined, "adds": adds, "durable": durable}
        done = self.node.store_blocks(keys, begin, end, writer=writer, **how)
        self._stored(keys[begin:end])
        if done.durable and not done.refused:
            self.durable |= set(keys[begin:end])

    @rule(
        name=names,
        first_refined=st.booleans(),
        second_refined=st.booleans(),
        adds=st.booleans(),
    )
    def race(self, name: int, first_refined: bool, second_refined: bool, adds: bool) -> None:
        """Two writers of the same blocks commit in the other order than they have reserved. adds:
        the first one adds its fine parts to what is here."""
        keys = chain(name)
        puts = [
            self.node.reserve(keys, writer=writer, refined=refined, adds=adds and writer == "one")
            for writer, refined in zip(WRITERS, (first_refined, second_refined), strict=True)
        ]
        for grant, sums in reversed(puts):
            self.node.run(self.node.store.puts.commit(DAEMON_SESSION, grant.lease_id, sums))
        self._stored(keys)

    def _stored(self, keys: list[BlockKey]) -> None:
        self.deleted -= {key for key in keys if self.node.planner.index.by_key(key)}

    @rule(name=names, refined=st.booleans(), wait_s=st.sampled_from([0.0, 5.0]))
    def get(self, name: int, refined: bool, wait_s: float) -> None:
        keys = chain(name)
        hit, _ = self.node.read(keys, refined=refined, wait_s=wait_s)
        assert not self.deleted & set(keys[:hit])

    @rule(name=names, begin=begins)
    def delete(self, name: int, begin: int) -> None:
        keys = chain(name)[begin:]
        self.node.run(self.node.store.deletes.delete(SPEC.id, keys))
        self.durable -= set(keys)
        self.deleted |= set(keys)

    @rule(name=names)
    def report(self, name: int) -> None:
        """A reader reports what may be good."""
        self.node.run(self.node.store.deletes.drop_wrong(SPEC.id, chain(name)))

    @rule()
    def flush(self) -> None:
        self.node.flush()

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
        try:
            self._clear()
        finally:
            self.node.__exit__()
            self.directory.cleanup()

    def _clear(self) -> None:
        """Nothing is left of anything."""
        node = self.node
        node.run(node.store.deletes.clear(None))
        node.until(lambda: node.arena.physical_nbytes == 0)  # a batch under way holds its slots
        assert node.store.report.stats()["dram"]["fine_bytes"] == 0
        assert node.planner.dirty.nbytes == 0
        for use in node.planner.index.namespaces:
            assert not any((use.dram_records + use.file_records).values())


class BaseInFilesMachine(FineMachine):
    """As above; the file tier has bases alone."""

    fine = False


class DemotingMachine(FineMachine):
    """As above; nothing is written before it has to leave, and by a codec."""

    codec = "zstd"
    write_on_demotion = True


TestFine = FineMachine.TestCase
TestBaseInFiles = BaseInFilesMachine.TestCase
TestDemoting = DemotingMachine.TestCase
for machine in (TestFine, TestBaseInFiles, TestDemoting):
    machine.settings = settings(
        max_examples=8,
        stateful_step_count=20,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
