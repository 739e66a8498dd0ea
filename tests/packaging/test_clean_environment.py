"""The package as a user installs it: no extras, nothing of the repository, nothing of ours.

Every command works there, or says which extra it needs. None ends with a traceback.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore.testing.daemon import Daemon

ROOT = Path(__file__).parents[2]
TRACEBACK = "Traceback (most recent call last)"
NAMES_THE_EXTRA = "pip install 'kvstore-tiers["
# A key that is not stored; a folder, a trace and a model that the fixture makes.
KEY = "00" * 32

# What each command is run with. One that is not here is run with nothing.
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "serve": ("--print-config",),
    "doctor": ("--set", "dram.capacity=64MiB", "--set", "file.path={directory}"),
    "support": ("--target", "{target}", "--output", "{scratch}/report.zip"),
    "ping": ("--target", "{target}"),
    "selftest": ("--target", "{target}"),
    "config get": ("--target", "{target}"),
    "config set": ("--target", "{target}", "dram.capacity=96MiB"),
    "status": ("--target", "{target}"),
    "stats": ("--target", "{target}"),
    "explain": ("--target", "{target}", "--last", "1"),
    "namespaces": ("--target", "{target}"),
    "scan": ("--target", "{target}"),
    "get": ("--target", "{target}", "--tokens", "1,2,3"),
    "hint end": ("--target", "{target}", "chat-17"),
    "hint expect": ("--target", "{target}", "chat-17", "--in", "30"),
    "hint demote": ("--target", "{target}", "chat-17"),
    "hint pin": ("--target", "{target}", "chat-17", "--ttl", "60"),
    "hint prefetch": ("--target", "{target}", "chat-17"),
    "put": ("--target", "{target}", "--tokens", "1,2,3", "{prompt}"),
    "flush": ("--target", "{target}"),
    "delete": ("--target", "{target}", "--namespace", KEY, KEY),
    "clear": ("--target", "{target}", "--all", "--yes"),
    "inspect": ("{directory}",),
    "verify": ("{directory}",),
    "gc": ("{unused}",),
    "trace record": ("--target", "{target}", "{scratch}/recorded.jsonl.gz", "--seconds", "1"),
    "trace synth": ("{scratch}/made.jsonl.gz", "--requests", "100"),
    "replay": ("{trace}", "--dram", "50%"),
    "plan": ("--model", "{model}", "--trace", "{trace}", "--prefill", "9000"),
    "bench make-conversations": ("-", "--conversations", "2"),
    "completion": ("bash",),
    "man": ("{scratch}/man",),
}
# Exit code 1 of these says that nothing was found, or that doctor found something to mend.
MAY_FIND_NOTHING = {
    "delete",
    "doctor",
    "get",
    "hint end",
    "hint expect",
    "hint demote",
    "hint pin",
    "hint prefetch",
}
# What needs an extra: run like this, it must name this one.
EXTRAS: dict[tuple[str, ...], str] = {
    ("top", "--target", "{target}"): "cli",
    ("explain", "--target", "{target}", "--prompt", "{prompt}", "--tokenizer", "{scratch}"): "cli",
    ("replay", "{trace}", "--dram", "50%", "--plot", "{scratch}/hits.png"): "bench",
    ("serve", "--set", "object.url=file://{scratch}/bucket"): "object",
    ("serve", "--set", "pool.url=mooncake://127.0.0.1:1"): "pool",
    ("serve", "--set", "server.traces_endpoint=http://127.0.0.1:1/v1/traces"): "otel",
    ("bench", "chat"): "bench",
    ("bench", "compare", "a.json", "b.json"): "bench",
    ("bench", "store"): "bench",
    ("bench", "tier"): "bench",
    ("bench", "index"): "bench",
    ("bench", "peers"): "bench",
    ("bench", "recovery"): "bench",
    ("bench", "scrub"): "bench",
    ("bench", "transformers"): "transformers",
    ("bench", "transformers", "--json"): "transformers",
    ("bench", "gpu", "--json"): "transformers",
}
LISTED = """
import json
from kvstore.cli import main
from kvstore.cli.tree import walk
print(json.dumps([each.command_path for each in walk(main, "kvstore")]))
"""
HELP = """
import sys
from click.testing import CliRunner
from kvstore.cli import main
from kvstore.cli.tree import walk
for each in walk(main, "kvstore"):
    ran = CliRunner().invoke(main, [*each.command_path.split()[1:], "--help"])
    if ran.exit_code or not ran.output.startswith("Usage: "):
        sys.exit(f"{each.command_path} --help: {ran.exit_code}, {ran.exception!r}\\n{ran.output}")
