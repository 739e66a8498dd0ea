"""Inspect a directory without taking it into use: what it holds, and whether that is intact.

It only reads and takes no lock, so a daemon may use the directory meanwhile. The daemon may punch
out a frame or unlink a segment; a second look tells that from damage.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvstore.format.frame import FrameHeader, SegmentTag, open_block, parse_header
from kvstore.model.block import PAGE_NBYTES, BlockKey, NamespaceId, padded
from kvstore.model.checksum import checksum
from kvstore.model.errors import ConfigError, CorruptBlock
from kvstore.tier.file.disk import Disk, RealDisk
from kvstore.tier.file.failure import DiskFailed
from kvstore.tier.file.keys import DirectoryKeys
from kvstore.tier.file.live import live_positions
from kvstore.tier.file.pages import aligned_buffer
from kvstore.tier.file.recovery import LoadedSegment, look_at_segment
from kvstore.tier.file.segment_file import SegmentFiles, parse_segment_name, segment_name
from kvstore.tier.file.spec_files import read_spec_files

Progress = Callable[[int], None]


class Problem(StrEnum):
    """What is wrong with a frame, or with one block of it."""

    HEADER = "header"  # its page is not the one that was written; needed if the footer is lost
    PAYLOAD = "payload"  # the bytes do not match their checksum
    UNREADABLE = "unreadable"  # the device refuses them, or the file ends before


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that are not what was written. key: the block's; None: the frame's header page.

    live: the daemon would look for a record there. If it does, it finds the damage by the same
    checksum, and the block is a miss.
    """

    segment: str
    offset: int
    problem: Problem
    key: BlockKey | None
    namespace_id: NamespaceId
    live: bool


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """What one segment file holds.

    Records are counted, one per block and part. dead_nbytes: of frames with nothing live, which the
    daemon frees at its next start. dropped: torn or rotten frames, never served. needs_epoch: of
    the tenant's key, of an encrypted segment. locked: its key is not known. unread: frames of a
    locked one that are where they say; nothing vouches for them.
    """

    name: str
    sealed: bool
    nbytes: int
    physical_nbytes: int
    runs: int
    tombstones: int
    records: int
    live_records: int
    dead_nbytes: int
    dropped: int
    needs_epoch: int | None = None
    locked: bool = False
    unread: int = 0


@dataclass(frozen=True, slots=True)
class NamespaceReport:
    """What is live of one namespace; nbytes as stored. model: "" where no file says it."""

    blocks: int
    records: int
    nbytes: int
    model: str = ""


@dataclass(frozen=True, slots=True)
class _Segment:
    loaded: LoadedSegment
    frames: list[tuple[int, FrameHeader]]  # offset and header


