"""Two calls to the Kubernetes API: list, and watch, the EndpointSlices of one Service.

http.client blocks, so each call has a thread of its own, and a deadline of the event loop's: when
it has passed, the socket is shut down under the thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Literal, TypeVar
from urllib.parse import urlencode

import msgspec

from kvstore.membership.endpoint_slices import Slice
from kvstore.membership.kubernetes_account import Account
from kvstore.model.errors import ConfigError, KVStoreError, Unavailable
from kvstore.system.detached import in_detached_thread

T = TypeVar("T")

CALL_S = 5.0  # for a list, and until a watch begins
WATCH_SPARE_S = 5.0  # after the server should have ended a watch
LIST_NBYTES_MAX = 32 << 20
EVENT_NBYTES_MAX = 4 << 20  # a slice has 1,000 endpoints at most
REFUSAL_NBYTES_MAX = 4096
READ_NBYTES = 64 << 10
GONE = 410


class Listed(msgspec.Struct, frozen=True):
    """What a list answers: the slices, and the version to watch from."""

    items: list[Slice]
    version: str


class Event(msgspec.Struct, frozen=True):
    """One change. slice: as it is now, or was."""

    type: Literal["ADDED", "MODIFIED", "DELETED"]
    slice: Slice


class ListMeta(msgspec.Struct, frozen=True):
    version: str = msgspec.field(name="resourceVersion", default="")


class _List(msgspec.Struct, frozen=True):
    items: list[Slice] | None = None  # Go writes null for none
    metadata: ListMeta = ListMeta()


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct, frozen=True):
    code: int = 0
    message: str = ""


class VersionGone(Unavailable):
    """The server does not know the changes since that version any more: list again."""


class KubernetesCalls:
    """The calls of one daemon. failed: how many had no answer that could be used.

    Each raises Unavailable, or ConfigError if a setting or a right has to change.
    """

    def __init__(self, account: Account, service: str) -> None:
        self.failed = 0
        self._account = account
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{account.namespace}/endpointslices"
        self._selector = {"labelSelector": f"kubernetes.io/service-name={service}"}

    @property
    def endpoint(self) -> str:
        host = self._account.host
        return f"{f'[{host}]' if ':' in host else host}:{self._account.port}"

    async def list(self) -> Listed:
        """Return all slices of the Service, within 5 s."""
        with self._counted():
            call = self._call("list", self._selector)
            try:
                data = await call.within(CALL_S, call.read_all)
            finally:
                call.abort()
            found = _decoded(data, _List)
            return Listed(found.items or [], found.metadata.version)

    async def watch(self, version: str, lasts_s: float) -> AsyncGenerator[Event, None]:
        """Yield the changes since `version`, for `lasts_s` at most; less if the server ends it.

        Raises VersionGone as well.
        """
        query = self._selector | {
            "watch": "true",
            "allowWatchBookmarks": "false",
            "resourceVersion": version,
            "timeoutSeconds": str(max(1, int(lasts_s))),
        }
        ends = time.monotonic() + lasts_s + WATCH_SPARE_S
        with self._counted():
            call = self._call("watch", query)
            try:
                await call.within(CALL_S, call.open)
                while line := await call.within(ends - time.monotonic(), call.read_line):
                    event = _event(line)
                    if event is not None:
                        yield event
            finally:
                call.abort()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except KVStoreError:
            self.failed += 1
            raise

    def _call(self, verb: str, query: dict[str, str]) -> _Call:
        return _Call(self._account, verb, f"{self._path}?{urlencode(query)}", self.endpoint)


class _Call:
    """One call. `open`, `read_all` and `read_line` block; `abort` makes them end, at any time."""

    def __init__(self, account: Account, verb: str, target: str, endpoint: str) -> None:
        self._account = account
        self._verb = verb
        self._target = target
        self._endpoint = endpoint
        self._sock: socket.socket | None = None
        self._response: http.client.HTTPResponse | None = None
        self._lock = threading.Lock()
        self._busy = 0  # threads that use it
        self._aborted = False
        self._buffer = b""

    async def within(self, timeout_s: float, work: Callable[[], T]) -> T:
        """Return what `work` returns, or raise Unavailable when the time is over."""
        with self._lock:
            self._busy += 1
        running = in_detached_thread(lambda: self._guarded(work), name="kvstore-kubernetes")
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):  # wait_for may lose a cancellation
                return await running
        except TimeoutError:
            self.abort()
            raise self._late() from None

    def abort(self) -> None:
        """End it, at any time and more than once. Whoever reads closes it, if somebody does."""
        with self._lock:
            self._aborted = True
            if not self._busy:
                self._close()
            elif self._sock is not None:
                with contextlib.suppress(OSError):
                    # Not the method of SSLSocket: it takes TLS from under the thread that reads.
                    socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def open(self) -> None:
        """Send the request, and read the head of the answer."""
        account = self._account
        token = account.token()
        connection = http.client.HTTPConnection(account.host, account.port)
        self._sock = socket.create_connection((account.host, account.port), timeout=CALL_S)
        if account.tls:
            secure = account.context().wrap_socket(
                self._sock, server_hostname=account.host, do_handshake_on_connect=False
            )
            self._sock = secure
            secure.do_handshake()
        if self._aborted:
            raise OSError("given up")
        connection.sock = self._sock
        headers = {
            "Accept": "application/json",
            "Authorization": f"Bearer {token}",
            "User-Agent": "kvstore",
            "Connection": "close",
        }
        connection.request("GET", self._target, headers=headers)
        self._response = connection.getresponse()
        if self._response.status != http.client.OK:
            raise self._refusal(self._response.status, self._response.read(REFUSAL_NBYTES_MAX))
        self._sock.settimeout(None)  # from here on, `within` says when it is over

    def read_all(self) -> bytes:
        self.open()
        assert self._response is not None
        data = self._response.read(LIST_NBYTES_MAX + 1)
        if len(data) > LIST_NBYTES_MAX:
            raise ValueError(f"more than {LIST_NBYTES_MAX} bytes")
        return data

    def read_line(self) -> bytes:
        """Return the next line that is not empty; b"" at the end."""
        assert self._response is not None
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                if line.strip():
                    return line
                continue
            if len(self._buffer) > EVENT_NBYTES_MAX:
                raise ValueError(f"an event of more than {EVENT_NBYTES_MAX} bytes")
            data = self._response.read1(READ_NBYTES)
            if not data:  # half a line is none
                return b""
            self._buffer += data

    def _guarded(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except ssl.SSLCertVerificationError as error:
            raise Unavailable(
                f"the API server at {self._endpoint} has a certificate that "
                f"{self._account.directory / 'ca.crt'} does not vouch for: {error.verify_message}"
            ) from error
        except TimeoutError as error:
            raise self._late() from error
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            # AttributeError: http.client's, of an answer that was cut off under it.
            raise Unavailable(
                f"the API server at {self._endpoint} did not answer a {self._verb}: {error}"
            ) from error
        finally:
            with self._lock:
                self._busy -= 1
                if self._aborted and not self._busy:
                    self._close()

    def _late(self) -> Unavailable:
        return Unavailable(
            f"the API server at {self._endpoint} did not answer a {self._verb} in time"
        )

    def _close(self) -> None:
        if self._response is not None:
            self._response.close()
        if self._sock is not None:
            self._sock.close()

    def _refusal(self, status: int, body: bytes) -> KVStoreError:
        namespace = self._account.namespace
        if status == http.client.FORBIDDEN:
            return ConfigError(
                f"cluster.membership=kubernetes: the pod's service account may not {self._verb} "
                f"endpointslices in the namespace {namespace}: give it a Role with apiGroups "
                "[discovery.k8s.io], resources [endpointslices], verbs [get, list, watch]"
            )
        if status == http.client.UNAUTHORIZED:
            return ConfigError(
                "cluster.membership=kubernetes: the API server refuses the token in "
                f"{self._account.directory / 'token'}: is it of this cluster?"
            )
        if status == http.client.NOT_FOUND:
            return ConfigError(
                "cluster.membership=kubernetes: the API server has no EndpointSlices of "
                "discovery.k8s.io/v1: Kubernetes 1.21 or newer is needed"
            )
        if status == GONE:
            return VersionGone("the changes since that version are forgotten")
        words = body.decode("utf-8", "replace")[:200]
        return Unavailable(f"the API server at {self._endpoint} answers {status}: {words!r}")


def _event(line: bytes) -> Event | None:
    """Return the change that a line tells; None for a bookmark, or what a newer server tells."""
    event = _decoded(line, _Event)
    if event.type == "ERROR":
        status = _decoded(event.object, _Status)
        if status.code == GONE:
            raise VersionGone("the changes since that version are forgotten")
        raise Unavailable(f"the API server ends a watch: {status.code} {status.message[:200]}")
    if event.type in ("ADDED", "MODIFIED", "DELETED"):
        return Event(event.type, _decoded(event.object, Slice))  # type: ignore[arg-type]
    return None


def _decoded(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Unavailable(
            f"the API server's answer is not understood: {str(error)[:200]}"
        ) from error
