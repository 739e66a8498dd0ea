"""Which versions of LMCache this connector is tested with."""

from __future__ import annotations

from kvstore.system.engine_versions import engine_version

TESTED = ("0.5.6",)


def check_version(*, allow_untested: bool) -> str:
    """Return the version of LMCache that is installed.

    Raises Incompatible without one, and for one that is not tested: the layout of its pages, the
    text of its keys and the order of its calls are not promised to stay.
    """
    return engine_version(
        "LMCache",
        "lmcache",
        TESTED,
        allow_untested=allow_untested,
        install="pip install 'kvstore-tiers[lmcache]'",
    )
