"""The program of the pool process: it runs Mooncake's client, and does what the daemon asks.

    python -m kvstore.tier.pool.worker SOCKET MEMORY

SOCKET and MEMORY are descriptors that it inherits; MEMORY is -1 if it gets no buffer. It ends with
the daemon: whatever a thread of it waits for, the end of the socket ends it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvstore.tier.pool.messages import (
    LENGTH,
    MESSAGE_NBYTES_MAX,
    M,
    Operation,
    Reply,
    Request,
    Setup,
    decode,
    encode,
)

MISSING = "mooncake is not installed: pip install 'kvstore-tiers[pool]' ({})"
LOCAL_NBYTES = 16 << 20  # of Mooncake's own: what it moves for calls that we do not make
LEAVE_S = 2.0
ERROR_CHARS_MAX = 500


class Worker:
    """Answers requests, several at once."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._sending = threading.Lock()
        self._store: Any = None
        self._mapped: mmap.mmap | None = None  # kept: it is unmapped with its last reference
        self._base = 0
        self._buffer_bytes = 0

    def run(self, memory: int) -> None:
        """Set up, then answer until the daemon ends."""
        setup = self._receive(Setup)
        if setup is None:
            return
        error = self._set_up(setup, memory)
        self._send(Reply(0, [0 if not error else 1], error))
        threads = ThreadPoolExecutor(setup.threads)
        while (request := self._receive(Request)) is not None:
            threads.submit(self._answer, request)

    def leave(self) -> None:
        """Take what it gives out of the pool, if that does not take long."""
        if self._store is not None:
            closing = threading.Thread(target=self._store.close, daemon=True)
            closing.start()
            closing.join(LEAVE_S)

    def _set_up(self, setup: Setup, memory: int) -> str:
        """Connect to the master; return what is wrong."""
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            return MISSING.format(error)
        self._store = MooncakeDistributedStore()
        code = self._store.setup(
            {
                "local_hostname": setup.address or address_towards(setup.master),
                "metadata_server": setup.metadata,
                "global_segment_size": str(setup.segment_bytes),
                "local_buffer_size": str(LOCAL_NBYTES),
                "protocol": setup.protocol,
                "rdma_devices": setup.device,
                "master_server_addr": setup.master,
            }
        )
        if code:
            return f"Mooncake's client could not be set up at {setup.master}: code {code}"
        if setup.buffer_bytes:
            self._mapped = mmap.mmap(memory, setup.buffer_bytes)
            self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._mapped))
            self._buffer_bytes = setup.buffer_bytes
            code = self._store.register_buffer(self._base, setup.buffer_bytes)
        return f"Mooncake does not register the buffer: code {code}" if code else ""

    def _answer(self, request: Request) -> None:
        try:
            reply = Reply(request.id, self._codes(request))
        except Exception as error:  # of native code: the daemon is told, and decides
            reply = Reply(request.id, [], repr(error)[:ERROR_CHARS_MAX])
        self._send(reply)

    def _codes(self, request: Request) -> list[int]:
        store, names = self._store, request.names
        match request.operation:
            case Operation.EXISTS:
                return list(store.batch_is_exist(names))
            case Operation.SIZES:
                return [store.get_size(name) for name in names]
            case Operation.REMOVE:
                return list(store.batch_remove(names, True))
            case Operation.PURGE:
                return [store.remove_by_regex(names[0], True)]
            case Operation.GET:
                return list(store.batch_get_into(names, self._places(request), request.sizes))
            case Operation.PUT:
                return list(store.batch_put_from(names, self._places(request), request.sizes))

    def _places(self, request: Request) -> list[int]:
        """Return addresses in the buffer. Raises ValueError for what is not all in it."""
        for offset, nbytes in zip(request.offsets, request.sizes, strict=True):
            if not 0 <= offset <= offset + nbytes <= self._buffer_bytes:
                raise ValueError("a place beyond the buffer")
        return [self._base + offset for offset in request.offsets]

    def _receive(self, kind: type[M]) -> M | None:
        """Return the next message; None at the end of the daemon."""
        head = self._exactly(LENGTH.size)
        if head is None:
            return None
        (nbytes,) = LENGTH.unpack(head)
        data = self._exactly(nbytes) if nbytes <= MESSAGE_NBYTES_MAX else None
        return decode(data, kind) if data is not None else None

    def _exactly(self, nbytes: int) -> bytes | None:
        data = bytearray()
        while len(data) < nbytes:
            piece = self._link.recv(nbytes - len(data))
            if not piece:
                return None
            data += piece
        return bytes(data)

    def _send(self, reply: Reply) -> None:
        try:
            with self._sending:
                self._link.sendall(encode(reply))
        except OSError:
            os._exit(0)  # the daemon has ended


def address_towards(master: str) -> str:
    """Return this host's address on the way to HOST:PORT. Nothing is sent."""
    host, _, port = master.rpartition(":")
    family, kind, protocol, _, where = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's goes to the daemon, which drains
    with socket.socket(fileno=int(sys.argv[1])) as link:
        code = 1
        try:
            worker = Worker(link)
            worker.run(int(sys.argv[2]))
            worker.leave()
            code = 0
        except Exception:
            traceback.print_exc()
        os._exit(code)  # no thread of Mooncake's is waited for


if __name__ == "__main__":
    main()
