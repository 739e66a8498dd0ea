"""What was deleted stays dead in a pool, whatever is forgotten for lack of room."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.model.block import BlockKey, NamespaceId
from kvstore.tier.pool import graves as module
from kvstore.tier.pool.graves import SKEW_MS, Graves

NAMESPACES = [NamespaceId(bytes([at]) * 32) for at in range(5)]
KEYS = [BlockKey(bytes([100 + at]) * 32) for at in range(8)]

deletes = st.lists(
    st.tuples(
        st.lists(st.sampled_from(NAMESPACES), min_size=1, max_size=2),
        st.none() | st.lists(st.sampled_from(KEYS), min_size=1, max_size=4),
        st.integers(1, 1 << 45),
        st.booleans(),
    ),
    max_size=20,
)


@given(deletes=deletes)
def test_no_grave_is_ever_lost(
    deletes: list[tuple[list[NamespaceId], list[BlockKey] | None, int, bool]],
) -> None:
    """Whatever its bounds make of it: a value as old as a delete of it is dead, here and after a
    restart."""
    dead: dict[tuple[NamespaceId, BlockKey], int] = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "KEYS_MAX", 6)
        patched.setattr(module, "NAMESPACES_MAX", 3)
        graves = Graves()
        for namespaces, keys, at, everything in deletes:
            graves.bury(namespaces, keys, at, everything=everything)
            for namespace in NAMESPACES if everything else namespaces:
                for key in keys if keys is not None and not everything else KEYS:
                    dead[namespace, key] = max(dead.get((namespace, key), 0), at + SKEW_MS)
        again = Graves()
        assert again.merge(graves.encode())
        for where, until in dead.items():
            assert graves.floor(*where) >= until
            assert again.floor(*where) >= until


def test_what_was_not_deleted_is_believed() -> None:
    graves = Graves()
    graves.bury(NAMESPACES[:1], KEYS[:1], 1000)
    graves.bury(NAMESPACES[1:2], None, 1000)
    assert graves.floor(NAMESPACES[0], KEYS[1]) == 0
    assert graves.floor(NAMESPACES[1], KEYS[1]) == 1000 + SKEW_MS
    assert graves.floor(NAMESPACES[2], KEYS[0]) == 0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 10,
        msgspec.msgpack.encode([2, 0, [], []]),
        msgspec.msgpack.encode([1, -1, [], []]),
        msgspec.msgpack.encode([1, 0, [(b"short", 1)], []]),
        msgspec.msgpack.encode([1, 0, [(NAMESPACES[0], 1 << 63)], []]),
    ],
)
def test_other_bytes_are_no_graves(data: bytes) -> None:
    graves = Graves()
    assert not graves.merge(data)
    assert graves.floor(NAMESPACES[0], KEYS[0]) == 0
