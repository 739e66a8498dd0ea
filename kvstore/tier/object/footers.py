"""Read the footer of an object."""

from __future__ import annotations

from kvstore.model.block import PAGE_NBYTES
from kvstore.model.errors import CorruptBlock
from kvstore.tier.object.catalog import Entry
from kvstore.tier.object.keys import BucketKeys
from kvstore.tier.object.layout import OBJECT_NBYTES_MAX, Run, read_footer, read_trailer
from kvstore.tier.object.requests import Requests

TAIL_NBYTES = 32 << 10  # most footers are smaller, and are read with the trailer in one request


async def fetch_footer(requests: Requests, entry: Entry, deadline: float, keys: BucketKeys) -> Run:
    """Return the run in an object, with one or two requests.

    Raises CorruptBlock if it is not one of ours, ObjectGone, and the errors of `requests`; of
    `BucketKeys.load` if it may be one that needs a newer key.
    """
    name, nbytes = entry.name, entry.nbytes
    if not 2 * PAGE_NBYTES <= nbytes <= OBJECT_NBYTES_MAX:
        raise CorruptBlock(f"an object of {nbytes} bytes")
    start = max(0, nbytes - TAIL_NBYTES)
    tail = await requests.fetch(str(name), start, nbytes - start, deadline)
    key = await keys.key_of(name, tail[-PAGE_NBYTES:], deadline)
    trailer = read_trailer(name, nbytes, tail[-PAGE_NBYTES:], key)
    begin, size = trailer.footer_offset, trailer.footer_nbytes
    if begin >= start:
        body = tail[begin - start : begin - start + size]
    else:
        body = await requests.fetch(str(name), begin, size, deadline)
    return read_footer(name, nbytes, trailer, body, names=keys.names, key=key)
