"""Daemons of tests, forked from a process that has imported what they need.

Imports are most of a daemon's start: 1.0 s on two cores, and 0.12 s forked. It is not the fork
server of multiprocessing: that is one for a process, and tests of engines have it, with other
modules; nor does it tell standard output and error apart. What a process inherits is as it is in a
start of its own: descriptors, environment, working directory. Where a test has changed anything
else that is inherited (limits, namespaces, affinity), or starts another command, it is a start of
its own.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import resource
import select
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

MESSAGE_NBYTES_MAX = 128 << 10
ANSWER_S = 60.0  # of the process that forks, which imports first
END_S = 10.0
_NUMBER = struct.Struct("=q")
_SERVE = [sys.executable, "-m", "kvstore.cli", "serve"]
_AT_IMPORT = ("PYTHON", "LD_", "MALLOC_", "OPENSSL_", "SSL_", "GRPC_", "KVSTORE_", "OPENBLAS_")


class Forked:
    """One process, with what tests use of `subprocess.Popen`."""

    def __init__(self, pid: int, ended: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        ended.setblocking(False)
        self._ended = ended.detach()
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if self.returncode is None:
                data = os.read(self._ended, _NUMBER.size)
                if not data:
                    raise RuntimeError("the process that forks daemons has ended")
                (self.returncode,) = _NUMBER.unpack(data)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired."""
        until = None if timeout is None else time.monotonic() + timeout
        ready = select.poll()
        ready.register(self._ended, select.POLLIN)
        while (code := self.poll()) is None:
            left_s = None if until is None else until - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise subprocess.TimeoutExpired("kvstore serve", timeout or 0)
            ready.poll(left_s and 1000 * left_s)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def __del__(self) -> None:
        os.close(self._ended)


class Forks:
    """The process that forks daemons, from the first one on."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._inherited: object = None
        self._lock = threading.Lock()

    def launch(
        self,
        command: Sequence[str],
        *,
        stdout: IO[bytes],
        stderr: IO[bytes],
        env: Mapping[str, str],
    ) -> Forked | subprocess.Popen[bytes]:
        """Start a daemon, as `subprocess.Popen` with these arguments does."""
        if list(command[: len(_SERVE)]) == _SERVE:
            with self._lock:
                control = self._begun()
                if _inherited(env) == self._inherited:
                    return _ask(control, command[len(_SERVE) - 1 :], env, stdout, stderr)
        return subprocess.Popen(command, stdout=stdout, stderr=stderr, env=dict(env))

    def _begun(self) -> socket.socket:
        if self._control is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            root = str(Path(__file__).parents[1])
            path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
            environment = {**os.environ, "PYTHONPATH": path}
            self._inherited = _inherited(environment)
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.forks", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env=environment,
                    cwd=root,
                )
            atexit.register(_end, process, ours)
            self._control = ours
        return self._control


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    """End the process that forks; its daemons are their tests' own."""
    control.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _ask(
    control: socket.socket,
    arguments: Sequence[str],
    env: Mapping[str, str],
    stdout: IO[bytes],
    stderr: IO[bytes],
) -> Forked:
    wanted = {"arguments": list(arguments), "env": dict(env), "cwd": os.getcwd()}
    ended, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        fds = [stdout.fileno(), stderr.fileno(), theirs.fileno()]
        socket.send_fds(control, [json.dumps(wanted).encode()], fds)
    ended.settimeout(ANSWER_S)
    (pid,) = _NUMBER.unpack(ended.recv(_NUMBER.size))
    return Forked(pid, ended)


def _inherited(env: Mapping[str, str]) -> object:
    """Return what a daemon of a test process inherits besides what is told to the one that forks,
    and what is read while modules are imported."""
    limits = (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_AS)
    spaces = ("net", "mnt", "pid", "user")
    status = Path("/proc/thread-self/status").read_text()
    return (
        [resource.getrlimit(each) for each in limits],
        [os.stat(f"/proc/thread-self/ns/{each}").st_ino for each in spaces],
        [line for line in status.splitlines() if line.startswith(("Umask", "Uid", "Gid", "Cap"))],
        sorted(os.sched_getaffinity(0)),
        sorted(each for each in env.items() if each[0].startswith(_AT_IMPORT)),
    )


# ---- the process that forks ----------------------------------------------------------------------


def serve(control: socket.socket) -> None:
    """Fork daemons until the other end is closed."""
    import kvstore.cli.serve
    import kvstore.daemon  # noqa: F401

    gc.collect()
    gc.freeze()
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for ready, _ in selector.select():
                if ready.fileobj is control:
                    data, fds, *_ = socket.recv_fds(control, MESSAGE_NBYTES_MAX, 3)
                    if not data:
                        return
                    pid = _fork(json.loads(data), fds)
                    ended = socket.socket(fileno=fds[2])
                    ended.send(_NUMBER.pack(pid))
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, ended))
                else:
                    pid, ended = ready.data
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    selector.unregister(ready.fileobj)
                    os.close(ready.fd)
                    with contextlib.suppress(OSError):  # nobody waits for it
                        ended.send(_NUMBER.pack(code))
                    ended.close()


def _fork(wanted: dict[str, object], fds: Sequence[int]) -> int:
    pid = os.fork()
    if not pid:
        _run(wanted, fds)
    os.close(fds[0])
    os.close(fds[1])
    return pid


def _run(wanted: dict[str, object], fds: Sequence[int]) -> NoReturn:
    """Be a daemon. Nothing of the process that forks is open in it."""
    code = 1
    try:
        os.dup2(fds[0], 1)
        os.dup2(fds[1], 2)
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        arguments, env, cwd = wanted["arguments"], wanted["env"], wanted["cwd"]
        assert isinstance(arguments, list)
        assert isinstance(env, dict)
        os.chdir(str(cwd))
        os.environ.clear()
        os.environ.update(env)
        sys.argv[1:] = arguments
        gc.unfreeze()
        from kvstore.cli import main

        main(arguments, prog_name="kvstore")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    # As `kvstore serve` sets it before gRPC is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    serve(socket.socket(fileno=int(sys.argv[1])))
