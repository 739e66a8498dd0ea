"""Compile the library: by the wheel's build hook, or by `python -m kvstore_kernels.native.build`.

One plain shared library for an architecture serves every Python: it knows nothing of Python, and is
called by ctypes. Needs a C++ compiler and nothing else, so this module imports only the standard
library: the hook loads it before anything is installed.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
NAME = "libkvstore.so"
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wno-psabi")
LINK = ("-shared", "-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL")
X86 = {
    "plain": ("-march=x86-64-v2",),
    "avx2": ("-march=x86-64-v3",),
    "vbmi2": ("-march=x86-64-v4", "-mavx512vbmi", "-mavx512vbmi2"),
}


class NoCompiler(RuntimeError):
    """There is no C++ compiler here, or it cannot compile this."""


def build(folder: Path = HERE) -> Path:
    """Compile into `folder` and return the library's path. Raises NoCompiler."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None:
        raise NoCompiler("no C++ compiler here: install one (on Debian: apt-get install g++)")
    x86 = platform.machine() in ("x86_64", "AMD64")
    kinds = X86 if x86 else {"plain": ()}
    defines = ("-DWITH_X86",) if x86 else ()
    with tempfile.TemporaryDirectory(dir=folder) as room:
        objects = [f"{room}/{kind}.o" for kind in kinds]
        commands = [
            (
                compiler,
                *FLAGS,
                *arch,
                f"-DTABLE=codec_{kind}",
                "-c",
                str(HERE / "codec.cpp"),
                "-o",
                to,
            )
            for (kind, arch), to in zip(kinds.items(), objects, strict=True)
        ]
        with ThreadPoolExecutor() as threads:
            list(threads.map(_run, commands))
        library = f"{room}/{NAME}"
        sources = (str(HERE / "library.cpp"), *objects)
        _run((compiler, *FLAGS, *LINK, *defines, *sources, "-o", library))
        os.replace(library, folder / NAME)  # a process that has the old one mapped keeps it
    return folder / NAME


def build_if_stale() -> Path:
    """Compile if a source is newer than the library, or there is none. Raises NoCompiler."""
    library = HERE / NAME
    sources = [each for each in HERE.rglob("*") if each.suffix in (".cpp", ".h", ".py")]
    newest = max(each.stat().st_mtime for each in sources if each.name != "__init__.py")
    if library.exists() and library.stat().st_mtime >= newest:
        return library
    return build()


def _run(command: Sequence[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise NoCompiler(
            f"{command[0]} did not compile the native library: {said[-2000:]}"
        ) from None


if __name__ == "__main__":
    try:
        print(build())
    except NoCompiler as error:
        sys.exit(str(error))