"""


@dataclass(frozen=True, slots=True)
class Clean:
    """An environment without extras, and files to run commands on."""

    directory: Path
    wheel: Path
    sdist: Path

    @property
    def bin(self) -> Path:
        return self.directory / "venv/bin"

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, far from the repository."""
        return subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self.directory,
            env={
                "PATH": f"{self.bin}:{os.environ['PATH']}",
                "HOME": str(self.directory),
                "XDG_RUNTIME_DIR": str(self.directory),
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def pip(self, *arguments: str) -> None:
        subprocess.run(
            [str(self.bin / "python"), "-m", "pip", "install", "-q", "--no-compile", *arguments],
            check=True,
            capture_output=True,
            timeout=180,
        )

    def python(self, code: str) -> str:
        ran = self.run("python", "-c", code)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout


class InstalledDaemon(Daemon):
    """A daemon of the environment: neither our Python nor our sources."""

    def __init__(self, clean: Clean) -> None:
        super().__init__()
        self._bin = clean.bin

    def command(self, *arguments: str) -> list[str]:
        return ["env", "-u", "PYTHONPATH", str(self._bin / "kvstore"), *arguments]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Clean:
    pytest.importorskip("hatchling")
    directory = tmp_path_factory.mktemp("clean")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(directory)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=120,
    )
    (wheel,), (sdist,) = directory.glob("*.whl"), directory.glob("*.tar.gz")
    venv.create(directory / "venv", with_pip=True)
    made = Clean(directory, wheel, sdist)
    made.pip(str(wheel))
    return made


@pytest.fixture(scope="module")
def daemon(clean: Clean) -> Iterator[Daemon]:
    with InstalledDaemon(clean) as daemon:
        yield daemon.start()
        assert daemon.stop() == 0


@pytest.fixture(scope="module")
def places(clean: Clean, daemon: Daemon) -> dict[str, str]:
    """What the arguments name."""
    config = {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 16,
        "num_hidden_layers": 16,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "torch_dtype": "bfloat16",
    }
    model = clean.directory / "config.json"
    model.write_text(json.dumps(config))
    prompt = clean.directory / "prompt.txt"
    prompt.write_text("once upon a time")
    trace = clean.directory / "trace.jsonl"
    assert clean.run("kvstore", "trace", "synth", str(trace), "--requests", "50").returncode == 0
    unused = shutil.copytree(daemon.directory / "file", clean.directory / "unused")
    return {
        "target": daemon.target,
        "unused": str(unused),
        "directory": str(daemon.directory / "file"),
        "scratch": str(clean.directory),
        "model": str(model),
        "prompt": str(prompt),
        "trace": str(trace),
    }


def test_every_command_shows_its_help(clean: Clean) -> None:
    clean.python(HELP)


def test_every_command_works_or_says_what_is_missing(clean: Clean, places: dict[str, str]) -> None:
    paths = [path.split()[1:] for path in json.loads(clean.python(LISTED))]
    known = {" ".join(path) for path in paths}
    assert set(ARGUMENTS) <= known, "a command of this test is gone"

    def run(path: list[str]) -> tuple[str, int, str]:
        given = [each.format(**places) for each in ARGUMENTS.get(" ".join(path), ())]
        ran = clean.run("kvstore", *path, *given)
        return " ".join(path), ran.returncode, ran.stdout + ran.stderr

    named = [path for path in paths if (*path,) not in EXTRAS]  # the others are below
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(run, named))
    assert [(name, said) for name, _, said in ended if TRACEBACK in said] == []
    for name, code, said in ended:
        may_be = {0} if name in ARGUMENTS else {0, 1, 2, 3}
        assert code in may_be | ({1} if name in MAY_FIND_NOTHING else set()), (name, code, said)


def test_a_missing_extra_is_named(clean: Clean, places: dict[str, str]) -> None:
    def run(command: tuple[str, ...]) -> str:
        ran = clean.run("kvstore", *(each.format(**places) for each in command))
        assert ran.returncode in (1, 2), (command, ran.stderr)
        return ran.stdout + ran.stderr

    with ThreadPoolExecutor(2) as pool:
        said = dict(zip(EXTRAS, pool.map(run, EXTRAS), strict=True))
    assert [(each, text) for each, text in said.items() if TRACEBACK in text] == []
    wrong = [
        (each, text)
        for each, text in said.items()
        if f"{NAMES_THE_EXTRA}{EXTRAS[each]}]'" not in text
    ]
    assert wrong == []


def test_python_m_kvstore_works(clean: Clean) -> None:
    assert clean.run("python", "-m", "kvstore", "--version").stdout.startswith("kvstore, version ")


def test_the_sdist_installs_the_same_files(clean: Clean) -> None:
    clean.pip("--no-deps", "--force-reinstall", str(clean.sdist))
    code = """
from importlib.metadata import files
print(*sorted(str(each) for each in files("kvstore-tiers") if each.suffix != ".pyc"), sep="\\n")
"""
    names = clean.python(code).split("\n")
    inside = set(zipfile.ZipFile(clean.wheel).namelist())
    packages = {name for name in inside if ".dist-info/" not in name}
    assert packages <= set(names)
    assert clean.run("kvstore", "--version").returncode == 0


def test_the_oldest_click_that_the_package_admits_will_do(clean: Clean) -> None:
    """Last of this module: engines' environments often hold an old one."""
    clean.pip("click==8.1.0")
    clean.python(HELP)
