"""Which versions of LMCache this connector is tested with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from kvstore import Incompatible

TESTED = ("0.5.6",)


def check_version(*, allow_untested: bool) -> str:
    """Return the version of LMCache that is installed.

    Raises Incompatible without one, and for one that is not tested: the layout of its pages, the
    text of its keys and the order of its calls are not promised to stay.
    """
    try:
        found = version("lmcache")
    except PackageNotFoundError:
        raise Incompatible(
            "LMCache is not installed in this environment: pip install 'kvstore-tiers[lmcache]'"
        ) from None
    if found not in TESTED and not allow_untested:
        raise Incompatible(
            f"LMCache {found} is not tested with kvstore, {', '.join(TESTED)} is: install that, or "
            "set allow_untested=true to try"
        )
    return found
