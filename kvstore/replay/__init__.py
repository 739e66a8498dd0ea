"""Recorded traffic against the planner, the index and the policies that ship, on a virtual clock.

No bytes are moved and no time is waited for: what is measured is what is decided.

    formats.py    a trace file -> rows
    workload.py   rows -> requests for numbered blocks
    node.py       one node without bytes: answers requests, counts tokens, reads and writes
    synth.py      made-up traffic of chats and agents, and draws.py: the numbers in it
    room.py       the space of its tiers
    bounds.py     what no cache can beat: the infinite one, and the offline optimum of a size
    run.py        all of it together: one `Result` per setting
"""

from kvstore.replay.formats import TraceFile
from kvstore.replay.node import Setup, Traffic
from kvstore.replay.room import RECLAIMS
from kvstore.replay.rows import FORMATS
from kvstore.replay.run import Result, replay
from kvstore.replay.workload import Workload, load_workload, workload_of

__all__ = [
    "FORMATS",
    "RECLAIMS",
    "Result",
    "Setup",
    "TraceFile",
    "Traffic",
    "Workload",
    "load_workload",
    "replay",
    "workload_of",
]
