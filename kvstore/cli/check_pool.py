"""What a pool needs: its package, its libraries, a master that can be reached; and who else can."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

from kvstore.settings import PoolSettings
from kvstore.store.findings import Finding, note, ok, wrong

ABOUT = "pool"
CONNECT_S = 3.0
IMPORT_S = 30.0
ENDING_CHARS = 200


def check_pool(settings: PoolSettings, *, running: bool) -> Iterator[Finding]:
    """Yield findings about `pool.url`, if it is set. running: a daemon says itself how it goes."""
    if not settings.on:
        return
    if settings.insecure:
        yield note(
            ABOUT,
            f"{settings.url}: Mooncake has neither TLS nor credentials, and its clients listen on "
            "all addresses: who reaches them may read, change and delete what is there",
            "keep its ports within a network of its own",
        )
    if running:
        return
    # In a process of its own: native code that is not for this machine may end it.
    program = [sys.executable, "-c", "import mooncake.store"]
    done = subprocess.run(program, capture_output=True, timeout=IMPORT_S, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()[-ENDING_CHARS:]
        yield wrong(
            ABOUT,
            f"Mooncake cannot be imported: {said or f'exit code {done.returncode}'}",
            "pip install 'kvstore-tiers[pool]'; on Debian: apt-get install libibverbs1 libcurl4 "
            "libnuma1",
        )
        return
    host, _, port = settings.master.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as error:
        yield wrong(
            ABOUT,
            f"{settings.url}: {error.strerror or error}",
            f"start mooncake_master --rpc_port={port}, or correct pool.url",
        )
        return
    yield ok(ABOUT, f"{settings.url}: its master can be reached")
