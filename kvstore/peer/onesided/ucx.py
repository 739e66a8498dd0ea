"""One-sided reads by UCX: `ucp_get_nbx` into registered memory.

Over RDMA the card of the lender answers by itself. Over transports without remote reads, such as
TCP, UCX asks the other end's library, which its mover thread lets work.
Memory is registered for remote reads alone: a peer cannot write into it.
"""

from __future__ import annotations

import ctypes
import select
import struct
from collections import deque
from collections.abc import Sequence
from ctypes import byref, c_int, c_size_t, c_void_p
from dataclasses import dataclass, field

from kvstore.peer.onesided.driver import (
    OFFER_NBYTES_MAX,
    REGIONS_MAX,
    DriverError,
    Piece,
    Regions,
    State,
)
from kvstore.peer.onesided.libucp import (
    API_VERSION,
    ATTR_FLAGS,
    ATTR_MEMH,
    CLOSE_FORCE,
    ERR_HANDLING_PEER,
    FEATURE_RMA,
    FEATURE_WAKEUP,
    IN_PROGRESS,
    OK,
    PROT_LOCAL_READ,
    PROT_LOCAL_WRITE,
    PROT_REMOTE_READ,
    EndpointParams,
    MapParams,
    Params,
    RequestParam,
    WorkerParams,
    check,
    failed_status,
    ignore_failure,
    load,
)

_HEAD = struct.Struct("<II")  # bytes of the address, regions
_REGION = struct.Struct("<QQI")  # address, bytes, bytes of the key
_SLACK = bytes(256)  # after what native code parses: a wrong length inside ends there
PROGRESS_MAX = 64  # calls in a row, before others are looked at


@dataclass(slots=True)
class _Region:
    handle: c_void_p
    key: bytes


@dataclass(slots=True)
class _Remote:
    """A peer. regions: those it offered, with their unpacked keys. reads: under way. closing: the
    request that ends its endpoint, if that is not at once."""

    endpoint: c_void_p
    regions: Regions[c_void_p] = field(default_factory=Regions)
    open: bool = True
    reads: int = 0
    closing: int | None = None


@dataclass(slots=True)
class _Read:
    remote: _Remote
    requests: deque[int] = field(default_factory=deque)
    failed: bool = False


