"""Leave to use the tiles of AMX, asked for before vLLM's attention needs it.

Linux lets a process use AMX once it has asked (arch_prctl, ARCH_REQ_XCOMP_PERM). vLLM's attention
on the CPU does not ask: a matrix product of oneDNN has done so before it. After a long hit the
first step of a new engine computes so little that no product did, and the process is ended by
SIGILL. Seen with vLLM 0.32 in eager mode, whose start computes nothing.
"""

from __future__ import annotations

import ctypes
import platform

_SYS_ARCH_PRCTL = 158  # on x86-64
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


def ask_for_tiles() -> bool:
    """Ask for the use of tiles, for all threads of this process. False: there is none here."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    return bool(syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)
