"""The README: short enough to be read, and every command in it works as it stands there."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.testing.daemon import Daemon
from kvstore.testing.wait import until
from tests.cli.run import kvstore
from tests.cluster.fleet import free_ports, met, wait_for
from tests.docs.examples import ROOT, Block, blocks, logical_lines

README = ROOT / "README.md"
BYTES_MAX = 6144
NOT_COPIED = (".git", ".venv*", "build", "dist", "env", "__pycache__", ".*_cache", ".hypothesis")
TARGETS = {"demo", "test", "torture", "docs", "hostile"}
# What each block of shell begins with; the test below that is named after it runs it.
TRY, TRANSFORMERS, MAKE = "python3 -m venv", "pip install '.[", "make "
VLLM, HOSTS = "kvstore serve --set dram", "kvstore serve --set cluster"
PROMPT = list(range(4, 200))
ANSWER_TOKENS = 4


def _block(start: str) -> Block:
    (found,) = [each for each in blocks(README) if each.text.startswith(start)]
    return found


def test_it_is_short() -> None:
    assert len(README.read_bytes()) <= BYTES_MAX


def test_its_figures_are_the_measured_ones() -> None:
    phases = json.loads((ROOT / "benchmarks/results/demo.json").read_text())["phases"]
    none, dram, disk = (
        f"{phases[name]['resumed_ttft_s']['median']:.2f} s" for name in ("none", "dram", "restart")
    )
    text = " ".join(README.read_text().split())
    assert f"{none} without kvstore, {dram} from DRAM, {disk} from disk" in text


def test_every_block_of_commands_is_run_below() -> None:
    shell = [each.text for each in blocks(README) if each.language in ("bash", "console", "text")]
    assert len(shell) == 5
    for start in (TRY, TRANSFORMERS, MAKE, VLLM, HOSTS):
        assert _block(start).language == "bash"


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory with a path short enough for a unix socket."""
    made = Path(tempfile.mkdtemp(prefix="kv-"))
    yield made
    shutil.rmtree(made)


@pytest.mark.timeout(420)
def test_the_first_try_works_in_a_fresh_clone(directory: Path) -> None:
    """From making an environment to reading the block back; only the paths are ours."""
    clone = directory / "clone"
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(*NOT_COPIED))
    own = f"--set server.socket={directory}/k.sock --set file.path={directory}/blocks"
    text = _block(TRY).text
    assert text.count("kvstore serve ") == 1
    text = text.replace("kvstore serve ", f"kvstore serve {own} --set server.metrics_listen= ")
    assert text.endswith("# drain the daemon and stop it\n")
    script = f"set -e\ntrap 'kill -9 $! 2>/dev/null' ERR\n{text}\nwait $!"
    environ = {
        "HOME": str(directory),
        "KVSTORE_TARGET": f"unix:{directory}/k.sock",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    ran = subprocess.run(
        ["bash", "-c", script],
        cwd=clone,
        env=environ,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "it works" in ran.stdout
    assert ran.stdout.endswith("hello\n")
    assert (directory / "blocks").is_dir()


def test_the_half_minute_draws_a_picture(tmp_path: Path) -> None:
    """The command as it is, on a shorter prompt and for one round."""
    pytest.importorskip("transformers")
    pip, command = logical_lines(_block(TRANSFORMERS).text)
    assert pip == "pip install '.[bench,transformers]'"
    program, *words = command.split()
    assert program == "kvstore"
    ran = subprocess.run(
        [sys.executable, "-m", "kvstore", *words, "--tokens", "200", "--rounds", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "resumed.png").read_bytes().startswith(b"\x89PNG")


def test_the_targets_of_make_can_be_made() -> None:
    """`make test` runs this test; of the others, make and their programs know every step."""
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", README.read_text(), re.MULTILINE))
    assert named == TARGETS
    assert {line.split()[1] for line in logical_lines(_block(MAKE).text)} == {"demo", "test"}
    for target in TARGETS:
        told = subprocess.run(
            ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
        ).stdout
        for module in re.findall(r"python -m ((?:kvstore|tests)[\w.]*)", told):
            subprocess.run(
                [sys.executable, "-m", module, "--help"],
                cwd=ROOT,
                capture_output=True,
                check=True,
                timeout=60,
            )


def test_two_hosts_meet(tmp_path: Path) -> None:
    """The commands as they are; both hosts are this one, at two addresses of loopback."""
    ports = free_ports(2)
    first, second, members = logical_lines(_block(HOSTS).text)
    assert members == "kvstore members"
    with ExitStack() as stack:
        daemons = []
        for line in (first, second):
            command = line.partition("#")[0]
            for host, port in zip(("10.0.0.1", "10.0.0.2"), ports, strict=True):
                command = command.replace(f"{host}:7702", f"127.0.0.{host[-1]}:{port}")
            program, serve, *words = shlex.split(command)
            assert (program, serve) == ("kvstore", "serve")
            settings = [word for word in words if word != "--set"]
            daemons.append(stack.enter_context(Daemon(*settings)))
        for each in daemons:
            each.start()
        for each in daemons:
            wait_for(lambda each=each: met(each))
            told = kvstore("members", "--target", each.target)
            assert (told.exit_code, told.output.count(" up ")) == (0, 1)


@pytest.mark.vllm
@pytest.mark.timeout(420)
def test_vllm_in_ten_lines(tmp_path: Path) -> None:
    """A real `vllm serve` with just this configuration stores a prompt and loads it again."""
    pytest.importorskip("vllm")
    import torch

    from kvstore_bench.demo.engine import EngineSpec, start_engine
    from kvstore_bench.demo.machine import describe
    from tests.connectors.vllm.tiny_models import make_llama

    daemon_line, engine_line = logical_lines(_block(VLLM).text)
    assert daemon_line.startswith("kvstore serve --set dram.capacity=")
    *words, transfer = shlex.split(engine_line)
    assert words == ["vllm", "serve", "MODEL", "--kv-transfer-config"]
    torch.manual_seed(7)
    make_llama().save_pretrained(tmp_path / "model")
    with Daemon() as daemon:
        transfer = transfer.replace("unix:/run/kvstore/kvstore.sock", daemon.start().target)
        spec = EngineSpec(
            name="readme",
            model=tmp_path / "model",
            machine=describe(),
            dtype="float32",
            threads=1,
            tokens_max=256,
            connector=json.loads(transfer),
        )
        engine = start_engine(spec, scratch=tmp_path, log=tmp_path / "log")
        try:
            engine.wait_healthy()
            first = engine.ask(PROMPT, ANSWER_TOKENS)
            with Client(daemon.target, arena=False) as client:
                until(lambda: client.admin.stats()["blocks"], timeout_s=30)
                engine.forget_prefixes()
                assert engine.ask(PROMPT, ANSWER_TOKENS).tokens == first.tokens
                assert sum(client.admin.stats()["totals"]["hit_blocks"].values()) > 0
        finally:
            engine.child.stop()
