"""What an attack acts on: a daemon with tenants, and the counts of what must not happen."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvstore import BlockKey, Client, KVStoreError
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace

SPACE = sample_namespace()
ANSWER_S = 2.0  # in which a daemon answers whatever it goes through
CALL_EVERY_S = 0.02
ASKED = sample_keys("beside", 4)
NOBODY = 65534
UIDS = {"acme": 4711, "beta": 4712}
COUNTS = (
    "read_other",
    "wrote_other",
    "wrong_served",
    "hung",
    "daemon_died",
    "calls_allowed",
    "methods_without_right",
    "forged_served",
    "charged",
    "canaries_found",
    "rotation_failed_calls",
)


def may_be_several_users(uids: Path = Path("/proc/self/uid_map")) -> bool:
    """Say whether this process is root, and has the users that are needed: in a user namespace of
    its own it may have one alone. uids: the ranges that there are."""
    ranges = [[int(each) for each in line.split()] for line in uids.read_text().splitlines()]
    needed = (*UIDS.values(), NOBODY)
    return os.getuid() == 0 and all(
        any(first <= uid < first + count for first, _, count in ranges) for uid in needed
    )


def tenant_settings() -> list[str]:
    """Return the settings of two tenants, each of a Unix user where this process may make some."""
    sizes = [f"tenants.{name}.dram.guaranteed=24MiB" for name in UIDS]
    if os.getuid():
        return sizes
    return sizes + [f"tenants.{name}.unix.uid={uid}" for name, uid in UIDS.items()]


def record_of(key: BlockKey) -> bytes:
    """Return the bytes that an honest writer puts under a key: 4 KiB and more, unlike any other."""
    nbytes = SPACE.groups[0].record_nbytes
    return hashlib.shake_128(b"honest" + key).digest(nbytes)


def _ask_for_a_prefix(client: Client) -> object:
    return client.match(SPACE.id, ASKED)


class Scene:
    """One case's world. quick: fewer rounds, as the tests run them.

    counts: of what must not happen. details: what was measured. controls: whether an attack that
    has to succeed did; one that did not says that the case would not see a breach.
    """

    def __init__(self, *, quick: bool) -> None:
        self.quick = quick
        self.counts = dict.fromkeys(COUNTS, 0)
        self.details: dict[str, Any] = {}
        self.controls: dict[str, bool] = {}

    @contextlib.contextmanager
    def daemon(
        self, *overrides: str, beside: Callable[[Client], object] = _ask_for_a_prefix
    ) -> Iterator[Daemon]:
        """Run a daemon with the tenants acme and beta. It has to live to the end, and to answer all
        the time. beside: what a client of acme calls again and again."""
        with Daemon("dram.capacity=96MiB", *tenant_settings(), *overrides) as daemon:
            daemon.directory.chmod(0o711)
            daemon.socket.parent.mkdir()
            daemon.socket.parent.chmod(0o711)
            daemon.start()
            with self.called_all_the_time(daemon, beside):
                yield daemon
            self._look_at(daemon)

    @contextlib.contextmanager
    def called_all_the_time(
        self, daemon: Daemon, call: Callable[[Client], object]
    ) -> Iterator[None]:
        """Let a client of acme call inside of the context, and count calls that took too long."""
        over, began_well = threading.Event(), threading.Event()
        took_s: list[float] = []
        answered = 0

        def work() -> None:
            nonlocal answered
            with client_of(daemon, "acme", timeout_s=4 * ANSWER_S) as client:
                client.register(SPACE)
                while not over.is_set():
                    began = time.monotonic()
                    with contextlib.suppress(KVStoreError):
                        call(client)
                        answered += 1
                        began_well.set()
                    took_s.append(time.monotonic() - began)
                    over.wait(CALL_EVERY_S)

        caller = threading.Thread(target=work, daemon=True)
        caller.start()
        began_well.wait(8 * ANSWER_S)
        before = answered
        try:
            yield
        finally:
            over.set()
            caller.join(8 * ANSWER_S)
            slow = sum(each > ANSWER_S for each in took_s)
            self.count("hung", slow + caller.is_alive())
            slowest_s = max([self.details.get("slowest_call_s", 0.0), *took_s])
            self.details["slowest_call_s"] = round(slowest_s, 3)
            self.controls["a neighbour was answered meanwhile"] = answered > before > 0

    def _look_at(self, daemon: Daemon) -> None:
        """After the attack it answers at once, and ends as it should."""
        if not daemon.alive:
            self.count("daemon_died")
            return
        try:
            with Client(daemon.target, arena=False, timeout_s=ANSWER_S) as operator:
                operator.admin.whoami()
        except KVStoreError:
            self.count("hung")
        if daemon.stop():
            self.count("daemon_died")

    def count(self, name: str, times: int = 1) -> None:
        """Note something that must not happen."""
        self.counts[name] += times

    @property
    def ok(self) -> bool:
        return not any(self.counts.values()) and all(self.controls.values())


def target_of(daemon: Daemon, tenant: str) -> str:
    """Return the address of a tenant's own socket."""
    return f"unix:{daemon.socket.parent / tenant / 'kvstore.sock'}"


def client_of(
    daemon: Daemon, tenant: str, *, token: str | None = None, timeout_s: float = 5.0
) -> Client:
    """Return a client of a tenant. Its sockets belong to the tenant's user."""
    return Client(
        target_of(daemon, tenant), token=token, daemon_uid=UIDS[tenant], timeout_s=timeout_s
    )


def put(client: Client, name: str, blocks: int, *, durable: bool = False) -> list[BlockKey]:
    """Store what an honest writer puts under the keys of a prompt; return them."""
    keys = sample_keys(name, blocks)
    client.register(SPACE)
    done = client.put(SPACE.id, keys, [record_of(key) for key in keys], durable=durable)
    assert (done.committed, done.refused) == (blocks, 0)
    return keys


def wrong_among(keys: Sequence[BlockKey], found: Sequence[bytes | None]) -> int:
    """Return how many answers are neither what was put nor a miss."""
    pairs = zip(keys, found, strict=True)
    return sum(data is not None and data != record_of(key) for key, data in pairs)
