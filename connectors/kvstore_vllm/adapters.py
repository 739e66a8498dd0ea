"""Which bytes a LoRA adapter is made of: its blocks are keyed by a digest of them.

vLLM reads an adapter's files when it likes: when the adapter is registered, with its first request,
and again after others have pushed it out. This process is not told. So an adapter takes part only
while its files are what they were when the engine began; they are looked at again whenever blocks
of it are to be saved. One that changed passes by, for as long as this engine lives: a new engine
finds its new digest. vLLM finds adapters by number and its own cached blocks by the adapter's name,
so a number or a name that stood for two of them passes by as well.

Not noticed: a folder above the adapter's own that is renamed, a file server whose clock is behind
that of this host, other files under the same path on another host of one engine, and, with
asynchronous scheduling, files that change within the step that reads them for the first time.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.model.errors import Incompatible
from kvstore.settings import default_digest_memory
from kvstore.system.file_digests import FileDigests
from kvstore_vllm.counters import Counters

logger = logging.getLogger(__name__)

ADAPTERS_MAX = 16384
QUEUE_MAX = 64
FILES_MAX = 64
LINKS_MAX = 40
SUFFIXES = (".json", ".safetensors", ".bin", ".pt")
OF_TRAINING = ("optimizer.pt", "scheduler.pt", "trainer_state.json", "training_args.bin")

UNKNOWN = "bypassed_unknown_adapter"
CHANGED = "bypassed_changed_adapter"
UNREADABLE = "bypassed_unreadable_adapter"

Stamps = tuple[tuple[int, ...], ...]
Source = tuple[str, bool]
"""Where vLLM finds an adapter, and how it reads it."""


@dataclass
class _Adapter:
    """One adapter as it was first seen. A thread fills in `digest` or `problem`."""

    folder: Path = Path()
    files: tuple[Path, ...] = ()
    stamps: Stamps = ()
    digest: str = ""
    problem: str = ""
    queued: bool = False


@dataclass
class _Owners:
    """What the names, or the numbers, of adapters stand for."""

    source: dict[Any, Source] = field(default_factory=dict)
    doubted: set[Any] = field(default_factory=set)

    def doubts(self, label: Any, source: Source) -> bool:
        return label in self.doubted or self.source.setdefault(label, source) != source


class Adapters:
    """The adapters of one engine. The scheduler's thread calls; files are hashed by another."""

    def __init__(
        self, counters: Counters, digests: FileDigests | None = None, settings: str = ""
    ) -> None:
        """Make it before the engine can load an adapter.

        settings: those of the engine that decide what an adapter's files do.
        """
        self._counters = counters
        self._digests = digests or FileDigests(default_digest_memory())
        # Read now, not with each adapter's first request: it takes longer than a step may wait.
        # The hashing thread finds what other engines hash later.
        self._remembered = self._digests.remembered()
        self._settings = settings
        self._began_ns = time.time_ns()
        self._adapters: dict[Source, _Adapter] = {}
        self._names = _Owners()
        self._numbers = _Owners()
        self._lock = threading.Lock()
        self._queue: deque[_Adapter] = deque()
        self._hashing = False

    def identity(self, request: Any) -> bytes | None:
        """Return what tells the adapter of a LoRARequest; None, and counted: it must pass by."""
        problem = self._problem(request)
        if problem:
            self._counters.add(**{problem: 1})
            return None
        adapter = self._adapters[_source(request)]
        _, is_3d = _source(request)
        return f"{adapter.digest}\0{is_3d}\0{self._settings}".encode()

    def unchanged(self, request: Any) -> bool:
        """Return whether all that was computed with the adapter so far is what `identity` says."""
        return not self._problem(request)

    def _problem(self, request: Any) -> str:
        """Return the name of the counter that says why the adapter passes by; "": it need not."""
        source = _source(request)
        name, number = request.lora_name, request.lora_int_id
        new = name not in self._names.source or number not in self._numbers.source
        if new and max(len(self._names.source), len(self._numbers.source)) >= ADAPTERS_MAX:
            return UNKNOWN
        in_doubt = [self._names.doubts(name, source), self._numbers.doubts(number, source)]
        if getattr(request, "load_inplace", False) or any(in_doubt):
            self._doubt(request, "its name or number stood for another, or was loaded in place")
            return CHANGED
        adapter = self._adapters.get(source)
        if adapter is None:
            adapter = self._adapters[source] = self._first_look(source[0])
        elif not adapter.problem and _stamps_now(adapter) != adapter.stamps:
            self._note_changed(adapter)
        if adapter.problem:
            return adapter.problem
        if not adapter.digest:
            self._enqueue(adapter)
            return UNKNOWN
        return ""

    def _doubt(self, request: Any, reason: str) -> None:
        if request.lora_name not in self._names.doubted:
            logger.warning("adapter=%s cache=off reason='%s'", request.lora_name, reason)
        self._names.doubted.add(request.lora_name)
        self._numbers.doubted.add(request.lora_int_id)

    def _first_look(self, path: str) -> _Adapter:
        try:
            folder = _folder(path)
            files = _files(folder)
            adapter = _Adapter(folder, files, _stamps(folder, files))
            if _changed_ns(adapter) > self._began_ns:
                self._note_changed(adapter)
                return adapter
            adapter.digest = self._remembered.known(files) or ""
        except (OSError, Incompatible) as error:
            logger.warning("adapter=%s cache=off reason=%r", path, str(error))
            return _Adapter(problem=UNREADABLE)
        return adapter

    def _note_changed(self, adapter: _Adapter) -> None:
        adapter.problem = CHANGED
        logger.warning(
            "adapter=%s cache=off reason='its files changed after this engine began, which may "
            "have loaded what was there before' do='restart the engine'",
            adapter.folder,
        )

    # Hashing --------------------------------------------------------------------------------------

    def _enqueue(self, adapter: _Adapter) -> None:
        """Have it hashed; if too many wait, its next request comes by here again."""
        with self._lock:
            if adapter.queued or len(self._queue) >= QUEUE_MAX:
                return
            adapter.queued = True
            self._queue.append(adapter)
            if self._hashing:
                return
            self._hashing = True
        threading.Thread(target=self._hash_all, name="kvstore-adapters", daemon=True).start()

    def _hash_all(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._hashing = False
                    return
                adapter = self._queue.popleft()
            self._hash(adapter)

    def _hash(self, adapter: _Adapter) -> None:
        try:
            digest = self._digests.digest(adapter.files)
        except (OSError, Incompatible) as error:
            logger.warning("adapter=%s cache=off reason=%r", adapter.folder, str(error))
            adapter.problem = UNREADABLE
            return
        except Exception:  # the next adapter has to be hashed all the same
            logger.exception("adapter=%s cache=off", adapter.folder)
            adapter.problem = UNREADABLE
            return
        if _stamps_now(adapter) != adapter.stamps:
            self._note_changed(adapter)
            return
        logger.info("adapter=%s digest=%s", adapter.folder, digest[:8])
        adapter.digest = digest


def _source(request: Any) -> Source:
    return request.lora_path, bool(getattr(request, "is_3d_lora_weight", False))


def _folder(path: str) -> Path:
    """Return where vLLM reads an adapter. Raises Incompatible if it asks a hub for it."""
    if path.startswith("~"):
        return Path(os.path.expanduser(path))  # unlike pathlib's: no error without such a home
    if not Path(path).exists():
        raise Incompatible(
            f"{path} is no folder of this machine; download the adapter and give its folder"
        )
    return Path(path).absolute()


def _files(folder: Path) -> tuple[Path, ...]:
    """Return the files that may tell an adapter. One too many costs misses, not wrong KV."""
    found = [
        each
        for each in folder.iterdir()
        if each.suffix in SUFFIXES and each.name not in OF_TRAINING and each.is_file()
    ]
    if len(found) > FILES_MAX:
        raise Incompatible(f"{folder} has over {FILES_MAX} files: is it an adapter?")
    if folder / "adapter_config.json" not in found:
        raise Incompatible(f"{folder} has no adapter_config.json")
    return tuple(sorted(found))


def _stamps(folder: Path, files: tuple[Path, ...]) -> Stamps:
    """Describe an adapter's files and their folder: the same later, the same bytes."""
    return tuple(
        (each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns)
        for each in (path.stat() for path in (folder, *files))
    )


def _stamps_now(adapter: _Adapter) -> Stamps:
    try:
        return _stamps(adapter.folder, adapter.files)
    except OSError:
        return ()


def _changed_ns(adapter: _Adapter) -> int:
    """Return when anything last changed that leads to the adapter's bytes."""
    links = [link.st_ctime_ns for path in (adapter.folder, *adapter.files) for link in _links(path)]
    return max([*links, *(when for stamp in adapter.stamps for when in stamp[-2:])])


def _links(path: Path) -> Iterator[os.stat_result]:
    """Yield every symbolic link on the way to `path`: pointing one elsewhere changes no file."""
    here, left, seen = Path(path.anchor), deque(path.parts[1:]), 0
    while left:
        part = left.popleft()
        if part == "..":
            here = here.parent
            continue
        status = (here / part).lstat()
        if not stat.S_ISLNK(status.st_mode):
            here /= part
            continue
        yield status
        seen += 1
        if seen > LINKS_MAX:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = (here / part).readlink()
        if target.is_absolute():
            here = Path(target.anchor)
        left.extendleft(reversed([each for each in target.parts if each != target.anchor]))
