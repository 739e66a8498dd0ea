"""Which versions of an engine a connector is tested with. Others are refused, unless they may try.

An engine's next version may keep KV in another way, or call its connector at other moments: that is
found out by tests, not by prompts.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from kvstore.model.errors import Incompatible

logger = logging.getLogger(__name__)

ALLOW = "KVSTORE_ALLOW_UNTESTED"
"""In the environment of a process, "1" lets every connector of it try."""

Release = tuple[int, ...]


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
    check_tested(
        name, found, tested, allow_untested=allow_untested, allow="set allow_untested=true"
    )
    return found


def check_tested(
    engine: str,
    found: str,
    tested: Sequence[str],
    *,
    allow_untested: bool,
    allow: str,
    between: bool = False,
) -> None:
    """Raise Incompatible, with the list of tested versions, for a version that is none of them.

    tested: from the oldest to the newest; "0.32" stands for all of its patches. between: versions
    between two tested ones are taken as well. allow: how a user lets another version try, as in "or
    ... to try it"; with allow_untested that is only logged.
    """
    release = release_of(found)
    known = [release_of(each) for each in tested]
    if release and any(release[: len(each)] == each for each in known):
        return
    if between and known[0] < release < known[-1]:
        return
    listed = ", ".join(tested)
    if not allow_untested and os.environ.get(ALLOW) != "1":
        raise Incompatible(
            f"{engine} {found} is not tested with kvstore, only {listed}; "
            f"install one of these, or {allow} to try it"
        )
    logger.warning("engine=untested name=%r version=%s tested=%r", engine, found, listed)


def release_of(text: str) -> Release:
    """Return the numbers that a version begins with; none if it begins with none."""
    numbers = re.match(r"v?(\d+(?:\.\d+)*)", text)
    return tuple(map(int, numbers[1].split("."))) if numbers else ()
