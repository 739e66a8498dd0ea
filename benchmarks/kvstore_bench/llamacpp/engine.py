"""The other end of a worker: started, asked, killed."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvstore import Unavailable
from kvstore_bench.llamacpp.worker import Answer, Ask, Setup

START_S = 600.0
ANSWER_S = 900.0
END_S = 20.0


class Engine:
    """One worker process. A context manager: at its end the process is gone."""

    def __init__(self, setup: Setup, site: Path, log: Path) -> None:
        path = [*(each for each in sys.path if each), str(site)]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvstore_bench.llamacpp.worker", json.dumps(asdict(setup))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                # Threads that wait actively slow each other down wherever a core is busy.
                env={
                    "OMP_WAIT_POLICY": "passive",
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path),
                },
                text=True,
                bufsize=1,
            )
        self._log = log
        self._read(START_S)

    def ask(self, tokens: Sequence[int], answer_tokens: int) -> Answer:
        """Return what the model answers. Raises Unavailable if it does not."""
        return self._send(Ask(list(tokens), answer_tokens))

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text. Raises Unavailable."""
        return self._send(Ask([], text=text)).answer

    def flush(self) -> Answer:
        """Make durable what was saved. Raises Unavailable."""
        return self._send(Ask([]))

    def kill(self) -> None:
        """SIGKILL."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(END_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _send(self, ask: Ask) -> Answer:
        assert self._process.stdin is not None
        try:
            print(json.dumps(asdict(ask)), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            pass  # the end of its log says why
        return Answer(**self._read(ANSWER_S))

    def _read(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if readable else ""
        if not line:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
            raise Unavailable(f"the model does not answer; {self._log} ends:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer
