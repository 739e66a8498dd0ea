"""Decide first, in pure code; `kvstore.move` carries the moves out.

`planner.py` is the file to read; `match.py` says how long a hit is, `leases.py` who holds what,
`explain.py` why a hit is not longer.
"""

from kvstore.decide.planner.conversations import Conversation, Conversations
from kvstore.decide.planner.departures import Departures
from kvstore.decide.planner.explain import Explainer
from kvstore.decide.planner.fine_parts import base_blocks, base_of, fine_slots
from kvstore.decide.planner.leases import DAEMON_SESSION, Leases, ProcessId, Reservation, SessionId
from kvstore.decide.planner.match import longest_hit, needed_spans
from kvstore.decide.planner.moves import Check, Read, Space, Write
from kvstore.decide.planner.outcomes import Outcomes
from kvstore.decide.planner.places import frames_of, is_readable
from kvstore.decide.planner.planner import Planner
from kvstore.decide.planner.steps import Steps
from kvstore.decide.planner.writes import RUN_NBYTES_MAX

__all__ = [
    "DAEMON_SESSION",
    "RUN_NBYTES_MAX",
    "Check",
    "Conversation",
    "Conversations",
    "Departures",
    "Explainer",
    "Leases",
    "Outcomes",
    "Planner",
    "ProcessId",
    "Read",
    "Reservation",
    "SessionId",
    "Space",
    "Steps",
    "Write",
    "base_blocks",
    "base_of",
    "fine_slots",
    "frames_of",
    "is_readable",
    "longest_hit",
    "needed_spans",
]
