"""fio: what the device does at best. One job a call, io_uring and O_DIRECT, its own clock."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from kvstore.model.errors import Unavailable

TIMEOUT_S = 600.0
INSTALL = "fio is not installed: apt-get install fio (Debian, Ubuntu), dnf install fio (Fedora)"


def has_fio() -> bool:
    """Return whether fio is there; `INSTALL` says how to get it."""
    return shutil.which("fio") is not None


def bandwidth(path: Path, kind: str, *, block_nbytes: int, depth: int, nbytes: int) -> float:
    """Return bytes/s of sequential I/O over the whole of `path`, a file of `nbytes`.

    kind: "write" makes the file and ends with an fsync; "read" reads what was so written.
    """
    command = [
        "fio",
        "--name=kvstore",
        f"--filename={path}",
        f"--rw={kind}",
        "--ioengine=io_uring",
        "--direct=1",
        f"--bs={block_nbytes}",
        f"--iodepth={depth}",
        f"--size={nbytes}",
        "--end_fsync=1",
        "--fallocate=none",
        "--output-format=json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise Unavailable(f"fio failed: {(done.stderr or done.stdout).strip()[-300:]}")
    (job,) = json.loads(done.stdout)["jobs"]
    side = job[kind]
    if side["io_bytes"] != nbytes:
        raise Unavailable(f"fio moved {side['io_bytes']} of {nbytes} bytes")
    return float(side["bw_bytes"])
