"""What comes with the command for the shell: completion, man pages, `python -m kvstore`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from kvstore.cli import main
from kvstore.cli.tree import walk
from tests.cli.run import kvstore

# bash calls the function with the command's name and reads COMPREPLY.
COMPLETE = """
eval "$(kvstore completion bash)"
COMP_WORDS=({line}) COMP_CWORD={word}
_kvstore_completion kvstore
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH on which `kvstore` is ours."""
    command = tmp_path / "kvstore"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvstore "$@"\n')
    command.chmod(0o755)
    return f"{tmp_path}:/usr/bin:/bin"


def completed(path: str, line: str) -> set[str]:
    script = COMPLETE.format(line=line, word=len(line.split()) - 1)
    ran = subprocess.run(
        ["bash", "-c", script],
        env={"PATH": path, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return set(ran.stdout.split())


@pytest.mark.parametrize(
    ("line", "expected"),
    [("kvstore ser", {"serve"}), ("kvstore serve --print", {"--print-config"})],
)
def test_bash_completes_commands_and_options(path: str, line: str, expected: set[str]) -> None:
    assert completed(path, line) == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_calls_the_command_back(shell: str) -> None:
    ran = kvstore("completion", shell)
    assert ran.exit_code == 0
    assert f"_KVSTORE_COMPLETE={shell}_complete" in ran.stdout
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=ran.stdout, text=True, check=True, timeout=10)


def test_every_command_has_a_man_page_with_all_its_options(tmp_path: Path) -> None:
    ran = kvstore("man", str(tmp_path / "man1"))
    assert ran.exit_code == 0, ran.output
    contexts = {each.command_path.replace(" ", "-"): each for each in walk(main, "kvstore")}
    pages = {file.stem: file.read_text() for file in (tmp_path / "man1").iterdir()}
    assert set(pages) == set(contexts)
    for name, context in contexts.items():
        for parameter in context.command.get_params(context):
            shown = isinstance(parameter, click.Option) and not parameter.hidden
            for option in parameter.opts if shown else ():
                assert option.replace("-", "\\-") in pages[name], (name, option)


@pytest.mark.skipif(not shutil.which("groff"), reason="no groff here")
def test_roff_reads_the_man_pages_without_a_warning(tmp_path: Path) -> None:
    kvstore("man", str(tmp_path))
    pages = sorted(map(str, tmp_path.glob("*.1")))
    ran = subprocess.run(
        ["groff", "-man", "-Tascii", "-ww", "-wel", *pages],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0
    assert ran.stderr == ""
    assert "kvstore serve --config kvstore.toml" in ran.stdout


def test_man_pages_for_a_place_nobody_may_write_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ran = kvstore("man", str(tmp_path / "file/man1"))
    assert ran.exit_code == 1
    assert "cannot be written" in ran.stderr


def test_python_m_kvstore_is_the_command() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "kvstore", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("kvstore, version ")
