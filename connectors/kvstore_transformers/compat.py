"""What differs between the versions of transformers that this connector is tested with.

Since 5.24 a cache is passed as `cache`, before as `past_key_values`.
"""

from __future__ import annotations

import inspect
from typing import Any

import transformers

from kvstore.system.engine_versions import check_tested

TESTED = ("5.19", "5.24")
"""Those between the two are taken as well."""


def check_release(*, allow_untested: bool) -> None:
    """Raise Incompatible, with the list of tested versions, for one that is none of them."""
    check_tested(
        "transformers",
        str(transformers.__version__),
        TESTED,
        allow_untested=allow_untested,
        allow="pass allow_untested=True",
        between=True,
    )


def in_forward(model: Any, cache: Any) -> dict[str, Any]:
    """Return a cache as the argument that `model` takes it by."""
    return {_name(model.forward): cache}


def in_generate(cache: Any) -> dict[str, Any]:
    """Return a cache as the argument that `generate` takes it by."""
    return {_name(transformers.GenerationMixin.prepare_inputs_for_generation): cache}


def _name(takes: Any) -> str:
    names = inspect.signature(takes).parameters
    return "cache" if "cache" in names else "past_key_values"
