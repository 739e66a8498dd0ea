"""Which files of weights an engine runs: their digest, found without delaying the engine.

An engine starts and serves while its files are hashed; its cache takes part when that is done.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvstore.model.errors import Incompatible
from kvstore.system.file_digests import FileDigests

logger = logging.getLogger(__name__)

PROGRESS_S = 5.0
REMEDY = "restart the engine, or set weights_id"
_SPLIT_GGUF = re.compile(r"(.*-)\d{5}(-of-\d{5}\.gguf)")

Source = str | Sequence[Path]
"""What tells weights: a name, or the files to hash."""


def file_and_splits(path: Path) -> list[Path]:
    """Return a file of weights, and the other files of a GGUF that is split."""
    split = _SPLIT_GGUF.fullmatch(path.name)
    others = path.parent.glob(f"{split[1]}?????{split[2]}") if split else ()
    return sorted({path, *others})


class Fingerprints:
    """The fingerprints of one engine's weights: `found` when all are known, else None.

    Files that changed after this process began may not be what the engine loaded: then `found`
    stays None, and the log says what to do.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        digests: FileDigests,
        began: Callable[[], float] | None = None,
        remedy: str = REMEDY,
    ) -> None:
        """Return at once with what is remembered; hash the rest in a thread.

        sources: by the name the fingerprint has in the namespace. began: tells when this process
        did, in seconds since the epoch. remedy: what the log says to do about files that changed
        since. Raises OSError for a file that is not there.
        """
        self.found: Mapping[str, str] | None = None
        self._sources = sources
        self._digests = digests
        self._remedy = remedy
        self._began = (began or process_began)()
        self._files = [file for source in sources.values() for file in _paths(source)]
        known = {name: self._known(source) for name, source in sources.items()}
        if all(known.values()):
            self._settle({name: digest or "" for name, digest in known.items()})
            return
        total = sum(file.stat().st_size for file in self._files)
        logger.info(
            "weights=hashing files=%d bytes=%d (saves and loads begin when it is done)",
            len(self._files),
            total,
        )
        threading.Thread(target=self._find, name="kvstore-weights", daemon=True).start()

    def _known(self, source: Source) -> str | None:
        return source if isinstance(source, str) else self._digests.known(source)

    def _find(self) -> None:
        started = time.monotonic()
        progress = _Progress()
        try:
            found = {
                name: source if isinstance(source, str) else self._digests.digest(source, progress)
                for name, source in self._sources.items()
            }
        except (OSError, Incompatible) as error:
            logger.error("weights=unknown cache=off reason=%r", str(error))
            return
        except Exception:  # nobody else would say why the cache takes no part
            logger.exception("weights=unknown cache=off")
            return
        logger.info("weights=hashed seconds=%.1f", time.monotonic() - started)
        self._settle(found)

    def _settle(self, found: Mapping[str, str]) -> None:
        try:
            late = next((file for file in self._files if self._is_late(file)), None)
        except OSError as error:
            logger.error("weights=unknown cache=off reason=%r", str(error))
            return
        if late is None:
            self.found = found
            return
        logger.error(
            "weights=unknown cache=off reason='%s changed after this engine began, which may have "
            "loaded what was there before' do=%r",
            late,
            self._remedy,
        )

    def _is_late(self, file: Path) -> bool:
        blobs = file.resolve().parent
        if blobs.name == "blobs" and blobs.parent.name.startswith("models--"):
            return False  # of the hub's cache, where a download makes a file and no one changes it
        status = file.stat()
        return max(status.st_mtime, status.st_ctime) > self._began


class _Progress:
    """Logs how far hashing is, now and then."""

    def __init__(self) -> None:
        self._next = time.monotonic() + PROGRESS_S

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + PROGRESS_S
            logger.info("weights=hashing done_bytes=%d bytes=%d", done, total)


def _paths(source: Source) -> Sequence[Path]:
    return () if isinstance(source, str) else source


def process_began() -> float:
    """Return when this process was started, in seconds since the epoch; 0 if nobody tells.

    The clock may have been set since: its change is taken out by counting from now.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        after_name = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        since_boot = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
    return 0.0
