"""How commands end: one line for what made them impossible, and the exit status."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import click

from kvstore.cli.outputs import check_outputs
from kvstore.model.errors import InvalidRequest, KVStoreError

EXIT_FAILED_REQUESTS = 1
EXIT_IMPOSSIBLE = 2
EXIT_INTERRUPTED = 130
EXTRA_OF = {
    "aiohttp": "vllm",
    "cryptography": "security",
    "cupy": "cuda",
    "matplotlib": "bench",
    "obstore": "object",
    "playwright": "dev",
    "rich": "bench",
    "starlette": "web",
    "tokenizers": "cli",
    "torch": "transformers",
    "transformers": "transformers",
    "uvloop": "bench",
    "vllm": "vllm",
    "zmq": "events",
}


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
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRA_OF:
            raise
        raise Impossible(_how_to_get(missing)) from error


def need(*modules: str) -> None:
    """Find out before a long run, not after it, that a package is missing.

    Raises InvalidRequest that names the extra.
    """
    for module in modules:
        if find_spec(module) is None:
            raise InvalidRequest(_how_to_get(module))


def needs(*, as_json: bool, plot: Path | None = None) -> tuple[str, ...]:
    """Return the packages that the output of a command needs."""
    return (*(() if as_json else ("rich",)), *(("matplotlib",) if plot else ()))


def _how_to_get(module: str) -> str:
    return f"{module} is not installed: pip install 'kvstore-tiers[{EXTRA_OF[module]}]'"


def check_targets(*targets: Path | None) -> None:
    """Find out before a long run, not after it, that its results cannot be written."""
    check_outputs(*targets)
