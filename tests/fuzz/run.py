"""Fuzz every parser, guided by coverage, for a bounded time.

    python -m tests.fuzz.run --seconds 60 --json fuzz.json
    python -m tests.fuzz.run --target namespace build/fuzz/namespace-crash-...   one input again

Each target runs in a process of its own, so that a crash is a result. Needs the extra `[fuzz]`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from tests.fuzz.service import SERVICE
from tests.fuzz.targets import TARGETS, check

ROOT = Path(__file__).parents[2]
ALL = {**TARGETS, "service": SERVICE}
RSS_MIB_MAX = 1024
INPUT_NBYTES_MAX = 1 << 16
UNIT_TIMEOUT_S = 20
GRACE_S = 60.0
_DONE = re.compile(r"Done (\d+) (?:runs )?in")
_COVERED = re.compile(r"cov: (\d+)")


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--seconds", default=120.0, show_default=True, help="For all targets together.")
@click.option("--target", "names", multiple=True, type=click.Choice(list(ALL)), help="Only this.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the result here too.")
@click.option(
    "--keep", default=Path("build/fuzz"), type=click.Path(path_type=Path), show_default=True
)
@click.argument("inputs", nargs=-1, type=click.Path(exists=True, path_type=Path))
def main(
    seconds: float, names: tuple[str, ...], file: Path | None, keep: Path, inputs: tuple[Path, ...]
) -> None:
    chosen = names or tuple(ALL)
    if inputs:
        for name in chosen:
            for each in inputs:
                check(ALL[name], each.read_bytes())
        return
    keep.mkdir(parents=True, exist_ok=True)
    results = {}
    for name in chosen:
        results[name] = _fuzz(name, max(1, round(seconds / len(chosen))), keep)
        click.echo(f"{name:16} {results[name]}", err=True)
    crashes = sum(len(result["crashes"]) for result in results.values())
    result: dict[str, Any] = {"crashes": crashes, "targets": results}
    click.echo(json.dumps(result))
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result) + "\n")
    sys.exit(bool(crashes))


def _fuzz(name: str, seconds: int, keep: Path) -> dict[str, Any]:
    """Run one target in a process of its own; what makes it crash stays in `keep`."""
    corpus = Path(tempfile.mkdtemp(prefix="kv-fuzz-"))
    try:
        for number, seed in enumerate(ALL[name].seeds):
            (corpus / f"seed{number}").write_bytes(seed)
        before = set(keep.iterdir())
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tests.fuzz.guided", name, str(corpus)),
                f"-max_total_time={seconds}",
                f"-rss_limit_mb={RSS_MIB_MAX}",
                f"-timeout={UNIT_TIMEOUT_S}",
                f"-max_len={INPUT_NBYTES_MAX}",
                f"-artifact_prefix={keep.resolve()}/{name}-",
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds + GRACE_S,
            check=False,
        )
        crashes = sorted(str(path) for path in set(keep.iterdir()) - before)
        runs, covered = _DONE.findall(done.stderr), _COVERED.findall(done.stderr)
        result: dict[str, Any] = {
            "runs": int(runs[-1]) if runs else 0,
            "covered": int(covered[-1]) if covered else 0,
            "corpus": len(list(corpus.iterdir())),
            "crashes": crashes,
        }
        if done.returncode and not crashes:
            result["crashes"] = [done.stderr[-2000:]]
        return result
    finally:
        shutil.rmtree(corpus)


if __name__ == "__main__":
    main()
