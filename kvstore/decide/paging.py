"""The keys of all blocks, page by page, however many there are and whatever comes and goes.

They are in the order of their last bytes, by which the index finds them: then a page looks at the
tables that have its keys, and not at all blocks for each page.
"""

from __future__ import annotations

from collections.abc import Container, Generator

from kvstore.decide.index import Index
from kvstore.decide.walks import WALK_ROWS
from kvstore.model.block import BlockKey, NamespaceId


def page(
    index: Index, namespace_id: NamespaceId | None, after: BlockKey | None, limit: int
) -> Generator[None, None, list[BlockKey]]:
    """Find the first `limit` keys of blocks, or of a namespace's, behind `after`: by their last
    byte, and by all others where that is the same. It wakes no block.

    Looks at WALK_ROWS keys between two yields. A block that is there all the while is found.
    """
    only = None if namespace_id is None else (namespace_id,)
    found: list[BlockKey] = []
    for last, keys in index.rows.tables(after[-1] if after else 0):
        behind = after if after and last in (None, after[-1]) else BlockKey(b"")
        most = limit - len(found)
        if last is not None:
            found += yield from _least(index, keys, only, behind, most)
        else:
            of_all = _least(index, keys, only, _with_last(behind), most, with_last=True)
            found += [BlockKey(each[1:]) for each in (yield from of_all)]
        if len(found) == limit:
            break
    return found


def _least(
    index: Index,
    keys: list[BlockKey],
    only: Container[NamespaceId] | None,
    behind: bytes,
    most: int,
    *,
    with_last: bool = False,
) -> Generator[None, None, list[BlockKey]]:
    """Find the least of the keys of blocks. with_last: of all, each behind its last byte."""
    least: list[BlockKey] = []
    for at in range(0, len(keys), WALK_ROWS):
        some = index.walks.kept(keys[at : at + WALK_ROWS], only)
        if with_last:
            some = [_with_last(key) for key in some]
        if len(least) < most:
            near = [key for key in some if key > behind]
        else:
            worst = least[-1]
            near = [key for key in some if behind < key < worst]
        if near:
            least = sorted(least + near)[:most]  # the first part is sorted already
        yield
    return least


def _with_last(key: BlockKey) -> BlockKey:
    return BlockKey(key[-1:] + key)