class UcxDriver:
    """Implements `Driver`."""

    name = "ucx"

    def __init__(self) -> None:
        """Raises DriverError; DriverMissing where UCX is not installed."""
        self._ucp = ucp = load()
        self._regions: Regions[_Region] = Regions()
        self._remotes: list[_Remote] = []
        self._closing: list[_Remote] = []
        self._context, self._worker = c_void_p(), c_void_p()
        config = c_void_p()
        check(ucp, ucp.ucp_config_read(None, None, byref(config)), "UCX's settings")
        params = Params(field_mask=1, features=FEATURE_RMA | FEATURE_WAKEUP)
        status = ucp.ucp_init_version(*API_VERSION, byref(params), config, byref(self._context))
        ucp.ucp_config_release(config)
        check(ucp, status, "UCX does not start")
        worker = WorkerParams(field_mask=1, thread_mode=0)
        status = ucp.ucp_worker_create(self._context, byref(worker), byref(self._worker))
        check(ucp, status, "a UCX worker")
        event = c_int()
        check(ucp, ucp.ucp_worker_get_efd(self._worker, byref(event)), "UCX's events")
        self._event_fd = event.value
        self._address = self._own_address()

    def _own_address(self) -> bytes:
        address, nbytes = c_void_p(), c_size_t()
        status = self._ucp.ucp_worker_get_address(self._worker, byref(address), byref(nbytes))
        check(self._ucp, status, "UCX's address")
        try:
            return ctypes.string_at(address, nbytes.value)
        finally:
            self._ucp.ucp_worker_release_address(self._worker, address)

    # ---- memory ----------------------------------------------------------------------------------

    def offer(self) -> bytes:
        """See `Driver`."""
        parts = [_HEAD.pack(len(self._address), len(self._regions)), self._address]
        for address, nbytes, region in self._regions:
            parts += [_REGION.pack(address, nbytes, len(region.key)), region.key]
        return b"".join(parts)

    def register(self, address: int, nbytes: int) -> None:
        """See `Driver`."""
        ucp, handle = self._ucp, c_void_p()
        params = MapParams(
            field_mask=1 << 0 | 1 << 1 | 1 << 3,  # address, length, prot
            address=address,
            length=nbytes,
            prot=PROT_LOCAL_READ | PROT_LOCAL_WRITE | PROT_REMOTE_READ,
        )
        status = ucp.ucp_mem_map(self._context, byref(params), byref(handle))
        check(ucp, status, f"registering {nbytes} bytes (see the limit of locked memory)")
        packed, size = c_void_p(), c_size_t()
        status = ucp.ucp_rkey_pack(self._context, handle, byref(packed), byref(size))
        if status < 0:
            ucp.ucp_mem_unmap(self._context, handle)
        check(ucp, status, "a remote key")
        key = ctypes.string_at(packed, size.value)
        ucp.ucp_rkey_buffer_release(packed)
        self._regions.add(address, nbytes, _Region(handle, key))

    def withdraw(self, address: int) -> None:
        """See `Driver`."""
        region = self._regions.pop(address)
        if region is not None:
            self._ucp.ucp_mem_unmap(self._context, region.handle)

    # ---- peers -----------------------------------------------------------------------------------

    def connect(self, offer: bytes) -> _Remote:
        """See `Driver`."""
        address, regions = parse_offer(offer)
        buffer = ctypes.create_string_buffer(address + _SLACK)
        params = EndpointParams(
            field_mask=1 << 0 | 1 << 1 | 1 << 2,  # address, error handling, error handler
            address=ctypes.addressof(buffer),
            err_mode=ERR_HANDLING_PEER,
            err_handler=ignore_failure,
        )
        endpoint = c_void_p()
        status = self._ucp.ucp_ep_create(self._worker, byref(params), byref(endpoint))
        check(self._ucp, status, "no way to a peer by UCX")
        remote = _Remote(endpoint)
        self._remotes.append(remote)
        try:
            for begin, nbytes, packed in regions:
                key, data = c_void_p(), ctypes.create_string_buffer(packed + _SLACK)
                status = self._ucp.ucp_ep_rkey_unpack(endpoint, data, byref(key))
                check(self._ucp, status, "a peer's remote key")
                remote.regions.add(begin, nbytes, key)
        except DriverError:
            self.disconnect(remote)
            raise
        return remote

    def disconnect(self, remote: _Remote) -> None:
        """See `Driver`."""
        if not remote.open:
            return
        remote.open = False
        self._remotes.remove(remote)
        params = RequestParam(op_attr_mask=ATTR_FLAGS, flags=CLOSE_FORCE)
        closing = self._ucp.ucp_ep_close_nbx(remote.endpoint, byref(params))
        remote.closing = closing if failed_status(closing) is None else None
        self._closing.append(remote)
        self._let_go()

    def _let_go(self) -> None:
        """Free what belongs to endpoints that have ended, with all their reads."""
        ucp, left = self._ucp, []
        for remote in self._closing:
            if remote.closing and ucp.ucp_request_check_status(remote.closing) != IN_PROGRESS:
                ucp.ucp_request_free(remote.closing)
                remote.closing = None
            if remote.closing or remote.reads:
                left.append(remote)
                continue
            for _, _, key in remote.regions:
                ucp.ucp_rkey_destroy(key)
        self._closing = left

    # ---- reads -----------------------------------------------------------------------------------

    def post(self, remote: _Remote, pieces: Sequence[Piece]) -> _Read:
        """See `Driver`."""
        if not remote.open:
            raise DriverError("the peer is disconnected")
        keys = [_key(remote, piece) for piece in pieces]  # before anything is under way
        read = _Read(remote)
        remote.reads += 1
        for piece, key in zip(pieces, keys, strict=True):
            params = RequestParam()
            region = self._regions.find(piece.target, piece.nbytes)
            if region is not None:
                params.op_attr_mask, params.memh = ATTR_MEMH, region.handle
            request = self._ucp.ucp_get_nbx(
                remote.endpoint, piece.target, piece.nbytes, piece.source, key, byref(params)
            )
            status = failed_status(request)
            if status is None:
                read.requests.append(request)
            elif status != OK:
                read.failed = True  # what was posted before it may still write
                break
        return read

    def state(self, read: _Read) -> State:
        """See `Driver`."""
        while read.requests:
            status = self._ucp.ucp_request_check_status(read.requests[0])
            if status == IN_PROGRESS:
                return State.UNDER_WAY
            read.failed = read.failed or status != OK
            self._ucp.ucp_request_free(read.requests.popleft())
        read.remote.reads -= 1
        return State.FAILED if read.failed else State.DONE

    def progress(self) -> None:
        """See `Driver`."""
        for _ in range(PROGRESS_MAX):
            if not self._ucp.ucp_worker_progress(self._worker):
                break
        if self._closing:
            self._let_go()

    def wait(self, wake_fd: int, timeout_s: float, *, reading: bool) -> None:
        """See `Driver`."""
        if self._ucp.ucp_worker_arm(self._worker) != OK:
            return  # busy: something came meanwhile
        select.select([self._event_fd, wake_fd], [], [], timeout_s)

    def close(self) -> None:
        """See `Driver`."""
        for remote in list(self._remotes):
            self.disconnect(remote)
        self.progress()
        for address, _, _ in list(self._regions):
            self.withdraw(address)
        self._ucp.ucp_worker_destroy(self._worker)
        self._ucp.ucp_cleanup(self._context)


def _key(remote: _Remote, piece: Piece) -> c_void_p:
    key = remote.regions.find(piece.source, piece.nbytes)
    if key is None:
        raise DriverError("a peer grants memory that it did not offer")
    return key


def parse_offer(offer: bytes) -> tuple[bytes, list[tuple[int, int, bytes]]]:
    """Return an address, and (begin, bytes, key) of each region. Raises DriverError. Pure."""
    try:
        nbytes, count = _HEAD.unpack_from(offer)
        at = _HEAD.size + nbytes
        address = offer[_HEAD.size : at]
        if (
            len(offer) > OFFER_NBYTES_MAX
            or count > REGIONS_MAX
            or not 0 < nbytes <= at <= len(offer)
        ):
            raise DriverError("not an offer of UCX memory")
        regions, end = [], 0
        for _ in range(count):
            begin, size, key_nbytes = _REGION.unpack_from(offer, at)
            at += _REGION.size
            key = offer[at : at + key_nbytes]
            at += key_nbytes
            if at > len(offer) or not key or begin < end or begin + size >= 1 << 64:
                raise DriverError("not an offer of UCX memory")
            end = begin + size
            regions.append((begin, size, key))
    except struct.error as error:
        raise DriverError("not an offer of UCX memory") from error
    return address, regions
