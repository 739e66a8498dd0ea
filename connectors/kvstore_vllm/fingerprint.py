"""Which weights an engine runs: a digest of every file it may have loaded, without delaying it.

Which files count: see `kvstore.system.model_files`. The digest is found in the background: see
`kvstore.system.fingerprints`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from kvstore.settings import default_digest_memory
from kvstore.system import fingerprints, model_files
from kvstore.system.file_digests import FileDigests
from kvstore.system.fingerprints import Source, process_began

__all__ = ["NAME_THEM", "Fingerprints", "Source", "process_began", "weights_files"]

NAME_THEM = 'name them in kv_connector_extra_config, e.g. "weights_id": "my-model-v3"'


def weights_files(path: Path) -> list[Path]:
    """Return the files that tell the weights in `path`, a model's folder or one file of weights.

    Raises Incompatible if there are no weights, or more files than a model has.
    """
    return model_files.weights_files(path, advice=NAME_THEM)


class Fingerprints(fingerprints.Fingerprints):
    """The same, remembered where all engines of this user look."""

    def __init__(
        self,
        sources: Mapping[str, Source],
        digests: FileDigests | None = None,
        began: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(sources, digests or FileDigests(default_digest_memory()), began)
