"""Which version of an engine is installed, and whether its connector is tested with it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from kvstore.model.errors import Incompatible


def engine_version(
    name: str, package: str, tested: Sequence[str], *, allow_untested: bool, install: str
) -> str:
    """Return the version of an engine that is installed.

    name: for people. package: its distribution. install: what to type if it is missing. Raises
    Incompatible without one, and for one that is not tested unless `allow_untested`.
    """
    try:
        found = version(package)
    except PackageNotFoundError:
        raise Incompatible(f"{name} is not installed in this environment: {install}") from None
    if found not in tested and not allow_untested:
        raise Incompatible(
            f"{name} {found} is not tested with kvstore, {', '.join(tested)} is: install that, or "
            "set allow_untested=true to try"
        )
    return found
