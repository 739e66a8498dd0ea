"""Loads: leased slots -> pages of a new cache, layer by layer, in a thread beside the model.

The model's forward of a layer waits until that layer's pages are there. They are verified as a
whole: a record's checksum is known when its last layer was copied, and only then, and if the lease
was held all the time, the load counts. The cache asks for that at its last layer, before a token
can follow from what was loaded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvstore import BlockKey, Client, CorruptBlock, Grant, KVStoreError, Namespace, Unavailable
from kvstore_kernels.layout import LEAF_NBYTES
from kvstore_kernels.packing import checksum_of_leaves
from kvstore_kernels.paged import record_nbytes
from kvstore_transformers.cache import Pages, empty_pages
from kvstore_transformers.copying import Copier, Filled
from kvstore_transformers.namespace import LayerGroup, Layout

logger = logging.getLogger(__name__)

SLICE_NBYTES_MIN = 1 << 20
"""Of a record: copies of less do not fill the link."""
WAIT_S = 60.0


class LoadFailed(Unavailable):
    """What was restored must not be used: compute everything anew."""


class _Slice(NamedTuple):
    """Layers of one group that are copied together: the bytes [begin, end) of its records."""

    group: int
    layers: tuple[int, ...]
    pages: Pages
    begin: int
    end: int


class Load:
    """One load. `run` belongs to a thread; `wait_layer` and `finish` to the model's.

    pages: of every group, the blocks a resume after grant.hit_blocks needs; valid by layers.
    """

    def __init__(
        self,
        client: Client,
        copier: Copier,
        layout: Layout,
        namespace: Namespace,
        *,
        keys: Sequence[BlockKey],
        grant: Grant,
        deadline: float,
    ) -> None:
        """deadline: time.monotonic() until when the lease is surely held. `run` gives it back.

        Raises Unavailable, and the lease stays the caller's, if it is not for what was asked.
        """
        self._client = client
        self._copier = copier
        self._namespace = namespace
        self._keys = keys
        self._lease_id = grant.lease_id
        self._deadline = deadline
        self._records: dict[int, list[memoryview]] = {}
        self._spans: dict[int, tuple[Sequence[BlockKey], Sequence[int]]] = {}
        self.pages: list[tuple[LayerGroup, Pages]] = []
        slices: list[_Slice] = []
        after = 0
        for span in grant.spans:
            index, count = span.part.group, span.end - span.begin
            group, size = layout.groups[index], namespace.groups[index].record_nbytes
            part = slice(after, after + count)
            after += count
            needed = namespace.groups[index].blocks_needed(grant.hit_blocks, namespace.block_tokens)
            slots = [slot for slot in grant.slots[part] if slot is not None]
            whole = len(slots) == count and all(slot.nbytes >= size for slot in slots)
            if range(span.begin, span.end) != needed or not whole or index in self._records:
                raise Unavailable("the lease does not cover every block that was found")
            self._records[index] = [client.view(slot)[:size] for slot in slots]
            self._spans[index] = keys[span.begin : span.end], grant.checksums[part]
            pages = empty_pages(group, count, namespace.block_tokens)
            self.pages.append((group, pages))
            slices += _slices(index, group, pages)
        if len(self._records) != len(layout.groups) or grant.hit_blocks > len(keys):
            raise Unavailable("the lease is not for what was asked")
        self._slices = sorted(slices, key=lambda each: each.layers[0])
        self._after = copier.mark()
        self._error: Exception | None = None
        self._done = threading.Event()
        self._ready = {layer: threading.Event() for each in slices for layer in each.layers}

    def wait_layer(self, layer: int) -> None:
        """Return when the pages of `layer` are there. Raises LoadFailed."""
        self._await(self._ready[layer])

    def finish(self) -> None:
        """Return when everything was copied, and is what its writer committed. Raises LoadFailed.

        The daemon drops blocks that were found corrupt."""
        self._await(self._done)

    def _await(self, event: threading.Event) -> None:
        if not event.wait(WAIT_S):
            raise LoadFailed(f"the load has not ended in {WAIT_S:.0f} s")
        if self._error is not None:
            raise LoadFailed(str(self._error)) from self._error

    # The thread -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Copy, verify, release; never raises."""
        try:
            self._run()
        except KVStoreError as error:
            self._error = error.with_traceback(None)  # it would keep views of the arena alive
        except Exception as error:
            logger.exception("load=failed")
            self._error = error.with_traceback(None)
        finally:
            self._records.clear()
            for event in (*self._ready.values(), self._done):
                event.set()

    def _run(self) -> None:
        try:
            corrupt = self._copy()
            in_time = time.monotonic() < self._deadline
        finally:
            release = self._client.submit(lambda remote: remote.release(self._lease_id))
        # A block is accused of being corrupt only if the daemon says that the slot was its own.
        if (corrupt or not in_time) and not all(release.result()):
            raise Unavailable("the lease ended during the load")
        if corrupt:
            self._drop(corrupt)
            raise CorruptBlock(f"{len(corrupt)} records do not match their checksums")

    def _copy(self) -> list[BlockKey]:
        """Copy slice by slice; return the keys of records that are not what was committed."""
        filled = [
            Filled(each.pages, [r[each.begin : each.end] for r in self._records[each.group]])
            for each in self._slices
        ]
        leaves = {group: [b""] * len(records) for group, records in self._records.items()}
        copied = self._copier.write(filled, self._after)
        for each, found in zip(self._slices, copied, strict=True):
            leaves[each.group] = [a + b for a, b in zip(leaves[each.group], found, strict=True)]
            for layer in each.layers:
                self._ready[layer].set()
        return [
            key
            for group, (keys, sums) in self._spans.items()
            for key, expected, found in zip(keys, sums, leaves[group], strict=True)
            if checksum_of_leaves(found) != expected
        ]

    def _drop(self, keys: Sequence[BlockKey]) -> None:
        """Delete blocks found corrupt, so that nobody is offered them again. Best effort."""
        try:
            self._client.delete(self._namespace.id, sorted(set(keys)), corrupt=True)
        except KVStoreError as error:
            logger.warning("drop=failed blocks=%d error=%r", len(keys), error)


def _slices(index: int, group: LayerGroup, pages: Pages) -> Iterator[_Slice]:
    """Cut a group's layers where leaves of the checksum end, and not too small."""
    first = begin = end = 0
    for at in range(len(group.layers)):
        end += record_nbytes(pages[2 * at : 2 * at + 2])
        last = at + 1 == len(group.layers)
        if last or (end - begin >= SLICE_NBYTES_MIN and end % LEAF_NBYTES == 0):
            yield _Slice(
                index, group.layers[first : at + 1], pages[2 * first : 2 * at + 2], begin, end
            )
            first, begin = at + 1, end
