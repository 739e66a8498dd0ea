"""Recorded traffic, replayed: arrival times, lengths and shared prefixes as they were.

formats   a file of one of six formats -> rows in seconds and tokens
prompts   block ids -> texts that share prefixes exactly where the ids do
replay    rows -> sessions with due times (this is what `load` returns)
"""

from kvstore_bench.traces.replay import Window, load_trace

__all__ = ["Window", "load_trace"]
