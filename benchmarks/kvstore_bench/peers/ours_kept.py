"""This store, read through its arena: what is got cold once is in DRAM from then on."""

from __future__ import annotations

from kvstore_bench.peers.ours import Ours
from kvstore_bench.peers.system import Place, System


def open_system(place: Place) -> System:
    return Ours(place, from_files=False)
