"""The daemon starts as the chart says, in a mount namespace: arguments, environment, user, root,
certificates, and the members that the API server tells."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.daemon import Daemon
from kvstore.testing.ports import free_ports
from tests.helm.chart import render
from tests.helm.pod import USER, PodHere, wait_until, why_not
from tests.tls import Authority

kmock = pytest.importorskip("kmock")
from tests.membership.api_server import cluster  # noqa: E402
from tests.membership.test_kubernetes import tls_before  # noqa: E402

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
START_S = 60.0


@contextlib.contextmanager
def api_server(directory: Path) -> Iterator[tuple[Callable[[str], None], int]]:
    """Run an API server with TLS, in a thread; yield what lets a pod be ready, and its port."""
    authority = Authority(directory / "authority")
    ready, done = threading.Event(), threading.Event()
    found: list[int] = []
    pending: list[str] = []

    async def serve() -> None:
        async with cluster(directory) as there, tls_before(there, authority) as port:
            (directory / "ca.crt").write_bytes(authority.ca.read_bytes())
            found.append(port)
            ready.set()
            while not done.is_set():
                await asyncio.sleep(0.05)
                while pending:
                    await there.ready(pending.pop())

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(START_S)
        yield pending.append, found[0]
    finally:
        done.set()
        thread.join(START_S)


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def process_status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (each.partition(":") for each in lines)}


def test_the_daemon_starts_as_the_chart_says(tmp_path: Path) -> None:
    peer_port, metrics_port, other_port = free_ports(3)
    values = {
        "config": {"dram": {"capacity": "64MiB"}, "file": {"capacity": "256MiB"}},
        "cluster": {"port": peer_port},
        "metrics": {"port": metrics_port},
    }
    rendered = render(values)
    directory, account = tmp_path / "pod", tmp_path / "account"
    directory.mkdir()
    account.mkdir()
    tmp_path.chmod(0o755)
    with api_server(account) as (let_be_ready, api_port):
        environment = {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(api_port),
        }
        pod = PodHere(rendered, directory, environment, account)
        pair = pod.volume("peer-tls")
        other = Daemon(
            "cluster.membership=static",
            f"cluster.listen=127.0.0.1:{other_port}",
            f"cluster.static=127.0.0.1:{other_port}",
            f"cluster.cert={pair / 'tls.crt'}",
            f"cluster.key={pair / 'tls.key'}",
            f"cluster.ca={pair / 'ca.crt'}",
        )
        with other, pod.running() as process:
            url = f"http://127.0.0.1:{metrics_port}"

            def ready() -> bool:
                assert process.poll() is None, pod.log.read_text()
                return status_of(f"{url}/readyz") == 200

            wait_until(ready, START_S)
            assert status_of(f"{url}/healthz") == 200
            assert status_of(f"{url}/metrics") == 200
            looks_as_it_should(process.pid)
            other.start()
            let_be_ready(f"127.0.0.1:{peer_port}")
            let_be_ready(f"127.0.0.1:{other_port}")
            wait_until(lambda: len(members(pod)["members"]) == 1, START_S)
            shown = members(pod)
            assert shown["membership"]["membership"] == "kubernetes"
            assert shown["membership"]["registered"]
            assert shown["secured"] == "sealed"
            assert shown["members"][0]["address"] == f"127.0.0.1:{other_port}"
            assert (pod.volume("disk-data") / "node_id").stat().st_uid == USER
            tested = pod.helm_test(START_S)
            assert tested.returncode == 0, (tested.stdout + tested.stderr).decode()
            assert "it works" in tested.stdout.decode()
        assert process.returncode == 0, pod.log.read_text()
        assert "node=stopped" in pod.log.read_text()


def looks_as_it_should(pid: int) -> None:
    """The process has the user, the rights and the root that the chart says."""
    status = process_status(pid)
    assert status["Uid"].split() == [str(USER)] * 4
    assert status["NoNewPrivs"] == "1"
    for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[name], 16) == 0, name
    root = next(
        line.split()
        for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
        if line.split()[4] == "/"
    )
    assert "ro" in root[5].split(",")
    with pytest.raises(OSError, match="Read-only"):
        os.open(f"/proc/{pid}/root/written", os.O_CREAT | os.O_WRONLY)


def members(pod: PodHere) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvstore.cli", "members", "--json", f"--daemon-uid={USER}"]
    done = subprocess.run(
        [*command, f"--target=unix:{pod.socket}"], capture_output=True, check=False, timeout=60
    )
    assert done.stdout, done.stderr.decode()
    found: dict[str, Any] = json.loads(done.stdout)
    return found
