"""What threads ask of the arena in the moment when its daemon is lost."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvstore import Slot, Unavailable
from kvstore.client.caller import Caller
from kvstore.client.session import Session


class Losing:
    """A caller whose connection is there when it is first looked at, and gone at the next look."""

    target = "unix:/absent"
    arena = Caller.arena
    daemon = Caller.daemon

    def __init__(self, looks: int = 1) -> None:
        self._left = looks
        self._there = SimpleNamespace(
            arena=SimpleNamespace(
                staging_nbytes=3, arena_nbytes=5, extents=lambda: {7: memoryview(b"x")},
                view=lambda slot: memoryview(b"y"),
            ),
            daemon=SimpleNamespace(node="here"),
        )  # fmt: skip

    @property
    def _connection(self):
        self._left -= 1
        return self._there if self._left >= 0 else None


@pytest.mark.parametrize(
    ("ask", "there", "gone"),
    [
        (lambda session: list(session.extents()), [7], []),
        (lambda session: session.staging_nbytes, 3, 0),
        (lambda session: session.arena_nbytes, 5, 0),
        (lambda session: session.node, "here", ""),
    ],
)
def test_a_question_has_one_answer_while_the_daemon_is_lost(ask, there, gone):
    assert ask(Session(Losing())) == there
    assert ask(Session(Losing(looks=0))) == gone


def test_a_view_is_given_or_refused_with_a_typed_error():
    slot = Slot(0, 0, 1)
    assert bytes(Session(Losing()).view(slot)) == b"y"
    with pytest.raises(Unavailable, match="not mapped"):
        Session(Losing(looks=0)).view(slot)
