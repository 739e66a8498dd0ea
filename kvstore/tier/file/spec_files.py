"""The meaning of each namespace in a directory: a small file, `<id in hex>.namespace`.

    the canonical text of the namespace | newline | the name of its model | newlines to a page

The files are beside the frames and outside the cap. They are not needed to find a block: they
describe what a start has found before an engine registers the namespace. So they are not synced.
The id is the digest of the text, so torn, rotten and forged files are ignored. The model's name is
not verified, and only shown.

Where the tier is encrypted, the file is, too, and its name is what stands for the id: see `named`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from kvstore.format.frame.seal import BLOB_NBYTES
from kvstore.model.block import KEY_NBYTES, PAGE_NBYTES, Namespace, NamespaceId, padded
from kvstore.model.errors import InvalidRequest
from kvstore.tier.file.disk import Disk
from kvstore.tier.file.failure import disk_errors
from kvstore.tier.file.keys import DirectoryKeys

SUFFIX = ".namespace"
FILE_NBYTES_MAX = 64 << 10
_ID_CHARS = 2 * KEY_NBYTES
_LABEL = b"namespace"


def named(namespace_id: NamespaceId, keys: DirectoryKeys | None) -> NamespaceId:
    """Return the id in the name of a namespace's file."""
    if keys is None:
        return namespace_id
    return NamespaceId(keys.ring.name(_LABEL, namespace_id))


def file_nbytes(namespace: Namespace) -> int:
    """Return the room that the file of a namespace takes."""
    return len(_content(namespace))


def spec_files_in(disk: Disk, path: Path) -> list[NamespaceId]:
    """Return the ids in the names of all files in a directory, read or not: see `named`. Raises
    DiskFailed."""
    with disk_errors(f"look for namespaces in {path}"):
        names = [name.removesuffix(SUFFIX) for name in disk.names(path) if name.endswith(SUFFIX)]
    return [NamespaceId(bytes.fromhex(name)) for name in sorted(names) if _is_id(name)]


def read_spec_files(
    disk: Disk, path: Path, ids: Iterable[NamespaceId], keys: DirectoryKeys | None = None
) -> list[Namespace]:
    """Return the given namespaces that have a valid file. Raises DiskFailed."""
    with disk_errors(f"read namespaces in {path}"):
        found = [_read(disk, path, namespace_id, keys) for namespace_id in ids]
    return [namespace for namespace in found if namespace is not None]


def write_spec_file(
    disk: Disk, path: Path, namespace: Namespace, keys: DirectoryKeys | None = None
) -> None:
    """Write the file of a namespace anew. Raises DiskFull, DiskFailed."""
    file = _file(path, named(namespace.id, keys))
    content = _content(namespace)
    if keys is not None:
        # The file has whole pages, too: what the seal adds, and filling.
        content = keys.seal_note(content + b"\n" * (PAGE_NBYTES - BLOB_NBYTES), _LABEL)
    with disk_errors(f"write {file}"):
        _unlink(disk, file)
        fd = disk.open(file, write=True, create=True)
        try:
            left, at = memoryview(content), 0
            while left:
                count = disk.pwritev(fd, [left], at)
                left, at = left[count:], at + count
        finally:
            disk.close(fd)


def remove_spec_files(disk: Disk, path: Path, ids: Iterable[NamespaceId]) -> None:
    """Remove files, by the ids in their names. Raises DiskFailed."""
    with disk_errors(f"remove namespaces in {path}"):
        for namespace_id in ids:
            _unlink(disk, _file(path, namespace_id))


def _read(
    disk: Disk, path: Path, namespace_id: NamespaceId, keys: DirectoryKeys | None
) -> Namespace | None:
    try:
        fd = disk.open(_file(path, named(namespace_id, keys)))
    except FileNotFoundError:
        return None
    try:
        nbytes = disk.sizes(fd).nbytes
        if nbytes > FILE_NBYTES_MAX:
            return None
        buffer = memoryview(bytearray(nbytes))
        if disk.preadv(fd, [buffer], 0) != nbytes:
            return None
    finally:
        disk.close(fd)
    content = bytes(buffer) if keys is None else keys.open_note(buffer, _LABEL)
    text, _, name = (content or b"").partition(b"\n")
    if hashlib.sha256(text).digest() != namespace_id:
        return None
    try:
        namespace = Namespace.from_json(text.decode(), name.decode(errors="replace"))
    except (InvalidRequest, UnicodeDecodeError):
        return None
    return namespace if namespace.id == namespace_id else None


def _content(namespace: Namespace) -> bytes:
    content = f"{namespace.to_json()}\n{namespace.name}".encode()
    return content.ljust(padded(len(content)), b"\n")


def _file(path: Path, namespace_id: NamespaceId) -> Path:
    return path / f"{namespace_id.hex()}{SUFFIX}"


def _is_id(name: str) -> bool:
    return len(name) == _ID_CHARS and set(name) <= set("0123456789abcdef")


def _unlink(disk: Disk, file: Path) -> None:
    try:
        disk.unlink(file)
    except FileNotFoundError:
        pass  # it is gone as it should be
