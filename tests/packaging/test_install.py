"""What a user's environment gets: light imports, unique names, a command, a vLLM plug-in."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "kvstore",
    "kvstore_bench",
    "kvstore_kernels",
    "kvstore_llamacpp",
    "kvstore_lmcache",
    "kvstore_sglang",
    "kvstore_transformers",
    "kvstore_trtllm",
    "kvstore_vllm",
}


def python(code: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("module", ["kvstore", "kvstore.client", "kvstore.daemon", "kvstore.cli"])
def test_the_core_imports_nothing_heavy(module: str) -> None:
    loaded = set(python(f"import sys, {module}; print(*sys.modules)").split())
    assert not loaded & {"torch", "cupy", "vllm", "ucxx", "transformers", "matplotlib", "aiohttp"}


def test_nothing_generic_lands_in_site_packages(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=180,
    )
    (wheel,) = tmp_path.glob("*.whl")
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES


def test_folders_of_packages_are_not_packages() -> None:
    for folder in ("connectors", "kernels", "benchmarks", "proto"):
        assert not (ROOT / folder / "__init__.py").exists()


def test_the_plug_in_is_registered_with_vllm() -> None:
    (found,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "kvstore"]
    assert found.value == "kvstore_vllm.plugin:register"


def test_the_version_is_the_same_everywhere() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert python("import kvstore; print(kvstore.__version__)").strip() == declared


def test_the_gpu_benchmark_needs_no_more_than_what_travels_with_it() -> None:
    """Of what is installed here beside that, nothing may be imported on the way."""
    code = """
import sys
absent = ("rich", "matplotlib", "uvloop", "aiohttp", "obstore", "vllm", "opentelemetry")
absent += ("cryptography",)
for name in absent:
    sys.modules[name] = None  # importing it fails
import kvstore.daemon
import kvstore_bench.gpu.gpu
import kvstore_vllm.worker
from kvstore.cli import main
main(["bench", "gpu", "--json"])
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert "no CUDA device" in ran.stderr
    assert ran.returncode == 2
