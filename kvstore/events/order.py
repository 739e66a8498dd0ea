"""Parents before children, and chains of blocks that one event can tell."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvstore.events.table import Rows, Table


def parent_rows(table: Table, rows: Rows) -> Rows:
    """Return where the parent of each row is among `rows`, -1 where it is not.

    A parent is one block nearer to the start: what a client says of its keys may not go in circles.
    """
    order = np.argsort(table.hashes[rows])
    sorted_ = table.hashes[rows][order]
    parents = table.parents[rows]
    at = np.minimum(np.searchsorted(sorted_, parents), len(rows) - 1)
    found = (sorted_[at] == parents) & (parents != 0)
    depths = table.depths[rows].astype(np.int64)
    found &= depths[order[at]] == depths - 1
    return np.where(found, order[at], -1)


def tops(above: Rows) -> Rows:
    """Return the topmost ancestor of each, itself if it has none. above: the parent, or -1."""
    top = np.where(above < 0, np.arange(len(above)), above)
    while True:
        higher = top[top]
        if np.array_equal(higher, top):
            return top
        top = higher


def in_chains(table: Table, rows: Rows) -> Rows:
    """Return the rows in such an order that parents come first, and blocks that follow each other
    in a prefix lie together where they can."""
    if len(rows) < 2:
        return rows
    above = parent_rows(table, rows)
    # Of the children of one block, one goes on in its chain; each of the others begins another.
    going_on = np.full(len(rows), -1)
    children = np.flatnonzero(above >= 0)
    _, first = np.unique(above[children], return_index=True)
    going_on[children[first]] = above[children[first]]
    chain = tops(going_on)
    depths = table.depths[rows]
    ordered: Rows = rows[np.lexsort((depths, chain, depths[chain]))]
    return ordered


def chains(table: Table, rows: Rows) -> Iterator[Rows]:
    """Cut ordered rows where one does not follow the one before, or runs with something else."""
    if not len(rows):
        return
    follows = table.parents[rows][1:] == table.hashes[rows][:-1]
    follows &= table.labels[rows][1:] == table.labels[rows][:-1]
    yield from np.split(rows, np.flatnonzero(~follows) + 1)