class Audit:
    """The frames of one directory, as found when it was made. Blocking.

    Raises ConfigError if `path` is no directory or holds renamed segments, Incompatible for another
    format version, DiskFailed. keys: of the directory; without them, encrypted segments are locked.
    """

    def __init__(
        self, path: Path, disk: Disk | None = None, *, keys: DirectoryKeys | None = None
    ) -> None:
        self._keys = keys
        self._disk = disk or RealDisk()
        self._path = path
        self._buffer = aligned_buffer(PAGE_NBYTES)
        try:
            names = self._disk.names(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        self._files = SegmentFiles(self._disk, path, direct=True, keys=keys)
        tags = sorted(tag for tag in map(parse_segment_name, names) if tag is not None)
        self._files.direct = all(map(self._can_direct, tags[:1]))
        looked = [loaded for tag in tags if (loaded := self._look(tag)) is not None]
        self._segments = [_Segment(loaded, loaded.frames.headers()) for loaded in looked]
        self._live: dict[tuple[int, int], tuple[int, ...]] = {}
        self._namespaces: dict[NamespaceId, NamespaceReport] = {}
        self._find_live()

    @property
    def segments(self) -> list[SegmentReport]:
        return [self._report(segment) for segment in self._segments]

    @property
    def runs(self) -> Iterator[tuple[Path, int, FrameHeader]]:
        """Yield the frames of records: file, offset of the header page, header."""
        for segment in self._segments:
            for offset, header in segment.frames:
                if not header.is_tombstone:
                    yield self._files.path(segment.loaded.tag), offset, header

    @property
    def namespaces(self) -> dict[NamespaceId, NamespaceReport]:
        return self._namespaces

    @property
    def models(self) -> dict[str, int]:
        """The blocks that are live, by model; "": no file says of which."""
        models: Counter[str] = Counter()
        for report in self._namespaces.values():
            models[report.model] += report.blocks
        return dict(models)

    @property
    def nbytes(self) -> int:
        """How much `verify` reads: every frame, dead ones too."""
        return sum(header.nbytes for segment in self._segments for _, header in segment.frames)

    def verify(self, progress: Progress = lambda nbytes: None) -> Iterator[Damage]:
        """Read every frame and yield what is damaged; `progress` hears how many bytes were read."""
        for segment in self._segments:
            for offset, header in segment.frames:
                tag = segment.loaded.tag
                damages = list(self._verify_frame(segment.loaded, offset, header))
                if damages and self._is_there(tag, offset):
                    yield from damages
                progress(header.nbytes)

    def _look(self, tag: SegmentTag) -> LoadedSegment | None:
        try:
            return look_at_segment(self._files, tag)
        except DiskFailed as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None  # unlinked since its directory was listed
            raise

    def _can_direct(self, tag: SegmentTag) -> bool:
        try:
            self._disk.close(self._disk.open(self._files.path(tag), direct=True))
        except OSError as error:
            return error.errno != errno.EINVAL
        return True

    def _find_live(self) -> None:
        placed = [(s.loaded.tag.number, *frame) for s in self._segments for frame in s.frames]
        keys: dict[NamespaceId, set[BlockKey]] = {}
        count: Counter[NamespaceId] = Counter()
        nbytes: Counter[NamespaceId] = Counter()
        all_live = live_positions([header for _, _, header in placed])
        for (number, offset, header), live in zip(placed, all_live, strict=True):
            if not live:
                continue
            self._live[number, offset] = live
            blocks = [header.blocks[position] for position in live]
            keys.setdefault(header.namespace_id, set()).update(block.key for block in blocks)
            count[header.namespace_id] += len(blocks)
            nbytes[header.namespace_id] += sum(block.stored_nbytes for block in blocks)
        specs = read_spec_files(self._disk, self._path, keys, self._keys)
        named = {each.id: each.title for each in specs}
        self._namespaces = {
            each: NamespaceReport(len(keys[each]), count[each], nbytes[each], named.get(each, ""))
            for each in keys
        }

    def _report(self, segment: _Segment) -> SegmentReport:
        loaded = segment.loaded
        live = [self._live.get((loaded.tag.number, offset), ()) for offset, _ in segment.frames]
        headers = [header for _, header in segment.frames]
        runs = [header for header in headers if not header.is_tombstone]
        return SegmentReport(
            name=segment_name(loaded.tag),
            sealed=loaded.sealed,
            nbytes=loaded.sizes.nbytes,
            physical_nbytes=loaded.sizes.physical_nbytes,
            runs=len(runs),
            tombstones=len(headers) - len(runs),
            records=sum(len(header.blocks) for header in runs),
            live_records=sum(map(len, live)),
            dead_nbytes=sum(
                header.nbytes
                for header, positions in zip(headers, live, strict=True)
                if not positions and not header.is_tombstone
            ),
            dropped=0 if loaded.locked else loaded.dropped,
            needs_epoch=loaded.needs_epoch,
            locked=loaded.locked,
            unread=loaded.dropped if loaded.locked else 0,
        )

    def _verify_frame(
        self, loaded: LoadedSegment, offset: int, header: FrameHeader
    ) -> Iterator[Damage]:
        tag = loaded.tag
        live = self._live.get((tag.number, offset), ())
        name = segment_name(tag)
        page = self._read(tag, offset, PAGE_NBYTES)
        if page is None or parse_header(page, tag, offset, loaded.key) != header:
            problem = Problem.UNREADABLE if page is None else Problem.HEADER
            used = bool(live) or header.is_tombstone
            yield Damage(name, offset, problem, None, header.namespace_id, used)
        for position, (start, block) in enumerate(zip(header.offsets, header.blocks, strict=True)):
            stored = self._read(tag, offset + start, block.stored_nbytes)
            if stored is not None and self._is_good(loaded, header, position, stored):
                continue
            problem = Problem.UNREADABLE if stored is None else Problem.PAYLOAD
            found = position in live
            yield Damage(name, offset, problem, block.key, header.namespace_id, found)

    def _is_good(
        self, loaded: LoadedSegment, header: FrameHeader, position: int, stored: memoryview
    ) -> bool:
        """Say whether a block is what was stored: by its tag, if it has one, and its checksum."""
        block = header.blocks[position]
        plain = stored[: block.stored_nbytes]
        if loaded.key is not None and not open_block(header, position, loaded.key, stored):
            return False
        return checksum(plain) == block.stored_checksum

    def _read(self, tag: SegmentTag, offset: int, nbytes: int) -> memoryview | None:
        """Return bytes that stay valid until the next call; None if they cannot be read."""
        if len(self._buffer) < padded(nbytes):
            self._buffer = aligned_buffer(padded(nbytes))
        try:
            self._files.read(tag, [self._buffer[: padded(nbytes)]], offset)
        except (CorruptBlock, DiskFailed):
            return None
        return self._buffer[:nbytes]

    def _is_there(self, tag: SegmentTag, offset: int) -> bool:
        """Return whether the frame at `offset` has not been punched out or unlinked meanwhile."""
        try:
            fd = self._disk.open(self._files.path(tag))
        except FileNotFoundError:
            return False
        try:
            return self._disk.next_data(fd, offset) == offset
        finally:
            self._disk.close(fd)
