"""The meaning of each namespace in a directory: a small file, `<id in hex>.namespace`.

    the canonical text of the namespace | newline | the name of its model | newlines to a page

The files are beside the frames and outside the cap. They are not needed to find a block: they
describe what a start has found before an engine registers the namespace. So they are not synced.
The id is the digest of the text, so torn, rotten and forged files are ignored. The model's name is
not verified, and only shown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from kvstore.model.block import KEY_NBYTES, Namespace, NamespaceId, padded
from kvstore.model.errors import InvalidRequest
from kvstore.tier.file.disk import Disk
from kvstore.tier.file.failure import disk_errors

SUFFIX = ".namespace"
FILE_NBYTES_MAX = 64 << 10
_ID_CHARS = 2 * KEY_NBYTES


def file_nbytes(namespace: Namespace) -> int:
    """Return the room that the file of a namespace takes."""
    return len(_content(namespace))


def spec_files_in(disk: Disk, path: Path) -> list[NamespaceId]:
    """Return the namespaces that have a file in a directory, read or not. Raises DiskFailed."""
    with disk_errors(f"look for namespaces in {path}"):
        names = [name.removesuffix(SUFFIX) for name in disk.names(path) if name.endswith(SUFFIX)]
    return [NamespaceId(bytes.fromhex(name)) for name in sorted(names) if _is_id(name)]


def read_spec_files(disk: Disk, path: Path, ids: Iterable[NamespaceId]) -> list[Namespace]:
    """Return the given namespaces that have a valid file. Raises DiskFailed."""
    with disk_errors(f"read namespaces in {path}"):
        found = [_read(disk, path, namespace_id) for namespace_id in ids]
    return [namespace for namespace in found if namespace is not None]


def write_spec_file(disk: Disk, path: Path, namespace: Namespace) -> None:
    """Write the file of a namespace anew. Raises DiskFull, DiskFailed."""
    file = _file(path, namespace.id)
    with disk_errors(f"write {file}"):
        _unlink(disk, file)
        fd = disk.open(file, write=True, create=True)
        try:
            left, at = memoryview(_content(namespace)), 0
            while left:
                count = disk.pwritev(fd, [left], at)
                left, at = left[count:], at + count
        finally:
            disk.close(fd)


def remove_spec_files(disk: Disk, path: Path, ids: Iterable[NamespaceId]) -> None:
    """Remove the files of some namespaces. Raises DiskFailed."""
    with disk_errors(f"remove namespaces in {path}"):
        for namespace_id in ids:
            _unlink(disk, _file(path, namespace_id))


def _read(disk: Disk, path: Path, namespace_id: NamespaceId) -> Namespace | None:
    try:
        fd = disk.open(_file(path, namespace_id))
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
    text, _, name = bytes(buffer).partition(b"\n")
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
