"""How commands end: one line for what made them impossible, and the exit status."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from kvstore.errors import InvalidRequest, KVStoreError

EXIT_FAILED_REQUESTS = 1
EXIT_IMPOSSIBLE = 2
EXIT_INTERRUPTED = 130
EXTRA = ("rich", "matplotlib")


class Impossible(click.ClickException):
    """The run could not be made; shown as one line."""

    exit_code = EXIT_IMPOSSIBLE


@contextmanager
def explained() -> Iterator[None]:
    """Turn what made a command impossible into one line and EXIT_IMPOSSIBLE."""
    try:
        yield
    except KVStoreError as error:
        raise Impossible(str(error)) from error
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        raise Impossible(f"{place}{error.strerror or error}") from error
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        extra = "pip install 'kvstore-tiers[bench]'"
        raise Impossible(f"{error.name} is not installed: {extra}") from error


def check_targets(*targets: Path | None) -> None:
    """Find out before a long run, not after it, that its results cannot be written."""
    for target in targets:
        if target and not target.absolute().parent.is_dir():
            raise InvalidRequest(f"{target}: there is no directory {target.parent}")
