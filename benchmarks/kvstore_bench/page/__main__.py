"""`python -m kvstore_bench.page`: measure, take pictures, write the file; exit 1 if a bar fails."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click

from kvstore.testing.daemon import Daemon
from kvstore.testing.ports import free_port
from kvstore_bench.console.exits import explained
from kvstore_bench.page import measures, pictures, workload
from kvstore_bench.page.browser import Browser, chromium
from kvstore_bench.page.viewers import viewers

REQUESTS = 10_000
REQUESTS_PER_S = 400.0
NODES = 50_000
WARM_S = 60.0
# field -> (at least, at most)
BARS: dict[str, tuple[float | None, float | None]] = {
    "first_figures_s": (None, 1),
    "put_seen_s": (None, 2),
    "says_away": (1, None),
    "back_s": (None, 3),
    "requests_shown": (REQUESTS, None),
    "nodes_shown": (NODES, None),
    "frame_ms_p99": (None, 16),
    "page_mb": (None, 100),
    "scripts_run": (None, 0),
    "foreign_host_status": (400, 400),
    "other_origin_refused": (1, None),
    "axe_violations": (None, 0),
    "console_errors": (None, 0),
    "foreign_requests": (None, 0),
    "viewer_cpu_share": (None, 0.02),
    "match_p50_with_viewers": (None, 1.05),
}
PARTS = ("live", "large", "viewers")


@click.command()
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), required=True)
@click.option("--pictures", "folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--parts", default=",".join(PARTS), show_default=True, help="What is measured.")
@click.option("--requests", default=REQUESTS, show_default=True)
@click.option("--nodes", default=NODES, show_default=True)
@click.option("--warm", "warm_s", default=WARM_S, show_default=True, help="Of the workload.")
def main(
    *, path: Path, folder: Path | None, parts: str, requests: int, nodes: int, warm_s: float
) -> None:
    """Measure the page in a real Chromium, on a real daemon with a workload."""
    chosen = parts.split(",")
    result: dict[str, Any] = {"requests": requests, "nodes": nodes}
    with explained():
        if "viewers" in chosen:
            _say("16 viewers")
            with Daemon("dram.capacity=256MiB") as daemon:
                result |= viewers(daemon.start())
        with chromium() as browser:
            result["chromium"] = browser.version
            if "large" in chosen:
                _say(f"{requests} requests and {nodes} nodes")
                result |= _large(browser, requests, nodes)
            if "live" in chosen:
                _say("live")
                result |= _live(browser, folder, warm_s)
            result["console_errors"] = sum(len(tab.errors) for tab in browser.tabs)
            result["errors_found"] = [error for tab in browser.tabs for error in tab.errors][:20]
            result["foreign_requests"] = sum(len(tab.foreign) for tab in browser.tabs)
    failed = [name for name in BARS if name in result and not _holds(name, result[name])]
    result |= {"bars": {name: list(bar) for name, bar in BARS.items()}, "failed": failed}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    click.echo(json.dumps({name: result[name] for name in BARS if name in result}, indent=2))
    sys.exit(1 if failed else 0)


def _live(browser: Browser, folder: Path | None, warm_s: float) -> dict[str, Any]:
    """Measure what a person sees of a busy daemon."""
    found: dict[str, Any] = {}
    own = f"server.metrics_listen=127.0.0.1:{free_port()}"
    sizes = ("dram.capacity=192MiB", "file.capacity=512MiB")
    with Daemon(own, *sizes) as daemon:
        daemon.start()
        with workload.chats(daemon.target):
            address = daemon.page_address
            time.sleep(2)
            found |= measures.first_figures(browser, address)
            tab = browser.open(address)
            found |= measures.put_seen(tab, daemon.target)
            found |= measures.outages(tab, daemon)
            found |= measures.strangers(browser, daemon)
            time.sleep(warm_s)
            found |= measures.accessibility(browser, address)
            if folder is not None:
                found["pictures"] = pictures.take(browser, address, folder)
            found |= measures.injections(browser, address, daemon.target)
    return found


def _large(browser: Browser, requests: int, nodes: int) -> dict[str, Any]:
    """Measure a page that has as much as it may."""
    sizes = ("dram.capacity=1GiB", "limits.outcomes_max=10000")
    with Daemon(*sizes, file=False) as daemon:
        daemon.start()
        workload.many_runs(daemon.target, nodes)
        tab = browser.open(daemon.page_address)
        workload.many_requests(daemon.target, requests, REQUESTS_PER_S)
        tab.page.wait_for_timeout(6000)  # the tree is drawn every few seconds
        measures.expand_all(tab)
        found = measures.frames(tab)
        tab.page.context.close()
    return found


def _holds(name: str, value: Any) -> bool:
    least, most = BARS[name]
    return (least is None or value >= least) and (most is None or value <= most)


def _say(text: str) -> None:
    click.echo(f"page: {text}", err=True)


if __name__ == "__main__":
    main()
