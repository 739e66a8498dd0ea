"""Which versions of llama-cpp-python this connector is tested with, and what it needs of one."""

from __future__ import annotations

from typing import Any

from kvstore import Incompatible
from kvstore.system.engine_versions import check_tested

TESTED = ("0.3.36",)
_NEEDED = (
    "llama_get_memory",
    "llama_memory_clear",
    "llama_memory_seq_pos_min",
    "llama_model_n_swa",
    "llama_state_seq_get_data_ext",
    "llama_state_seq_get_size_ext",
    "llama_state_seq_set_data_ext",
)


def check_version(llama_cpp: Any, *, allow_untested: bool) -> str:
    """Return the version of the package. Raises Incompatible, saying what to do.

    A version that was not tried may keep the state of a sequence in another way, or call its cache
    at other moments.
    """
    version = str(getattr(llama_cpp, "__version__", "unknown"))
    lacking = [name for name in _NEEDED if not hasattr(llama_cpp, name)]
    if lacking:
        raise Incompatible(
            f"llama-cpp-python {version} has no {', '.join(lacking)}: kvstore is tested with "
            f"{', '.join(TESTED)}"
        )
    check_tested(
        "llama-cpp-python",
        version,
        TESTED,
        allow_untested=allow_untested,
        allow="pass allow_untested=True",
    )
    return version
