"""A body that a thread hands over, until it is told to stop."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvstore.tier.object.drain import Drain
from kvstore.tier.object.failure import ObjectFailed


def test_after_stop_nothing_is_written() -> None:
    first, go_on = threading.Event(), threading.Event()
    target = bytearray(6)
    told: list[int] = []

    def body() -> Iterator[bytes]:
        yield b"abc"
        first.set()
        assert go_on.wait(10)
        yield b"def"

    drain = Drain(body(), [memoryview(target)], told.append)
    thread = threading.Thread(target=drain.run)
    thread.start()
    assert first.wait(10)
    drain.stop()
    go_on.set()
    thread.join(10)
    assert not thread.is_alive()
    assert target == b"abc\0\0\0"
    assert told == []


@pytest.mark.parametrize("sizes", [(5,), (1, 4), (2, 3), (1, 1, 1, 2)])
def test_a_body_fills_the_buffers_in_order(sizes: tuple[int, ...]) -> None:
    targets = [memoryview(bytearray(size)) for size in sizes]
    told: list[bytes] = []
    Drain(
        [b"ab", b"", b"cde", b""], targets, lambda index: told.append(bytes(targets[index]))
    ).run()
    assert b"".join(targets) == b"abcde"
    assert told == list(map(bytes, targets)), "told as each is full"


def test_too_much_and_too_little_is_refused() -> None:
    for size, words in ((4, "more bytes"), (6, "less bytes")):
        with pytest.raises(ObjectFailed, match=words):
            Drain([b"ab", b"cde"], [memoryview(bytearray(size))], lambda _: None).run()
    with pytest.raises(ObjectFailed, match="more bytes"):
        Drain([b"ab", b"cde"], [memoryview(bytearray(2))], lambda _: None).run()
