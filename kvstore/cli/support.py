"""`kvstore support`: one file about this machine and its daemon, for an issue report."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import click

import kvstore
from kvstore.cli.doctor import check_all
from kvstore.cli.namespaces import namespace_json
from kvstore.cli.outputs import check_outputs
from kvstore.cli.target import Target, connect, shown_options, target_for
from kvstore.client import Client
from kvstore.model.errors import KVStoreError
from kvstore.settings import Settings, load_settings
from kvstore.system.logs import LINES_MAX
from kvstore.system.memory import read_memory
from kvstore.system.redaction import REDACTED, redacted

JOURNAL_S = 10.0
_PACKAGE = "kvstore-tiers"
_ROOT_COMMAND = re.compile(r"^((?:security\.)?root_command = )(.*)$", re.MULTILINE)
_ENGINES = ("vllm", "torch", "transformers", "lmcache", "sglang")
_README = """Made by `kvstore support` of kvstore {version}, {when}.

  versions.json    kvstore, Python, kernel, packages, memory and its limits
  settings.toml    of the daemon, or what it would be started with
  doctor.txt       what `kvstore doctor` finds
  stats.json       what the daemon holds, owes and has counted
  namespaces.json  models' shapes and digests, and how many blocks each has
  log.txt          the daemon's last log lines

What is not in it: prompts, tokens, blocks, request ids, environment variables, keys, passwords, and
the arguments of security.root_command. Of hashes only the first 8 digits are left. Paths, model
names, the names of clients, and names and addresses of hosts are in it: look through it before you
attach it.
{missing}"""


@click.command()
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write; default: kvstore-support-TIME.zip here.",
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The TOML file of a daemon that does not run.",
)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="As for `kvstore serve`."
)
@click.option(
    "--target",
    type=Target(),
    help="The daemon to ask; default: the settings' socket, or else as for every command.",
)
@shown_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def support(
    *,
    output: Path | None,
    config: Path | None,
    overrides: tuple[str, ...],
    target: str | None,
    as_json: bool,
) -> None:
    """Write one file for an issue report, without prompts, keys or tokens.

    It works without a daemon, too. Nothing is sent anywhere.

    \b
    Examples:
      kvstore support
      kvstore support --target unix:/run/kvstore/kvstore.sock --output /tmp/report.zip
    """
    settings = load_settings(config, overrides)
    when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    path = output or Path(f"kvstore-support-{when}.zip")
    check_outputs(path)
    files, missing = collect(settings, target or target_for(settings))
    files["README.txt"] = _README.format(
        version=kvstore.__version__, when=when, missing="".join(f"\n{each}\n" for each in missing)
    )
    _write(path, files)
    if as_json:
        click.echo(json.dumps({"path": str(path), "files": sorted(files), "missing": missing}))
        return
    click.echo(f"wrote {path}: {', '.join(sorted(files))}")
    for each in missing:
        click.echo(f"not in it: {each}")
    click.echo("Look through it, then attach it to your issue.")


def collect(settings: Settings, target: str) -> tuple[dict[str, str], list[str]]:
    """Return the texts by file name, and what could not be had."""
    files = {"versions.json": _json(_versions()), "settings.toml": _shown(settings.to_toml())}
    missing: list[str] = []
    try:
        with connect(target) as client:
            client.connect()
            for name, ask in _QUESTIONS.items():
                try:
                    files[name] = ask(client)
                except KVStoreError as error:
                    missing.append(f"{name}: {error}")
    except KVStoreError as error:
        missing.append(f"the daemon's answers: {error}")
    if "log.txt" not in files and (lines := _journal()):
        files["log.txt"] = lines
    findings = check_all(settings, target)
    files["doctor.txt"] = "\n".join(line for each in findings for line in each.lines()) + "\n"
    return files, [redacted(each) for each in missing]


def _journal() -> str:
    """Return what systemd has of the last daemon's log, "" if nothing."""
    asked = ["journalctl", "--unit=kvstore*", f"--lines={LINES_MAX}", "--output=cat", "--quiet"]
    try:
        done = subprocess.run(
            asked, capture_output=True, text=True, errors="replace", timeout=JOURNAL_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _settings(client: Client) -> str:
    lines = [
        f"{entry.key} = {entry.value}{'  # live' * entry.live}\n"
        for entry in client.admin.settings()
    ]
    return "# of the running daemon\n" + _shown("".join(lines))


def _shown(settings: str) -> str:
    """Return settings without the arguments of the root's command: they may hold a password in any
    form."""
    return _ROOT_COMMAND.sub(lambda found: f"{found[1]}{_program(found[2])}", settings)


def _program(value: str) -> str:
    """Return a command's TOML with its program alone."""
    command = tomllib.loads(f"value = {value}")["value"]
    if isinstance(command, str) or len(command) == 1:
        return value
    return json.dumps([command[0], REDACTED])


def _namespaces(client: Client) -> str:
    return _json([namespace_json(use) for use in client.admin.namespaces()])


_QUESTIONS: dict[str, Callable[[Client], str]] = {
    "stats.json": lambda client: _json(client.admin.stats()),
    "settings.toml": _settings,
    "namespaces.json": _namespaces,
    "log.txt": lambda client: "".join(f"{line}\n" for line in client.admin.log_lines()),
}


def _versions() -> dict[str, Any]:
    return {
        "kvstore": kvstore.__version__,
        "python": sys.version,
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "system": platform.freedesktop_os_release().get("PRETTY_NAME", "")
        if Path("/etc/os-release").exists()
        else "",
        "libc": " ".join(platform.libc_ver()),
        "processors": os.cpu_count(),
        "processors_allowed": len(os.sched_getaffinity(0)),
        "memory": [bound.text() for bound in read_memory().bounds],
        "packages": dict(_packages()),
    }


def _packages() -> Iterator[tuple[str, str]]:
    """Yield the versions of what this package can use, as far as it is installed."""
    try:
        wanted = {line.split(";")[0].strip() for line in requires(_PACKAGE) or ()}
    except PackageNotFoundError:  # run from a source tree
        wanted = set()
    names = {_name_of(each) for each in wanted} | set(_ENGINES)
    for name in sorted(names):
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def _name_of(requirement: str) -> str:
    end = next((at for at, sign in enumerate(requirement) if sign in "<>=!~[ ("), None)
    return requirement[:end]


def _json(value: object) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def _write(path: Path, files: dict[str, str]) -> None:
    """Write a new zip that only its owner may read."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror}") from error
    with open(fd, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as report:
        for name, text in sorted(files.items()):
            report.writestr(name, redacted(text))
