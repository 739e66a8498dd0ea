"""The floor: one file a block, O_DIRECT, a pool of threads. No index, no checksum, no cap."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvstore_bench.peers.system import Place, System


def open_system(place: Place) -> System:
    return Plain(place)


class Plain:
    """`put` writes; `flush` is an fdatasync a file and one of the directory."""

    def __init__(self, place: Place) -> None:
        self._directory = place.directory
        self._blocks = place.blocks
        self._threads = ThreadPoolExecutor(place.threads)
        self._put: list[str] = []

    def put(self, keys: Sequence[bytes]) -> None:
        self._put = [self._path(key) for key in keys]
        list(self._threads.map(_write, self._put, self._blocks.sources))

    def flush(self) -> None:
        list(self._threads.map(_sync, [*self._put, str(self._directory)]))

    def get(self, keys: Sequence[bytes]) -> list[bool]:
        paths = [self._path(key) for key in keys]
        return list(self._threads.map(_read, paths, self._blocks.targets))

    def chill(self) -> bool:
        return True

    def close(self) -> None:
        self._threads.shutdown()

    def _path(self, key: bytes) -> str:
        return str(self._directory / key.hex())


def _write(path: str, source: memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        if os.write(descriptor, source) != len(source):
            raise OSError(f"{path}: written only in part")
    finally:
        os.close(descriptor)


def _read(path: str, target: memoryview) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except FileNotFoundError:
        return False
    try:
        return os.preadv(descriptor, [target], 0) == len(target)
    finally:
        os.close(descriptor)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
