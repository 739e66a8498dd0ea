"""How many bytes a daemon at its cap writes for each byte it accepts."""

from __future__ import annotations

from pathlib import Path
from random import Random

from kvstore import Client
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records

CAPACITY_BYTES = 24 << 20
ROUNDS = 4  # of what the cap holds
NAMESPACE = sample_namespace("amplification")
CHAIN_BLOCKS_MAX = 32


def amplification() -> dict[str, float]:
    """Fill the file tier several times over, then measure the next fillings.

    Over the bytes of the records it accepted meanwhile: what the kernel says that the process wrote
    (padding, headers, footers and all), and, `own`, what the daemon's metrics say.
    """
    draw = Random(1)
    with Daemon(f"file.capacity={CAPACITY_BYTES}", "file.segment=4MiB") as daemon:
        daemon.start()
        with Client(daemon.target) as client:
            client.register(NAMESPACE)
            _fill(client, draw, "first")
            before = _written(daemon, client)
            accepted = sum(_fill(client, draw, f"next {number}") for number in range(ROUNDS))
            after = _written(daemon, client)
        daemon.stop()
    device, own = (end - begin for begin, end in zip(before, after, strict=True))
    return {
        "write_amplification": round(device / accepted, 3),
        "write_amplification_own": round(own / accepted, 3),
    }


def _fill(client: Client, draw: Random, name: str) -> int:
    """Put chains until as much as the cap was accepted, and flush. Returns the bytes accepted."""
    accepted = number = 0
    while accepted < CAPACITY_BYTES:
        number += 1
        keys = sample_keys(f"{name} {number}", draw.randint(1, CHAIN_BLOCKS_MAX))
        done = client.put(NAMESPACE.id, keys, sample_records(keys))
        accepted += done.committed * NAMESPACE.groups[0].record_nbytes
    assert client.admin.flush(60.0), "the file tier does not keep up"
    return accepted


def _written(daemon: Daemon, client: Client) -> tuple[int, int]:
    lines = Path(f"/proc/{daemon.pid}/io").read_text().splitlines()
    device = dict(line.split(": ") for line in lines)["write_bytes"]
    return int(device), int(client.admin.stats()["totals"]["tier_bytes"]["file/write"])
