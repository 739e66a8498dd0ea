"""Server-sent events: bytes in, the data of whole events out."""

from __future__ import annotations

EVENT_NBYTES_MAX = 4 << 20


class MalformedStream(Exception):
    """The bytes are no event stream, or an event of it is not what the endpoint promises."""


class EventParser:
    """Split an event stream that arrives in arbitrary pieces.

    Only `data` fields matter here; comments (keep-alives) and other fields are skipped. An event
    that lacks its final blank line is never returned, so a cut stream shows no half event.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._nbytes = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Take the next bytes; return the data of every event they complete.

        Raises MalformedStream past EVENT_NBYTES_MAX bytes without the end of an event.
        """
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events = []
        for line in lines:
            if event := self._line(line.removesuffix(b"\r")):
                events.append(event)
        if self._nbytes + len(self._rest) > EVENT_NBYTES_MAX:
            raise MalformedStream(f"an event is longer than {EVENT_NBYTES_MAX} bytes")
        return events

    def _line(self, line: bytes) -> bytes | None:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
            self._nbytes += len(line)
            return None
        if line or not self._data:
            return None
        event = b"\n".join(self._data)
        self._data.clear()
        self._nbytes = 0
        return event
