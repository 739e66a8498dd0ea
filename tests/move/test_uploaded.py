"""What a daemon knows of runs in the bucket, and how long it believes that."""

from __future__ import annotations

import pytest

from kvstore.model.block import BlockKey, NamespaceId
from kvstore.move import uploaded
from kvstore.move.uploaded import BELIEVED_S, SETTLE_S, Uploaded

ONE, TWO = NamespaceId(b"1" * 32), NamespaceId(b"2" * 32)
A, B, C = (BlockKey(bytes([name]) * 32) for name in range(3))


class Clock:
    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def known(clock: Clock) -> Uploaded:
    known = Uploaded(clock)
    known.note(A, clock.at)
    known.note(B, clock.at)
    return known


def test_a_run_is_believed_to_be_there_for_a_while(known: Uploaded, clock: Clock) -> None:
    assert known.since(ONE, A) == clock.at
    assert known.since(ONE, C) is None
    clock.at += BELIEVED_S
    assert known.since(ONE, A) is None


def test_a_delete_forgets_the_runs_of_its_namespaces(known: Uploaded, clock: Clock) -> None:
    clock.at += 1
    known.forget([ONE])
    assert (known.since(ONE, A), known.since(TWO, B)) == (None, clock.at - 1)


def test_what_was_looked_at_before_its_delete_has_settled_is_looked_at_again(
    known: Uploaded, clock: Clock
) -> None:
    """It may have been stored too soon after the tombstone to live."""
    known.forget([ONE])
    for later_s, believed in ((0, False), (SETTLE_S, False), (SETTLE_S + 1, True)):
        known.note(A, clock.at + later_s)
        assert (known.since(ONE, A) is not None) is believed


def test_runs_and_namespaces_are_bounded(
    known: Uploaded, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploaded, "RUNS_MAX", 2)
    monkeypatch.setattr(uploaded, "FORGOTTEN_MAX", 4)
    known.note(C, clock.at)
    assert known.since(ONE, A) is None
    assert known.since(ONE, C) == clock.at
    known.forget([NamespaceId(bytes([name]) * 32) for name in range(5)])
    assert known.since(ONE, C) is None, "all count as forgotten"
    assert not known._forgotten
