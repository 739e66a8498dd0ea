"""What the demo ran on: read once, and written beside the numbers."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts that move the numbers. gpu: "" without one; load_1m: other work at the start."""

    cpu: str
    cores: int
    memory_gib: float
    bf16: bool
    gpu: str
    load_1m: float
    kernel: str
    python: str
    vllm: str
    torch: str

    @property
    def dtype(self) -> str:
        """What vLLM computes in: bfloat16 in hardware, as its emulation is 5 times slower."""
        return "bfloat16" if self.bf16 or self.gpu else "float32"

    @property
    def threads(self) -> int:
        """OpenMP threads of one engine on a CPU.

        One leaves cores to the front end and the daemon, and gives the steadier numbers. A CPU
        without BF16 units prefills four times slower, and needs all to finish in time.
        """
        return 1 if self.bf16 else self.cores


def describe() -> Machine:
    """Look at this machine."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    flags = set(_field(cpuinfo, "flags").split())
    return Machine(
        cpu=_field(cpuinfo, "model name"),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        bf16=bool(flags & {"avx512_bf16", "amx_bf16"}),
        gpu=_gpu(),
        load_1m=round(os.getloadavg()[0], 2),
        kernel=platform.release(),
        python=platform.python_version(),
        vllm=_version("vllm"),
        torch=_version("torch"),
    )


def _field(cpuinfo: str, name: str) -> str:
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), "")


def _gpu() -> str:
    """Return the name of the first GPU, if the installed vLLM can use one."""
    if "cpu" in _version("vllm") or not shutil.which("nvidia-smi"):
        return ""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return shown.stdout.splitlines()[0].strip() if shown.returncode == 0 and shown.stdout else ""


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
