"""Loads: leased slots, and places in files, -> pages of a new cache, layer by layer, in a thread
beside the model.

The model's forward of a layer waits until that layer's pages are there. They are verified as a
whole: a record's checksum is known when its last layer was copied, and only then, and if the lease
was held all the time, the load counts. The cache asks for that at its last layer, before a token
can follow from what was loaded.

Where files cannot be read, the layers that are not there yet come through the arena after all.

A lossy block counts with its base part alone. Its fine part is used if the lease has it and it
belongs to that base. One that does not is reported, and fails the load only of who insists on it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import NamedTuple, TypeVar

from kvstore import (
    BlockKey,
    Client,
    CorruptBlock,
    FilePlace,
    Grant,
    KVStoreError,
    Namespace,
    Slot,
    Span,
    Unavailable,
)
from kvstore_kernels.codec.copies import Fine
from kvstore_kernels.layout import LEAF_NBYTES
from kvstore_kernels.packing import Leaves, checksum_of_leaves
from kvstore_kernels.paged import record_nbytes
from kvstore_transformers.cache import Pages, empty_pages
from kvstore_transformers.coding import CodedCopier
from kvstore_transformers.copying import Copier, Filled
from kvstore_transformers.direct import DirectFailed, DirectStorage, FilledFromFiles
from kvstore_transformers.namespace import LayerGroup, Layout

logger = logging.getLogger(__name__)

SLICE_NBYTES_MIN = 1 << 20
"""Of a record: copies of less do not fill the link."""
WAIT_S = 60.0


T = TypeVar("T")
Record = memoryview | FilePlace
"""Where a record is: in a slot, or in a file."""


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
        copier: Copier | CodedCopier,
        direct: DirectStorage,
        layout: Layout,
        namespace: Namespace,
        *,
        keys: Sequence[BlockKey],
        grant: Grant,
        deadline: float,
        bytes_deadline: float,
        refined: bool = False,
    ) -> None:
        """copier: of records as the model keeps them, or of coded ones. deadline: time.monotonic()
        until when the lease is surely held. `run` gives it back. bytes_deadline: until when bytes
        may come from slower tiers. refined: lossy blocks without their fine parts fail.

        Raises Unavailable, and the lease stays the caller's, if it is not for what was asked.
        """
        self._client = client
        self._copier = copier
        self._direct = direct
        self._refined = refined
        self._namespace = namespace
        self._keys = keys[: grant.hit_blocks]
        self._grant = grant
        self._lease_ids = [grant.lease_id]
        self._deadline = deadline
        self._bytes_deadline = min(deadline, bytes_deadline)
        self._records = _records_of(client, namespace, grant)
        self._fines = _fines_of(client, namespace, grant)
        self._wrong_fines: list[BlockKey] = []
        self._spans: dict[int, tuple[Sequence[BlockKey], Sequence[int]]] = {}
        self.pages: list[tuple[LayerGroup, Pages]] = []
        slices: list[_Slice] = []
        if len(self._records) != len(layout.groups) or grant.hit_blocks > len(keys):
            raise Unavailable("the lease is not for what was asked")
        for span, sums in _per_span(grant, grant.checksums):
            index = span.part.group
            if index in namespace.fine:
                continue
            group, spec = layout.groups[index], namespace.groups[index]
            if range(span.begin, span.end) != spec.blocks_needed(
                grant.hit_blocks, namespace.block_tokens
            ):
                raise Unavailable("the lease does not cover every block that was found")
            self._spans[index] = keys[span.begin : span.end], sums
            pages = empty_pages(group, len(sums), namespace.block_tokens)
            self.pages.append((group, pages))
            slices += _slices(index, group, pages)
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
        release: Future[list[bool]] | None = None
        try:
            release = self._run()
        except KVStoreError as error:
            self._error = error.with_traceback(None)  # it would keep views of the arena alive
        except Exception as error:
            logger.exception("load=failed")
            self._error = error.with_traceback(None)
        finally:
            self._records.clear()
            self._fines.clear()
            for event in (*self._ready.values(), self._done):
                event.set()
        if release is not None and self._wrong_fines:  # nobody waits for this: bases were used
            self._accuse(self._wrong_fines, release)

    def _run(self) -> Future[list[bool]]:
        try:
            corrupt = self._copy()
            in_time = time.monotonic() < self._deadline
        finally:
            leases = tuple(self._lease_ids)
            release = self._client.submit(lambda remote: remote.release(*leases))
        # A block is accused of being corrupt only if the daemon says that the slot, or the place in
        # a file, was its own.
        if (corrupt or not in_time) and not all(release.result()):
            raise Unavailable("the lease ended during the load")
        if corrupt:
            self._drop([*corrupt, *self._wrong_fines])
            raise CorruptBlock(f"{len(corrupt)} records do not match their checksums")
        return release

    def _accuse(self, keys: Sequence[BlockKey], release: Future[list[bool]]) -> None:
        """Drop blocks with wrong fine parts, if the slots were the daemon's own all the time."""
        try:
            if all(release.result()):
                self._drop(keys)
        except KVStoreError as error:
            logger.info("drop=none blocks=%d error=%r", len(keys), error)

    def _copy(self) -> list[BlockKey]:
        """Copy everything; return the keys of records that are not what was committed."""
        copier = self._copier
        if isinstance(copier, CodedCopier):
            return self._decode(copier)
        leaves = {group: [b""] * len(records) for group, records in self._records.items()}
        from_files = any(isinstance(r, FilePlace) for rs in self._records.values() for r in rs)
        for each, found in zip(self._slices, self._copied(copier), strict=True):
            leaves[each.group] = [a + b for a, b in zip(leaves[each.group], found, strict=True)]
            for layer in each.layers:
                self._ready[layer].set()
        corrupt = [
            key
            for group, (keys, sums) in self._spans.items()
            for key, expected, found in zip(keys, sums, leaves[group], strict=True)
            if checksum_of_leaves(found) != expected
        ]
        if corrupt and from_files:
            self._direct.distrust("records from files do not match their checksums")
        return corrupt

    def _decode(self, copier: CodedCopier) -> list[BlockKey]:
        """Decode group by group; a group's layers are ready together.

        Raises Unavailable if a fine part is missing that is insisted on."""
        corrupt: list[BlockKey] = []
        for index, (group, pages) in enumerate(self.pages):
            keys, sums = self._spans[index]
            records = [each for each in self._records[index] if isinstance(each, memoryview)]
            fines = self._fines.get(index, [None] * len(records))
            opened = copier.open(index, pages)
            found = copier.refine(opened, range(len(records)), records, fines, self._after)
            checked = list(zip(keys, sums, found, strict=True))
            corrupt += [key for key, expected, each in checked if each.base != expected]
            wrong = [key for key, _, each in checked if each.refined is False]
            sizes = [len(record) for record in records]
            missing = copier.coding.note_fines(index, sizes, found)
            if self._refined and missing:
                raise Unavailable(f"{missing} blocks came without their fine parts")
            if self._refined:
                corrupt += wrong
            else:
                self._wrong_fines += wrong
            for layer in group.layers:
                self._ready[layer].set()
        return corrupt

    def _copied(self, copier: Copier) -> Iterator[Leaves]:
        """Copy slices in order; yield the leaves' sums of each one's records when it is done.

        A slice that is done stays as it is: the model may have used it."""
        done = 0
        try:
            with closing(self._from_both(copier)) as copied:
                for leaves in copied:
                    yield leaves
                    done += 1
            return
        except DirectFailed as error:
            logger.info("load=by_arena slices_left=%d error=%r", len(self._slices) - done, error)
        self._bring_up()
        yield from copier.write(list(map(self._filled, self._slices[done:])), self._after)

    def _from_both(self, copier: Copier) -> Generator[Leaves]:
        """Copy from slots and files at once. Raises DirectFailed."""
        began = time.monotonic()
        files = list(map(self._filled_from_files, self._slices))
        slots = list(map(self._filled, self._slices))
        wanted = [each for each in files if each.blocks]
        with (
            closing(self._direct.write(wanted, self._after, self._bytes_deadline)) as read,
            closing(copier.write([s for s in slots if s.blocks], self._after)) as copied,
        ):
            for in_files, in_slots in zip(files, slots, strict=True):
                found = [b""] * (len(in_files.blocks) + len(in_slots.blocks))
                for blocks, source in ((in_files.blocks, read), (in_slots.blocks, copied)):
                    for block, sums in zip(blocks, next(source) if blocks else (), strict=True):
                        found[block] = sums
                yield found
        if not any(each.blocks for each in slots):
            nbytes = sum(place.nbytes for each in files for place in each.places)
            self._direct.note_pace(nbytes, time.monotonic() - began)

    def _filled(self, each: _Slice) -> Filled:
        """Return what of a slice comes from slots."""
        found = [
            (block, record[each.begin : each.end])
            for block, record in enumerate(self._records[each.group])
            if isinstance(record, memoryview)
        ]
        return Filled(each.pages, [block for block, _ in found], [view for _, view in found])

    def _filled_from_files(self, each: _Slice) -> FilledFromFiles:
        """Return what of a slice comes from files: it begins where a page of its record does."""
        found = [
            (block, FilePlace(place.path, place.offset + each.begin, each.end - each.begin))
            for block, place in enumerate(self._records[each.group])
            if isinstance(place, FilePlace)
        ]
        return FilledFromFiles(
            each.pages, [block for block, _ in found], [place for _, place in found]
        )

    def _bring_up(self) -> None:
        """Lease the same records in the arena, beside the first lease. Raises Unavailable."""
        asked_at = time.monotonic()
        grant = self._client.acquire(
            self._namespace.id,
            self._keys,
            spans=self._grant.spans,
            wait_s=max(0.0, self._bytes_deadline - asked_at),
        )
        self._lease_ids.append(grant.lease_id)
        self._deadline = min(self._deadline, asked_at + grant.deadline_s)
        if (grant.spans, grant.checksums) != (self._grant.spans, self._grant.checksums):
            raise Unavailable("what is in the arena is not what was in files")
        self._records = _records_of(self._client, self._namespace, grant)

    def _drop(self, keys: Sequence[BlockKey]) -> None:
        """Delete blocks found corrupt, so that nobody is offered them again. Best effort."""
        try:
            self._client.admin.delete(self._namespace.id, sorted(set(keys)), corrupt=True)
        except KVStoreError as error:
            logger.warning("drop=failed blocks=%d error=%r", len(keys), error)


