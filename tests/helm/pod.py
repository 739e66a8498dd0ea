"""A pod of the chart without a cluster: its mounts, user, environment and arguments, in a mount
namespace of its own. What kubelets do is done here as they do it. Needs root.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.helm.chart import ROOT, Rendered

USER = 10001
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
SOURCES = "/opt/kvstore"
STOP_S = 60
_DROPPED = "--no-new-privs --inh-caps=-all --ambient-caps=-all"
_AS_DAEMON = f"setpriv --reuid={USER} --regid={USER} --groups={USER} --bounding-set=-all {_DROPPED}"
_AS_ROOT = f"setpriv --bounding-set=-all,+chown {_DROPPED}"


def why_not() -> str:
    """Return why pods cannot be made here, "" if they can."""
    if os.geteuid() != 0:
        return "mount namespaces need root"
    try:
        tried = ["unshare", "--mount", "--propagation=private", "mount", "-t", "tmpfs", "x", "/mnt"]
        done = subprocess.run(tried, capture_output=True, check=False, timeout=20)
        subprocess.run(["setpriv", "--version"], capture_output=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        return f"mount namespaces need unshare and setpriv: {error}"
    return done.stderr.decode(errors="replace").strip()


class PodHere:
    """The daemon's pod. volumes: directory with a directory for each of its volumes.

    environment: what a kubelet adds.
    """

    def __init__(
        self, rendered: Rendered, directory: Path, environment: dict[str, str], account: Path
    ) -> None:
        self.rendered = rendered
        self.directory = directory
        self.log = directory / "log"
        self._account = account
        self._environment = {"POD_IP": "127.0.0.1", "NODE_NAME": "node-1"} | environment
        self._root = directory / "root"
        self._root.mkdir()
        for each in rendered.pod["volumes"]:
            self._fill(each)

    def volume(self, name: str) -> Path:
        return self.directory / name

    @property
    def socket(self) -> Path:
        return self.volume("sockets") / "kvstore.sock"

    @contextlib.contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """Prepare the directories, start the daemon, and end it at the end by SIGTERM."""
        container = self.rendered.daemon
        lines = [self._enter(container)]
        for each in self.rendered.pod.get("initContainers", []):
            words = shlex.join(each["command"])
            lines.append(f"chroot {self._root} {_AS_ROOT} {words}")
        arguments = [self._expanded(each) for each in container["args"]]
        lines.append(self._run(container, [*_KVSTORE, *arguments]))
        with self.log.open("wb") as log:
            process = self._start("\n".join(lines), stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def helm_test(self, timeout_s: float) -> subprocess.CompletedProcess[bytes]:
        """Run what the pod of `helm test` runs, on the same node."""
        (container,) = self.rendered.one("Pod")["spec"]["containers"]
        script = "\n".join([self._enter(container), self._run(container, container["command"])])
        command = [*_UNSHARED, script]
        return subprocess.run(command, capture_output=True, check=False, timeout=timeout_s)

    # ---- what a kubelet does -----------------------------------------------------------------

    def _fill(self, volume: dict[str, Any]) -> None:
        """Make a volume: Secrets belong to root and the pod's group, which may read them."""
        at = self.volume(volume["name"])
        at.mkdir()
        files: dict[str, bytes] = {}
        if "configMap" in volume:
            files["kvstore.toml"] = self.rendered.settings.encode()
        elif "secret" in volume:
            data = self.rendered.one("Secret")["data"]
            files = {name: base64.b64decode(text) for name, text in data.items()}
        elif "emptyDir" in volume:
            at.chmod(0o777)
        for name, content in files.items():
            path = at / name
            path.write_bytes(content)
            os.chown(path, 0, USER)
            path.chmod(0o440 if "secret" in volume else 0o644)

    def _enter(self, container: dict[str, Any]) -> str:
        """Return the shell's lines that make the container's root, which nobody can write to."""
        root = shlex.quote(str(self._root))
        lines = ["set -e", f"mount -t tmpfs -o mode=0755 tmpfs {root}", f"cd {root}"]
        for name in ("bin", "sbin", "lib", "lib64"):
            real = Path("/", name)
            if real.is_symlink():
                lines.append(f"ln -s {os.readlink(real)} {name}")
            elif real.is_dir():
                lines.append(_bound(str(real), name))
        lines.append(_bound("/usr", "usr"))
        lines += [f"mkdir {name}; mount --rbind /{name} {name}" for name in ("proc", "dev", "sys")]
        lines += ["mkdir etc", "cp /etc/ld.so.cache etc/", "echo kvstore:x:10001: > etc/group"]
        lines.append("echo kvstore:x:10001:10001::/tmp:/bin/sh > etc/passwd")
        mounts = [(self.volume(each["name"]), each) for each in container["volumeMounts"]]
        if self.rendered.pod["automountServiceAccountToken"]:
            mounts.append((self._account, {"mountPath": ACCOUNT, "readOnly": True}))
        for source, each in mounts:
            lines.append(_bound(str(source), each["mountPath"][1:], ro=each.get("readOnly", False)))
        # The image: this Python, and these sources.
        for each in dict.fromkeys((sys.base_prefix, sys.prefix)):
            if not each.startswith("/usr"):
                lines.append(_bound(each, each[1:]))
        lines.append(_bound(str(ROOT), SOURCES[1:]))
        command = f'#!/bin/sh\\nexec {sys.executable} -m kvstore.cli "$@"\\n'
        lines.append(f"mkdir image; printf '{command}' > image/kvstore; chmod 755 image/kvstore")
        return "\n".join([*lines, f"cd /; mount -o remount,ro,mode=0755 {root}"])

    def _run(self, container: dict[str, Any], command: Sequence[str]) -> str:
        path = ":".join(f"{SOURCES}{each}" for each in ("", "/kernels", "/connectors"))
        environment = {"PATH": "/image:/usr/bin:/bin", "PYTHONPATH": path, "HOSTNAME": "pod-1"}
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        for each in container["env"]:
            known = self._environment.get(each["name"], "")
            environment[each["name"]] = each.get("value", known)
        environment |= {key: self._environment[key] for key in self._environment if "KUBE" in key}
        words = [f"{key}={value}" for key, value in environment.items()]
        return f"exec chroot {self._root} {_AS_DAEMON} env -i {shlex.join([*words, *command])}"

    def _expanded(self, argument: str) -> str:
        for name, value in self._environment.items():
            argument = argument.replace(f"$({name})", value)
        return argument

    def _start(self, script: str, **files: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*_UNSHARED, script], **files)


_UNSHARED = ["unshare", "--mount", "--propagation=private", "sh", "-c"]
_KVSTORE = ["kvstore"]


def _bound(source: str, target: str, *, ro: bool = True) -> str:
    source, target = shlex.quote(source), shlex.quote(target)
    line = f"mkdir -p {target}; mount --bind {source} {target}"
    return f"{line}; mount -o remount,bind,ro {target}" if ro else line


def wait_until(true: Any, timeout_s: float) -> None:
    ends = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < ends, "not in time"
        time.sleep(0.1)
