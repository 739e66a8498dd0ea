"""A slot is reused only when nobody can still touch it; limbo is bounded and always emptied."""

from __future__ import annotations

import itertools

import pytest

from kvstore.decide.index import HeldSlot, StoredFrame
from kvstore.decide.planner import DAEMON_SESSION, Leases, ProcessId, Reservation, SessionId
from kvstore.model.block import Part, Slot
from kvstore.model.errors import SessionEnded, Unavailable

TOKEN = "engine-1-secret-token"


class Desk:
    """Leases with a clock to turn and a record of what was freed."""

    def __init__(self, limbo_bytes_max: int = 1 << 20, sessions_max: int = 4) -> None:
        self.time = 0.0
        self.freed: list[HeldSlot] = []
        self.leases = Leases(
            lease_s=30.0,
            limbo_bytes_max=limbo_bytes_max,
            sessions_max=sessions_max,
            now=lambda: self.time,
            new_id=itertools.count(100).__next__,
            unpin=lambda held: self.freed.append(held) if held.pins == 0 else None,
            unpin_frame=self._unpin_frame,
        )

    def _unpin_frame(self, frame: StoredFrame) -> None:
        frame.pins -= 1

    def session(self, token: str = TOKEN) -> tuple[SessionId, ProcessId]:
        session = self.leases.open(token, "test")
        return session, self.leases.join(session, token)


def slot(number: int = 0) -> HeldSlot:
    return HeldSlot(Slot(0, number * 4096, 4096))


def frame() -> StoredFrame:
    return StoredFrame(Slot(0, 0, 8192), Part(0, 0), 0, (4096,), 1)


def test_a_lease_pins_until_its_last_reader_releases() -> None:
    desk, held = Desk(), slot()
    session, _ = desk.session()
    lease = desk.leases.grant(session, [held, None], readers=2)
    assert desk.leases.release(session, lease.id)
    assert held.pins == 1
    assert desk.leases.release(session, lease.id)
    assert desk.freed == [held]


def test_a_release_too_many_is_not_held() -> None:
    desk = Desk()
    session, _ = desk.session()
    lease = desk.leases.grant(session, [slot()])
    assert desk.leases.release(session, lease.id)
    assert not desk.leases.release(session, lease.id)
    assert not desk.leases.release(session, 999)


def test_an_expired_lease_keeps_its_slot_until_released_and_says_it_was_not_held() -> None:
    desk, held = Desk(), slot()
    session, _ = desk.session()
    lease = desk.leases.grant(session, [held])
    desk.time = 31.0
    assert desk.leases.expire() == 1
    assert desk.leases.expire() == 0
    assert held.pins == 1
    assert desk.leases.limbo_bytes == 4096
    assert not desk.leases.release(session, lease.id)
    assert desk.leases.limbo_bytes == 0
    assert desk.freed == [held]


def test_a_lease_past_its_deadline_is_not_held_even_before_anybody_looked() -> None:
    desk = Desk()
    session, _ = desk.session()
    lease = desk.leases.grant(session, [slot()])
    desk.time = 30.5
    assert not desk.leases.release(session, lease.id)


def test_an_expired_reservation_cannot_be_committed() -> None:
    desk = Desk()
    session, _ = desk.session()
    write = Reservation(b"n" * 32, (), 0, None, (), 0)  # type: ignore[arg-type]
    lease = desk.leases.grant(session, [slot()], write=write)
    assert desk.leases.reservation(session, lease.id) is lease
    desk.time = 31.0
    assert desk.leases.reservation(session, lease.id) is None


def test_the_death_of_one_member_ends_the_session_but_frees_nothing_of_the_living() -> None:
    desk, held = Desk(), slot()
    session, scheduler = desk.session()
    worker = desk.leases.join(session, TOKEN)
    lease = desk.leases.grant(session, [held])
    desk.leases.leave(session, scheduler)
    assert held.pins == 1
    with pytest.raises(SessionEnded):
        desk.leases.grant(session, [slot()])
    assert not desk.leases.release(session, lease.id)
    desk.leases.leave(session, worker)
    assert desk.leases.count == 0


def test_the_death_of_the_last_member_frees_everything() -> None:
    desk, held = Desk(), slot()
    session, process = desk.session()
    desk.leases.grant(session, [held])
    desk.leases.leave(session, process)
    assert desk.freed == [held]
    assert desk.leases.leased_bytes == 0
    assert desk.leases.limbo_bytes == 0


