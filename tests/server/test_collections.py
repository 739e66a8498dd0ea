"""Garbage collections of a daemon: short however much it holds, and still complete enough."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: when the oldest generation is collected depends on all a process holds.
SCRIPT = """
import gc
import weakref

from kvstore.system.garbage import bound_collections


class Call:
    '''A cycle, as gRPC makes one for every call.'''

    def __init__(self):
        self.context = self


bound_collections()
held = [[number] for number in range(100_000)]
assert gc.get_freeze_count() > 50_000, "what lives long is still looked at"
calls = [Call() for _ in range(100)]
gone = [weakref.ref(call) for call in calls]
gc.collect(1)  # now they are old
del calls
held += [[number] for number in range(100_000)]
assert not any(ref() for ref in gone), "cycles that ended late are never freed"
"""


def test_what_lives_long_is_not_walked_again_and_cycles_that_end_late_are_freed() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
