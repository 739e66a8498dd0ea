"""A system's processes, from the runner's side: asked with a deadline, ended, killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from multiprocessing import Pipe
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import kvstore
from kvstore.model.errors import Unavailable
from kvstore.testing.lmcache import lmcache_site
from kvstore_bench.peers.roster import Peer
from kvstore_bench.peers.worker import MESSAGE_NBYTES_MAX

START = Path(__file__).with_name("start.py")
ASK_TIMEOUT_S = 120.0
END_TIMEOUT_S = 30.0
LOG_LINES = 40


class Process:
    """A worker and whatever it starts: one process group. A context manager; its end kills them."""

    def __init__(self, peer: Peer, python: str, runtime: Path) -> None:
        self._peer = peer
        self._channel, theirs = Pipe()
        paths = [str(Path(kvstore.__file__).parents[1])] if peer.own else []
        if "lmcache" in peer.needs and python == sys.executable:
            paths += map(str, filter(None, [lmcache_site()]))
        paths += filter(None, [os.environ.get("PYTHONPATH", "")])
        environ = {**os.environ, **peer.environ, "PYTHONPATH": os.pathsep.join(paths)}
        try:
            self._process = subprocess.Popen(
                [python, str(START), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**environ, "TMPDIR": str(runtime)},
            )
        except OSError as error:
            raise Unavailable(f"{python} cannot be started: {error.strerror}") from error
        theirs.close()
        self._log: deque[bytes] = deque(maxlen=LOG_LINES)
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    def ask(self, request: str, **arguments: Any) -> dict[str, Any]:
        """Have the worker do something. Raises Unavailable if it fails, ends or takes too long."""
        try:
            self._channel.send_bytes(json.dumps({"do": request, **arguments}).encode())
            if not self._channel.poll(ASK_TIMEOUT_S):
                raise Unavailable(f"no answer to {request} in {ASK_TIMEOUT_S:.0f} s{self._said()}")
            reply: dict[str, Any] = json.loads(self._channel.recv_bytes(MESSAGE_NBYTES_MAX))
        except (EOFError, OSError) as error:
            self._reader.join(1.0)
            raise Unavailable(f"it ended during {request}{self._said()}") from error
        if "error" in reply:
            raise Unavailable(f"{request}: {reply['error']}")
        return reply

    def end(self) -> None:
        """Close the system in an orderly way, and wait until all its processes are gone."""
        self.ask("close")
        self._channel.close()
        self._reader.join(END_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to all of them: what a crash looks like. Returns when they are gone."""
        if self._reader.is_alive() or self._process.poll() is None:  # else the number may be reused
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(END_TIMEOUT_S)
        self._reader.join(END_TIMEOUT_S)
        if self._reader.is_alive():
            raise Unavailable(f"{self._peer.name}: processes are left after SIGKILL")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()
        self.kill()

    def _read_log(self) -> None:
        """Keep the last lines. The pipe ends when the last process that holds it does."""
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            self._log.extend(iter(lambda: lines.readline(4096), b""))

    def _said(self) -> str:
        lines = b"".join(self._log).decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""
