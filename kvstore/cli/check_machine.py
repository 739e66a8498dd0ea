"""What of the machine a daemon depends on: limits, memory, huge pages, /dev/shm."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from kvstore.model.words import size
from kvstore.settings import Settings
from kvstore.store.findings import Finding, note, ok, wrong
from kvstore.system.memory import Fit, read_memory
from kvstore.tier.dram import makes_huge_pages
from kvstore_kernels import native

DESCRIPTORS_SPARE = 512  # segments, extents, sockets of the daemon itself
DESCRIPTORS_PER_SESSION = 16  # scheduler and worker: each kind of link may take an eighth of all
SHM_NBYTES_MIN = 1 << 30
_PINNING_DEVICES = ("/dev/nvidiactl", "/dev/infiniband")


def check_machine(settings: Settings, *, running: bool) -> Iterator[Finding]:
    """Yield findings. running: a daemon of these settings has its memory already."""
    yield _descriptors(settings.limits.sessions_max)
    yield _locked_memory()
    yield _memory(settings, running=running)
    yield huge_pages(possible=makes_huge_pages())
    yield _shm(Path("/dev/shm"))
    yield judge_native(native.reason())


def _descriptors(sessions_max: int) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_SPARE + DESCRIPTORS_PER_SESSION * sessions_max
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return ok("open files", f"{soft} allowed" if soft > 0 else "no limit")
    do = f"ulimit -n {wanted}   (systemd: LimitNOFILE={wanted})"
    if hard != resource.RLIM_INFINITY and hard < wanted:
        do += f", as root: the hard limit is {hard}"
    text = f"{soft} allowed; limits.sessions_max={sessions_max} may need {wanted}"
    return (wrong if soft < DESCRIPTORS_SPARE else note)("open files", text, do)


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "no limit" if soft == resource.RLIM_INFINITY else f"{size(soft)} allowed"
    if soft == resource.RLIM_INFINITY or not any(map(os.path.exists, _PINNING_DEVICES)):
        return ok("locked memory", f"{text} (needed only to pin memory for a GPU or RDMA)")
    return note(
        "locked memory",
        f"{text}: engines may not be able to pin the arena for their GPU",
        "ulimit -l unlimited   (systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1)",
    )


def _memory(settings: Settings, *, running: bool) -> Finding:
    """Judge as `kvstore serve` does."""
    if running:
        return ok("memory", "the running daemon has its arena")
    pool_bytes = settings.pool.host_bytes
    judged = read_memory().judge(settings.dram.capacity_bytes, pool_bytes=pool_bytes)
    if judged.fit is Fit.FITS:
        return ok("memory", judged.text)
    return (note if judged.fit is Fit.TIGHT else wrong)("memory", judged.text, judged.do)


def huge_pages(*, possible: bool) -> Finding:
    """Judge whether the arena, which is shared memory, can have huge pages."""
    if possible:
        return ok("huge pages", "the kernel makes them for the arena")
    return note(
        "huge pages",
        "the kernel makes none for the arena: disks and copies are up to a third slower",
        "use Linux 6.1 or newer; in /sys/kernel/mm/transparent_hugepage/shmem_enabled, not deny",
    )


def judge_native(missing: str) -> Finding:
    """Judge whether engines here can store coded records. missing: why not, or ""."""
    if missing:
        return note(
            "coded records",
            f"no native library, so engines on CPUs store KV raw: {missing}",
            "python -m kvstore_kernels.native.build   (or install a wheel of this platform)",
        )
    isa = native.use_isa().name
    return ok(
        "coded records", f"native library for {isa}: engines on CPUs store KV exactly, in less"
    )


def _shm(path: Path) -> Finding:
    try:
        space = os.statvfs(path)
    except OSError:
        return note("/dev/shm", "not there; kvstore does not use it, vLLM's workers do")
    total = space.f_frsize * space.f_blocks
    if total < SHM_NBYTES_MIN:
        return note(
            "/dev/shm",
            f"{size(total)}: kvstore does not use it, but vLLM with several workers does",
            "docker run --ipc=host, or --shm-size=16g",
        )
    return ok("/dev/shm", size(total))
