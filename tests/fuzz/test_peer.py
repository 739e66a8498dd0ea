"""The target of peers' requests reaches the handlers: else no hostile request would reach them."""

from __future__ import annotations

import pytest

from kvstore.peer.messages import decode_match_reply
from kvstore.peer.onesided.messages import decode_grant_reply
from kvstore.peer.wire import HELD, Frame, Kind
from kvstore.testing.lender import MemoryLender
from tests.fuzz.peer import KEYS, REQUESTS, mended, replies, requests

WHO, NAMESPACE, MATCH, WAITS, HEADS, ONE_SIDED, NAMES = REQUESTS


def answers(seed: bytes) -> dict[int, Frame]:
    """Return the answers to a seed's requests, by number: from 2, those after HELLO."""
    assert mended(seed[1:]) == seed[1:]
    return {frame.id: frame for frame in replies(seed[1:], greeted=seed[:1] != b"\0")}


@pytest.mark.parametrize(
    ("seed", "kinds"),
    [
        (WHO, {1: Kind.REPLY}),
        (NAMESPACE, {2: Kind.REPLY}),
        (MATCH, {2: Kind.REPLY}),
        (WAITS, {2: Kind.REPLY, 3: Kind.ERROR, 4: Kind.REPLY}),  # 3: no READ on this connection
        (HEADS, {2: Kind.REPLY, 3: Kind.REPLY, 4: Kind.REPLY}),
        (ONE_SIDED, {2: Kind.REPLY, 3: Kind.REPLY, 4: Kind.REPLY}),
        (NAMES, {2: Kind.REPLY, 3: Kind.REPLY}),
    ],
)
def test_every_valid_request_is_answered(seed: bytes, kinds: dict[int, Kind]) -> None:
    assert {number: frame.kind for number, frame in answers(seed).items()} == kinds


def test_the_answers_are_about_what_is_stored() -> None:
    assert decode_match_reply(answers(MATCH)[2].body, keys=len(KEYS)).hit_blocks == len(KEYS)
    granted = answers(ONE_SIDED)
    grant = decode_grant_reply(granted[2].body, records=len(KEYS))
    assert grant is not None
    assert grant.read.sizes == (10,) * len(KEYS)
    assert granted[3].body == HELD


def test_a_handler_that_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryLender, "match", None)
    with pytest.raises(AssertionError, match="a handler has raised"):
        requests(MATCH)
