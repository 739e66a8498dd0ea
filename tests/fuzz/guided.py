"""One target under atheris: `python -m tests.fuzz.guided NAME CORPUS [libFuzzer options]`."""

from __future__ import annotations

import logging
import sys

import atheris

with atheris.instrument_imports(include=["kvstore"]):
    from tests.fuzz.service import SERVICE
    from tests.fuzz.targets import TARGETS, check


def main() -> None:
    logging.disable()
    name = sys.argv.pop(1)
    target = SERVICE if name == "service" else TARGETS[name]

    def once(data: bytes) -> None:
        check(target, data)

    atheris.Setup(sys.argv, once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
