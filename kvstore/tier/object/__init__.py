"""The object tier: runs of blocks in a bucket (S3, GCS, Azure) or a shared folder.

What is promised:

- Nothing wrong is found: footers are checked as a whole, and every record's checksum travels with
  what `find` answers. Bytes are verified by who reads them, as those of the file tier.
- An object is whole or not there, and never changes. One that somebody collected is a miss.
- A deleted block does not come back, whoever still has an object with it (`tombstones`).
- A store that is slow, full or down costs bounded time: deadlines, bounded retries, a breaker.
- Nothing of the credentials is in a log line, an error or a metric (`failure`).

Several daemons share a bucket without knowing of each other; what each one sees of the others is at
most `object.believed_s` old, and what it misses of what they have stored, 5 s.
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
