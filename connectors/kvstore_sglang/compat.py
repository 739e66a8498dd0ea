"""Which versions of SGLang this connector is tested with."""

from __future__ import annotations

from kvstore.system.engine_versions import engine_version

TESTED = ("0.5.23",)


def check_version(*, allow_untested: bool) -> str:
    """Return the version of SGLang that is installed.

    Raises Incompatible without one, and for one that is not tested: the bytes of its host pages,
    its page hashes and its storage interface change from month to month.
    """
    return engine_version(
        "SGLang", "sglang", TESTED, allow_untested=allow_untested, install="pip install sglang"
    )
