"""Whether a daemon answers, in which version; and if none does, whether one could start."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import kvstore
from kvstore.cli.reach import reach, reach_of
from kvstore.cli.target import connect
from kvstore.client import Client
from kvstore.client.trust import user_name
from kvstore.decide.policy.registry import policy_by_name
from kvstore.model.errors import ConfigError, KVStoreError, Unauthorized, Unavailable
from kvstore.settings import Settings, entries, listen_address, metrics_address, settings_of
from kvstore.store.findings import Finding, daemon_health, note, ok, wrong


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found out about a daemon. settings: its own, None if it does not tell them."""

    findings: list[Finding]
    running: bool
    settings: Settings | None = None


def check_daemon(target: str, given: Settings) -> Checked:
    """Look for a daemon at `target`; `given` is what one would be started with."""
    try:
        with connect(target) as client:
            stats = client.admin.stats()
            own, unread = _settings_of(client)
    except Unavailable:
        none = note("daemon", f"none at {target} yet", "kvstore serve")
        return Checked([none, *check_addresses(given), *check_policies(given)], running=False)
    except Unauthorized as error:
        refused = wrong("daemon", str(error), "see --target and --daemon-uid")
        return Checked([refused], running=True)
    except KVStoreError as error:
        failed = wrong("daemon", str(error), "run the same release on both sides")
        return Checked([failed], running=True)
    findings = [_version(target, stats["version"]), *daemon_health(stats), *reach(stats)]
    findings += unread if own is None else _differences(given, own)
    return Checked(findings, running=True, settings=own)


def _settings_of(client: Client) -> tuple[Settings | None, list[Finding]]:
    """Return the daemon's settings; None and why if it tells none, as over TCP, or others, as
    another release does."""
    try:
        return settings_of(client.admin.settings()), []
    except KVStoreError as error:
        unread = note(
            "settings",
            f"the daemon's own cannot be read ({error}): those of --config and --set are judged",
            "ask it at its unix socket, with its own release of this command",
        )
        return None, [unread]


def _differences(given: Settings, own: Settings) -> Iterator[Finding]:
    """Yield the settings that were named here and are others in the daemon."""
    usual, theirs = ({each.key: each.value for each in entries(of)} for of in (Settings(), own))
    for each in entries(given):
        if each.key in theirs and each.value not in (usual.get(each.key), theirs[each.key]):
            yield note(
                "settings",
                f"{each.key} is {theirs[each.key]} in the daemon, not {each.value}",
                f"restart it with the other value, or: kvstore config set {each.key}=VALUE"
                if each.live
                else "restart it with the other value",
            )


def _version(target: str, version: str) -> Finding:
    if version != kvstore.__version__:
        return note(
            "daemon",
            f"release {version} answers at {target}; this command is {kvstore.__version__}",
            "restart the daemon after an upgrade: kvstore flush && kvstore serve ...",
        )
    return ok("daemon", f"release {version} answers at {target}")


def check_addresses(settings: Settings) -> Iterator[Finding]:
    """Yield what would keep a daemon from starting with these addresses."""
    for key, address in (
        ("server.listen", listen_address(settings)),
        ("server.metrics_listen", metrics_address(settings)),
    ):
        if address is not None:
            yield _port(key, *address)
    yield _socket(settings.server.socket_path)
    yield from reach_of(settings)


def check_policies(settings: Settings) -> Iterator[Finding]:
    """Yield the eviction policies that there are not."""
    for key, name in (
        ("dram.eviction_policy", settings.dram.eviction_policy),
        ("file.eviction_policy", settings.file.eviction_policy),
    ):
        try:
            policy_by_name(name)
        except ConfigError as error:
            yield wrong("eviction", str(error), f"--set {key}=hz, or install its package")


def _port(key: str, host: str, port: int) -> Finding:
    about = key.partition(".")[2]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return wrong(
                about,
                f"{host}:{port} cannot be had: {error.strerror}",
                f'--set {key}={host}:{port + 10}, or --set {key}="" for none '
                f"(to find its user: ss -ltnp 'sport = :{port}')",
            )
    return ok(about, f"{host}:{port} is free")


def _socket(path: Path) -> Finding:
    about = "socket"
    there = next(each for each in (path.parent, *path.parent.parents) if os.path.exists(each))
    if not os.access(there, os.W_OK | os.X_OK):
        return wrong(
            about, f"{there} cannot be written", f"sudo install -d -m 700 -o $USER {path.parent}"
        )
    if path.exists() and not stat.S_ISSOCK(path.lstat().st_mode):
        return wrong(about, f"{path} is there and is not a socket", f"rm {path}")
    lock = Path(f"{path}.lock")
    if os.path.exists(lock) and not os.access(lock, os.R_OK | os.W_OK):
        owner = user_name(lock.stat().st_uid)
        return wrong(about, f"{lock} belongs to {owner}", "--set server.socket=PATH, one of yours")
    if _is_locked(lock):
        return wrong(
            about,
            f"a daemon holds {path} and does not answer",
            f"look at its log; to find it: fuser {path}.lock",
        )
    return ok(about, f"{path} can be made")


def _is_locked(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError), path.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
