"""What the stages of a pipeline-parallel engine hold: each has some layers of the KV cache groups.

A group of the engine is stored as one group for each stage that has layers of it: a block is a hit
only if every stage has stored its share. Without pipeline parallelism there is one stage, and the
groups that are stored are those of the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kvstore.model.errors import Incompatible
from kvstore_vllm.metadata import LossySizes, stage_group


class Stage(msgspec.Struct, frozen=True):
    """What each worker of one stage holds.

    layers: the names of its layers, by KV cache group of the engine; a group may have none here.
    record_nbytes: bytes of one block of each group that has some, in one shard; if it is coded, the
    most of a record. lossy: sizes of their base and fine parts, if records are lossy. coded: the
    form of records and their shapes; "": they are stored as they are. backends: names of the
    attention back ends (and CPU instruction sets), which decide how keys and values are packed
    inside a page.
    """

    layers: tuple[tuple[str, ...], ...]
    record_nbytes: tuple[int, ...]
    backends: tuple[str, ...] = ()
    coded: str = ""
    lossy: tuple[LossySizes, ...] = ()

    @property
    def tables(self) -> tuple[int, ...]:
        """The engine's groups of which it has layers: its block tables that are read here."""
        return tuple(index for index, names in enumerate(self.layers) if names)

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, text: bytes) -> Stage:
        """Parse what a worker of this engine has told. Raises Incompatible."""
        try:
            stage = msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, RecursionError) as error:
            raise Incompatible(f"a stage of this engine tells what is none: {error}") from error
        counts = {len(stage.tables), len(stage.record_nbytes)}
        if len(counts) != 1 or len(stage.lossy) not in (0, len(stage.record_nbytes)):
            raise Incompatible("a stage of this engine tells other sizes than it has groups")
        return stage


class StoredGroup(msgspec.Struct, frozen=True):
    """A group as it is stored. table: the engine's group. stage: whose layers. at: which of the
    groups of that stage it is."""

    table: int
    stage: int
    at: int
    name: str


def stored_groups(stages: Sequence[Stage]) -> list[StoredGroup]:
    """Return the groups that are stored for an engine, in their order in the namespace.

    Raises Incompatible if the stages do not fit together.
    """
    if len({len(stage.layers) for stage in stages}) != 1:
        raise Incompatible("the stages of this engine have different KV cache groups")
    return list(_stored(stages))


def _stored(stages: Sequence[Stage]) -> Iterator[StoredGroup]:
    for table in range(len(stages[0].layers)):
        for index, stage in enumerate(stages):
            if table in stage.tables:
                name = stage_group(table, index) if len(stages) > 1 else f"{table}"
                yield StoredGroup(table, index, stage.tables.index(table), name)


def groups_of(stages: Sequence[Stage], stage: int) -> tuple[int, ...]:
    """Return where in the namespace the groups of one stage are."""
    found = stored_groups(stages)
    return tuple(index for index, each in enumerate(found) if each.stage == stage)
