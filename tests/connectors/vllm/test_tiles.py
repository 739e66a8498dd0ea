"""The use of AMX, asked for in time. What happens without is seen by engines that restart: see
`test_lossy_engine`, on a processor with AMX."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HAS_TILES = "amx_tile" in Path("/proc/cpuinfo").read_text()
_ASK = """
import ctypes
from kvstore_vllm.tiles import ask_for_tiles
asked = ask_for_tiles()
granted = ctypes.c_uint64()
ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(granted))  # ARCH_GET_XCOMP_PERM
print(asked, bool(granted.value >> 18 & 1))
"""


@pytest.mark.vllm
def test_a_process_that_asks_may_use_tiles() -> None:
    told = subprocess.run(
        [sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=60, check=True
    )
    assert told.stdout.split() == [str(HAS_TILES)] * 2
