"""The object tier: runs of blocks in a bucket (S3, GCS, Azure) or a shared folder.

What is promised:

- No wrong bytes are served: footers are checked as a whole, and a lookup returns every record's
  checksum. The reader verifies the bytes, as with the file tier.
- An object is whole or does not exist, and it never changes. A collected object is a miss.
- A deleted block is not served again, even if an object with it still exists (`tombstones`).
- A store that is slow, full or down costs bounded time: deadlines, bounded retries, a breaker.
- No log line, error or metric has any part of the credentials (`failure`).

Several daemons share a bucket without knowing of each other. A daemon sees the deletes of others
after at most `object.believed_s`, and their new objects after at most 5 s.
"""

from kvstore.tier.object.failure import ObjectFailed, ObjectGone, ObjectRefused
from kvstore.tier.object.layout import ObjectExtent, PlacedFrame, Run, lay_out, run_blocks
from kvstore.tier.object.ranges import ObjectRead
from kvstore.tier.object.reads import Outcome
from kvstore.tier.object.requests import Bucket
from kvstore.tier.object.tier import ObjectTier
from kvstore.tier.object.walk import Found, FoundFrame

__all__ = [
    "Bucket",
    "Found",
    "FoundFrame",
    "ObjectExtent",
    "ObjectFailed",
    "ObjectGone",
    "ObjectRead",
    "ObjectRefused",
    "ObjectTier",
    "Outcome",
    "PlacedFrame",
    "Run",
    "lay_out",
    "run_blocks",
]
