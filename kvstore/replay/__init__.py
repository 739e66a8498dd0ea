"""Recorded traffic against the planner, the index and the policies that ship, on a virtual clock.

No bytes are moved and no time is waited for: what is measured is what is decided.

    formats.py    a trace file -> rows
    workload.py   rows -> requests for numbered blocks
    node.py       one node without bytes: answers requests, counts tokens, reads and writes
    synth.py      made-up traffic of chats and agents, and draws.py: the numbers in it
    room.py       the space of its tiers
    bounds.py     what no cache can beat: the infinite one, and the offline optimum of a size
    run.py        all of it together: one `Result` per setting
    hosts.py      many nodes, and what they lend each other; told.py: what they know of each other
    routers.py    which of them gets a request
    run_hosts.py  all of that together: one `HostsResult` per setting and router
"""

from kvstore.replay.formats import TraceFile
from kvstore.replay.hosts import HOSTS_MAX, all_of
from kvstore.replay.node import Setup, Traffic
from kvstore.replay.room import RECLAIMS
from kvstore.replay.routers import ROUTERS
from kvstore.replay.rows import FORMATS
from kvstore.replay.run import Result, replay
from kvstore.replay.run_hosts import Fleet, HostsResult, replay_hosts
from kvstore.replay.workload import Workload, load_workload, workload_of

__all__ = [
    "FORMATS",
    "HOSTS_MAX",
    "RECLAIMS",
    "ROUTERS",
    "Fleet",
    "HostsResult",
    "Result",
    "Setup",
    "TraceFile",
    "Traffic",
    "Workload",
    "all_of",
    "load_workload",
    "replay",
    "replay_hosts",
    "workload_of",
]
