"""The native library: there, or missing with a word about what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from kvstore_kernels import native

ROOT = Path(__file__).parents[2]
COMPILER = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), "")
SAY = "from kvstore_kernels import native; print(native.library() is None, native.reason())"


def test_it_was_compiled_when_the_project_was_installed() -> None:
    assert native.library() is not None, native.reason()


def test_it_can_be_turned_off() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SAY],
        env={**os.environ, "KVSTORE_NATIVE": "0"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert ran.stdout.strip() == "True KVSTORE_NATIVE=0 turns it off"


def build(tmp_path: Path, compiler: str) -> tuple[Path, str]:
    pytest.importorskip("hatchling")
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "kvstore", "connectors", "benchmarks"):
        (tree / name).symlink_to(ROOT / name)
    source = ROOT / "kernels"
    for path in source.rglob("*"):
        if path.is_file() and path.suffix in (".py", ".cpp", ".h", ".cu", ".typed", ".LICENSE"):
            target = tree / "kernels" / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    ran = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")],
        cwd=tree,
        env={**os.environ, "CXX": compiler},
        capture_output=True,
        text=True,
        check=True,
        timeout=180,
    )
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    return wheel, ran.stdout + ran.stderr


def test_a_wheel_without_a_compiler_works_without_the_library(tmp_path: Path) -> None:
    wheel, said = build(tmp_path, "no-such-compiler")
    assert "without its native library" in said
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert any(".dist-info/licenses/" in n and n.endswith("xxhash.LICENSE") for n in names)
    said = from_wheel(wheel, tmp_path, SAY)
    assert said.startswith("True ")
    assert "install a wheel of this platform, or a C++ compiler" in said


def from_wheel(wheel: Path, tmp_path: Path, code: str) -> str:
    """Return what `code` prints where nothing is installed but this wheel."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    ran = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(site), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return ran.stdout


@pytest.mark.skipif(not COMPILER, reason="there is no C++ compiler here")
def test_a_wheel_has_the_library_and_serves_every_python_of_its_platform(tmp_path: Path) -> None:
    wheel, said = build(tmp_path, COMPILER)
    assert "without its native library" not in said
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert names.count("kvstore_kernels/native/libkvstore.so") == 1
    assert not [name for name in names if name.endswith((".so", ".o")) and "libkvstore" not in name]
    used = f"{SAY}; print(native.__file__, native.use_isa())"
    works, where = from_wheel(wheel, tmp_path, used).splitlines()
    assert works.strip() == "False"
    assert where.startswith(f"{tmp_path}/site/")
