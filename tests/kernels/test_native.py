"""The native library: there, or missing with a word about what to do."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvstore_kernels import native

ROOT = Path(__file__).parents[2]
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
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    ran = subprocess.run(
        [sys.executable, "-S", "-c", SAY],
        env={"PYTHONPATH": str(site), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert ran.stdout.startswith("True ")
    assert "install a wheel of this platform, or a C++ compiler" in ran.stdout