def test_a_token_reopened_after_the_end_is_a_new_session() -> None:
    desk = Desk()
    session, process = desk.session()
    assert desk.leases.open(TOKEN, "again") == session
    desk.leases.leave(session, process)
    assert desk.leases.open(TOKEN, "again") != session


def test_nobody_joins_with_another_token() -> None:
    desk = Desk()
    session, _ = desk.session()
    with pytest.raises(SessionEnded):
        desk.leases.join(session, "somebody-elses-token")


def test_a_session_that_has_not_joined_gets_no_slots() -> None:
    desk = Desk()
    with pytest.raises(SessionEnded):
        desk.leases.grant(desk.leases.open(TOKEN, "test"), [slot()])


def test_a_session_with_too_much_limbo_gets_nothing_more() -> None:
    desk = Desk(limbo_bytes_max=4096)
    session, _ = desk.session()
    leases = [desk.leases.grant(session, [slot(i)]) for i in range(2)]
    desk.time = 31.0
    desk.leases.expire()
    with pytest.raises(Unavailable):
        desk.leases.grant(session, [slot(5)])
    desk.leases.release(session, leases[0].id)
    desk.leases.grant(session, [slot(5)])


def test_sessions_are_bounded_and_idle_ones_make_room() -> None:
    desk = Desk(sessions_max=2)
    first, _ = desk.session("token-a")
    desk.leases.open("token-b", "idle")
    third = desk.leases.open("token-c", "test")
    desk.leases.join(third, "token-c")
    with pytest.raises(Unavailable):
        desk.leases.open("token-d", "one too many")
    assert {session.id for session in desk.leases.sessions()} == {first, third}


def test_frames_are_held_until_the_release_or_the_deadline_and_never_in_limbo() -> None:
    desk, read = Desk(), frame()
    session, process = desk.session()
    first = desk.leases.grant(session, [None], frames=[read])
    second = desk.leases.grant(session, [slot()], frames=[read])
    assert (read.pins, desk.leases.framed_bytes) == (2, 2 * 8192)
    assert desk.leases.release(session, first.id)
    assert (read.pins, desk.leases.framed_bytes) == (1, 8192)
    desk.time = 31.0
    assert desk.leases.expire() == 1
    assert (read.pins, desk.leases.framed_bytes) == (0, 0)
    assert desk.leases.limbo_bytes == 4096, "only the slot is"
    assert not desk.leases.release(session, second.id)
    desk.leases.grant(session, [], frames=[read])
    desk.leases.leave(session, process)
    assert (read.pins, desk.leases.framed_bytes) == (0, 0)


def test_what_becomes_of_a_frame_on_a_lost_disk_is_not_known() -> None:
    desk, read = Desk(), frame()
    session, _ = desk.session()
    lease = desk.leases.grant(session, [], frames=[read])
    read.is_out = True
    assert not desk.leases.release(session, lease.id)
    assert read.pins == 0


def test_frames_are_let_go_of_before_the_file_tier_closes() -> None:
    desk, read = Desk(), frame()
    session, _ = desk.session()
    lease = desk.leases.grant(session, [], readers=2, frames=[read])
    desk.leases.let_go_of_frames()
    assert (read.pins, desk.leases.framed_bytes) == (0, 0)
    assert not desk.leases.release(session, lease.id)
    assert not desk.leases.release(session, lease.id)
    assert read.pins == 0


def test_a_slow_host_keeps_no_other_host_from_borrowing() -> None:
    desk = Desk(limbo_bytes_max=4096)
    late = [desk.leases.grant(DAEMON_SESSION, [slot(n)], borrower="slow") for n in (0, 1)]
    desk.time = 31.0
    assert desk.leases.expire() == 2
    assert desk.leases.limbo_bytes == 8192
    with pytest.raises(Unavailable, match="host slow has 8192 bytes in limbo"):
        desk.leases.grant(DAEMON_SESSION, [slot(2)], borrower="slow")
    desk.leases.grant(DAEMON_SESSION, [slot(3)], borrower="other")
    desk.leases.grant(DAEMON_SESSION, [slot(4)])  # what the daemon itself brings
    for lease in late:
        assert not desk.leases.release(DAEMON_SESSION, lease.id)
    assert desk.leases.limbo_bytes == 0
    desk.leases.grant(DAEMON_SESSION, [slot(2)], borrower="slow")
