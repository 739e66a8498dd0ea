"""Memory of huge pages, for those whom the file tier is compared with.

The arena has them. The disk of a virtual machine was read up to twice as fast into them as into
small pages.
"""

from __future__ import annotations

import contextlib
import mmap
import os

_TUNABLES = "GLIBC_TUNABLES"


def huge_memory(nbytes: int) -> mmap.mmap:
    """Return anonymous memory, of huge pages once it is touched, where the system has them."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def huge_buffers() -> dict[str, str]:
    """Return the environment for a program whose large buffers are to have them: glibc asks for
    them since 2.35."""
    known = os.environ.get(_TUNABLES)
    wanted = "glibc.malloc.hugetlb=1"
    return {**os.environ, _TUNABLES: f"{known}:{wanted}" if known else wanted}
