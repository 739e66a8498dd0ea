"""UCX's C library, as far as one-sided reads need it: structures and signatures of libucp.

Facts are those of `ucp/api/ucp.h` 1.22, whose structures only grow at their ends; a mask says which
fields are set. UCXX, the Python binding, has messages and streams but no `ucp_get_nbx`, no memory
handles and no remote keys, so it cannot read one-sided.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any

from kvstore.peer.onesided.driver import DriverError, DriverMissing, prepare_ucx

INSTALL = "pip install 'kvstore-tiers[ucx]' (libucx-cu12), or install UCX 1.17 or newer"
API_VERSION = (1, 17)
OK, IN_PROGRESS = 0, 1
BUSY = -15
FEATURE_RMA, FEATURE_WAKEUP = 1 << 1, 1 << 4
ERR_HANDLING_PEER = 1
PROT_LOCAL_READ, PROT_LOCAL_WRITE, PROT_REMOTE_READ = 1 << 0, 1 << 1, 1 << 8
ATTR_FLAGS, ATTR_MEMH = 1 << 4, 1 << 8
CLOSE_FORCE = 1 << 0
_LIBRARIES = ("libucs.so.0", "libuct.so.0", "libucp.so.0")


class Params(ctypes.Structure):
    """`ucp_params_t`."""

    _fields_ = [
        ("field_mask", c_uint64),
        ("features", c_uint64),
        ("rest", c_uint64 * 16),
    ]


class WorkerParams(ctypes.Structure):
    """`ucp_worker_params_t`. thread_mode: 0, one thread."""

    _fields_ = [
        ("field_mask", c_uint64),
        ("thread_mode", c_int),
        ("rest", c_uint64 * 40),
    ]


ErrorHandler = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int)
"""`ucp_err_handler_cb_t`: of an endpoint that failed. Its reads then fail by themselves."""


class EndpointParams(ctypes.Structure):
    """`ucp_ep_params_t`."""

    _fields_ = [
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("err_mode", c_int),
        ("err_handler", ErrorHandler),
        ("err_argument", c_void_p),
        ("rest", c_uint64 * 16),
    ]


class MapParams(ctypes.Structure):
    """`ucp_mem_map_params_t`."""

    _fields_ = [
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("length", c_size_t),
        ("flags", c_uint),
        ("prot", c_uint),
        ("memory_type", c_int),
        ("exported", c_void_p),
        ("rest", c_uint64 * 8),
    ]


class RequestParam(ctypes.Structure):
    """`ucp_request_param_t`."""

    _fields_ = [
        ("op_attr_mask", c_uint32),
        ("flags", c_uint32),
        ("request", c_void_p),
        ("callback", c_void_p),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply_buffer", c_void_p),
        ("memory_type", c_int),
        ("recv_info", c_void_p),
        ("memh", c_void_p),
        ("rest", c_uint64 * 8),
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ucp_get_version": (None, [POINTER(c_uint)] * 3),
    "ucp_config_read": (c_int, [c_char_p, c_char_p, POINTER(c_void_p)]),
    "ucp_config_release": (None, [c_void_p]),
    "ucp_init_version": (
        c_int,
        [c_uint, c_uint, POINTER(Params), c_void_p, POINTER(c_void_p)],
    ),
    "ucp_cleanup": (None, [c_void_p]),
    "ucp_worker_create": (c_int, [c_void_p, POINTER(WorkerParams), POINTER(c_void_p)]),
    "ucp_worker_destroy": (None, [c_void_p]),
    "ucp_worker_get_address": (c_int, [c_void_p, POINTER(c_void_p), POINTER(c_size_t)]),
    "ucp_worker_release_address": (None, [c_void_p, c_void_p]),
    "ucp_worker_get_efd": (c_int, [c_void_p, POINTER(c_int)]),
    "ucp_worker_arm": (c_int, [c_void_p]),
    "ucp_worker_progress": (c_uint, [c_void_p]),
    "ucp_mem_map": (c_int, [c_void_p, POINTER(MapParams), POINTER(c_void_p)]),
    "ucp_mem_unmap": (c_int, [c_void_p, c_void_p]),
    "ucp_rkey_pack": (c_int, [c_void_p, c_void_p, POINTER(c_void_p), POINTER(c_size_t)]),
    "ucp_rkey_buffer_release": (None, [c_void_p]),
    "ucp_ep_create": (c_int, [c_void_p, POINTER(EndpointParams), POINTER(c_void_p)]),
    "ucp_ep_close_nbx": (c_void_p, [c_void_p, POINTER(RequestParam)]),
    "ucp_ep_rkey_unpack": (c_int, [c_void_p, c_void_p, POINTER(c_void_p)]),
    "ucp_rkey_destroy": (None, [c_void_p]),
    "ucp_get_nbx": (
        c_void_p,
        [c_void_p, c_void_p, c_size_t, c_uint64, c_void_p, POINTER(RequestParam)],
    ),
    "ucp_request_check_status": (c_int, [c_void_p]),
    "ucp_request_free": (None, [c_void_p]),
    "ucs_status_string": (c_char_p, [c_int]),
}


def _ignore(argument: int, endpoint: int, status: int) -> None:
    """Without any handler, UCX writes an error to the terminal."""


ignore_failure = ErrorHandler(_ignore)


def load() -> ctypes.CDLL:
    """Return libucp: the one of the wheel, else the system's. Raises DriverMissing."""
    prepare_ucx()
    found = importlib.util.find_spec("libucx")
    folder = os.path.dirname(found.origin) if found is not None and found.origin else ""
    names = [os.path.join(folder, "lib", name) for name in _LIBRARIES] if folder else _LIBRARIES
    try:
        libraries = [ctypes.CDLL(name) for name in names]
        library = libraries[-1]
        for name, (result, arguments) in _SIGNATURES.items():
            owner = libraries[0] if name.startswith("ucs_") else library
            function = getattr(owner, name)
            function.restype, function.argtypes = result, arguments
            setattr(library, name, function)
    except (OSError, AttributeError) as error:
        raise DriverMissing(f"UCX does not load ({error}): {INSTALL}") from error
    numbers = [c_uint() for _ in range(3)]
    library.ucp_get_version(*(byref(each) for each in numbers))
    version = numbers[0].value, numbers[1].value
    if version < API_VERSION:
        raise DriverMissing(f"UCX {version[0]}.{version[1]} is too old: {INSTALL}")
    return library


def check(library: ctypes.CDLL, status: int, what: str) -> None:
    """Raise DriverError for a status that is one."""
    if status < 0:
        raise DriverError(f"{what}: {library.ucs_status_string(status).decode()}")


def failed_status(pointer: int | None) -> int | None:
    """Return the status that a pointer stands for, None for a request (`UCS_PTR_STATUS`)."""
    if not pointer:
        return OK
    return pointer - (1 << 64) if pointer >= (1 << 64) - 100 else None
