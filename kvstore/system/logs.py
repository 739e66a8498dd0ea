"""The daemon's log: lines of text or of JSON on stderr, and the last of them in memory.

A message is an event and what belongs to it, as `key=value` pairs. In JSON each pair is a field.
"""

from __future__ import annotations

import ast
import json
import logging
import re
import time
from collections import deque

LINES_MAX = 1000
LINE_CHARS_MAX = 4000

_TEXT = "%(asctime)s level=%(levelname)s logger=%(name)s %(message)s"
_PAIR = re.compile(r"""(?<!\S)([a-z_][a-z0-9_]*)=('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\S*)""")
_NUMBER = re.compile(r"-?\d{1,18}(\.\d{1,18})?")


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, its pairs, and what was raised."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        message = record.getMessage()
        line = {
            **fields_of(message),
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class LastLines(logging.Handler):
    """Keeps the last lines, shortened, for whoever asks for them later."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[str] = deque(maxlen=LINES_MAX)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record)[:LINE_CHARS_MAX])

    def lines(self, limit: int = LINES_MAX) -> list[str]:
        """Return the last `limit` lines, oldest first."""
        found = list(self._lines)
        return found[max(0, len(found) - limit) :]


LAST_LINES = LastLines()
"""Of this process: its log is one, however many parts write to it."""


def configure(level: str, form: str) -> None:
    """Write the log of this process to stderr from now on. form: text or json."""
    formatter = JsonFormatter() if form == "json" else logging.Formatter(_TEXT)
    stderr = logging.StreamHandler()
    for handler in (stderr, LAST_LINES):
        handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[stderr, LAST_LINES], force=True)


def set_level(level: str) -> None:
    logging.getLogger().setLevel(level.upper())


def fields_of(message: str) -> dict[str, object]:
    """Return the `key=value` pairs of a message; numbers as numbers, quoted texts unquoted."""
    return {key: _value(text) for key, text in _PAIR.findall(message)}


def _value(text: str) -> object:
    if _NUMBER.fullmatch(text):
        return float(text) if "." in text else int(text)
    if text[:1] in ("'", '"'):
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return text
    return text
