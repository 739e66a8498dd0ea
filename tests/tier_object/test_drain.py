"""A body that a thread hands over, until it is told to stop."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvstore.tier.object.bucket import _Drain
from kvstore.tier.object.failure import ObjectFailed


def test_after_stop_nothing_reaches_the_sink() -> None:
    first, go_on = threading.Event(), threading.Event()
    seen: list[tuple[int, bytes]] = []

    def body() -> Iterator[bytes]:
        yield b"abc"
        first.set()
        assert go_on.wait(10)
        yield b"def"

    drain = _Drain(body(), 6, lambda position, data: seen.append((position, bytes(data))))
    thread = threading.Thread(target=drain.run)
    thread.start()
    assert first.wait(10)
    drain.stop()
    go_on.set()
    thread.join(10)
    assert not thread.is_alive()
    assert seen == [(0, b"abc")]


def test_stop_waits_for_the_sink() -> None:
    begun, go_on, stopped = threading.Event(), threading.Event(), threading.Event()

    def sink(_: int, data: memoryview) -> None:
        begun.set()
        assert go_on.wait(10)

    drain = _Drain([b"abc"], 3, sink)
    running = threading.Thread(target=drain.run)
    running.start()
    assert begun.wait(10)
    stopping = threading.Thread(target=lambda: (drain.stop(), stopped.set()))
    stopping.start()
    assert not stopped.wait(0.05)
    go_on.set()
    assert stopped.wait(10)
    running.join(10)
    stopping.join(10)


def test_a_body_is_told_in_order_and_too_much_of_it_is_refused() -> None:
    seen: list[tuple[int, bytes]] = []
    chunks = [b"ab", b"", b"cde"]
    drain = _Drain(chunks, 5, lambda position, data: seen.append((position, bytes(data))))
    assert drain.run() == 5
    assert seen == [(0, b"ab"), (2, b""), (2, b"cde")]
    with pytest.raises(ObjectFailed, match="more bytes"):
        _Drain(chunks, 4, lambda position, data: None).run()
