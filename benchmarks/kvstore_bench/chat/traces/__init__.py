"""Recorded traffic, replayed: arrival times, lengths and shared prefixes as they were.

prompts   block ids -> texts that share prefixes exactly where the ids do
replay    rows, as `kvstore.replay.formats` reads them -> sessions with due times, for `load`
"""

from kvstore_bench.chat.traces.replay import Window, load_trace

__all__ = ["Window", "load_trace"]
