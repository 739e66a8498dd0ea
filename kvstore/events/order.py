"""Parents before children, and chains of blocks that one event can tell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvstore.events.table import Rows, Table

JOINED_PARTS = 8  # of the rows: if more chains could be one with another, they are put together


class Line(NamedTuple):
    """Rows, parents before children. above: the row of each one's parent. at: where in the line
    that is. -1: there is none."""

    rows: Rows
    above: Rows
    at: Rows


def in_line(table: Table, rows: Rows) -> Line:
    """Put rows, which go up, in line; blocks that follow each other in a prefix lie together where
    they can.

    Most lie so already: those that came together have rows one after another.
    """
    above = table.above(rows)
    at = _places(rows, above)
    own = np.arange(len(rows))
    parts = np.count_nonzero((at >= 0) & (at != own - 1))
    if parts * JOINED_PARTS <= len(rows) and (at < own).all():
        return Line(rows, above, at)
    depths, at = _depths(at)
    order = _in_chains(depths, at)
    place = np.empty_like(order)
    place[order] = own
    return Line(rows[order], above[order], np.where(at < 0, -1, place[at])[order])


def _places(rows: Rows, above: Rows) -> Rows:
    """Return where among `rows`, which go up, each of `above` is; -1 where it is not."""
    at = np.arange(-1, len(rows) - 1)
    is_other = rows[at] != above
    is_other[:1] = True
    others = np.flatnonzero(is_other)
    if len(others):
        wanted = above[others]
        found = np.minimum(np.searchsorted(rows, wanted), len(rows) - 1)
        at[others] = np.where(rows[found] == wanted, found, -1)
    return at


def _depths(at: Rows) -> tuple[Rows, Rows]:
    """Return how far each is below its topmost ancestor, and `at` without what goes in circles, or
    follows such: clients may say anything of their keys."""
    depths, up = (at >= 0).astype(np.int64), at.copy()
    for _ in range(len(at).bit_length() + 1):  # each doubles how far a row looks up
        going = np.flatnonzero(up >= 0)
        if not len(going):
            break
        further = up[going]
        depths[going] += depths[further]
        up[going] = up[further]
    in_circles = up >= 0
    depths[in_circles] = 0
    return depths, np.where(in_circles, -1, at)


def tops(above: Rows) -> Rows:
    """Return the topmost ancestor of each, itself if it has none. above: the parent, or -1."""
    top = np.where(above < 0, np.arange(len(above)), above)
    while True:
        higher = top[top]
        if np.array_equal(higher, top):
            return top
        top = higher


def _in_chains(depths: Rows, at: Rows) -> Rows:
    """Return in which order rows have their parents first, and blocks that follow each other in a
    prefix lie together where they can."""
    # Of the children of one block, one goes on in its chain; each of the others begins another.
    going_on = np.full(len(at), -1)
    children = np.flatnonzero(at >= 0)
    _, first = np.unique(at[children], return_index=True)
    going_on[children[first]] = at[children[first]]
    chain = tops(going_on)
    order: Rows = np.lexsort((depths, chain, depths[chain]))
    return order


def chains(table: Table, rows: Rows) -> Iterator[Rows]:
    """Cut ordered rows where one does not follow the one before, or runs with something else."""
    if not len(rows):
        return
    follows = table.parents[rows][1:] == table.hashes[rows][:-1]
    follows &= table.labels[rows][1:] == table.labels[rows][:-1]
    begin = 0
    for end in (np.flatnonzero(~follows) + 1).tolist():
        yield rows[begin:end]
        begin = end
    yield rows[begin:]
