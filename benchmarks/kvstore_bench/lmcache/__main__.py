"""`make test-lmcache`: kill and stop LMCache's server and its daemon, and count what is lost.

    python -m kvstore_bench.lmcache --json build/test-lmcache.json

Chunks are stored through LMCache's own server and flushed; then LMCache, the daemon, and both are
killed (SIGKILL). Everything is loaded after the first kill, a part of it after each other one, and
compared with what was stored: `lost` and `wrong` have to be 0. `late` was found when it was asked
for again: a lookup waits for the daemon no longer than its deadline. Then the daemon is stopped, by
SIGSTOP: `lookup_delay_ms` says by how much the first lookup of each stop is later than usual, and
`lookup_delay_after_ms` the same of all lookups after it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from kvstore.testing.lmcache import ENVIRONMENT, lmcache_site
from kvstore_bench.console.exits import explained
from kvstore_bench.console.progress import progress

DELAY_MS_MAX = 50.0
AFTER_MS_MAX = 10.0  # p99, beyond what lookups differ by with a daemon that runs


def broken(result: dict[str, Any], stored_min: int) -> list[str]:
    """Return which promises do not hold."""
    usual = result["lookup_ms"]
    after_max = AFTER_MS_MAX + usual["p99"] - usual["p50"]
    checks = {
        f"verified >= {stored_min}": result["verified"] >= stored_min,
        "wrong = 0": not result["wrong"],
        "lost = 0": not any(result["lost"].values()),
        f"lookup_delay_ms <= {DELAY_MS_MAX:.0f}": max(result["lookup_delay_ms"]) <= DELAY_MS_MAX,
        f"lookup_delay_after_ms.p99 <= {after_max:.0f}": (
            result["lookup_delay_after_ms"]["p99"] <= after_max
        ),
    }
    return [name for name, holds in checks.items() if not holds]


@click.command()
@click.option(
    "--requests", type=click.IntRange(8), default=313, show_default=True, help="Of 32 chunks."
)
@click.option(
    "--stops", type=click.IntRange(1), default=5, show_default=True, help="Of the daemon."
)
@click.option(
    "--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Write it there."
)
def main(*, requests: int, stops: int, out: Path | None) -> None:
    """Kill and stop a real LMCache server and its daemon, and count what is lost."""
    site = lmcache_site()
    if site is None:
        raise click.ClickException("LMCache is not installed: `make setup` does that")
    import os

    os.environ.update(ENVIRONMENT)
    sys.path.insert(0, str(site))
    from kvstore_bench.lmcache.course import Course

    with explained(), tempfile.TemporaryDirectory(prefix="kv-lmcache-") as directory:
        course = Course(site, Path(directory), requests=requests, stops=stops)
        with progress("lmcache", course.steps, quiet=not sys.stderr.isatty()) as say:
            result = course.run(say)
    from importlib.metadata import version

    result = {"lmcache": version("lmcache"), **result}
    result["broken"] = broken(result, requests * 32)
    text = json.dumps(result, indent=1)
    click.echo(text)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")
    os._exit(bool(result["broken"]))  # LMCache's threads would go on


if __name__ == "__main__":
    main()