def _per_span(grant: Grant, items: Sequence[T]) -> Iterator[tuple[Span, Sequence[T]]]:
    """Yield the spans of a grant with their share of what it has one of per slot."""
    begin = 0
    for span in grant.spans:
        end = begin + span.end - span.begin
        yield span, items[begin:end]
        begin = end


def _records_of(client: Client, namespace: Namespace, grant: Grant) -> dict[int, list[Record]]:
    """Return where the records of each group are. Raises Unavailable if one is nowhere."""
    places = grant.places or (None,) * len(grant.slots)
    both = list(zip(grant.slots, places, strict=True))
    records: dict[int, list[Record]] = {}
    for span, found in _per_span(grant, both):
        index = span.part.group
        group = namespace.groups[index]
        if index in namespace.fine:
            continue
        least, most = 1 if group.varies else group.record_nbytes, group.record_nbytes
        some = [slot or place for slot, place in found]
        if group.varies and any(isinstance(each, FilePlace) for each in some):
            raise Unavailable("coded records are not read from files")
        if index in records or any(
            each is None or not least <= each.nbytes <= most for each in some
        ):
            raise Unavailable("the lease does not cover every block that was found")
        records[index] = [
            client.view(each) if isinstance(each, Slot) else each
            for each in some
            if each is not None
        ]
    return records


def _fines_of(client: Client, namespace: Namespace, grant: Grant) -> dict[int, list[Fine | None]]:
    """Return the fine parts of each lossy group's blocks, as far as the lease has them.

    Raises Unavailable if they are not of the blocks that the lease is for."""
    bases = {span.part.group: (span.begin, span.end) for span in grant.spans}
    both = list(zip(grant.slots, grant.checksums, strict=True))
    fines: dict[int, list[Fine | None]] = {}
    for span, found in _per_span(grant, both):
        refines = namespace.groups[span.part.group].refines
        if refines == -1:
            continue
        if bases.get(refines) != (span.begin, span.end):
            raise Unavailable("the lease has fine parts of other blocks than it is for")
        fines[refines] = [
            None if slot is None else Fine(client.view(slot), sum_) for slot, sum_ in found
        ]
    return fines


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
