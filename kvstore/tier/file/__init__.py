"""The file tier: frames in append-only segments, on NVMe or any POSIX directory.

What is promised:

- `sync` (durability.py) covers every write that returned before it was called with a completed
  fdatasync, new files' directory included. A frame so covered is found again by the next `open`,
  after kill -9 and after power loss, unless it was freed or killed by a durable tombstone.
- The physical bytes of the segments (`st_blocks`) stay under the cap. The last part of the cap is
  kept for tombstones; only when that is used up as well does a tombstone exceed the cap, because a
  delete must always be possible.
- Space is freed by punching holes where the file system can, and by unlinking dead segments.
- One process at a time: the directory is locked.
- Of several directories (`Devices`), one that fails loses only its own frames. A delete has
  succeeded only when every directory has its tombstone, so each judges its own frames alone. If a
  record is in two directories in use, the frame of the highest sequence counts.

Recovery reads only the footer of a sealed segment, never the payload; a later read verifies it. A
segment without a valid footer (the tail of a process that was killed, or a rotten footer) is
scanned. The scan verifies every payload, so that a torn frame cannot supersede an older durable
one; then the segment is sealed. New frames always go to a fresh segment. After `open` all
tombstones are known and every run can be found by its keys. The headers of runs are parsed when a
key is asked for, or one after another in the background: see `found.py`. A key in several frames is
live in the one of the highest sequence, unless a later tombstone killed it.

With `Sealing` (keys.py) new segments are encrypted, each under a key of its own (format 2). A read
decrypts into its targets, and tells which blocks have a wrong tag. Segments of format 1 are refused
unless they are accepted explicitly: whoever can write to the disk can forge one.

A directory written by another format version is refused (Incompatible), not skipped: a skipped
segment may hold the tombstone of a block that this release would then serve again.
"""

from kvstore.tier.file.audit import Audit, Damage, NamespaceReport, Problem, SegmentReport
from kvstore.tier.file.devices.device import Device, DeviceState, Mount, Placed
from kvstore.tier.file.devices.devices import Devices
from kvstore.tier.file.disk import Disk, RealDisk, Sizes
from kvstore.tier.file.failure import DiskFailed, DiskFull, DiskHung
from kvstore.tier.file.found import FrameRecord
from kvstore.tier.file.keys import DirectoryKeys, destroy_keys
from kvstore.tier.file.pages import aligned_buffer, aligned_copy
from kvstore.tier.file.sealed_io import WrongTag
from kvstore.tier.file.segment import FileExtent
from kvstore.tier.file.segment_file import holds_blocks
from kvstore.tier.file.tier import FileTier, Recovered

__all__ = [
    "Audit",
    "Damage",
    "Device",
    "DeviceState",
    "Devices",
    "DirectoryKeys",
    "Disk",
    "DiskFailed",
    "DiskFull",
    "DiskHung",
    "FileExtent",
    "FileTier",
    "FrameRecord",
    "Mount",
    "NamespaceReport",
    "Placed",
    "Problem",
    "RealDisk",
    "Recovered",
    "SegmentReport",
    "Sizes",
    "WrongTag",
    "aligned_buffer",
    "aligned_copy",
    "destroy_keys",
    "holds_blocks",
]
