"""Run the tests that failed once more, one by one, with nothing beside them.

`make test` runs tests side by side on all cores. A virtual machine that stands still for some
seconds, or a neighbour that takes a core, makes deadlines pass that hold at any other time. What
fails alone, too, has failed; what does not is named, so that nobody takes it for sound.

    python -m tests.again STATUS [arguments of pytest]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TESTS_FAILED = 1  # pytest's exit status; others mean that it could not run them
FAILED_MAX = 12  # more than these are no accident
CACHE = Path(".pytest_cache/v/cache/lastfailed")


def main(status: int, arguments: Sequence[str]) -> int:
    """Return the exit status: 0 if only tests failed, and none of them again."""
    if status != TESTS_FAILED:
        return status
    failed = sorted(json.loads(CACHE.read_text()))
    if len(failed) > FAILED_MAX:
        print(f"{len(failed)} tests failed: too many for an accident")
        return status
    print(f"{len(failed)} tests failed beside others; once more, alone:", *failed, sep="\n  ")
    command = [sys.executable, "-m", "pytest", "--last-failed", "--last-failed-no-failures", "none"]
    return subprocess.call([*command, *arguments])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.again", description=__doc__)
    parser.add_argument("status", type=int, help="how the first run ended")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="for pytest")
    given = parser.parse_args()
    sys.exit(main(given.status, given.arguments))
